"""A model's matrices rounded into GGUF's block types, and a file that holds them.

Codes are the nearest ones, for scales that fit the block's largest number. llama.cpp's own tools
search for better scales; that changes the weights, and not the work of a product.

Shape letters: N outputs, B blocks of a row, S sub-blocks of a block, W weights of either, Y bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, unflatten

from hunch.errors import ConfigError
from hunch.hub.gguf_file import TYPES
from hunch.models.weights import Weights

_SIZES = {name: size for name, size, _ in TYPES.values()}


def rounded(block_format: str, w_NK: Tensor) -> Tensor:
    """The blocks of a matrix, uint8 [N, bytes of a row]."""
    return _MAKERS[block_format](unflatten(w_NK.float(), 1, (-1, _SIZES[block_format]))).flatten(1)


def _half(some: Tensor) -> Tensor:
    """Its bytes as float16, [..., 2]."""
    return some.half()[..., None].view(torch.uint8)


def _over(some: Tensor, by: Tensor) -> Tensor:
    """The quotient; zero where the divisor is."""
    return torch.where(by == 0, 0.0, some / torch.where(by == 0, 1.0, by))


def _peak(w: Tensor) -> Tensor:
    """The number furthest from zero along the last axis, with its sign."""
    return w.gather(-1, w.abs().argmax(-1, keepdim=True))[..., 0]


def _codes(w: Tensor, scale: Tensor, offset: int, most: int) -> Tensor:
    return (_over(w, scale[..., None]).round() + offset).clamp(0, most).to(torch.uint8)


def _nibbles(code: Tensor) -> Tensor:
    """Bytes of the last axis' first half, in their low bits, and its second half."""
    low, high = code.chunk(2, -1)
    return (low & 15) | (high & 15) << 4


def _fields(code: Tensor, width: int) -> Tensor:
    """Bytes of the last axis but one, whose entries have `width` bits each, the first lowest."""
    shifts = torch.arange(0, code.shape[-2] * width, width, device=code.device)
    return (code.long() << shifts[:, None]).sum(-2).to(torch.uint8)


def _bits(code_NBW: Tensor) -> Tensor:
    """The fifth bits of 32 weights in 4 bytes, bit w for weight w."""
    return _fields(unflatten(code_NBW >> 4, -1, (4, 8)).transpose(-1, -2), 1)


def _middled(w_NBW: Tensor, bits: int) -> Tensor:
    """Q4_0 and Q5_0: the number furthest from zero has the lowest code, which has no positive
    counterpart."""
    middle = 1 << (bits - 1)
    scale_NB = (_peak(w_NBW) / -middle).half().float()
    code = _codes(w_NBW, scale_NB, middle, 2 * middle - 1)
    high = [_bits(code)] if bits == 5 else []
    return torch.cat([_half(scale_NB), *high, _nibbles(code)], -1)


def _from_minimum(w_NBW: Tensor, bits: int) -> Tensor:
    """Q4_1 and Q5_1."""
    low_NB = w_NBW.amin(-1).half().float()
    scale_NB = ((w_NBW.amax(-1) - low_NB) / ((1 << bits) - 1)).half().float()
    code = _codes(w_NBW - low_NB[..., None], scale_NB, 0, (1 << bits) - 1)
    high = [_bits(code)] if bits == 5 else []
    return torch.cat([_half(scale_NB), _half(low_NB), *high, _nibbles(code)], -1)


def _q8_0(w_NBW: Tensor) -> Tensor:
    scale_NB = (w_NBW.abs().amax(-1) / 127).half().float()
    code = _over(w_NBW, scale_NB[..., None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_half(scale_NB), code.view(torch.uint8)], -1)


def _with_units(w_NBW: Tensor, bits: int) -> Tensor:
    """Q4_K and Q5_K: scales and minima of 32 weights count units of 256."""
    w_NBSW, most = unflatten(w_NBW, -1, (8, 32)), (1 << bits) - 1
    minimum = -w_NBSW.amin(-1).clamp(max=0)
    scale = (w_NBSW.amax(-1) + minimum).clamp(min=0) / most
    unit, min_unit = ((some.amax(-1) / 63).half().float() for some in (scale, minimum))
    count = _over(scale, unit[..., None]).round().clamp(0, 63)
    min_count = _over(minimum, min_unit[..., None]).round().clamp(0, 63)
    raised = w_NBSW + (min_count * min_unit[..., None])[..., None]
    code = _codes(raised, count * unit[..., None], 0, most)
    a, b = count.to(torch.uint8).chunk(2, -1)
    m, n = min_count.to(torch.uint8).chunk(2, -1)
    counts = torch.cat([a | b >> 4 << 6, m | n >> 4 << 6, (b & 15) | (n & 15) << 4], -1)
    high = [_fields(code >> 4, 1)] if bits == 5 else []
    low = _nibbles(unflatten(code.flatten(-2), -1, (4, 64))).flatten(-2)
    return torch.cat([_half(unit), _half(min_unit), counts, *high, low], -1)


def _q6_k(w_NBW: Tensor) -> Tensor:
    w_NBSW = unflatten(w_NBW, -1, (16, 16))
    scale = _peak(w_NBSW) / -32
    unit = (scale.abs().amax(-1) / 127).half().float()
    count = _over(scale, unit[..., None]).round().clamp(-128, 127)
    code = _codes(w_NBSW, count * unit[..., None], 32, 63)
    code = unflatten(code.flatten(-2), -1, (2, 128))
    high = _fields(unflatten(code >> 4, -1, (4, 32)), 2).flatten(-2)
    counts = count.to(torch.int8).view(torch.uint8)
    return torch.cat([_nibbles(code).flatten(-2), high, counts, _half(unit)], -1)


_MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda w: _middled(w, 4),
    "Q4_1": lambda w: _from_minimum(w, 4),
    "Q5_0": lambda w: _middled(w, 5),
    "Q5_1": lambda w: _from_minimum(w, 5),
    "Q8_0": _q8_0,
    "Q4_K": lambda w: _with_units(w, 4),
    "Q5_K": lambda w: _with_units(w, 5),
    "Q6_K": _q6_k,
}
FORMATS = tuple(_MAKERS)
_KEYS = {  # of the metadata, with a model's config in their place
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
}


def write_gguf(path: Path, block_format: str, weights: Weights, like: Path) -> Path:
    """All matrices of a model in a type, with the metadata of the file `like`."""
    fields = _fields_of(like)
    architecture = str(fields["general.architecture"][0])
    own = {f"{architecture}.{key}": weights.config[name] for key, name in _KEYS.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in own.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for key, (value, *types) in fields.items():
        if key not in own and key != "general.architecture" and not key.startswith("GGUF."):
            writer.add_key_value(key, value, *types)
    number = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, weights.config["num_hidden_layers"])
    for name in weights.names():
        tensor = weights.tensor(name)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _paired(tensor, weights.config["head_dim"])
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.dim() == 1:
            writer.add_tensor(there, tensor.float().cpu().numpy())
            continue
        blocks = rounded(block_format, tensor).cpu().numpy()
        writer.add_tensor(there, blocks, raw_dtype=gguf.GGMLQuantizationType[block_format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _paired(rows_NK: Tensor, head_dim: int) -> Tensor:
    """The two halves of a head shuffled together, as llama files have q and k."""
    return unflatten(rows_NK, 0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


@lru_cache(maxsize=1)
def _fields_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Each value of a file's metadata and its types, an array's being two."""
    if not path.is_file():
        raise ConfigError(f"{path} is no GGUF file, whose tokenizer a GGUF of other types needs")
    fields = gguf.GGUFReader(path).fields.items()
    return {key: (field.contents(), *field.types[:2]) for key, field in fields}

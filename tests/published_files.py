"""Random codes as published quantised checkpoints have them, and the numbers they stand for.

Written from the formats' own descriptions, a weight at a time where that is clearest.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hunch.bench.device.published import lay_awq, lay_gptq, lay_packed
from hunch.kernels.quant import BOOKS

Made = tuple[dict[str, Tensor], Tensor]  # tensors after the module's name, the numbers [N, K]
GROUP = 32


def _random(n: int, k: int, high: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales of groups of inputs."""
    generator = torch.Generator().manual_seed(seed)
    size = (n, -(-k // GROUP))
    code = torch.randint(0, high, (n, k), generator=generator)
    zero = torch.randint(1, high - 1, size, generator=generator)
    scale = (torch.rand(size, generator=generator) * 0.02 + 0.005).half()
    return code, zero, scale


def _numbers(code: Tensor, zero: Tensor, scale: Tensor, group_of: Tensor) -> Tensor:
    return (code - zero[:, group_of]).float() * scale.float()[:, group_of]


def _groups(k: int, order: int | None) -> Tensor:
    """The group of each input; `order`: seed of another order than one after the other."""
    group_of = torch.arange(k) // GROUP
    if order is None:
        return group_of
    return group_of[torch.randperm(k, generator=torch.Generator().manual_seed(order))]


def awq(n: int, k: int, seed: int = 0) -> Made:
    code, zero, scale = _random(n, k, 16, seed)
    return lay_awq(code, zero, scale), _numbers(code, zero, scale, _groups(k, None))


def gptq(
    n: int, k: int, seed: int = 0, *, bits: int = 4, order: bool = False, v2: bool = False
) -> Made:
    code, zero, scale = _random(n, k, 1 << bits, seed)
    group_of = _groups(k, 99 if order else None)
    tensors = lay_gptq(code, zero, scale, group_of, bits=bits, is_v2=v2)
    return tensors, _numbers(code, zero, scale, group_of)


def pack_quantised(
    n: int, k: int, seed: int = 0, *, bits: int = 4, zeros: bool = False, order: bool = False
) -> Made:
    code, zero, scale = _random(n, k, 1 << bits, seed)
    group_of = _groups(k, 98 if order else None)
    tensors = lay_packed(
        code,
        scale,
        bits=bits,
        zero_NG=zero if zeros else None,
        group_K=group_of if order else None,
    )
    middle = zero if zeros else torch.full_like(zero, 1 << (bits - 1))
    return tensors, _numbers(code, middle, scale, group_of)


def int8(n: int, k: int, seed: int = 0) -> Made:
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, 1, generator=generator) * 0.01).bfloat16()
    return {"weight": code, "weight_scale": scale}, code.float() * scale.float()


def fp8(n: int, k: int, seed: int = 0, *, scales: str = "blocks") -> Made:
    """`scales`: blocks of 128 x 128, rows, or one for all."""
    torch.manual_seed(seed)
    weight = (torch.randn(n, k) * 20).to(torch.float8_e4m3fn)
    numbers = weight.float()
    if scales == "blocks":
        scale = torch.rand(-(-n // 128), -(-k // 128)) * 0.01
        for row in range(n):
            for block in range(scale.shape[1]):
                numbers[row, block * 128 : (block + 1) * 128] *= scale[row // 128, block]
        return {"weight": weight, "weight_scale_inv": scale}, numbers
    scale = torch.rand(n, 1) * 0.01 if scales == "rows" else torch.rand(()) * 0.01
    beside = {"weight_scale": scale, "input_scale": torch.ones(())}
    return {"weight": weight, **beside}, numbers * scale


def bitsandbytes(n: int, k: int, seed: int = 0, *, form: str = "nf4", nested: bool = True) -> Made:
    """4 bits: blocks of 64 through all rows; `nested`: scales are codes, in blocks of 256."""
    rng = np.random.default_rng(seed)
    code = rng.integers(0, 16, n * k, dtype=np.uint8)
    book = np.array(BOOKS["nf4" if form == "nf4" else "fp4_bnb"], dtype=np.float32)
    state: dict[str, Any] = {
        "quant_type": form, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k],
    }  # fmt: skip
    num_blocks = -(-n * k // 64)
    stored = {"quant_map": book}
    if nested:
        absmax = rng.integers(0, 256, num_blocks, dtype=np.uint8)
        levels = np.sort(rng.uniform(-1, 1, 256).astype(np.float32))
        unit = rng.uniform(0.01, 0.02, -(-num_blocks // 256)).astype(np.float32)
        offset = np.float32(0.03)
        scale = [levels[a] * unit[block // 256] + offset for block, a in enumerate(absmax)]
        state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        stored |= {"nested_absmax": unit, "nested_quant_map": levels}
    else:
        absmax = rng.uniform(0.01, 0.05, num_blocks).astype(np.float32)
        scale = list(absmax)
    stored |= {
        "absmax": absmax,
        f"quant_state.bitsandbytes__{form}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    numbers = [book[one] * scale[place // 64] for place, one in enumerate(code)]
    tensors = {f"weight.{name}": torch.from_numpy(some.copy()) for name, some in stored.items()}
    byte = torch.from_numpy(code[::2] << 4 | code[1::2])
    return {"weight": byte[:, None], **tensors}, torch.tensor(np.array(numbers)).view(n, k)


def bitsandbytes_int8(n: int, k: int, seed: int = 0) -> Made:
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    largest = torch.rand(n, generator=generator)
    beside = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": code, **beside}, code.float() * (largest / 127)[:, None]


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {  # name: quantization_config, maker
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        partial(gptq, order=True),
    ),
    "gptq v2 8": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        partial(gptq, bits=8, v2=True),
    ),
    "compressed int4": (COMPRESSED, pack_quantised),
    "compressed zeros": (COMPRESSED, partial(pack_quantised, zeros=True)),
    "compressed order": (COMPRESSED, partial(pack_quantised, order=True)),
    "compressed 8": (COMPRESSED, partial(pack_quantised, bits=8, zeros=True)),
    "compressed int8": (COMPRESSED, int8),
    "compressed fp8": (COMPRESSED, partial(fp8, scales="rows")),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "fp8 whole": ({"quant_method": "fp8"}, partial(fp8, scales="all")),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        bitsandbytes,
    ),
    "bitsandbytes fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        partial(bitsandbytes, form="fp4", nested=False),
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        bitsandbytes_int8,
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        partial(fp8, scales="rows"),
    ),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


def random_mxfp4(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A gpt-oss's tensors with random experts in their place, as they are published: blocks
    [expert, out, group, 16] and a power of two for each group."""
    generator = torch.Generator().manual_seed(seed)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        num_experts, num_in, num_out = stored.pop(name).shape
        size = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, size, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return stored


def quantised_copy(
    folder: Path, form: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of random matrices in a format, with the other tensors as they are; and all of
    its numbers. What it computes is another model than the given one."""
    settings, make = FORMATS[form]
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if "_proj.weight" not in name:
            stored[name], numbers[name] = tensor, tensor
            continue
        # Act-order is the same for matrices of the same input, as their inputs decide it.
        made, numbers[name] = make(*tensor.shape, seed=index)
        stored |= {f"{name.removesuffix('weight')}{last}": part for last, part in made.items()}
    return write(folder, {**config, "quantization_config": settings}, stored), numbers

"""Small GGUF files with random weights, written by the gguf package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 300


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama files store them: the two halves of a head shuffled together."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def random_tensors(*, is_tied: bool = True, has_bias: bool = False) -> dict[str, np.ndarray]:
    """A decoder's tensors under Hugging Face names."""
    rng = np.random.default_rng(3)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, WIDTH),
        "model.norm.weight": matrix(WIDTH),
    }
    if not is_tied:
        tensors["lm_head.weight"] = matrix(VOCAB, WIDTH)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (MLP, WIDTH),
            "mlp.up_proj": (MLP, WIDTH),
            "mlp.down_proj": (WIDTH, MLP),
        }
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        if has_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = shapes[f"self_attn.{name}"][0]
                tensors[f"{prefix}self_attn.{name}.bias"] = matrix(rows)
    return tensors


# Of formats whose blocks the gguf package does not make: inputs and bytes of a block, and where its
# half floats are, with values that make weights of about 1/16 around zero.
RANDOM_BLOCKS = {
    "IQ4_NL": (32, 18, {0: 1e-3}),
    "Q2_K": (256, 84, {80: 4e-3, 82: 6e-3}),
    "Q4_K": (256, 144, {0: 2.5e-4, 2: 1.9e-3}),
    "Q5_K": (256, 176, {0: 1.2e-4, 2: 1.9e-3}),
    "Q6_K": (256, 210, {208: 4.7e-5}),
}


def random_blocks(block_format: str, num_out: int, num_in: int, seed: int) -> np.ndarray:
    """Any bytes are a block: uint8 [out, bytes of a row]."""
    size, num_bytes, halves = RANDOM_BLOCKS[block_format]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_out, num_in // size, num_bytes), dtype=np.uint8)
    for first, value in halves.items():
        blocks[..., first : first + 2] = np.array([value], np.float16).view(np.uint8)
    return blocks.reshape(num_out, -1)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, ending = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, inner = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[inner]}.{ending}"
    return f"{_NAMES[stem]}.{ending}"


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


def names_in(architecture: str, num_layers: int) -> gguf.TensorNameMap:
    """How converters name an architecture's tensors."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, num_layers)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    block_format: str | Sequence[str] = "F32",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A file as converters write it; vectors in F32, matrices as told (several: in turn)."""
    writer = gguf.GGUFWriter(path, architecture)
    usual = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": MLP,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50000.0,
    }
    for key, value in (usual | (metadata or {})).items():
        add_key(writer, key, value)
    formats = cycle([block_format] if isinstance(block_format, str) else block_format)
    for seed, (name, value) in enumerate(tensors.items()):
        if architecture in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            value = interleave(value, HEADS if "q_proj" in name else KV_HEADS)
        form = next(formats) if value.ndim == 2 else "F32"
        if form in RANDOM_BLOCKS:
            packed = random_blocks(form, *value.shape, seed)
        elif form != "F32":
            packed = gguf.quants.quantize(value, gguf.GGMLQuantizationType[form])
        if form != "F32":
            quantised = gguf.GGMLQuantizationType[form]
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


def write_parts(
    folder: Path,
    tensors: dict[str, np.ndarray],
    count: int,
    *,
    metadata: dict[str, Any] | None = None,
) -> list[Path]:
    """The same in several files, as llama-gguf-split makes them; "" stands for no tensor."""
    names, parts = list(tensors), []
    for number in range(count):
        path = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        some = {name: tensors[name] for name in names[number::count] if name}
        known = (metadata or {}) if number == 0 else {}
        said = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        parts.append(write_gguf(path, some, metadata={**known, **said}))
    return parts

"""A model's matrices rounded into published formats, and checkpoints that hold them.

Codes are the nearest ones, without calibration: the files are for measuring kernels, not for use.
Layout is separate from rounding, so that tests can lay out codes of their own.

Shape letters: N outputs, K inputs, G groups of inputs, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, unflatten
from torch.nn import functional

from hunch.kernels.quant import BOOKS, FP4
from hunch.kernels.quantise import quantise
from hunch.models.weights import Weights

Stored = dict[str, Tensor]  # a matrix's tensors, by what follows the module's name
GROUP = 128
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word has output _AWQ_ORDER[i] of its eight
_SCALE_OF_ZEROS = 2.0**-7
_FP4_GROUP = 32
_NF4_BLOCK = 64
_FP8_BLOCK = 128
_FP8_MOST = 448.0


# --- how formats lay out codes --------------------------------------------------------------------


def words(code: Tensor, bits: int) -> Tensor:
    """Numbers along the last axis in 32-bit words, the first in the lowest bits."""
    per = 32 // bits
    parts = unflatten(functional.pad(code.long(), (0, -code.shape[-1] % per)), -1, (-1, per))
    return (parts << torch.arange(0, 32, bits, device=code.device)).sum(-1).to(torch.int32)


def lay_awq(code_NK: Tensor, zero_NG: Tensor, scale_NG: Tensor) -> Stored:
    def interleaved(some: Tensor) -> Tensor:
        return words(unflatten(some.T, 1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1), 4)

    return {"qweight": interleaved(code_NK), "qzeros": interleaved(zero_NG), "scales": scale_NG.T}


def lay_gptq(
    code_NK: Tensor,
    zero_NG: Tensor,
    scale_NG: Tensor,
    group_K: Tensor,
    *,
    bits: int = 4,
    is_v2: bool = False,
) -> Stored:
    """The first version stores zero points less one."""
    return {
        "qweight": words(code_NK, bits).T,
        "qzeros": words(zero_NG.T - (0 if is_v2 else 1), bits),
        "scales": scale_NG.T,
        "g_idx": group_K.int(),
    }


def lay_packed(
    code_NK: Tensor,
    scale_NG: Tensor,
    *,
    bits: int = 4,
    zero_NG: Tensor | None = None,
    group_K: Tensor | None = None,
) -> Stored:
    """compressed-tensors' pack-quantized. Zero points are packed along the outputs."""
    stored = {
        "weight_packed": words(code_NK, bits),
        "weight_scale": scale_NG,
        "weight_shape": torch.tensor(code_NK.shape),
    }
    if zero_NG is not None:
        stored["weight_zero_point"] = words(zero_NG.T, bits).T
    if group_K is not None:
        stored["weight_g_idx"] = group_K.int()
    return stored


# --- how matrices are rounded ---------------------------------------------------------------------


def _with_zeros(w_NK: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales in float16 of groups of inputs."""
    w_NGK, most = unflatten(w_NK, 1, (-1, group)), (1 << bits) - 1
    low_NG, high_NG = w_NGK.amin(2).clamp(max=0), w_NGK.amax(2).clamp(min=0)
    scale_NG = ((high_NG - low_NG) / most).half()
    scale_NG = torch.where(scale_NG == 0, _SCALE_OF_ZEROS, scale_NG)
    zero_NG = (-low_NG / scale_NG.float()).round().clamp(1, most).int()  # GPTQ has no zero point 0
    code_NGK = (w_NGK / scale_NG.float()[:, :, None]).round() + zero_NG[:, :, None]
    return code_NGK.clamp(0, most).int().flatten(1), zero_NG, scale_NG


def _awq(w_NK: Tensor) -> Stored:
    return lay_awq(*_with_zeros(w_NK, 4, GROUP))


def _gptq(w_NK: Tensor, bits: int = 4, is_ordered: bool = False) -> Stored:
    """Act-order is the same for all matrices with the same inputs, as it depends on these."""
    num_in = w_NK.shape[1]
    group_K = torch.arange(num_in) // GROUP
    if not is_ordered:
        return lay_gptq(*_with_zeros(w_NK, bits, GROUP), group_K, bits=bits)
    order_K = torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))
    place_K = order_K.argsort()
    code_NK, zero_NG, scale_NG = _with_zeros(w_NK[:, order_K.to(w_NK.device)], bits, GROUP)
    code_NK = code_NK[:, place_K.to(w_NK.device)]
    return lay_gptq(code_NK, zero_NG, scale_NG, group_K[place_K], bits=bits)


def _packed(w_NK: Tensor) -> Stored:
    codes = quantise(w_NK.bfloat16(), "int4", GROUP)
    return lay_packed(codes.code_NK, codes.scale_NG)


def _by_row(w_NK: Tensor, code_format: str, dtype: torch.dtype) -> Stored:
    codes = quantise(w_NK.bfloat16(), code_format)
    return {"weight": codes.code_NK.view(dtype), "weight_scale": codes.scale_NG}


def _fp8_blocks(w_NK: Tensor) -> Stored:
    size = (-1, _FP8_BLOCK)
    blocks = unflatten(unflatten(w_NK, 1, size), 0, size)
    scale = blocks.abs().amax((1, 3), keepdim=True) / _FP8_MOST
    scale = torch.where(scale == 0, _SCALE_OF_ZEROS, scale)
    weight_NK = (blocks / scale).to(torch.float8_e4m3fn).view(w_NK.shape)
    return {"weight": weight_NK, "weight_scale_inv": scale[:, 0, :, 0]}


def round_fp4(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """mxfp4: bytes of two codes, [N, G, 16], and scales [N, G], powers of two with 127 added."""
    w_NGK = unflatten(w_NK, 1, (-1, _FP4_GROUP))
    peak_NG = w_NGK.abs().amax(2).clamp(min=2.0**-120)
    power_NG = peak_NG.log2().floor() - 2  # of the largest code, 6, which is 1.5 * 2**2
    value_NGK = (w_NGK / torch.exp2(power_NG)[:, :, None]).clamp(-6, 6)
    levels = torch.tensor(FP4, device=w_NK.device)
    code_NGK = torch.bucketize(value_NGK.abs(), (levels[1:] + levels[:-1]) / 2)
    code_NGK = (code_NGK + 8 * (value_NGK < 0)).to(torch.uint8)
    low, high = unflatten(code_NGK, 2, (-1, 2)).unbind(3)
    return low | (high << 4), (power_NG + 127).to(torch.uint8)


def _fp4(w_NK: Tensor) -> Stored:
    byte_NGB, scale_NG = round_fp4(w_NK)
    return {"weight_packed": byte_NGB.flatten(1), "weight_scale": scale_NG}


def _nf4(w_NK: Tensor) -> Stored:
    """bitsandbytes' 4 bits: the nearest entries of its code book, in blocks that cross rows."""
    book = torch.tensor(BOOKS["nf4"], device=w_NK.device)
    blocks_BK = w_NK.float().reshape(-1, _NF4_BLOCK)
    absmax_B = blocks_BK.abs().amax(1)
    value_BK = blocks_BK / absmax_B.clamp(min=_SCALE_OF_ZEROS)[:, None]
    high, low = torch.bucketize(value_BK, (book[1:] + book[:-1]) / 2).view(-1, 2).unbind(1)
    state = {
        "quant_type": "nf4", "blocksize": _NF4_BLOCK, "dtype": "bfloat16",
        "shape": list(w_NK.shape),
    }  # fmt: skip
    state_Y = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        "weight": (high << 4 | low).to(torch.uint8)[:, None],
        "weight.absmax": absmax_B,
        "weight.quant_map": book,
        "weight.quant_state.bitsandbytes__nf4": state_Y,
    }


def _largest_of_rows(w_NK: Tensor) -> Stored:
    """bitsandbytes' 8 bits: 127 stands for the largest of a row."""
    largest_N = w_NK.float().abs().amax(1)
    code_NK = (w_NK.float() * (127 / largest_N.clamp(min=_SCALE_OF_ZEROS))[:, None]).round()
    return {"weight": code_NK.to(torch.int8), "SCB": largest_N}


# --- checkpoints ----------------------------------------------------------------------------------


class Format(NamedTuple):
    settings: dict[str, Any]  # its quantization_config
    make: Callable[[Tensor], Stored]


def _compressed(num_bits: int, make: Callable[[Tensor], Stored], **weights: Any) -> Format:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": num_bits, **weights}}}
    return Format({"quant_method": "compressed-tensors", "config_groups": groups}, make)


_GROUPED = {"bits": 4, "group_size": GROUP}
FORMATS = {
    "awq": Format({"quant_method": "awq", "version": "gemm", **_GROUPED}, _awq),
    "gptq": Format({"quant_method": "gptq", **_GROUPED}, _gptq),
    "gptq-act-order": Format(
        {"quant_method": "gptq", "desc_act": True, **_GROUPED}, partial(_gptq, is_ordered=True)
    ),
    "gptq-8": Format({"quant_method": "gptq", **_GROUPED, "bits": 8}, partial(_gptq, bits=8)),
    "compressed-int4": _compressed(4, _packed, group_size=GROUP),
    "compressed-int8": _compressed(8, partial(_by_row, code_format="int8", dtype=torch.int8)),
    "compressed-fp8": _compressed(
        8, partial(_by_row, code_format="fp8", dtype=torch.float8_e4m3fn)
    ),
    "compressed-mxfp4": _compressed(4, _fp4, group_size=_FP4_GROUP),
    "bitsandbytes-nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "bitsandbytes-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, _largest_of_rows
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK]}, _fp8_blocks
    ),
}


def write_published(folder: Path, form: str, weights: Weights) -> Path:
    """Write a model with its layers' matrices in a format, and the rest in bfloat16."""
    stored: Stored = {}
    for name in weights.names():
        if not name.endswith("_proj.weight"):
            stored[name] = weights.tensor(name).bfloat16()
            continue
        made = FORMATS[form].make(weights.tensor(name))
        stored |= {f"{name.removesuffix('weight')}{last}": part for last, part in made.items()}
    return write_checkpoint(folder, weights.config, FORMATS[form].settings, stored)


def write_checkpoint(
    folder: Path, config: dict[str, Any], settings: dict[str, Any], stored: Stored
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(
        {name: part.cpu().contiguous() for name, part in stored.items()},
        folder / "model.safetensors",
    )
    return folder


EXPERTS_VOCAB = 8192
_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": EXPERTS_VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "tie_word_embeddings": False,
}


def write_experts(folder: Path, device: str = "cpu", **sizes: int) -> Path:
    """Write a gpt-oss of random weights with experts in mxfp4, as no small one was published."""
    config = _OSS | sizes
    width, inner, heads, kv_heads, head_dim, num_experts, vocab_size = (
        int(str(config[key]))
        for key in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "num_local_experts", "vocab_size",
        )
    )  # fmt: skip
    random = torch.Generator(device).manual_seed(0)
    stored: Stored = {}

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def matrix(name: str, num_out: int, num_in: int, scale: float = 1.0) -> None:
        stored[f"{name}.weight"] = (some(num_out, num_in) * (scale * num_in**-0.5)).bfloat16()

    def linear(name: str, num_out: int, num_in: int) -> None:
        matrix(name, num_out, num_in)
        stored[f"{name}.bias"] = (0.1 * some(num_out)).bfloat16()

    def experts(name: str, num_out: int, num_in: int) -> None:
        byte_NGB, scale_NG = round_fp4(some(num_experts * num_out, num_in) * num_in**-0.5)
        stored[f"{name}_blocks"] = unflatten(byte_NGB, 0, (num_experts, -1))
        stored[f"{name}_scales"] = unflatten(scale_NG, 0, (num_experts, -1))
        stored[f"{name}_bias"] = (0.1 * some(num_experts, num_out)).bfloat16()

    matrix("model.embed_tokens", vocab_size, width, width**0.5)
    matrix("lm_head", vocab_size, width, 3.0)  # a few of its tokens are likely
    norms = ["model.norm"]
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        norms += [f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm"]
        linear(f"{prefix}self_attn.q_proj", heads * head_dim, width)
        linear(f"{prefix}self_attn.k_proj", kv_heads * head_dim, width)
        linear(f"{prefix}self_attn.v_proj", kv_heads * head_dim, width)
        linear(f"{prefix}self_attn.o_proj", width, heads * head_dim)
        stored[f"{prefix}self_attn.sinks"] = some(heads).bfloat16()
        linear(f"{prefix}mlp.router", num_experts, width)
        experts(f"{prefix}mlp.experts.gate_up_proj", 2 * inner, width)
        experts(f"{prefix}mlp.experts.down_proj", width, inner)
    for name in norms:
        stored[f"{name}.weight"] = (1 + 0.1 * some(width)).bfloat16()
    return write_checkpoint(folder, config, {"quant_method": "mxfp4"}, stored)

"""Matrices written as published quantised checkpoints have them, and the numbers they stand for.

Written from the formats' own descriptions, a weight at a time where that is clearest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]  # tensors after the module's name, the numbers [N, K]
GROUP = 32


def _random(n: int, k: int, high: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zero points and scales of groups of inputs."""
    rng = np.random.default_rng(seed)
    code = rng.integers(0, high, (n, k))
    num_groups = -(-k // GROUP)
    zero = rng.integers(1, high - 1, (n, num_groups))
    scale = (rng.random((n, num_groups)) * 0.02 + 0.005).astype(np.float16)
    return code, zero, scale


def _numbers(code: np.ndarray, zero: np.ndarray | int, scale: np.ndarray, group_of: Any) -> Tensor:
    zero_nk = zero[:, group_of] if isinstance(zero, np.ndarray) else zero
    value = (code - zero_nk).astype(np.float32) * scale.astype(np.float32)[:, group_of]
    return torch.from_numpy(value)


def _words(code: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis in 32-bit words, the first in the lowest bits."""
    per = 32 // bits
    out = np.zeros((*code.shape[:-1], -(-code.shape[-1] // per)), np.uint32)
    for index in range(code.shape[-1]):
        value = code[..., index].astype(np.uint32) << np.uint32(bits * (index % per))
        out[..., index // per] |= value
    return out.view(np.int32)


def awq(n: int, k: int, seed: int = 0) -> Made:
    code, zero, scale = _random(n, k, 16, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word has output order[i] of its eight

    def interleaved(some: np.ndarray) -> np.ndarray:
        eights = some.T.reshape(some.shape[1], -1, 8)[:, :, order]
        return _words(eights.reshape(some.shape[1], -1), 4)

    tensors = {"qweight": interleaved(code), "qzeros": interleaved(zero), "scales": scale.T.copy()}
    group_of = np.arange(k) // GROUP
    return _tensors(tensors), _numbers(code, zero, scale, group_of)


def gptq(
    n: int, k: int, seed: int = 0, *, bits: int = 4, order: bool = False, v2: bool = False
) -> Made:
    code, zero, scale = _random(n, k, 1 << bits, seed)
    group_of = np.arange(k) // GROUP
    if order:
        group_of = np.random.default_rng(99).permutation(group_of)
    tensors = {
        "qweight": np.ascontiguousarray(_words(code, bits).T),
        "qzeros": _words(zero.T - (0 if v2 else 1), bits),
        "scales": scale.T.copy(),
        "g_idx": group_of.astype(np.int32),
    }
    return _tensors(tensors), _numbers(code, zero, scale, group_of)


def pack_quantised(
    n: int, k: int, seed: int = 0, *, bits: int = 4, zeros: bool = False, order: bool = False
) -> Made:
    code, zero, scale = _random(n, k, 1 << bits, seed)
    group_of = np.arange(k) // GROUP
    if order:
        group_of = np.random.default_rng(98).permutation(group_of)
    tensors = {
        "weight_packed": _words(code, bits),
        "weight_scale": scale,
        "weight_shape": np.array([n, k]),
    }
    if zeros:
        tensors["weight_zero_point"] = np.ascontiguousarray(_words(zero.T, bits).T)
    if order:
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    middle: np.ndarray | int = zero if zeros else 1 << (bits - 1)
    return _tensors(tensors), _numbers(code, middle, scale, group_of)


def int8(n: int, k: int, seed: int = 0) -> Made:
    rng = np.random.default_rng(seed)
    code = rng.integers(-127, 128, (n, k)).astype(np.int8)
    scale = torch.from_numpy(rng.random((n, 1)).astype(np.float32) * 0.01).bfloat16()
    numbers = torch.from_numpy(code.astype(np.float32)) * scale.float()
    return {"weight": torch.from_numpy(code), "weight_scale": scale}, numbers


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


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {  # name: quantization_config, maker
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda n, k, seed=0: gptq(n, k, seed, order=True),
    ),
    "gptq v2 8": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda n, k, seed=0: gptq(n, k, seed, bits=8, v2=True),
    ),
    "compressed int4": (COMPRESSED, pack_quantised),
    "compressed zeros": (
        COMPRESSED,
        lambda n, k, seed=0: pack_quantised(n, k, seed, zeros=True),
    ),
    "compressed order": (
        COMPRESSED,
        lambda n, k, seed=0: pack_quantised(n, k, seed, order=True),
    ),
    "compressed 8": (
        COMPRESSED,
        lambda n, k, seed=0: pack_quantised(n, k, seed, bits=8, zeros=True),
    ),
    "compressed int8": (COMPRESSED, int8),
    "compressed fp8": (
        COMPRESSED,
        lambda n, k, seed=0: fp8(n, k, seed, scales="rows"),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "fp8 whole": ({"quant_method": "fp8"}, lambda n, k, seed=0: fp8(n, k, seed, scales="all")),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        lambda n, k, seed=0: fp8(n, k, seed, scales="rows"),
    ),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


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

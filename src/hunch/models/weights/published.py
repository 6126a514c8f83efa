"""Checkpoints with a `quantization_config`: their matrices under the names a plain one has.

Read as published: fp8 (blocks, rows, whole tensors), int4 and int8 of compressed-tensors, AWQ, GPTQ
with and without act-order, bitsandbytes, and the 4-bit floats of gpt-oss. A checkpoint's settings
for activations are ignored: they stay in 16 bits, which is nearer to the model it was made from.

Shape letters: N outputs, K inputs, G groups of inputs, E experts, Y bytes of a row, P halves of a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.quant import Codes
from hunch.models.weights import bitsandbytes
from hunch.models.weights.base import Packed, Rows, Weights, WeightsOver
from hunch.models.weights.json_file import read_json
from hunch.models.weights.methods import READERS, fp4, method_of

_KEYS = ("quantization_config", "compression_config")  # in config.json
_FILES = {  # of older tools, which wrote a file of their own
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
_BESIDE = (  # tensors that belong to a matrix, after its module's name
    "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point",
    "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
    "input_scale", "input_scale_ub", "input_zero_point", "output_scale", "activation_scale",
    *bitsandbytes.BESIDE,
)  # fmt: skip
_ENDS = tuple(f".{part}" for part in _BESIDE)
_MARKS = (  # one of them is beside every quantised matrix
    "qweight", "weight_packed", "weight_scale", "weight_scale_inv",
    bitsandbytes.ABSMAX, bitsandbytes.SCALES,
)  # fmt: skip
_UNUSED = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")  # of a KV cache's precision


class RawWeights(Weights, Protocol):
    """Files whose tensors can be had as they are stored."""

    def raw_names(self) -> list[str]: ...

    def raw(self, name: str) -> Tensor: ...

    def raw_shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded(Packed):
    """A matrix of a published format, read when it is asked for."""

    read: Callable[[torch.device | str], Codes]

    def take(self, rows: Rows) -> Packed:
        whole = self.read
        count = len(range(self.shape[0])[rows]) if isinstance(rows, slice) else len(rows)
        return replace(
            self, shape=(count, self.shape[1]), read=lambda device: whole(device).take(rows)
        )

    def numbers(self, first: int, last: int) -> Tensor:
        return self.read("cpu").rows(first, last).numbers()

    def take_columns(self, first: int, last: int) -> Packed | None:
        return None  # their numbers are read

    def codes(self, device: torch.device | str = "cpu") -> Codes | None:
        return self.read(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp4Experts(Packed):
    """Rows of gpt-oss's experts in the file: bytes of two codes, and a scale for 32 codes."""

    words_NY: Tensor
    scale_NG: Tensor

    def take(self, rows: Rows) -> Packed:
        words_NY, scale_NG = self.words_NY[rows], self.scale_NG[rows]
        shape = len(words_NY), self.shape[1]
        return replace(self, shape=shape, words_NY=words_NY, scale_NG=scale_NG)

    def take_columns(self, first: int, last: int) -> Packed | None:
        return None  # their numbers are read

    def blocks(self) -> Tensor:
        """A scale, then 16 bytes: the codes of the first 16 inputs in the low bits."""
        words_NGP8 = self.words_NY.reshape(len(self.words_NY), -1, 2, 8)
        low, high = torch.stack([words_NGP8 & 15, words_NGP8 >> 4], dim=-1).flatten(3).unbind(2)
        return torch.cat([self.scale_NG[:, :, None], low | high << 4], dim=2).flatten(1)

    def numbers(self, first: int, last: int) -> Tensor:
        return fp4(self.words_NY[first:last], self.scale_NG[first:last]).numbers()

    def codes(self, device: torch.device | str = "cpu") -> Codes | None:
        return fp4(self.words_NY.to(device), self.scale_NG.to(device))


def settings_of(stored: RawWeights) -> Mapping[str, Any] | None:
    """A checkpoint's quantisation settings, wherever its tool wrote them; None: it has none."""
    for key in _KEYS:
        given = stored.config.get(key)
        if given and not isinstance(given, Mapping):
            raise ModelFormatError(f"config.json: {key}={given!r} must be an object")
        if given:
            return {"quant_method": "compressed-tensors", **given} if key == _KEYS[1] else given
    for name, method in _FILES.items():
        if (stored.path / name).is_file():
            content = read_json(stored.path / name)
            return {"quant_method": method, **content, **dict(content.get("quantization") or {})}
    return None


class PublishedWeights(WeightsOver):
    """`Weights` over the stored tensors of a quantised checkpoint."""

    def __init__(self, stored: RawWeights, settings: Mapping[str, Any]) -> None:
        super().__init__(stored)
        self.settings = settings
        self.method = method_of(settings)
        self._stored = stored
        self.config = {k: v for k, v in stored.config.items() if k not in _KEYS}
        self._raw = set(stored.raw_names())
        self._read = READERS[self.method]
        self._shapes = self._find()

    def _find(self) -> dict[str, tuple[int, ...]]:
        """The names of a plain checkpoint, and their shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for name in sorted(self._raw):
            module, _, last = name.rpartition(".")
            if name.endswith(("_blocks", "_scales")) and self.method == "mxfp4":
                if name.endswith("_blocks"):
                    *most, num_groups, num_bytes = self._stored.raw_shape(name)
                    shape = (*most, num_groups * num_bytes * 2)
                    found[name.removesuffix("_blocks") + ".weight"] = shape
            elif last in ("qweight", "weight_packed"):
                found[f"{module}.weight"] = self._packed_shape(module, last)
            elif last == "weight" and (state := bitsandbytes.state_name(self._raw, module)):
                found[name] = bitsandbytes.shape_in(self._stored.raw(state), name)
            elif not name.endswith(_ENDS) and last not in _UNUSED:
                found[name] = tuple(self._stored.raw_shape(name))
        return found

    def _packed_shape(self, module: str, last: str) -> tuple[int, ...]:
        size = self._stored.raw_shape(f"{module}.{last}")
        if last == "weight_packed":
            if f"{module}.weight_shape" in self._raw:
                shape = self._stored.raw(f"{module}.weight_shape").tolist()
                return int(shape[0]), int(shape[1])
            return size[0], size[1] * 2  # bytes of two codes
        _, num_out = self._stored.raw_shape(f"{module}.scales")
        if self.method == "awq":
            return num_out, size[0]
        return num_out, size[0] * 32 // int(self.settings.get("bits", 4))

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelFormatError(f"{self.path} has no tensor {name}")
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        stem = name.removesuffix(".weight")
        if f"{stem}_blocks" in self._raw:
            return self._experts(stem, dtype)
        packed = self.packed(name)
        if packed is not None:
            codes = packed.codes()
            assert codes is not None
            return codes.numbers(dtype)
        stored = self._stored.raw(name)
        if name.endswith(".weight") and not stored.is_floating_point():
            raise ModelFormatError(
                f"{self.path}: {name} is stored in {stored.dtype}, and no scales are beside it"
            )
        return stored.to(dtype)

    def packed(self, name: str) -> Packed | None:
        shape = self.shape(name)
        module, _, last = name.rpartition(".")
        if f"{module}_blocks" in self._raw:
            return self._packed_experts(module, shape)
        is_quantised = any(f"{module}.{mark}" in self._raw for mark in _MARKS)
        if last != "weight" or len(shape) != 2 or not is_quantised:
            return None

        @lru_cache(maxsize=1)  # a matrix is asked for a few rows at a time
        def read(device: torch.device | str) -> Codes:
            beside = [part for part in (*_BESIDE, "weight") if f"{module}.{part}" in self._raw]
            tensors = {part: self._stored.raw(f"{module}.{part}").to(device) for part in beside}
            codes = self._read(tensors, self.settings, module)
            if codes.shape != shape:
                raise ModelFormatError(f"{self.path}: {module} holds {codes.shape}, not {shape}")
            return codes

        return Coded(self.method, (shape[0], shape[1]), torch.empty(0), _nothing, read=read)

    def _packed_experts(self, stem: str, shape: tuple[int, ...]) -> Packed:
        """The rows of all experts."""
        blocks, scales = (self._stored.raw(f"{stem}_{part}") for part in ("blocks", "scales"))
        num_experts, num_out, num_in = shape
        return Fp4Experts(
            "MXFP4",
            (num_experts * num_out, num_in),
            torch.empty(0),
            _nothing,
            words_NY=blocks.flatten(0, 1).flatten(1),
            scale_NG=scales.flatten(0, 1),
        )

    def _experts(self, stem: str, dtype: torch.dtype) -> Tensor:
        """All experts' matrices, [E, N, K], one expert at a time."""
        blocks, scales = (self._stored.raw(f"{stem}_{part}") for part in ("blocks", "scales"))
        codes = (fp4(b.flatten(1), s) for b, s in zip(blocks, scales, strict=True))
        return torch.stack([one.numbers(dtype) for one in codes])


def _nothing() -> None:
    """There is no copy in memory to release."""

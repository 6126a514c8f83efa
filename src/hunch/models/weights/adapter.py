"""A model with a LoRA adapter: the adapter's products are added to the matrices they belong to.

W + scale * B @ A is computed once, when a matrix is read, so that a pass over the result is a pass
over any model: as exact, as fast, and for every format, kernel and kind of device there is.

Shape letters: N outputs, K inputs, R the adapter's rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.quant import Codes
from hunch.models.weights.base import Packed, Rows, Weights, WeightsOver

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_ROOTS = ("", "model.", "model.language_model.", "language_model.model.")
# Other features of PEFT: to ignore one would change the text.
_NEEDED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one matrix: b_NR @ a_RK, with its scale in b."""

    b_NR: Tensor
    a_RK: Tensor

    def numbers(self, first: int, last: int) -> Tensor:
        """The product's rows [first, last)."""
        return self.b_NR[first:last] @ self.a_RK


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedPacked(Packed):
    """A quantised matrix and what is added to it; it has no blocks of its own."""

    base: Packed
    added: LowRank

    def take(self, rows: Rows) -> Packed:
        base, added = self.base.take(rows), replace(self.added, b_NR=self.added.b_NR[rows])
        return replace(self, shape=base.shape, base=base, added=added)

    def take_columns(self, first: int, last: int) -> Packed | None:
        return None  # reading expands its numbers

    def numbers(self, first: int, last: int) -> Tensor:
        return self.base.numbers(first, last) + self.added.numbers(first, last)

    def codes(self, device: torch.device | str = "cpu") -> Codes | None:
        return None


class AdaptedWeights(WeightsOver):
    """`Weights` over others, with an adapter's products added."""

    def __init__(self, weights: Weights, path: str | Path) -> None:
        super().__init__(weights)
        self._added = read_adapter(Path(path), weights)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        added = self._added.get(name)
        if added is None:
            return self.weights.tensor(name, dtype)
        merged = self.weights.tensor(name, torch.float32) + added.b_NR @ added.a_RK
        return merged.to(dtype)

    def packed(self, name: str) -> Packed | None:
        packed, added = self.weights.packed(name), self._added.get(name)
        if packed is None or added is None:
            return packed
        return MergedPacked(
            f"{packed.format} with an adapter",
            packed.shape,
            packed.data,
            packed.release,
            base=packed,
            added=added,
        )


def read_adapter(path: Path, weights: Weights) -> dict[str, LowRank]:
    """What a PEFT adapter adds, by the names of the file's matrices."""
    config = _config(path)
    parts: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path / TENSORS, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = _NAME.fullmatch(name)
                if found is None:
                    raise UnsupportedModelError(
                        f"{path}: {name} is no part of a LoRA adapter's matrices, which alone "
                        "are read"
                    )
                parts.setdefault(found[1], {})[found[2]] = file.get_tensor(name).float()
    except (OSError, SafetensorError) as error:
        raise ModelFormatError(f"{path / TENSORS} cannot be read: {error}") from None
    if not parts:
        raise ModelFormatError(f"{path / TENSORS}: no adapter in it")
    known = set(weights.names())
    return dict(_product(path, config, weights, known, *item) for item in parts.items())


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(
            f"{path}: an adapter is a directory with {CONFIG} and {TENSORS}, as PEFT writes it "
            f"({error})"
        ) from None
    if not isinstance(config, dict):
        raise ModelFormatError(f"{path / CONFIG} is not a JSON object")
    for name, allowed in _NEEDED.items():
        if config.get(name, allowed[0]) not in allowed:
            raise UnsupportedModelError(
                f"{path / CONFIG}: {name}={config[name]!r} is not supported; only {allowed[0]!r}"
            )
    return config


def _product(
    path: Path,
    config: Mapping[str, Any],
    weights: Weights,
    known: set[str],
    module: str,
    parts: Mapping[str, Tensor],
) -> tuple[str, LowRank]:
    name = _stored(module, known)
    if name is None:
        raise ModelFormatError(f"{path}: it changes {module}, which {weights.path} does not have")
    if set(parts) != {"A", "B"}:
        raise ModelFormatError(f"{path}: {module} has no lora_{'AB'['A' in parts]}")
    rank, scale = len(parts["A"]), _scale(config, module, len(parts["A"]))
    b_NR, a_RK = parts["B"] * scale, parts["A"]
    if config.get("fan_in_fan_out"):  # the file holds the matrix transposed
        b_NR, a_RK = a_RK.t() * scale, parts["B"].t()
    shape = tuple(weights.shape(name))
    if b_NR.ndim != 2 or b_NR.shape[1] != rank or (len(b_NR), a_RK.shape[-1]) != shape:
        raise ModelFormatError(
            f"{path}: {module} has lora_A {tuple(parts['A'].shape)} and lora_B "
            f"{tuple(parts['B'].shape)}, for a matrix of {shape}"
        )
    return name, LowRank(b_NR.contiguous(), a_RK.contiguous())


def _stored(module: str, known: set[str]) -> str | None:
    """The file's name for a module's matrix, whichever of the usual prefixes either has."""
    root = next((root for root in reversed(_ROOTS) if module.startswith(root)), "")
    bare = module.removeprefix(root)
    candidates = [f"{module}.weight", *(f"{root}{bare}.weight" for root in _ROOTS)]
    return next((name for name in candidates if name in known), None)


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or with rsLoRA alpha / sqrt(rank); some modules may have an alpha of their
    own."""
    alpha = config.get("lora_alpha", rank)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        try:
            is_meant = re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
        except re.error as error:
            raise ModelFormatError(f"{CONFIG}: alpha_pattern {pattern!r}: {error}") from None
        if is_meant:
            alpha = own
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelFormatError(f"{CONFIG}: lora_alpha={alpha!r} must be a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)

"""What a drafter takes over from its target: some of its layers, and the units of them that count.

Of a wide target a whole layer is too much for a drafter: in a model of 7B parameters one takes a
thirtieth of the target's pass. Four fifths of that are the MLP, most of whose units add little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.models.build import Names
from hunch.models.heads.draft_model import CUT_FROM
from hunch.models.spec import ModelSpec
from hunch.models.weights import Packed, Weights

INNER, UNITS = "intermediate_size", "unit_share"  # keys of config.json
_OTHER_KEY = ("OPTForCausalLM", "GPT2LMHeadModel")  # whose configs name that number otherwise
_MULTIPLE = 256  # units are kept in such numbers, which all kernels take


def can_lose_units(spec: ModelSpec, weights: Weights, names: Names) -> bool:
    """Whether layers of the target can be had with fewer units."""
    if spec.experts is not None or spec.ffn_widths or spec.is_transposed:
        return False
    first, inner = f"{names.layer.format(0)}{names.up}.weight", weights.config.get(INNER)
    is_apart = not {first, first.removeprefix("model.")}.isdisjoint(weights.names())
    return is_apart and inner == spec.ffn_width and inner not in (spec.width, _MULTIPLE)


def check_units(share: float, spec: ModelSpec | None = None) -> None:
    """Raise for a share that is none, or for layers of a target that cannot lose units."""
    if not 0 < share <= 1:
        raise ConfigError(f"units={share} must be above 0 and at most 1")
    if spec is None or share == 1:
        return
    if spec.experts is not None or spec.ffn_widths or spec.architecture in _OTHER_KEY:
        raise ConfigError(f"units={share}: layers of {spec.architecture} keep all units; leave it")


def num_units(spec: ModelSpec, share: float) -> int:
    """How many units a share of them is."""
    return min(max(round(share * spec.ffn_width / _MULTIPLE), 1) * _MULTIPLE, spec.ffn_width)


def with_units(spec: ModelSpec, share: float) -> ModelSpec:
    return replace(spec, ffn_width=num_units(spec, share))


def strongest_units(weights: Weights, prefix: str, names: Names, count: int) -> Tensor:
    """Which units of a layer add most: what they read with, times what they write with."""
    strength = read(weights, f"{prefix}{names.down}.weight").norm(dim=0)
    known = set(weights.names())
    for part in (names.gate, names.up):
        name = f"{prefix}{part}.weight"
        if not known.isdisjoint((name, name.removeprefix("model."))):
            strength = strength * read(weights, name).norm(dim=1)
    found: Tensor = strength.topk(count).indices.sort().values
    return found


def read(weights: Weights, name: str) -> Tensor:
    known = set(weights.names())
    return weights.tensor(name if name in known else name.removeprefix("model."), torch.float32)


def fitted(tensor: Tensor, shape: tuple[int, ...], units: Tensor | None) -> Tensor:
    """A tensor of a layer, of its units only those that are kept."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            assert units is not None
            tensor = tensor.index_select(dim, units)
    return tensor


class CutWeights:
    """Some layers of a target's weights under the names of a smaller model, with their first units:
    as large as a drafter to be timed. Nothing is copied."""

    def __init__(
        self, weights: Weights, layers: list[int], names: Names, spec: ModelSpec | None = None
    ) -> None:
        self.weights, self.path = weights, Path(weights.path)
        self.metadata: Mapping[str, Any] = {}
        self.config = {**weights.config, "num_hidden_layers": len(layers), CUT_FROM: ""}
        self.config.pop("layer_types", None)
        self.inner = {}
        if spec is not None and weights.config.get(INNER) != spec.ffn_width:
            self.inner = {weights.config[INNER]: spec.ffn_width}
            self.config[INNER] = spec.ffn_width
        known = set(weights.names())
        self.stored: dict[str, str] = {}
        for name in known:
            full = name if name.startswith("model.") else f"model.{name}"
            for ours, theirs in enumerate(layers):
                prefix = names.layer.format(theirs)
                if full.startswith(prefix):
                    self.stored[names.layer.format(ours) + full.removeprefix(prefix)] = name
            if full.startswith(names.final_norm):
                self.stored[full] = name
        self.nbytes = 0

    def names(self) -> list[str]:
        return list(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.weights.shape(self.stored[name])
        return tuple(self.inner.get(size, size) for size in shape) if ".mlp." in name else shape

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        found = self.weights.tensor(self.stored[name], dtype)
        return found[tuple(slice(size) for size in self.shape(name))]

    def packed(self, name: str) -> Packed | None:
        return None  # a trained draft is written in plain numbers

"""What a drafter takes over from its target: some of its layers, and the strongest units of these.

Of a wide target a whole layer is too much for a drafter: in a model of 7B parameters one takes a
thirtieth of the target's pass. Four fifths of that are the MLP, most of whose units add little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.models.build import Names
from hunch.models.heads.draft_model import CUT_FROM, DRAFTS_FOR
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights

INNER, UNITS, ABREAST = "intermediate_size", "unit_share", "abreast"  # keys of config.json
_OTHER_KEY = ("OPTForCausalLM", "GPT2LMHeadModel")  # whose configs have other names for that number
_MULTIPLE = 256  # of this the number of units is a multiple, as all kernels support that


def layers_text(layers: list[int]) -> str:
    """These layers as an option of the recipe `draft`."""
    return "".join(f"{layer}," for layer in layers)


def cut_options(config: Mapping[str, Any]) -> dict[str, str]:
    """The options that make a draft of this shape."""
    options = {
        "layers": layers_text(config["cut_layers"]),
        "units": str(config.get(UNITS, 1.0)),
        ABREAST: str(config.get(ABREAST, 1)),
    }
    return options | ({"from": str(config[CUT_FROM])} if DRAFTS_FOR in config else {})


def can_lose_units(spec: ModelSpec, weights: Weights, names: Names) -> bool:
    """Whether layers of the target can be built with fewer units."""
    if spec.experts is not None or spec.ffn_widths or spec.is_transposed:
        return False
    first, inner = f"{names.layer.format(0)}{names.up}.weight", weights.config.get(INNER)
    is_apart = not {first, first.removeprefix("model.")}.isdisjoint(weights.names())
    return is_apart and inner == spec.ffn_width and inner not in (spec.width, _MULTIPLE)


def check_units(share: float, spec: ModelSpec | None = None) -> None:
    """Raise for a number that is no share, or for a target whose layers cannot lose units."""
    if not 0 < share <= 1:
        raise ConfigError(f"units={share} must be above 0 and at most 1")
    if spec is None or share == 1:
        return
    if spec.experts is not None or spec.ffn_widths or spec.architecture in _OTHER_KEY:
        raise ConfigError(f"units={share}: layers of {spec.architecture} keep all units; leave it")


def with_units(spec: ModelSpec, share: float) -> ModelSpec:
    """The spec with layers that keep a share of their units."""
    num_units = max(round(share * spec.ffn_width / _MULTIPLE), 1) * _MULTIPLE
    return replace(spec, ffn_width=min(num_units, spec.ffn_width))


def in_groups(layers: Sequence[int], abreast: int) -> list[list[int]]:
    """Which of the target's layers each of the drafter's holds."""
    return [list(layers[at : at + abreast]) for at in range(0, len(layers), abreast)]


def side_by_side(spec: ModelSpec, abreast: int) -> ModelSpec:
    """The spec of layers that each hold `abreast` of the target's side by side: heads and units."""
    return replace(
        spec,
        num_heads=abreast * spec.num_heads,
        num_kv_heads=abreast * spec.num_kv_heads,
        ffn_width=abreast * spec.ffn_width,
    )


def heads_config(spec: ModelSpec) -> dict[str, int]:
    """Keys of config.json for a number of heads that is not the target's."""
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }


def check_abreast(abreast: int, spec: ModelSpec) -> None:
    """Raise for a target whose layers cannot stand side by side."""
    if abreast < 1:
        raise ConfigError(f"abreast={abreast} must be 1 or more")
    found = not_abreast(spec)
    if abreast > 1 and found:
        words = f"{spec.architecture} has {', '.join(found)}"
        raise ConfigError(f"abreast={abreast}: {words}; leave it")


def not_abreast(spec: ModelSpec) -> list[str]:
    """The properties of a target's layers that keep them from standing side by side."""
    problems = {
        "norms of heads": spec.has_qk_norm,
        "biases after attention or in the MLP": spec.has_out_bias or spec.has_mlp_bias,
        "layers that differ": bool(spec.ffn_widths) or len(set(spec.windows)) > 1,
        "experts": spec.experts is not None,
        "layer norms": spec.norm != "rms",
        "norms of what is added": spec.has_branch_norms,
        "attention and MLP side by side": spec.is_parallel,
        "another name for its number of units": spec.architecture in _OTHER_KEY,
    }
    return [name for name, is_there in problems.items() if is_there]


def taken_together(
    weights: Weights,
    part: str,
    group: Sequence[int],
    names: Names,
    units: Mapping[int, Tensor],
    inner: int,
) -> Tensor:
    """A tensor of a layer that holds some of the target's side by side.

    Each reads the same state, and what all of them write is added. They share one norm; by what a
    layer's own norm differs from it, the layer's matrices are multiplied.
    """
    found = []
    for layer in group:
        tensor = read(weights, names.layer.format(layer) + part)
        if layer in units:
            shape = tuple(inner if n == weights.config.get(INNER) else n for n in tensor.shape)
            tensor = fitted(tensor, shape, units[layer])
        found.append(tensor)
    if len(group) == 1:
        return found[0]
    name, is_weight = part.removesuffix(".weight"), part.endswith(".weight")
    if name in (names.attn_norm, names.mlp_norm):
        return _common(torch.stack(found))
    if is_weight and name in (names.out, names.down):
        return torch.cat(found, dim=1)
    if is_weight:
        before = names.attn_norm if name in (names.q, names.k, names.v) else names.mlp_norm
        norms_GD = torch.stack(
            [read(weights, f"{names.layer.format(layer)}{before}.weight") for layer in group]
        )
        own_GD = norms_GD / _common(norms_GD)
        found = [tensor * own_D for tensor, own_D in zip(found, own_GD, strict=True)]
    return torch.cat(found, dim=0)


def _common(norms_GD: Tensor) -> Tensor:
    """The norm that layers side by side share."""
    return norms_GD.square().mean(0).sqrt().clamp(min=1e-3)


def strongest_units(weights: Weights, prefix: str, names: Names, count: int) -> Tensor:
    """A layer's units with the largest weights, incoming times outgoing: those that add most."""
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
    """A tensor of a layer, cut to the units that are kept."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            assert units is not None
            tensor = tensor.index_select(dim, units)
    return tensor

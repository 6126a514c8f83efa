"""Experts from a config and a source of tensors: shared by every family that has them.

Shape letters: E experts, D width, F inner width of an expert, U = 2F rows of gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.experts import Routing
from hunch.layers.experts import Experts, ExpertSpec, Router, StackedLinear
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.models.reading import Config, read_float, read_int
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import span


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Where a layer's experts stand in a file. `{}` is the number of the expert; names without it
    hold all experts, [E, out, in]."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert."  # before gate_proj, up_proj, down_proj
    shared_gate: str = "mlp.shared_expert_gate"

    def all_up(self, num_experts: int) -> list[tuple[str, ...]]:
        """Of each expert: gate and up, or one name for both. One entry: of all experts."""
        if "{}" not in self.up[0]:
            return [self.up]
        return [tuple(name.format(e) for name in self.up) for e in range(num_experts)]

    def all_down(self, num_experts: int) -> list[str]:
        if "{}" not in self.down:
            return [self.down]
        return [self.down.format(expert) for expert in range(num_experts)]


EXPERT_NAMES = ExpertNames()


def read_count(config: Config, *keys: str) -> int:
    """The number of experts, under whichever name the file has it."""
    for key in keys:
        if config.get(key) is not None:
            return read_int(config, key)
    raise ModelFormatError(f"config.json lacks {keys[0]}")


def sparse_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Qwen's way to say which layers have experts."""
    step = read_int(config, "decoder_sparse_step", 1)
    dense: Any = config.get("mlp_only_layers") or ()
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def build_experts(spec: ModelSpec, source: Source, prefix: str, names: ExpertNames) -> Experts:
    """The experts of the layer whose tensors are named `prefix` + the family's names."""
    experts = spec.experts
    assert experts is not None
    return Experts(
        build_router(experts, source, prefix, names, spec.width),
        _stacked_up(spec, experts, source, prefix, names),
        _stacked_down(spec, experts, source, prefix, names),
        spec.activation,
        *_shared(spec, experts, source, prefix, names),
        group=source.group,
    )


def build_router(
    experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames, width: int
) -> Router:
    count = experts.routing.num_experts
    name = prefix + names.router
    bias = source.floats(f"{name}.bias", count) if experts.has_router_bias else None
    choice = source.floats(prefix + names.choice_bias, count) if experts.has_choice_bias else None
    return Router(
        Linear(source.floats(f"{name}.weight", count, width), bias), experts.routing, choice
    )


def _stacked_up(
    spec: ModelSpec, experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames
) -> StackedLinear:
    count, inner = experts.routing.num_experts, experts.width
    span(inner, source.group, "inner width of an expert")  # raises where it is less than the ranks
    parts = []
    for group in names.all_up(count):
        rows = 2 * inner // len(group)
        shape = (rows, spec.width) if "{}" in names.up[0] else (count, rows, spec.width)
        pieces = [
            _half(source, f"{prefix}{name}.weight", shape, is_both=len(group) == 1)
            for name in group
        ]
        parts.append(torch.cat(pieces, dim=-2))
    return StackedLinear(_stacked(parts))


def _half(source: Source, name: str, shape: tuple[int, ...], *, is_both: bool) -> Tensor:
    """This rank's rows of gate, of up, or of both."""
    if not is_both or source.group.size == 1:
        return source.take(name, *shape, split=len(shape) - 2)
    gate, up = source.take(name, *shape).chunk(2, dim=-2)
    first, last = span(gate.shape[-2], source.group)
    return torch.cat([part[..., first:last, :] for part in (gate, up)], dim=-2)


def _stacked_down(
    spec: ModelSpec, experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames
) -> StackedLinear:
    count, size = experts.routing.num_experts, (spec.width, experts.width)
    shape = size if "{}" in names.down else (count, *size)
    parts = [
        source.take(f"{prefix}{name}.weight", *shape, split=len(shape) - 1)
        for name in names.all_down(count)
    ]
    return StackedLinear(_stacked(parts))


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.stack(parts)


def _shared(
    spec: ModelSpec, experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames
) -> tuple[GatedMLP | None, Linear | None]:
    if not experts.shared_width:
        return None, None
    where, inner = prefix + names.shared, experts.shared_width
    up_names = (f"{where}gate_proj", f"{where}up_proj")
    mlp = GatedMLP(
        source.linear(up_names, (inner, inner), spec.width),
        source.row_linear(f"{where}down_proj", spec.width, inner, has_bias=False),
        spec.activation,
    )
    if not experts.is_shared_gated:
        return mlp, None
    return mlp, Linear(source.floats(f"{prefix}{names.shared_gate}.weight", 1, spec.width))


def read_deepseek_experts(config: Config, num_layers: int) -> ExpertSpec:
    """DeepSeek V3's and GLM's: sigmoid scores, a bias for the choice alone, groups of experts."""
    inner = read_int(config, "moe_intermediate_size")
    routing = Routing(
        num_experts=read_count(config, "n_routed_experts", "num_local_experts"),
        num_chosen=read_int(config, "num_experts_per_tok"),
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        num_groups=read_int(config, "n_group", 1),
        num_groups_kept=read_int(config, "topk_group", 1),
        scale=read_float(config, "routed_scaling_factor", 1.0),
    )
    num_shared = read_int(config, "n_shared_experts") if config.get("n_shared_experts") else 0
    return ExpertSpec(
        routing=routing,
        width=inner,
        layers=(True,) * num_layers,
        has_choice_bias=True,
        shared_width=num_shared * inner,
    )

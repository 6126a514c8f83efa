"""Experts from a config and a source of tensors: shared by every family that has them.

Shape letters: E experts, D width, F inner width of an expert, U = 2F rows of gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.experts import Routing
from hunch.kernels.quant import Quantised, Weight
from hunch.layers.experts import Experts, ExpertsBeside, ExpertSpec, Router, StackedLinear
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.models.reading import Config, Defaulted, read_count, read_float, read_int
from hunch.models.source import EXPAND, Asked, Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import span


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """A layer's tensors; `{}` is the number of the expert. How files hold all experts in one
    tensor is told by the rest; see arrange.py."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert."  # before gate_proj, up_proj, down_proj
    shared_first: str = "gate_proj"  # the shared expert's name for that
    shared_gate: str = "mlp.shared_expert_gate"
    all_up: str = "mlp.experts.gate_up_proj"  # [expert, gate and up, in]
    all_down: str = "mlp.experts.down_proj"
    is_turned: bool = True  # both, without ".weight": [expert, in, out]
    narrow: str = "mixer.fc1_latent_proj"  # if experts read narrower vectors than the model's
    widen: str = "mixer.fc2_latent_proj"
    router_scale: str = "router.scale"  # of experts beside an MLP: factors of the router's inputs
    factor: str = "router.per_expert_scale"  # factors of experts' weights
    norm: str = "pre_feedforward_layernorm_2"
    mlp_out_norm: str = "post_feedforward_layernorm_1"
    out_norm: str = "post_feedforward_layernorm_2"
    is_interleaved: bool = False  # in all_up rows of gate and up alternate


EXPERT_NAMES = ExpertNames()


def read_experts(config: Config, width: int, layers: Iterable[bool], **more: Any) -> ExpertSpec:
    """Experts by the keys that most families have for their numbers; `more` are further fields of
    ExpertSpec and of its routing."""
    routing = {name: more.pop(name) for name in Routing.__dataclass_fields__ if name in more}
    return ExpertSpec(
        routing=Routing(
            num_experts=read_int(config, "num_experts"),
            num_chosen=read_int(config, "num_experts_per_tok"),
            **routing,
        ),
        width=width,
        layers=tuple(layers),
        **more,
    )


def read_wide_experts(config: Config, num_layers: int, **more: Any) -> ExpertSpec:
    """In every layer, each as wide as the config says of MLPs."""
    width = read_int(config, "intermediate_size")
    return read_experts(config, width, (True,) * num_layers, **more)


def read_qwen_experts(config: Config, num_layers: int, **more: Any) -> ExpertSpec:
    """Softmax over all experts, whose weights add up to one where the config says so."""
    step = read_int(config, "decoder_sparse_step", 1)
    dense: Any = config.get("mlp_only_layers") or ()
    return read_experts(
        config,
        read_int(config, "moe_intermediate_size"),
        (i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        is_normed=bool(config.get("norm_topk_prob", False)),
        **more,
    )


def read_shared_experts(config: Config, num_layers: int, **more: Any) -> ExpertSpec:
    """The same beside a shared expert."""
    shared_width = read_int(config, "shared_expert_intermediate_size")
    return read_qwen_experts(config, num_layers, shared_width=shared_width, **more)


def build_experts(spec: ModelSpec, source: Source, prefix: str, names: ExpertNames) -> Experts:
    """The experts of the layer whose tensors are named `prefix` + the family's names."""
    experts = spec.experts
    assert experts is not None
    narrow = widen = None
    width = experts.narrow_width or spec.width
    if experts.narrow_width:
        narrow = source.linear((prefix + names.narrow,), (width,), spec.width, is_split=False)
        widen = source.linear((prefix + names.widen,), (spec.width,), width, is_split=False)
    numbers, inner = range(experts.routing.num_experts), experts.width
    span(inner, source.group, "inner width of an expert")  # raises where it is less than the ranks
    up = [[prefix + name.format(e) for name in (names.gate, names.up)] for e in numbers]
    down = [[prefix + names.down.format(e)] for e in numbers]
    return Experts(
        build_router(experts, source, prefix, names, spec.width),
        _stacked_linear(experts, source, up, (inner, width), 0),
        _stacked_linear(experts, source, down, (width, inner), 1),
        spec.activation,
        *_shared(spec, experts, source, prefix, names),
        group=source.group,
        narrow=narrow,
        widen=widen,
    )


def build_router(
    experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames, width: int
) -> Router:
    count = experts.routing.num_experts
    name = prefix + names.router
    bias = source.floats(f"{name}.bias", count) if experts.has_router_bias else None
    choice = source.floats(prefix + names.choice_bias, count) if experts.has_choice_bias else None
    weight_ED, factor = source.floats(f"{name}.weight", count, width), None
    if experts.is_beside:
        scale_D = source.floats(prefix + names.router_scale, width)
        weight_ED, factor = router_weight(weight_ED, scale_D), prefix + names.factor
    factor_E = None if factor is None else source.floats(factor, count)
    return Router(Linear(weight_ED, bias), experts.routing, choice, factor_E)


def router_weight(weight_ED: Tensor, scale_D: Tensor) -> Tensor:
    """A router's matrix, multiplied by its inputs' scales and divided by the root of their
    number."""
    return weight_ED * (scale_D * float(max(len(scale_D), 1) ** -0.5))


def build_beside(spec: ModelSpec, source: Source, prefix: str, names: ExpertNames) -> ExpertsBeside:
    """Experts beside an MLP."""
    norms = (
        source.rms_norm(prefix + name, spec.width, spec.norm_eps)
        for name in (names.norm, names.mlp_out_norm, names.out_norm)
    )
    return ExpertsBeside(build_experts(spec, source, prefix, names), *norms)


def _stacked_linear(
    experts: ExpertSpec, source: Source, names: list[list[str]], size: tuple[int, int], split: int
) -> StackedLinear:
    """One product of all experts, whose matrices of this size are split by rows (0) or columns."""
    weight = _stacked_matrix(source, names, size, split)
    if not experts.has_bias:
        return StackedLinear(weight, num_experts=len(names))
    bias_split = None if split else 0
    bias_EN = _stacked(
        [
            [source.take(f"{name}.bias", size[0], split=bias_split) for name in some]
            for some in names
        ]
    )
    # Each rank has a part of every sum over columns: the bias is added once.
    is_added = split == 0 or source.group.rank == 0
    return StackedLinear(weight, bias_EN if is_added else None, len(names))


def _stacked_matrix(
    source: Source, names: list[list[str]], size: tuple[int, int], split: int
) -> Weight:
    """All experts' matrices as they are held: one for all in few bits, else [E, N, K]."""
    if source.hold != EXPAND:
        asked: list[Asked] = [(f"{name}.weight", size, None) for some in names for name in some]
        weight = source.matrix(asked, split)
        if isinstance(weight, Quantised):
            return weight
        return weight.view(len(names), -1, weight.shape[1])
    return _stacked(
        [[source.take(f"{name}.weight", *size, split=split) for name in some] for some in names]
    )


def _stacked(parts: list[list[Tensor]]) -> Tensor:
    """All experts in one tensor, the parts of each stacked."""
    return torch.stack([torch.cat(pieces) for pieces in parts])


def _shared(
    spec: ModelSpec, experts: ExpertSpec, source: Source, prefix: str, names: ExpertNames
) -> tuple[GatedMLP | None, Linear | None]:
    if not experts.shared_width:
        return None, None
    where, inner = prefix + names.shared, experts.shared_width
    up_names = (where + names.shared_first, f"{where}up_proj")
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
    older = config.get("num_local_experts")
    count = read_int(Defaulted(config, {"n_routed_experts": older}), "n_routed_experts")
    return read_experts(
        Defaulted({"num_experts": count}, config),
        inner,
        first_dense(config, num_layers),
        shared_width=read_count(config, "n_shared_experts") * inner,
        has_choice_bias=True,
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        num_groups=read_int(config, "n_group", 1),
        num_groups_kept=read_int(config, "topk_group", 1),
        scale=read_float(config, "routed_scaling_factor", 1.0),
    )


def first_dense(config: Config, num_layers: int) -> tuple[bool, ...]:
    """The number of first layers without experts, by DeepSeek's and GLM's keys."""
    types = config.get("mlp_layer_types")
    first = read_count(config, "first_k_dense_replace")
    if isinstance(types, Sequence) and not isinstance(types, str):
        return tuple(layer_type == "sparse" for layer_type in types)
    step = read_int(config, "moe_layer_freq", 1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))

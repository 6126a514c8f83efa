"""Qwen2-MoE and Qwen3-MoE: Qwen's attention, and experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.experts import read_count, sparse_layers
from hunch.models.families.qwen2 import Qwen2
from hunch.models.families.qwen3 import Qwen3
from hunch.models.reading import Config, read_int
from hunch.models.spec import ModelSpec


def read_experts(config: Config, num_layers: int) -> ExpertSpec:
    """Softmax over all experts, whose weights add up to one where the config says so."""
    routing = Routing(
        num_experts=read_count(config, "num_experts", "num_local_experts"),
        num_chosen=read_int(config, "num_experts_per_tok"),
        is_normed=bool(config.get("norm_topk_prob", False)),
    )
    return ExpertSpec(
        routing=routing,
        width=read_int(config, "moe_intermediate_size"),
        layers=sparse_layers(config, num_layers),
    )


class Qwen3Moe(Qwen3):
    """Layers without experts have Qwen3's MLP."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        return replace(spec, experts=read_experts(config, spec.num_layers))


class Qwen2Moe(Qwen2):
    """Beside the chosen experts a shared one, of which each token takes as much as it needs."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        experts = replace(
            read_experts(config, spec.num_layers),
            shared_width=read_int(config, "shared_expert_intermediate_size"),
            is_shared_gated=True,
        )
        has_bias = bool(config.get("qkv_bias", True))
        return replace(spec, experts=experts, has_qkv_bias=has_bias)

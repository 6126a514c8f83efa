"""Granite-MoE: Granite with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.granite import Granite
from hunch.models.reading import Config, read_int
from hunch.models.spec import ModelSpec


class GraniteMoe(Granite):
    """Softmax over the chosen experts alone."""

    names: ClassVar[Names] = Names(
        experts=ExpertNames(
            router="block_sparse_moe.router.layer",
            all_up="block_sparse_moe.input_linear",
            all_down="block_sparse_moe.output_linear",
        )
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        routing = Routing(
            num_experts=read_count(config, "num_local_experts"),
            num_chosen=read_int(config, "num_experts_per_tok"),
            scores="chosen",
        )
        experts = ExpertSpec(
            routing=routing, width=spec.ffn_width, layers=(True,) * spec.num_layers
        )
        return replace(spec, experts=experts)

"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.mistral import Mistral
from hunch.models.reading import Config, read_int
from hunch.models.spec import ModelSpec

_EXPERT = "block_sparse_moe.experts.{}."


class Mixtral(Mistral):
    """Softmax over all experts; the weights of the chosen add up to one."""

    names: ClassVar[Names] = Names(
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate=f"{_EXPERT}w1",
            up=f"{_EXPERT}w3",
            down=f"{_EXPERT}w2",
        )
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        routing = Routing(
            num_experts=read_count(config, "num_local_experts"),
            num_chosen=read_int(config, "num_experts_per_tok", 2),
            is_normed=True,
        )
        experts = ExpertSpec(
            routing=routing, width=spec.ffn_width, layers=(True,) * spec.num_layers
        )
        return replace(spec, experts=experts)

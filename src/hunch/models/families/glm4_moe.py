"""GLM-4.5 and 4.6: heads turned in part, and DeepSeek's kind of experts after the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, first_dense, read_deepseek_experts
from hunch.models.reading import Config
from hunch.models.spec import ModelSpec, read_common


class Glm4Moe(Decoder):
    """Its larger models norm the heads of q and k."""

    names: ClassVar[Names] = Names(experts=ExpertNames(shared="mlp.shared_experts."))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        num_layers = common["num_layers"]
        experts = read_deepseek_experts(config, num_layers)
        return ModelSpec(
            **common,
            experts=replace(experts, layers=first_dense(config, num_layers)),
            has_qk_norm=bool(config.get("use_qk_norm", False)),
            has_qkv_bias=bool(config.get("attention_bias", False)),
        )

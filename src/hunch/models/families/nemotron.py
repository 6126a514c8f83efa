"""MLPs of squares without a gate: AFM, Jais 2, and Nemotron (3, 4, Minitron)."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.families.llama import Llama
from hunch.models.reading import FROM_GGUF, Config, Defaulted, read_float
from hunch.models.spec import ModelSpec


class Arcee(Llama):
    """AFM-4.5B: Llama's layers with an MLP that has no gate."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"hidden_act": "relu2", "rms_norm_eps": 1e-5})
        return replace(super().read_config(config, architecture), is_gated=False)


class Jais2(Arcee):
    """Layer norms, and biases everywhere."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"attention_bias": True, "mlp_bias": True})
        return replace(
            super().read_config(config, architecture),
            norm="layer",
            norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        )


class Nemotron(Arcee):
    """Layer norms of 1 + w; half of each head is turned."""

    turns_part = True

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"partial_rotary_factor": 0.5})
        return replace(
            super().read_config(config, architecture),
            norm="layer",
            norm_eps=read_float(config, "norm_eps", 1e-5),
            is_norm_shifted=not config.get(FROM_GGUF, False),
        )

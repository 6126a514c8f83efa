"""Mistral and Ministral 3: Llama with a sliding window; Mixtral: the same with experts."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_count
from hunch.models.reading import FROM_GGUF, Config, Defaulted, read_int, read_windows
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS: dict[str, Config] = {  # of what files leave out
    "MistralForCausalLM": {"sliding_window": 4096},
    "MinistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Ministral3ForCausalLM": {"rms_norm_eps": 1e-5},
    "PhimoeForCausalLM": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
}
_EXPERT = "block_sparse_moe.experts.{}."


class Mistral(Decoder):
    """A token sees the last `sliding_window` positions; null means all of them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, _DEFAULTS.get(architecture, {}))
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        return ModelSpec(**common)


class Ministral3(Mistral):
    """Queries may grow with their position. Some files also read pictures (Mistral Small
    3.1 and later, Ministral 3): only the text model is taken."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(key) or {})
        if not given and config.get("model_type") == "ministral3" and not config.get(FROM_GGUF):
            raise ModelFormatError("config.json lacks rope_parameters")
        beta = given.pop("llama_4_scaling_beta", None)
        given.pop("max_position_embeddings", None)
        spec = super().read_config(Defaulted({key: given}, config), architecture)
        if not beta or spec.rope is None:
            return spec
        span = read_int(given, "original_max_position_embeddings")
        return replace(spec, rope=replace(spec.rope, temper=float(beta), temper_span=span))


class Mixtral(Mistral):
    """Softmax over all experts; the weights of the chosen add up to one."""

    names = Names(
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

"""Mistral and Ministral 3: Llama with a sliding window; Mixtral: the same with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hunch.errors import ModelFormatError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_wide_experts
from hunch.models.keys import Keys
from hunch.models.reading import FROM_GGUF, Config, Defaulted, no_layers, read_int
from hunch.models.spec import ModelSpec

_EXPERT = "block_sparse_moe.experts.{}."


class Mistral(Decoder):
    """A token sees the last `sliding_window` positions; null means all of them."""

    keys = Keys(given={"sliding_window": 4096}, sees_all=no_layers)


class Ministral3(Mistral):
    """Queries may grow with their position. Some files also read pictures (Mistral Small
    3.1 and later, Ministral 3): only the text model is taken."""

    keys = Keys(sees_all=no_layers)

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(key) or {})
        if not given and config.get("model_type") == "ministral3" and not config.get(FROM_GGUF):
            raise ModelFormatError("config.json lacks rope_parameters")
        beta = given.pop("llama_4_scaling_beta", None)
        given.pop("max_position_embeddings", None)
        usual = {"rms_norm_eps": 1e-5} if architecture == "Ministral3ForCausalLM" else {}
        config = Defaulted(Defaulted({key: given}, config), usual)
        spec = super().read_config(config, architecture)
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
    keys = Keys(
        given={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        named={"num_experts": "num_local_experts"},
        sees_all=no_layers,
        experts=partial(read_wide_experts, is_normed=True),
    )

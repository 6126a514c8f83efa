"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, read_int, read_windows
from hunch.models.spec import ModelSpec, read_common


class Mistral(Decoder):
    """A token sees the last `sliding_window` positions; null means all of them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        return ModelSpec(**common)


class Ministral3(Mistral):
    """Queries may grow with their position. Of files that read pictures too (Mistral Small 3.1 and
    later, Ministral 3), what reads text is taken."""

    names: ClassVar[Names] = Names(unread=r"^(model\.)?(vision_tower|multi_modal_projector)\.")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(key) or {})
        beta = given.pop("llama_4_scaling_beta", None)
        given.pop("max_position_embeddings", None)
        spec = super().read_config(Defaulted({key: given}, config), architecture)
        if not beta or spec.rope is None:
            return spec
        span = read_int(given, "original_max_position_embeddings")
        return replace(spec, rope=replace(spec.rope, temper=float(beta), temper_span=span))

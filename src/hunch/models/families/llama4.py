"""Llama 4 (text): attention in chunks, heads that some layers do not turn, one expert a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.llama import read_turns
from hunch.models.reading import Config, Defaulted, read_attn_biases, read_float, read_int, refuse
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}


class Llama4(Decoder):
    """Layers that do not turn their heads see the whole text, with queries that grow with their
    position; the others see their chunk, and norm their heads without weights.

    transformers turns heads before it norms them: a turn does not change what the norm divides by.
    """

    names = Names(
        q_norm="",
        k_norm="",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        experts=ExpertNames(
            router="feed_forward.router",
            gate="feed_forward.experts.{}.gate_proj",
            up="feed_forward.experts.{}.up_proj",
            down="feed_forward.experts.{}.down_proj",
            shared="feed_forward.shared_expert.",
            all_up="feed_forward.experts.gate_up_proj",
            all_down="feed_forward.experts.down_proj",
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "for_llm_compressor", False)
        common = read_common(Defaulted(config, _DEFAULTS), architecture)
        num_layers = common["num_layers"]
        turns = read_turns(config, num_layers)
        sizes = {"chunk": config.get("attention_chunk_size", 8192)}  # null: there are none
        chunk = read_int(sizes, "chunk") if sizes["chunk"] else 0
        common |= {
            "ffn_width": read_int(config, "intermediate_size_mlp", 16384),
            "windows": tuple(-chunk if turn and chunk else None for turn in turns),
            "is_rope_interleaved": True,
        }
        config.get("layer_types")  # follow from the list of turns
        still = RopeSpec(
            rope_type="none",
            temper=read_float(config, "attn_scale", 0.1),
            temper_span=read_int(config, "floor_scale", 8192),
            temper_shift=1,
        )
        if not config.get("attn_temperature_tuning", True):
            still = RopeSpec(rope_type="none")
        has_norm = bool(config.get("use_qk_norm", True))
        if has_norm and common["rope"].rope_type in ("yarn", "longrope"):  # it is normed away
            common["rope"] = replace(common["rope"], attention_factor=1.0)
        return ModelSpec(
            **common,
            has_qk_norm=has_norm,
            unnormed=tuple(not turn for turn in turns),
            more_ropes=(still,),
            rope_of=tuple(int(not turn) for turn in turns),
            **read_attn_biases(config),
            experts=_read_experts(config, num_layers),
        )


def _read_experts(config: Config, num_layers: int) -> ExpertSpec:
    """A sigmoid weighs what experts read; every token asks a shared one too."""
    width, step = (
        read_int(config, "intermediate_size"),
        read_int(config, "interleave_moe_layer_step", 1),
    )
    layers: Any = config.get("moe_layers")
    if layers is None:
        layers = range(step - 1, num_layers, step)
    routing = Routing(
        num_experts=read_count(config, "num_local_experts"),
        num_chosen=read_int(config, "num_experts_per_tok", 1),
        scores="chosen_sigmoid",
        is_of_input=True,
    )
    return ExpertSpec(
        routing=routing,
        width=width,
        layers=tuple(layer in layers for layer in range(num_layers)),
        shared_width=width,
    )

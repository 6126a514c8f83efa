"""Llama 4 (text): attention in chunks, layers without rotary positions, one expert a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_experts
from hunch.models.families.llama import read_turns
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import STILL, Config, read_count, read_float, read_int
from hunch.models.spec import ModelSpec


class Llama4(Decoder):
    """Layers that do not rotate their heads see the whole text, with queries that grow with their
    position; the others see their chunk, and norm their heads without weights.

    transformers rotates heads before it norms them: that does not change what the norm divides by.
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

    keys = Keys(
        given={
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attention_chunk_size": 8192,
            "num_experts_per_tok": 1,
        },
        named={"num_experts": "num_local_experts"},
        only={"for_llm_compressor": False},
        # layer_types follows from the list of rotated layers; the scales may be switched off.
        unused={"layer_types", "attn_scale", "floor_scale"},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias") | {"has_qk_norm": "use_qk_norm"},
        fields={"is_rope_interleaved": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        turns = read_turns(config, spec.num_layers)
        chunk = read_count(config, "attention_chunk_size")  # null: there are none
        still = STILL
        if config.get("attn_temperature_tuning"):
            still = RopeSpec(
                rope_type="none",
                temper=read_float(config, "attn_scale", 0.1),
                temper_span=read_int(config, "floor_scale", 8192),
                temper_shift=1,
            )
        rope = spec.rope
        assert rope is not None
        # The norm removes it, but for the epsilon, which is small beside heads.
        if spec.has_qk_norm and rope.rope_type in ("yarn", "longrope"):
            rope = replace(rope, attention_factor=1.0)
        return replace(
            spec.with_rope(still, (not turn for turn in turns)),
            rope=rope,
            ffn_width=read_int(config, "intermediate_size_mlp", 16384),
            windows=tuple(-chunk if turn and chunk else None for turn in turns),
            unnormed=tuple(not turn for turn in turns),
            experts=_read_experts(config, spec),
        )


def _read_experts(config: Config, spec: ModelSpec) -> ExpertSpec:
    """A sigmoid weighs the inputs of experts; there is a shared expert for every token."""
    width, step = spec.ffn_width, read_int(config, "interleave_moe_layer_step", 1)
    layers: Any = config.get("moe_layers")
    if layers is None:
        layers = range(step - 1, spec.num_layers, step)
    is_sparse = (layer in layers for layer in range(spec.num_layers))
    how: dict[str, Any] = {"scores": "chosen_sigmoid", "is_of_input": True}
    return read_experts(config, width, is_sparse, shared_width=width, **how)

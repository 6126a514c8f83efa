"""LFM2: most layers convolve over the last few tokens, the others attend; also with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.kernels.short_conv import ConvShape
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_experts
from hunch.models.keys import Keys
from hunch.models.reading import FULL, Config, read_float, read_int
from hunch.models.recurrent import is_of_type
from hunch.models.spec import ModelSpec

_CONV = "conv"


class Lfm2(Decoder):
    """The width of its MLPs is two thirds of what most configs say."""

    names = Names(
        final_norm="model.embedding_norm",
        attn_norm="operator_norm",
        mlp_norm="ffn_norm",
        out="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        recurrent="conv.",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        experts=ExpertNames(
            router="feed_forward.gate",
            choice_bias="feed_forward.expert_bias",
            gate="feed_forward.experts.{}.w1",
            up="feed_forward.experts.{}.w3",
            down="feed_forward.experts.{}.w2",
            all_up="feed_forward.experts.gate_up_proj",
            all_down="feed_forward.experts.down_proj",
            is_turned=False,
        ),
    )

    keys = Keys(
        given={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128_000,
        },
        named={
            "rms_norm_eps": "norm_eps",
            "tie_word_embeddings": "tie_embedding",
            "intermediate_size": "block_ff_dim",
        },
        only={"conv_bias": False, "block_use_swiglu": True, "use_pos_enc": True},
        # Keys that repeat others, or are about how the weights were initialised.
        unused={
            *("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads", "theta"),
            *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
            "conv_use_xavier_init",
        },
        fields={"has_qk_norm": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(
            spec,
            ffn_width=cls.read_ffn(config, spec.ffn_width),
            recurrence=ConvShape(width=spec.width, num_taps=read_int(config, "conv_L_cache", 3)),
            is_recurrent=_read_layer_types(config, spec.num_layers),
        )

    @staticmethod
    def read_ffn(config: Config, width: int) -> int:
        by = config.get("block_ffn_dim_multiplier", 1.0)
        multiple = read_int(config, "block_multiple_of", 256)
        if not config.get("block_auto_adjust_ff_dim", True):
            return width
        width = int(2 * width / 3)
        return width if by is None else -(-int(by * width) // multiple) * multiple


def _read_layer_types(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers convolve."""
    attending = config.get("full_attn_idxs")
    attending = range(num_layers) if attending is None else attending
    types: Any = config.get("layer_types")
    if types is None:
        types = [FULL if layer in attending else _CONV for layer in range(num_layers)]
    return is_of_type(types, _CONV, num_layers)


def _read_experts(config: Config, num_layers: int) -> ExpertSpec:
    num_dense = config.get("num_dense_layers") or 0
    return read_experts(
        config,
        read_int(config, "moe_intermediate_size"),
        (layer >= num_dense for layer in range(num_layers)),
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob")),
        scale=read_float(config, "routed_scaling_factor", 1.0),
        has_choice_bias=bool(config.get("use_expert_bias")),
    )


class Lfm2Moe(Lfm2):
    """Experts chosen by sigmoids in all but the first layers."""

    keys = Lfm2.keys.but(
        given={
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "use_expert_bias": True,
        },
        experts=_read_experts,
    )

    @staticmethod
    def read_ffn(config: Config, width: int) -> int:
        return width

"""Granite (4 with Mamba layers, MoE, with windows), MiniCPM: Llama with scales along the stream."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_wide_experts
from hunch.models.families.llama import Llama
from hunch.models.mamba import is_mamba, read_layer_types, read_mamba
from hunch.models.reading import (
    STILL,
    Config,
    check_listed,
    read_float,
    read_int,
    read_rope,
    read_windows,
)
from hunch.models.spec import ModelSpec


class Granite(Llama):
    """Llama with the multipliers of its config."""

    keys = Llama.keys.but(
        given={"attention_multiplier": 1.0},
        numbers={
            "embed_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attn_scale": "attention_multiplier",
        },
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(spec, logits_scale=1.0 / read_float(config, "logits_scaling", 1.0))


class HyperClovaX(Granite):
    """What is added to the stream is normed, then scaled; logits are multiplied, not divided."""

    names = Names(attn_out_norm="post_norm1", mlp_out_norm="post_norm2")
    keys = Granite.keys.but(
        given={"attention_multiplier": None, "use_post_norm": True},
        flags={"has_branch_norms": "use_post_norm"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(
            spec,
            attn_scale=spec.attn_scale or spec.head_dim**-0.5,
            logits_scale=read_float(config, "logits_scaling", 1.0),
        )


class MiniCPM(Llama):
    """The scales of MiniCPM 1, 2 and 4, by the keys of its own code."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        only={"sparse_config": None, "num_experts": 0},
        unused={"mup_denominator"},  # of a drafter's scale
        numbers={"embed_scale": "scale_emb"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(
            spec,
            residual_scale=read_float(config, "scale_depth", 1.0) * spec.num_layers**-0.5,
            logits_scale=read_int(config, "dim_model_base", 1) / spec.width,
        )


class GraniteMoe(Granite):
    """Softmax over the chosen experts alone."""

    names = Names(
        experts=ExpertNames(
            router="block_sparse_moe.router.layer",
            all_up="block_sparse_moe.input_linear",
            all_down="block_sparse_moe.output_linear",
        )
    )
    keys = Granite.keys.but(
        named={"num_experts": "num_local_experts"},
        experts=partial(read_wide_experts, scores="chosen"),
    )


class GraniteMoeShared(GraniteMoe):
    """An MLP beside the experts, for every token."""

    names = Names(
        gate="shared_mlp.gate_proj",
        up="shared_mlp.up_proj",
        gate_up="shared_mlp.input_linear",
        aliases=(("shared_mlp.output_linear", "shared_mlp.down_proj"),),
        experts=replace(GraniteMoe.names.experts, shared="shared_mlp."),
    )
    keys = GraniteMoe.keys.but(given={"shared_intermediate_size": 1024})

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        spec = super().read_more(spec, config)
        assert spec.experts is not None
        has_shared = config.get("shared_intermediate_size") != 0
        shared = read_int(config, "shared_intermediate_size", 1024) if has_shared else 0
        experts = replace(spec.experts, shared_width=shared)
        return replace(spec, experts=experts, ffn_width=shared or spec.ffn_width)


def _read_any_experts(config: Config, num_layers: int) -> ExpertSpec | None:
    has_some = bool(config.get("num_experts"))
    return read_wide_experts(config, num_layers, scores="chosen") if has_some else None


class GraniteHybrid(GraniteMoeShared):
    """Granite 4: layers attend or are Mamba 2; with experts beside the MLP, or without."""

    names = replace(GraniteMoeShared.names, down="shared_mlp.down_proj", recurrent="mamba.")
    keys = GraniteMoeShared.keys.but(
        given={"num_experts": 8, "num_experts_per_tok": 2},
        only={
            "hidden_act": "silu",  # the convolutions' too
            "normalization_function": "rmsnorm",
            "position_embedding_type": ("nope", "rope"),
        },
        experts=_read_any_experts,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        for key in config:  # of kinds of layers that it may not have
            if key.startswith(("mamba_", "time_step_")) or key == "num_experts_per_tok":
                config.get(key)
        if spec.experts is not None:
            spec = super().read_more(spec, config)
        else:
            spec = super(GraniteMoeShared, cls).read_more(spec, config)
            spec = replace(spec, ffn_width=read_int(config, "shared_intermediate_size", 1024))
        if config.get("position_embedding_type") != "rope":
            spec = replace(spec, rope=STILL)
        types = config.get("layer_types") or ["mamba"] * spec.num_layers
        is_recurrent = is_mamba(read_layer_types(types, spec.num_layers))
        if not any(is_recurrent):
            return spec
        return replace(spec, recurrence=read_mamba(config, spec.width), is_recurrent=is_recurrent)


def with_windows(spec: ModelSpec, config: Config) -> ModelSpec:
    """Three of four layers with a window, sinks, and rotary angles of the layer's own, or none."""
    sees_all = [layer % 4 == 0 for layer in range(spec.num_layers)]
    assert spec.rope is not None
    thetas = config.get("layer_rope_theta") or [spec.rope.theta] * spec.num_layers
    check_listed("layer_rope_theta", thetas, spec.num_layers)
    different = list(dict.fromkeys(thetas))
    how = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [
        read_rope(config, spec.head_dim, {**how, "rope_theta": theta}) if theta else STILL
        for theta in different
    ]
    return replace(
        spec,
        windows=read_windows(config, spec.num_layers, sees_all),
        has_sinks=True,
        rope=ropes[0],
        more_ropes=tuple(ropes[1:]),
        rope_of=tuple(different.index(theta) for theta in thetas),
    )


class GraniteSWA(Granite):
    """Granite with windows."""

    keys = Granite.keys.but(
        given={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128}
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return with_windows(super().read_more(spec, config), config)


class GraniteMoeSWA(GraniteMoeShared):
    """The same with experts, whose tensors are named as transformers' code has them."""

    names = replace(
        GraniteMoeShared.names,
        experts=replace(
            GraniteMoeShared.names.experts,
            router="block_sparse_moe.router",
            all_up="block_sparse_moe.experts.gate_up_proj",
            all_down="block_sparse_moe.experts.down_proj",
            is_turned=False,
        ),
    )
    keys = GraniteMoeShared.keys.but(given={"shared_intermediate_size": 0, "sliding_window": 128})

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return with_windows(super().read_more(spec, config), config)

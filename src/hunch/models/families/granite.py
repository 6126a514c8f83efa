"""Granite (4 with Mamba layers, MoE, with windows), MiniCPM: Llama with scales along the stream."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.llama import Llama
from hunch.models.mamba import is_mamba, read_layer_types, read_mamba
from hunch.models.reading import (
    Config,
    Defaulted,
    read_float,
    read_int,
    read_rope,
    read_windows,
    refuse,
)
from hunch.models.spec import ModelSpec

_HYBRID_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


class Granite(Llama):
    """The multipliers of its config stand where Llama has ones."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(
            super().read_config(config, architecture),
            embed_scale=read_float(config, "embedding_multiplier", 1.0),
            residual_scale=read_float(config, "residual_multiplier", 1.0),
            attn_scale=read_float(config, "attention_multiplier", 1.0),
            logits_scale=1.0 / read_float(config, "logits_scaling", 1.0),
        )


class HyperClovaX(Granite):
    """What is added is normed before it is scaled; logits are multiplied, not divided."""

    names = Names(attn_out_norm="post_norm1", mlp_out_norm="post_norm2")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        has_scale = config.get("attention_multiplier") is not None
        return replace(
            spec,
            attn_scale=spec.attn_scale if has_scale else spec.head_dim**-0.5,
            logits_scale=read_float(config, "logits_scaling", 1.0),
            has_branch_norms=bool(config.get("use_post_norm", True)),
        )


class MiniCPM(Llama):
    """The scales of MiniCPM 1, 2 and 4, by the keys of its own code."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "sparse_config", None)
        refuse(config, "num_experts", 0)
        config.get("mup_denominator")  # of a drafter's scale
        spec = super().read_config(Defaulted(config, {"rms_norm_eps": 1e-5}), architecture)
        base = read_int(config, "dim_model_base", 1)
        return replace(
            spec,
            embed_scale=read_float(config, "scale_emb", 1.0),
            residual_scale=read_float(config, "scale_depth", 1.0) * spec.num_layers**-0.5,
            logits_scale=base / spec.width,
            is_tied=bool(config.get("tie_word_embeddings", True)),
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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        routing = Routing(
            num_experts=read_count(config, "num_local_experts"),
            num_chosen=read_int(config, "num_experts_per_tok"),
            scores="chosen",
        )
        experts = ExpertSpec(
            routing=routing, width=spec.ffn_width, layers=(True,) * spec.num_layers
        )
        return replace(spec, experts=experts)


class GraniteMoeShared(GraniteMoe):
    """An MLP beside the experts, which every token asks."""

    names = Names(
        gate="shared_mlp.gate_proj",
        up="shared_mlp.up_proj",
        gate_up="shared_mlp.input_linear",
        aliases=(("shared_mlp.output_linear", "shared_mlp.down_proj"),),
        experts=replace(GraniteMoe.names.experts, shared="shared_mlp."),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        assert spec.experts is not None
        width = config.get("shared_intermediate_size", 1024)
        shared = read_int(config, "shared_intermediate_size", 1024) if width != 0 else 0
        experts = replace(spec.experts, shared_width=shared)
        return replace(spec, experts=experts, ffn_width=shared or spec.ffn_width)


class GraniteHybrid(GraniteMoeShared):
    """Granite 4: layers attend or are Mamba 2; with experts beside the MLP, or without."""

    names = replace(GraniteMoeShared.names, down="shared_mlp.down_proj", recurrent="mamba.")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # the convolutions' too
        refuse(config, "normalization_function", "rmsnorm")
        refuse(config, "position_embedding_type", "rope", "nope")
        for key in config:  # of layers and experts that it may not have
            if key.startswith(("mamba_", "time_step_")) or key == "num_experts_per_tok":
                config.get(key)
        family = GraniteMoeShared if config.get("num_local_experts", 8) else Granite
        config = Defaulted(config, _HYBRID_DEFAULTS)
        spec = family.read_config(config, architecture)
        if config.get("position_embedding_type") != "rope":
            spec = replace(spec, rope=RopeSpec(rope_type="none"))
        if spec.experts is None:
            spec = replace(spec, ffn_width=read_int(config, "shared_intermediate_size", 1024))
        types = config.get("layer_types") or ["mamba"] * spec.num_layers
        is_recurrent = is_mamba(read_layer_types(types, spec.num_layers))
        if not any(is_recurrent):
            return spec
        shape = read_mamba(config, spec.width)
        return replace(spec, recurrence=shape, is_recurrent=is_recurrent)


def with_windows(spec: ModelSpec, config: Config) -> ModelSpec:
    """Three of four layers with a window, sinks, and angles of each layer's own, or none."""
    types = [["full", "sliding"][layer % 4 > 0] + "_attention" for layer in range(spec.num_layers)]
    given = Defaulted(config, {"sliding_window": 128, "layer_types": types})
    assert spec.rope is not None
    thetas = config.get("layer_rope_theta") or [spec.rope.theta] * spec.num_layers
    if len(thetas) != spec.num_layers:
        raise ModelFormatError(
            f"layer_rope_theta lists {len(thetas)} layers, num_hidden_layers={spec.num_layers}"
        )
    different = list(dict.fromkeys(thetas))
    how = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [
        read_rope(config, spec.head_dim, {**how, "rope_theta": theta})
        if theta
        else RopeSpec(rope_type="none")
        for theta in different
    ]
    return replace(
        spec,
        windows=read_windows(given, spec.num_layers),
        has_sinks=True,
        rope=ropes[0],
        more_ropes=tuple(ropes[1:]),
        rope_of=tuple(different.index(theta) for theta in thetas),
    )


class GraniteSWA(Granite):
    """Granite with windows."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        config = Defaulted(config, given)
        return with_windows(super().read_config(config, architecture), config)


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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"shared_intermediate_size": 0})
        return with_windows(super().read_config(config, architecture), config)

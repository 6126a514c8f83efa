"""Qwen2, 2.5 and 3, with experts or without, what reads text of those with pictures, and models of
others with their attention: dots.llm1, Hy3, Mellum, Flint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import (
    ExpertNames,
    first_dense,
    read_count,
    read_deepseek_experts,
    sparse_layers,
)
from hunch.models.reading import (
    Config,
    Defaulted,
    read_attn_biases,
    read_int,
    read_rope,
    read_windows,
    refuse,
    without_pictures,
)
from hunch.models.spec import ModelSpec, read_common


class Qwen2(Decoder):
    """The upper layers may have a sliding window, where the config switches it on."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(without_pictures(config), architecture)
        if config.get("dual_chunk_attention_config") is not None:
            # Chunks differ from plain attention beyond the first: texts up to there are served.
            chunks = {**config["dual_chunk_attention_config"]}
            size = read_int(chunks, "chunk_size") - read_int(chunks, "local_size")
            common["max_len"] = min(common["max_len"], size)
        common["windows"] = cls.windows(
            Defaulted(config, {"sliding_window": 4096}),
            common["num_layers"],
            is_on=bool(config.get("use_sliding_window", False)),
            first=int(config.get("max_window_layers", 80 if "VL" in architecture else 28)),
        )
        # GGUF files say it; Hugging Face's config.json has no word for it.
        has_bias = bool(config.get("attention_bias", True))
        return ModelSpec(**common, has_qkv_bias=has_bias)

    @staticmethod
    def windows(config: Config, num_layers: int, is_on: bool, first: int) -> tuple[int | None, ...]:
        """`first`: of the layers with a window, where they are not listed."""
        return read_windows(config, num_layers, is_on, first)


class Qwen3(Qwen2):
    """Qwen2's windows; biases only where the config asks for them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "use_qk_norm", True)
        return replace(
            super().read_config(config, architecture),
            **read_attn_biases(config),
            has_qk_norm=True,
        )


def read_experts(config: Config, num_layers: int) -> ExpertSpec:
    """Softmax over all experts, whose weights add up to one where the config says so."""
    routing = Routing(
        num_experts=read_count(config, "num_experts", "num_local_experts"),
        num_chosen=read_int(config, "num_experts_per_tok"),
        is_normed=bool(config.get("norm_topk_prob", False)),
    )
    return ExpertSpec(
        routing=routing,
        width=read_int(config, "moe_intermediate_size"),
        layers=sparse_layers(config, num_layers),
    )


class Qwen3Moe(Qwen3):
    """Layers without experts have Qwen3's MLP."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        return replace(spec, experts=read_experts(config, spec.num_layers))

    @staticmethod
    def windows(config: Config, num_layers: int, is_on: bool, first: int) -> tuple[int | None, ...]:
        """All layers have one, whatever else the config says."""
        return read_windows(config, num_layers, is_on)


class Qwen3VLMoe(Qwen3Moe):
    """The weights of the chosen experts add up to one."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "norm_topk_prob", True)
        return super().read_config(Defaulted({"norm_topk_prob": True}, config), architecture)


class Qwen2Moe(Qwen2):
    """Beside the chosen experts a shared one, of which each token takes as much as it needs."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        experts = replace(
            read_experts(config, spec.num_layers),
            shared_width=read_int(config, "shared_expert_intermediate_size"),
            is_shared_gated=True,
        )
        has_bias = bool(config.get("qkv_bias", True))
        return replace(spec, experts=experts, has_qkv_bias=has_bias)

    @staticmethod
    def windows(config: Config, num_layers: int, is_on: bool, first: int) -> tuple[int | None, ...]:
        """Every second layer below `first`, where they are not listed."""
        if not is_on and "sliding_attention" in (config.get("layer_types") or ()):
            raise UnsupportedModelError(  # transformers has windows of 0 there
                "config.json: layer_types has windows, which use_sliding_window switches off"
            )
        layer_types = ("full_attention", "sliding_attention")
        types = [layer_types[i % 2 == 0 and i < first] for i in range(num_layers)]
        types = config.get("layer_types") or types
        return read_windows(Defaulted({"layer_types": types}, config), num_layers, is_on)


class Dots1(Qwen3):
    """dots.llm1: Qwen3's attention, DeepSeek's experts."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "scoring_func", "sigmoid", "noaux_tc")
        refuse(config, "topk_method", "noaux_tc")
        given = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62}
        spec = super().read_config(Defaulted(config, given), architecture)
        inner = Defaulted(config, {"norm_topk_prob": False})
        experts = read_deepseek_experts(inner, spec.num_layers)
        layers = first_dense(config, spec.num_layers)
        return replace(spec, experts=replace(experts, layers=layers))


class Hy3(Qwen3):
    """Hy3: DeepSeek's experts under names of its own."""

    names = Names(
        experts=ExpertNames(
            shared="mlp.shared_experts.", choice_bias="mlp.e_score_correction_bias"
        ),
        aliases=(
            ("mlp.router.gate", "mlp.gate"),
            ("mlp.expert_bias", "mlp.e_score_correction_bias"),
            *(
                (f"mlp.shared_mlp.{name}_proj", f"mlp.shared_experts.{name}_proj")
                for name in ("gate", "up", "down")
            ),
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "mlp_bias", False)
        config.get("enable_moe_fp32_combine")  # of sums, which are in float32 here anyway
        given = {"rope_theta": 11_158_840.0, "rms_norm_eps": 1e-5, "head_dim": 128}
        given |= {"n_routed_experts": config.get("num_experts", 192)}
        given |= {"n_shared_experts": config.get("num_shared_experts", 1)}
        given |= {"routed_scaling_factor": config.get("router_scaling_factor", 2.826)}
        config = Defaulted(config, given)
        spec = super().read_config(config, architecture)
        layers = first_dense(Defaulted(config, {"first_k_dense_replace": 1}), spec.num_layers)
        experts = read_deepseek_experts(config, spec.num_layers)
        return replace(spec, experts=replace(experts, layers=layers))


class Mellum(Qwen3Moe):
    """Layers with a window turn their heads by angles of their own."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"norm_topk_prob": True, "sliding_window": 1024})
        if config.get("rope_parameters") is None:
            config = Defaulted(config, {"rope_theta": 5e5})
        spec = super().read_config(config, architecture)
        whole = {"layer_types": ["full_attention"] * spec.num_layers}
        windows = read_windows(Defaulted(config, whole), spec.num_layers)
        given = config.get("rope_parameters")
        local = given.get("sliding_attention") if isinstance(given, Mapping) else None
        near = read_rope(config, spec.head_dim, local or {"rope_theta": 1e4})
        assert spec.experts is not None
        return replace(
            spec,
            windows=windows,
            more_ropes=(near,),
            rope_of=tuple(int(window is not None) for window in windows),
            experts=replace(spec.experts, layers=first_dense(config, spec.num_layers)),
        )


class Flint(Qwen3Moe):
    """Layers without a window do not turn their heads; sinks; experts chosen by sigmoids."""

    names = Names(aliases=(("self_attn.softmax_offset", "self_attn.sinks"),))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"norm_topk_prob": True, "sliding_window": 513, "mlp_only_layers": [0, 1]}
        config = Defaulted(config, given | {"shared_expert_intermediate_size": 1024})
        spec = super().read_config(config, architecture)
        last = spec.num_layers - 1
        layer_types = ["full_attention", "sliding_attention"]
        types = [layer_types[i >= 2 and i % 4 != 1 and i != last] for i in range(last + 1)]
        windows = read_windows(Defaulted(config, {"layer_types": types}), spec.num_layers)
        assert spec.experts is not None
        experts = replace(
            spec.experts,
            routing=replace(spec.experts.routing, scores="sigmoid"),
            shared_width=read_int(config, "shared_expert_intermediate_size"),
        )
        return replace(
            spec,
            windows=windows,
            more_ropes=(RopeSpec(rope_type="none"),),
            rope_of=tuple(int(window is None) for window in windows),
            has_sinks=True,
            experts=experts,
        )

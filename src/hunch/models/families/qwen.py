"""Qwen2, 2.5 and 3, with experts or without, the text models of vision-language ones, and other
models with their attention: dots.llm1, Hy3, Mellum, Flint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import (
    ExpertNames,
    first_dense,
    read_deepseek_experts,
    read_qwen_experts,
    read_shared_experts,
)
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import SLIDING, STILL, Config, read_int, read_local_rope, read_windows
from hunch.models.spec import ModelSpec

_NO_WINDOWS = {"use_sliding_window": False}  # which transformers does not read for these


class Qwen2(Decoder):
    """The upper layers may have a sliding window, where the config switches it on."""

    keys = Keys(
        # GGUF files tell whether there are biases; Hugging Face's config.json has no key for it.
        given={"sliding_window": 4096, "max_window_layers": 28, "attention_bias": True},
        flags={"has_qkv_bias": "attention_bias"},
        reads_pictures=True,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        if config.get("dual_chunk_attention_config") is not None:
            # Beyond the first chunk attention is not plain: texts up to there are served.
            chunks = {**config["dual_chunk_attention_config"]}
            size = read_int(chunks, "chunk_size") - read_int(chunks, "local_size")
            spec = replace(spec, max_len=min(spec.max_len, size))
        is_on = bool(config.get("use_sliding_window", False))
        sees_all = cls.sees_all(config, spec.num_layers)
        return replace(spec, windows=read_windows(config, spec.num_layers, sees_all, is_on))

    @classmethod
    def sees_all(cls, config: Config, num_layers: int) -> Sequence[bool]:
        """Layers without a window, where files do not list them."""
        return [layer < int(config["max_window_layers"]) for layer in range(num_layers)]


class Qwen2VL(Qwen2):
    """The text model of vision-language ones."""

    keys = Qwen2.keys.but(given={"max_window_layers": 80})


class Qwen3(Qwen2):
    """Qwen2's windows; biases only where the config asks for them."""

    keys = Qwen2.keys.but(
        given={"attention_bias": False},
        only={"use_qk_norm": True},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
        fields={"has_qk_norm": True},
    )


class Qwen3VL(Qwen3):
    """The text model of vision-language ones."""

    keys = Qwen3.keys.but(only=_NO_WINDOWS)


class Qwen3Moe(Qwen3):
    """Layers without experts have Qwen3's MLP."""

    keys = Qwen3.keys.but(
        named={"num_experts": "num_local_experts"},
        unused={"max_window_layers"},  # all have a window, if one has
        experts=read_qwen_experts,
    )

    @classmethod
    def sees_all(cls, config: Config, num_layers: int) -> Sequence[bool]:
        return ()


class Qwen3VLMoe(Qwen3Moe):
    """The weights of the chosen experts add up to one."""

    keys = Qwen3Moe.keys.but(only=_NO_WINDOWS | {"norm_topk_prob": True})


class Qwen2Moe(Qwen2):
    """Beside the chosen experts a shared one, with a gate for each token."""

    keys = Qwen2.keys.but(
        given={"qkv_bias": True},
        named={"num_experts": "num_local_experts"},
        unused={"attention_bias"},  # of GGUF files
        flags={"has_qkv_bias": "qkv_bias"},
        experts=partial(read_shared_experts, is_shared_gated=True),
    )

    @classmethod
    def sees_all(cls, config: Config, num_layers: int) -> Sequence[bool]:
        """All but every second one below a number of layers."""
        is_on = config.get("use_sliding_window", False)
        if not is_on and SLIDING in (config.get("layer_types") or ()):
            raise UnsupportedModelError(  # transformers has windows of 0 there
                "config.json: layer_types has windows, which use_sliding_window switches off"
            )
        below = super().sees_all(config, num_layers)
        return [layer % 2 != 0 or not is_below for layer, is_below in enumerate(below)]


class Dots1(Qwen3):
    """dots.llm1: Qwen3's attention, DeepSeek's experts."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))
    keys = Qwen3.keys.but(
        given={"use_sliding_window": True, "max_window_layers": 62, "norm_topk_prob": False},
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc"},
        experts=read_deepseek_experts,
    )


class Hy3(Dots1):
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

    keys = Qwen3.keys.but(
        given={
            "rope_theta": 11_158_840.0,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "n_routed_experts": 192,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        named={
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "router_scaling_factor",
        },
        only={"mlp_bias": False},
        unused={"enable_moe_fp32_combine"},  # of sums, which are in float32 here anyway
        experts=read_deepseek_experts,
    )


class Mellum(Qwen3Moe):
    """Layers with a window have rotary angles of their own."""

    keys = Qwen3Moe.keys.but(
        given={"norm_topk_prob": True, "sliding_window": 1024, "rope_theta": 5e5}
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        spec = super().read_more(spec, config)
        windows = read_windows(config, spec.num_layers, (True,) * spec.num_layers)
        local = read_local_rope(config, spec.head_dim, {"rope_theta": 1e4})
        assert spec.experts is not None
        experts = replace(spec.experts, layers=first_dense(config, spec.num_layers))
        spec = replace(spec, windows=windows, experts=experts)
        return spec.with_rope(local, (not sees_all for sees_all in spec.sees_all))


class Flint(Qwen3Moe):
    """Layers without a window do not rotate their heads; sinks; experts chosen by sigmoids."""

    names = Names(aliases=(("self_attn.softmax_offset", "self_attn.sinks"),))
    keys = Qwen3Moe.keys.but(
        given={
            "norm_topk_prob": True,
            "sliding_window": 513,
            "mlp_only_layers": [0, 1],
            "shared_expert_intermediate_size": 1024,
        },
        fields={"has_sinks": True},
        experts=partial(read_shared_experts, scores="sigmoid"),
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        spec = super().read_more(spec, config)
        last = spec.num_layers - 1
        sees_all = [i < 2 or i % 4 == 1 or i == last for i in range(last + 1)]
        spec = replace(spec, windows=read_windows(config, spec.num_layers, sees_all))
        return spec.with_rope(STILL, spec.sees_all)

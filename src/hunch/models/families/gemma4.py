"""Gemma 4 (text): layers with a window and without differ in their heads; some read the keys and
values of earlier ones; there may be a table with a vector of every token for every layer.

Of files for pictures and sound too, only the text model is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames
from hunch.models.families.gemma import Gemma2
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import (
    FULL,
    SLIDING,
    Config,
    Defaulted,
    check_listed,
    last_of,
    read_count,
    read_int,
    read_rope,
    read_windows,
)
from hunch.models.spec import ModelSpec, OtherHeads, TokenInputs

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class Gemma4(Decoder):
    """Norms mean w; the scale of scores is in the norms of q and k."""

    names = replace(
        Gemma2.names,
        experts=ExpertNames(
            router="router.proj",
            gate="experts.{}.gate_proj",
            up="experts.{}.up_proj",
            down="experts.{}.down_proj",
            all_up="experts.gate_up_proj",
            all_down="experts.down_proj",
            is_turned=False,
        ),
    )

    keys = Keys(
        given={  # of text models: their files leave out what does not differ
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "global_head_dim": 512,
        },
        named={"hidden_act": "hidden_activation"},
        only={"use_bidirectional_attention": (None, "vision")},  # of pictures alone
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
        numbers={"logits_cap": "final_logit_softcapping"},
        fields={
            "attn_scale": 1.0,
            "has_qk_norm": True,
            "has_v_norm": True,
            "has_branch_norms": True,
            "has_layer_scale": True,
        },
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        ropes: Any = config.get("rope_parameters") or _ROPES
        if not isinstance(ropes, Mapping) or not {SLIDING, FULL} <= set(ropes):
            raise ModelFormatError(f"rope_parameters must name {SLIDING} and {FULL}")
        read = Defaulted({"rope_parameters": ropes[SLIDING]}, config)
        spec = super().read_config(read, architecture)
        assert spec.other_heads is not None
        head_dim = spec.other_heads.head_dim
        full = replace(read_rope(config, head_dim, ropes[FULL]), head_dim=head_dim)
        return spec.with_rope(full, spec.other_heads.layers)

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        types = _layer_types(config, spec.num_layers)
        is_full = tuple(layer_type == FULL for layer_type in types)
        return replace(
            spec,
            embed_scale=float(spec.width) ** 0.5,
            windows=read_windows(Defaulted({"layer_types": types}, config), spec.num_layers),
            ffn_widths=_widths(config, spec),
            other_heads=_full_heads(config, is_full, spec.num_kv_heads),
            kv_of=kv_of(config, types),
            is_value_key=is_full if config.get("attention_k_eq_v") else (),
            inputs=_inputs(config),
            experts=_experts(config, spec.num_layers),
        )


class Gemma4Unified(Gemma4):
    """Gemma 4 without the table."""

    keys = Gemma4.keys.but(
        given={
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
        }
    )


def _layer_types(config: Config, num_layers: int) -> tuple[str, ...]:
    sees_all = last_of(6, num_layers)
    types = config.get("layer_types") or [(SLIDING, FULL)[some] for some in sees_all]
    check_listed("layer_types", types, num_layers)
    return (*types[:-1], FULL)  # the last has no window, whatever a file says


def kv_of(config: Config, types: tuple[str, ...]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last one before them of their kind."""
    num_shared = read_count(config, "num_kv_shared_layers")
    if not num_shared:
        return ()
    first = len(types) - num_shared
    if first < 1 or not set(types[first:]) <= set(types[:first]):
        raise ModelFormatError(
            f"num_kv_shared_layers={num_shared} of {len(types)} layers: there is no layer of each "
            "kind before them to share with"
        )
    last = {layer_type: at for at, layer_type in enumerate(types[:first])}
    return tuple(at if at < first else last[layer_type] for at, layer_type in enumerate(types))


def _widths(config: Config, spec: ModelSpec) -> tuple[int, ...]:
    """Layers that read others' keys and values may have MLPs twice as wide."""
    num_shared, width = read_count(config, "num_kv_shared_layers"), spec.ffn_width
    if not config.get("use_double_wide_mlp") or not num_shared:
        return ()
    return (width,) * (spec.num_layers - num_shared) + (2 * width,) * num_shared


def _full_heads(config: Config, is_full: tuple[bool, ...], num_kv_heads: int) -> OtherHeads:
    head_dim, by_layer = read_int(config, "global_head_dim"), config.get("per_layer_config")
    given = config.get("num_global_key_value_heads")
    if config.get("attention_k_eq_v") and given is not None:
        num_kv_heads = read_int(config, "num_global_key_value_heads")
    if by_layer is not None:  # newer files list every layer that differs
        changed = _same_for_all(by_layer, is_full)
        head_dim = read_int(changed, "head_dim", head_dim)
        num_kv_heads = read_int(changed, "num_key_value_heads", num_kv_heads)
    return OtherHeads(num_kv_heads=num_kv_heads, head_dim=head_dim, layers=is_full)


def _same_for_all(by_layer: Any, is_full: tuple[bool, ...]) -> Config:
    """The entry that all layers without a window have in `per_layer_config` ("05" is 5)."""
    wanted = {str(at) for at, is_there in enumerate(is_full) if is_there}
    found = list(by_layer.values()) if isinstance(by_layer, Mapping) else []
    is_known = bool(found) and {str(key).lstrip("0") or "0" for key in by_layer} == wanted
    is_known = is_known and all(some == found[0] for some in found)
    if not is_known or set(found[0]) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModelError(
            f"per_layer_config={str(by_layer)[:80]}: only heads of layers without a window may "
            "differ, all in the same way"
        )
    return dict(found[0])


def _experts(config: Config, num_layers: int) -> ExpertSpec | None:
    if not config.get("enable_moe_block"):
        return None
    routing = Routing(
        num_experts=read_int(config, "num_experts"),
        num_chosen=read_int(config, "top_k_experts"),
        is_normed=True,
    )
    width = read_int(config, "moe_intermediate_size")
    return ExpertSpec(routing=routing, width=width, layers=(True,) * num_layers, is_beside=True)


def _inputs(config: Config) -> TokenInputs | None:
    vocab_size = read_int(config, "vocab_size_per_layer_input")
    if not config.get("hidden_size_per_layer_input"):
        return None
    return TokenInputs(width=read_int(config, "hidden_size_per_layer_input"), vocab_size=vocab_size)

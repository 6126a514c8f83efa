"""Jamba: most layers are Mamba 1, the others attend without positions, some have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.kernels.selective import SelectiveShape
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames
from hunch.models.families.qwen import read_experts
from hunch.models.reading import Config, Defaulted, read_int, refuse
from hunch.models.spec import ModelSpec, read_common

_EXPERTS = {"num_experts_per_tok": 2}
_EXPERT = "feed_forward.experts.{}."
# Of how it runs elsewhere, and what follows from other keys.
_UNUSED = (
    *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "layers_block_type"),
    *("num_logits_to_keep", "calc_logits_for_entire_prompt", "layer_types"),
)


class Jamba(Decoder):
    """What the channels of a Mamba layer give is normed; experts are not weighed anew."""

    names = Names(
        recurrent="mamba.",
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        experts=ExpertNames(
            router="feed_forward.router",
            gate=f"{_EXPERT}gate_proj",
            up=f"{_EXPERT}up_proj",
            down=f"{_EXPERT}down_proj",
            all_up="feed_forward.experts.gate_up_proj",
            all_down="feed_forward.experts.down_proj",
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # the convolutions' too
        refuse(config, "sliding_window", None)
        refuse(config, "mamba_inner_layernorms", True)
        for key in _UNUSED:
            config.get(key)
        common = read_common(config, architecture)
        width, num_layers = common["width"], common["num_layers"]
        rank: Any = config.get("mamba_dt_rank", "auto")
        shape = SelectiveShape(
            width=read_int(config, "mamba_expand", 2) * width,
            k_dim=read_int(config, "mamba_d_state", 16),
            rank=-(-width // 16) if rank == "auto" else read_int(config, "mamba_dt_rank"),
            num_taps=read_int(config, "mamba_d_conv", 4),
            has_conv_bias=bool(config.get("mamba_conv_bias", True)),
            has_bias=bool(config.get("mamba_proj_bias", False)),
            part_eps=common["norm_eps"],
            has_part_weights=True,
        )
        attends = _every(config, "attn_layer", 8, 4, num_layers)
        is_sparse = _every(config, "expert_layer", 2, 1, num_layers)
        given = Defaulted(config, {"moe_intermediate_size": common["ffn_width"]})
        experts = read_experts(Defaulted(given, _EXPERTS), num_layers)
        has_experts = experts.routing.num_experts > 1 and any(is_sparse)
        return ModelSpec(
            **common | {"rope": RopeSpec(rope_type="none")},
            recurrence=shape,
            is_recurrent=tuple(not attending for attending in attends),
            experts=replace(experts, layers=is_sparse) if has_experts else None,
        )


def _every(
    config: Config, prefix: str, period: int, offset: int, num_layers: int
) -> tuple[bool, ...]:
    """Per layer: whether it is the one of its period that the config names."""
    period = read_int(config, f"{prefix}_period", period)
    offset = config.get(f"{prefix}_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ModelFormatError(f"{prefix}_offset={offset!r} must be 0 to {prefix}_period - 1")
    return tuple(layer % period == offset for layer in range(num_layers))

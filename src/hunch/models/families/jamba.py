"""Jamba: most layers are Mamba 1, the others attend without positions, some have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.kernels.selective import SelectiveShape
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_experts
from hunch.models.families.bamba import Bamba
from hunch.models.keys import Keys
from hunch.models.reading import STILL, Config, read_int
from hunch.models.spec import ModelSpec

_EXPERT = "feed_forward.experts.{}."


class Jamba(Decoder):
    """The outputs of a Mamba layer's channels are normed; experts' weights are not normalised."""

    names = replace(
        Bamba.names,
        experts=ExpertNames(
            router="feed_forward.router",
            gate=f"{_EXPERT}gate_proj",
            up=f"{_EXPERT}up_proj",
            down=f"{_EXPERT}down_proj",
            all_up="feed_forward.experts.gate_up_proj",
            all_down="feed_forward.experts.down_proj",
        ),
    )

    keys = Keys(
        given={"num_experts_per_tok": 2, "mamba_conv_bias": True},
        named={"num_experts": "num_local_experts"},
        only={
            "hidden_act": "silu",  # the convolutions' too
            "sliding_window": None,
            "mamba_inner_layernorms": True,
        },
        unused={  # of other software, or following from other keys
            *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "layers_block_type"),
            *("num_logits_to_keep", "calc_logits_for_entire_prompt", "layer_types"),
        },
        fields={"rope": STILL},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        rank: Any = config.get("mamba_dt_rank", "auto")
        shape = SelectiveShape(
            width=read_int(config, "mamba_expand", 2) * spec.width,
            k_dim=read_int(config, "mamba_d_state", 16),
            rank=-(-spec.width // 16) if rank == "auto" else read_int(config, "mamba_dt_rank"),
            num_taps=read_int(config, "mamba_d_conv", 4),
            has_conv_bias=bool(config.get("mamba_conv_bias")),
            has_bias=bool(config.get("mamba_proj_bias", False)),
            part_eps=spec.norm_eps,
            has_part_weights=True,
        )
        attends = _every(config, "attn_layer", 8, 4, spec.num_layers)
        is_sparse = _every(config, "expert_layer", 2, 1, spec.num_layers)
        experts = read_experts(config, spec.ffn_width, is_sparse)
        has_experts = experts.routing.num_experts > 1 and any(is_sparse)
        return replace(
            spec,
            recurrence=shape,
            is_recurrent=tuple(not attending for attending in attends),
            experts=experts if has_experts else None,
        )


def _every(
    config: Config, prefix: str, period: int, offset: int, num_layers: int
) -> tuple[bool, ...]:
    """Per layer: whether it has the place in its period that the config names."""
    period = read_int(config, f"{prefix}_period", period)
    offset = config.get(f"{prefix}_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ModelFormatError(f"{prefix}_offset={offset!r} must be 0 to {prefix}_period - 1")
    return tuple(layer % period == offset for layer in range(num_layers))

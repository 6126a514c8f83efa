"""Falcon-H1: every layer attends and is Mamba 2, side by side, with a factor for each part."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.kernels.ssm import SsmShape
from hunch.models.decoder import Decoder
from hunch.models.families.bamba import Bamba
from hunch.models.keys import Keys
from hunch.models.mamba import read_mamba
from hunch.models.reading import Config, read_float, read_int
from hunch.models.spec import ModelSpec, RowFactors


class FalconH1(Decoder):
    """The factors of its config are multiplied into the matrices when these are read."""

    names = Bamba.names

    keys = Keys(
        given={"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True},
        only={
            "hidden_act": "silu",  # the convolutions' too
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
        },
        unused={"num_logits_to_keep", "layers_block_type", "mamba_use_mlp"},
        numbers={"embed_scale": "embedding_multiplier", "logits_scale": "lm_head_multiplier"},
        fields={"attends_too": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        has_inner = config.get("mamba_d_ssm") is not None
        shape = read_mamba(
            config,
            spec.width,
            read_int(config, "mamba_d_ssm") if has_inner else None,
            has_norm=bool(config.get("mamba_rms_norm", False)),
            is_norm_first=bool(config.get("mamba_norm_before_gate")),
        )
        return replace(
            spec,
            recurrence=shape,
            is_recurrent=(True,) * spec.num_layers,
            row_factors=_row_factors(config, spec, shape),
        )


def _row_factors(config: Config, spec: ModelSpec, shape: SsmShape) -> RowFactors:
    width, names = spec.width, FalconH1.names
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attn_in = read_float(config, "attention_in_multiplier", 1.0)
    attn_out = read_float(config, "attention_out_multiplier", 1.0)
    key = read_float(config, "key_multiplier", 1.0)
    ssm_in = read_float(config, "ssm_in_multiplier", 1.0)
    ssm_out = read_float(config, "ssm_out_multiplier", 1.0)
    gate, down = _floats(config, "mlp_multipliers", 2)
    z, x, b, c, dt = (ssm_in * factor for factor in _floats(config, "ssm_multipliers", 5))
    parts = (
        (names.q, ((q_size, attn_in),)),
        (names.k, ((kv_size, attn_in * key),)),
        (names.v, ((kv_size, attn_in),)),
        (names.out, ((width, attn_out),)),
        (names.gate, ((spec.ffn_width, gate),)),
        (names.down, ((width, down),)),
        ("mamba.in_proj_z", ((shape.value_width, z),)),
        ("mamba.in_proj_xbc", ((shape.value_width, x), (shape.key_width, b), (shape.key_width, c))),
        ("mamba.in_proj_dt", ((shape.num_heads, dt),)),
        ("mamba.out_proj", ((width, ssm_out),)),
    )
    return tuple(part for part in parts if any(factor != 1.0 for _, factor in part[1]))


def _floats(config: Config, key: str, count: int) -> list[float]:
    given = config.get(key) or [1.0] * count
    if len(given) != count:
        raise ModelFormatError(f"config.json: {key}={given!r} must list {count} numbers")
    return [read_float({key: factor}, key) for factor in given]

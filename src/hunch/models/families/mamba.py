"""Mamba, FalconMamba (Mamba 1) and Mamba 2 without layers that attend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.selective import SelectiveShape
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import Keys
from hunch.models.mamba import MAMBA_NAMES, read_limits, read_mamba
from hunch.models.reading import LINEAR, STILL, Config, read_float, read_int, refuse
from hunch.models.spec import ModelSpec

MAX_LEN = 1 << 17  # nothing in the layers limits a text's length
_KV_DIM = 16  # of the one layer that every cache has: nothing is written to it


class Mamba1(Decoder):
    """Each layer is one half: x + mixer(norm(x)). A cache still has one layer with a head, which
    nothing uses."""

    names = Names(
        roots=("model.", "backbone."),
        embed="model.embeddings.weight",
        final_norm="model.norm_f",
        attn_norm="norm",
        mlp_norm="norm",
        recurrent="mixer.",
    )
    keys = Keys(
        given={
            "max_position_embeddings": MAX_LEN,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_conv_bias": True,
        },
        numbers={"norm_eps": "layer_norm_epsilon"},
        only={"hidden_act": "silu", "num_attention_heads": 1},
        # Of initialisation, training and other software. The stream has the model's precision here.
        unused={
            *("time_step_scale", "time_step_init_scheme", "rescale_prenorm_residual"),
            *("residual_in_fp32", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
            *("chunk_size", "rms_norm", "d_inner", "d_model", "n_layer", "ssm_cfg"),
            *("fused_add_norm", "pad_vocab_size_multiple"),
        },
        fields={"head_dim": _KV_DIM, "rope": STILL},
        has_rope=False,
        ffn_share=2,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        read_limits(config)
        refuse(config, "layer_types", None, [LINEAR] * spec.num_layers)
        return replace(
            spec,
            ffn_width=spec.width,
            is_recurrent=(True,) * spec.num_layers,
            is_mlp=(False,) * spec.num_layers,
            recurrence=cls.read_shape(config, spec.width),
        )

    @classmethod
    def read_shape(cls, config: Config, width: int) -> Recurrence:
        inner = read_int(config, "expand", 2) * width
        if config.get("intermediate_size", inner) != inner:
            raise ModelFormatError(f"intermediate_size must be expand * hidden_size, {inner}")
        rank: Any = config.get("time_step_rank", "auto")
        return SelectiveShape(
            width=inner,
            k_dim=read_int(config, "state_size", 16),
            rank=-(-width // 16) if rank == "auto" else read_int(config, "time_step_rank"),
            num_taps=read_int(config, "conv_kernel", 4),
            has_conv_bias=bool(config.get("use_conv_bias")),
            has_bias=bool(config.get("use_bias", False)),
            part_eps=cls.part_eps(config),
        )

    @staticmethod
    def part_eps(config: Config) -> float | None:
        """The epsilon of norms of the channels' outputs; None: there are no such norms."""
        return None


class FalconMamba(Mamba1):
    """The channels' outputs are normed, without weights."""

    @staticmethod
    def part_eps(config: Config) -> float | None:
        return read_float(config, "mixer_rms_eps", 1e-6)


class Mamba2(Mamba1):
    """The same halves with the recurrence of Mamba 2."""

    keys = Mamba1.keys.but(
        given={"tie_word_embeddings": False, "num_heads": 128, "head_dim": 64}
        | {"mamba_n_groups": 8, "mamba_d_state": 128},
        named={"mamba_n_heads": "num_heads", "mamba_d_state": "state_size"} | MAMBA_NAMES,
        only={"use_bias": False},
        unused={"norm_before_gate"},  # transformers norms after the gate, whatever this is
    )

    @classmethod
    def read_shape(cls, config: Config, width: int) -> Recurrence:
        inner = read_int(config, "num_heads") * read_int(config, "head_dim")
        if inner != read_int(config, "expand", 2) * width:
            raise ModelFormatError(f"num_heads * head_dim, {inner}, must be expand * hidden_size")
        return read_mamba(config, width, inner)

"""Mamba, FalconMamba (Mamba 1) and Mamba 2 without layers that attend."""

from __future__ import annotations

from typing import Any

from hunch.errors import ModelFormatError
from hunch.kernels.selective import SelectiveShape
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.mamba import read_limits, read_mamba
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.spec import ModelSpec, read_sizes

# Of how it is drawn, trained and run elsewhere. The stream is kept in the model's precision here.
_UNUSED = (
    *("time_step_scale", "time_step_init_scheme", "rescale_prenorm_residual", "residual_in_fp32"),
    *("use_mambapy", "use_falcon_mambapy", "use_associative_scan", "chunk_size", "rms_norm"),
    *("d_inner", "d_model", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple"),
)
MAX_LEN = 1 << 17  # nothing in the layers says how long a text may be
_KV_DIM = 16  # of the one layer that every cache has: nobody writes to it


class Mamba1(Decoder):
    """Each layer is one half: x + mixer(norm(x))."""

    names = Names(
        roots=("model.", "backbone."),
        embed="model.embeddings.weight",
        final_norm="model.norm_f",
        attn_norm="norm",
        mlp_norm="norm",
        recurrent="mixer.",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_layers(config, architecture)
        width = common["width"]
        inner = read_int(config, "expand", 2) * width
        if config.get("intermediate_size", inner) != inner:
            raise ModelFormatError(f"intermediate_size must be expand * hidden_size, {inner}")
        rank: Any = config.get("time_step_rank", "auto")
        shape = SelectiveShape(
            width=inner,
            k_dim=read_int(config, "state_size", 16),
            rank=-(-width // 16) if rank == "auto" else read_int(config, "time_step_rank"),
            num_taps=read_int(config, "conv_kernel", 4),
            has_conv_bias=bool(config.get("use_conv_bias", True)),
            has_bias=bool(config.get("use_bias", False)),
            part_eps=cls.part_eps(config),
        )
        return ModelSpec(**common, recurrence=shape)

    @staticmethod
    def part_eps(config: Config) -> float | None:
        """Of norms of what the channels give; None: there are none."""
        return None


class FalconMamba(Mamba1):
    """What the channels give is normed, without weights."""

    @staticmethod
    def part_eps(config: Config) -> float | None:
        return read_float(config, "mixer_rms_eps", 1e-6)


class Mamba2(Mamba1):
    """The same halves with the recurrence of Mamba 2."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"tie_word_embeddings": False})
        common = read_layers(config, architecture)
        refuse(config, "use_bias", False)
        config.get("norm_before_gate")  # transformers norms after the gate, whatever it says
        config.get("intermediate_size")
        heads = read_int(config, "num_heads", 128)
        inner = heads * read_int(config, "head_dim", 64)
        if inner != read_int(config, "expand", 2) * common["width"]:
            raise ModelFormatError(f"num_heads * head_dim, {inner}, must be expand * hidden_size")
        mamba = {
            "mamba_n_heads": heads,
            "mamba_n_groups": config.get("n_groups", 8),
            "mamba_d_state": config.get("state_size", 128),
            "mamba_d_conv": config.get("conv_kernel", 4),
            "mamba_conv_bias": config.get("use_conv_bias", True),
        }
        return ModelSpec(
            **common, recurrence=read_mamba(Defaulted(config, mamba), common["width"], inner)
        )


def read_layers(config: Config, architecture: str) -> dict[str, Any]:
    """Layers that are recurrent alone, as arguments of ModelSpec. A cache has one layer with a head
    all the same, for nobody."""
    for key in _UNUSED:
        config.get(key)
    read_limits(config)
    refuse(config, "hidden_act", "silu")
    width, num_layers = read_int(config, "hidden_size"), read_int(config, "num_hidden_layers")
    refuse(config, "layer_types", None, ["linear_attention"] * num_layers)
    return read_sizes(config, architecture, width, num_layers, 1) | {
        "head_dim": _KV_DIM,
        "ffn_width": width,
        "max_len": read_int(config, "max_position_embeddings", MAX_LEN),
        "norm_eps": read_float(config, "layer_norm_epsilon", 1e-5),
        "rope": RopeSpec(rope_type="none"),
        "is_recurrent": (True,) * num_layers,
        "is_mlp": (False,) * num_layers,
        "is_tied": bool(config.get("tie_word_embeddings", True)),
    }

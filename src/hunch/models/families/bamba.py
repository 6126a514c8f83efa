"""Bamba: most layers are Mamba 2, the others attend, with half of each head turned."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.mamba import is_mamba, read_layer_types, read_mamba
from hunch.models.reading import Config, Defaulted, read_attn_biases, refuse
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


class Bamba(Decoder):
    """An MLP after each."""

    turns_part = True
    names = Names(
        recurrent="mamba.",
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # the convolutions' too
        for key in ("num_logits_to_keep", "z_loss_coefficient", "layers_block_type"):
            config.get(key)
        common = read_common(Defaulted(config, _DEFAULTS), architecture)
        attending = config.get("attn_layer_indices") or ()
        types = ["attention" if i in attending else "mamba" for i in range(common["num_layers"])]
        layer_types = read_layer_types(types, common["num_layers"])
        return ModelSpec(
            **common,
            recurrence=read_mamba(config, common["width"]),
            is_recurrent=is_mamba(layer_types),
            **read_attn_biases(config),
            has_mlp_bias=bool(config.get("mlp_bias", False)),
        )

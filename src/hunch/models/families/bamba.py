"""Bamba: most layers are Mamba 2, the others attend, with half of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.families.llama import Llama
from hunch.models.mamba import read_mamba
from hunch.models.reading import Config
from hunch.models.spec import ModelSpec


class Bamba(Llama):
    """Each is followed by an MLP."""

    turns_part = True
    names = Names(
        recurrent="mamba.",
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
    )

    keys = Llama.keys.but(
        given={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        only={"hidden_act": "silu"},  # the convolutions' too
        unused={"num_logits_to_keep", "z_loss_coefficient", "layers_block_type"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        attending = config.get("attn_layer_indices") or ()
        return replace(
            spec,
            recurrence=read_mamba(config, spec.width),
            is_recurrent=tuple(layer not in attending for layer in range(spec.num_layers)),
        )

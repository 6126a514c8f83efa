"""GPT-NeoX (Pythia, Dolly): layer norms, a plain MLP, and both branches over the same stream."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import ATTN_BIASES, PLAIN_LAYERS, Keys


class GptNeoX(Decoder):
    """A quarter of each head is rotated, unless the config has another share."""

    turns_part = True
    names = Names(
        roots=("gpt_neox.", ""),
        embed="gpt_neox.embed_in.weight",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out.weight",
        layer="gpt_neox.layers.{}.",
        q="attention.q",
        k="attention.k",
        v="attention.v",
        qkv="attention.query_key_value",
        out="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        unread=r"\.attention\.(masked_)?bias$",  # masks that old files hold as tensors
    )

    keys = Keys(
        given={
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        named={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias")
        | {"is_parallel": "use_parallel_residual"},
        numbers={"norm_eps": "layer_norm_eps"},
        fields=PLAIN_LAYERS | {"has_mlp_bias": True, "num_qkv_groups": 0},
    )

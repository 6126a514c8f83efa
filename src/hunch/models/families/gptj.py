"""GPT-J and CodeGen: a plain MLP beside attention, and the first part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.models.decoder import Decoder
from hunch.models.families.gpt2 import Gpt2
from hunch.models.keys import PLAIN_LAYERS, Keys
from hunch.models.reading import Config, Defaulted, read_int, read_rope
from hunch.models.spec import ModelSpec

_NUM_PARTS = 4


class GptJ(Decoder):
    """Both branches read one layer norm; rotary pairs are neighbours."""

    turns_part = True
    names = replace(
        Gpt2.names,
        q="attn.q_proj",
        k="attn.k_proj",
        v="attn.v_proj",
        qkv="attn.qkv_proj",
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        unread=r"\.attn\.((masked_)?bias|causal_mask|embed_positions)$",  # tables of old files
    )

    keys = Keys(
        given={"rotary_dim": 64, "hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5},
        named=Gpt2.keys.named,
        only={"scale_attn_weights": True},
        unused={"n_ctx", "rotary"},  # of old files, which repeat n_positions and rotary_dim
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS
        | dict.fromkeys(("is_parallel", "has_mlp_bias", "has_head_bias"), True)
        | {"has_mlp_norm": False, "is_rope_interleaved": True},
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        share = {"partial_rotary_factor": read_int(config, "rotary_dim") / spec.head_dim}
        return replace(spec, rope=read_rope(Defaulted(config, share), spec.head_dim))


class CodeGen(GptJ):
    """Its files hold q, v and k in four parts, as it was trained on four chips."""

    keys = GptJ.keys.but(fields={"num_qkv_groups": _NUM_PARTS, "is_qvk": True})

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        if spec.num_heads % _NUM_PARTS:
            raise ModelFormatError(f"n_head={spec.num_heads} is not a multiple of {_NUM_PARTS}")
        return super().read_more(spec, config)

"""GPT-J and CodeGen: a plain MLP beside attention, and the first part of each head is turned."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.spec import ModelSpec, read_common

_NUM_PARTS = 4


class GptJ(Decoder):
    """Both branches read one layer norm; pairs that are turned are neighbours."""

    turns_part = True
    names = Names(
        roots=("transformer.", ""),
        embed="transformer.wte.weight",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attn_norm="ln_1",
        q="attn.q_proj",
        k="attn.k_proj",
        v="attn.v_proj",
        qkv="attn.qkv_proj",
        out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        unread=r"\.attn\.((masked_)?bias|causal_mask|embed_positions)$",  # tables of old files
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        width, num_heads = read_int(config, "n_embd"), read_int(config, "n_head")
        refuse(config, "scale_attn_weights", True)
        config.get("n_ctx")  # n_positions once more
        config.get("rotary")  # of old files; rotary_dim says it
        turned = read_int(config, "rotary_dim", 64)
        older = {
            "hidden_size": width,
            "num_attention_heads": num_heads,
            "num_hidden_layers": read_int(config, "n_layer"),
            "intermediate_size": read_int(config, "n_inner", 4 * width),
            "max_position_embeddings": read_int(config, "n_positions", 2048),
            "hidden_act": config.get("activation_function", "gelu_new"),
            "partial_rotary_factor": turned * num_heads / width,
        }
        common = read_common(Defaulted(config, older), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_epsilon", 1e-5)
        return ModelSpec(
            **common,
            norm="layer",
            is_parallel=True,
            has_mlp_norm=False,
            is_gated=False,
            has_mlp_bias=True,
            has_head_bias=True,
            is_rope_interleaved=True,
        )


class CodeGen(GptJ):
    """Its files hold q, v and k in four parts, as it was trained on four chips."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        if spec.num_heads % _NUM_PARTS:
            raise ModelFormatError(f"n_head={spec.num_heads} is not a multiple of {_NUM_PARTS}")
        return replace(spec, num_qkv_groups=_NUM_PARTS, is_qvk=True)

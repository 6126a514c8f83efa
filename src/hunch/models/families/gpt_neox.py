"""GPT-NeoX (Pythia, Dolly): layer norms, a plain MLP, and both branches over the same stream."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import FROM_GGUF, Config, Defaulted, read_float
from hunch.models.spec import ModelSpec, read_common


class GptNeoX(Decoder):
    """A quarter of each head is turned, if the config does not say otherwise."""

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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        older = {
            "partial_rotary_factor": config.get("rotary_pct", 0.25),
            "rope_theta": config.get("rotary_emb_base", 10000),
            "hidden_act": "gelu",
        }
        common = read_common(Defaulted(config, older), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps", 1e-5)
        has_bias = bool(config.get("attention_bias", True))
        return ModelSpec(
            **common,
            norm="layer",
            is_parallel=bool(config.get("use_parallel_residual", True)),
            is_gated=False,
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=True,
            num_qkv_groups=1 if config.get(FROM_GGUF) else common["num_kv_heads"],
        )

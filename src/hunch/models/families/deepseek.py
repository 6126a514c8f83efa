"""Latent attention: DeepSeek V2 to V3.2, GLM-4.7-Flash and 5 with experts, Youtu and MiniCPM3
without."""

from __future__ import annotations

from dataclasses import replace

from hunch.config import say_once
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Attend
from hunch.layers.experts import ExpertSpec
from hunch.layers.latent import ExactTailPaged, TailPaged
from hunch.models.build import Names
from hunch.models.decoder import AnyBlock, Decoder
from hunch.models.experts import ExpertNames, first_dense, read_deepseek_experts
from hunch.models.latent import build_latent_block, read_latent
from hunch.models.reading import Config, Defaulted, read_attn_biases, read_float, read_int, refuse
from hunch.models.source import Source
from hunch.models.spec import ModelSpec

_DEFAULTS: dict[str, Config] = {  # of what files leave out
    "Glm4MoeLiteForCausalLM": {
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
    },
    "YoutuForCausalLM": {"tie_word_embeddings": True},
    "MiniCPM3ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_interleave": False,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    },
    "GlmMoeDsaForCausalLM": {
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 3,
    },
    "DeepseekV32ForCausalLM": {
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    "DeepseekV3ForCausalLM": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
}
_SCALES = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}


class Youtu(Decoder):
    """An MLP in every layer."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "mlp_bias", False)
        spec = read_latent(Defaulted(config, _DEFAULTS.get(architecture, {})), architecture)
        return replace(spec, **read_attn_biases(config))

    def build_layer(self, source: Source, prefix: str, layer: int) -> AnyBlock:
        return build_latent_block(self.spec, source, prefix, layer, self.names)

    def attend(self, attn: AttnInputs, kv: KVCache) -> Attend:
        rope = self.rope
        assert rope is not None
        return (ExactTailPaged if self.is_exact else TailPaged)(attn, kv, rope(attn.pos_T))


class MiniCPM3(Youtu):
    """With MiniCPM's scales along the stream."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        size = read_int(config, "hidden_size") // read_int(config, "num_attention_heads")
        spec = super().read_config(Defaulted(config, {"v_head_dim": size}), architecture)
        depth, given = spec.num_layers**0.5, Defaulted(config, _SCALES)
        return replace(
            spec,
            embed_scale=read_float(given, "scale_emb"),
            residual_scale=read_float(given, "scale_depth", depth) / depth,
            logits_scale=read_int(given, "dim_model_base", spec.width) / spec.width,
        )


class DeepseekV3(Youtu):
    """Experts chosen by sigmoid scores with a bias; GLM's config names its dense layers."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, _DEFAULTS.get(architecture, {}))
        spec = super().read_config(config, architecture)
        experts = cls.read_experts(config, spec.num_layers)
        return replace(spec, experts=replace(experts, layers=first_dense(config, spec.num_layers)))

    @classmethod
    def read_experts(cls, config: Config, num_layers: int) -> ExpertSpec:
        refuse(config, "scoring_func", "sigmoid", None)
        refuse(config, "topk_method", "noaux_tc", None)
        return read_deepseek_experts(config, num_layers)


class DeepseekV32(DeepseekV3):
    """V3, where a token sees as many others at most as a second, small attention chooses. Up to
    that number all are chosen: texts of that length are served, without it."""

    names = replace(DeepseekV3.names, unread=r"\.self_attn\.indexer\.")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        for key in ("index_head_dim", "index_n_heads", "indexer_types", "indexer_rope_interleave"):
            config.get(key)
        spec = super().read_config(config, architecture)
        refuse(config, "layer_types", None, ["indexed_attention"] * spec.num_layers)
        num_seen = read_int(config, "index_topk", 2048)
        say_once(
            f"{architecture}: texts of up to {num_seen} tokens are served (index_topk): in longer "
            "ones it chooses which tokens are seen"
        )
        return replace(spec, max_len=min(spec.max_len, num_seen))


class DeepseekV2(DeepseekV3):
    """Experts chosen by a softmax; a group is worth as much as its best expert."""

    @classmethod
    def read_experts(cls, config: Config, num_layers: int) -> ExpertSpec:
        refuse(config, "scoring_func", "softmax", None)
        refuse(config, "topk_method", "greedy", "group_limited_greedy", None)
        experts = read_deepseek_experts(config, num_layers)
        is_grouped = config.get("topk_method") == "group_limited_greedy"
        routing = replace(
            experts.routing,
            scores="softmax",
            is_normed=False,  # as the family's own code has it, whatever norm_topk_prob says
            num_best=1,
            num_groups=experts.routing.num_groups if is_grouped else 1,
            num_groups_kept=experts.routing.num_groups_kept if is_grouped else 1,
        )
        return replace(experts, routing=routing, has_choice_bias=False)

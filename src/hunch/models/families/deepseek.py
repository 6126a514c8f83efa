"""Latent attention: DeepSeek V2 to V3.2, GLM-4.7-Flash and 5 with experts, Youtu and MiniCPM3
without."""

from __future__ import annotations

from dataclasses import replace

from hunch.config import say_once
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Attend
from hunch.layers.latent import ExactTailPaged, TailPaged
from hunch.models.build import Names
from hunch.models.decoder import AnyBlock, Decoder
from hunch.models.experts import ExpertNames, read_deepseek_experts
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.latent import build_latent_block, read_latent
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.source import Source
from hunch.models.spec import ModelSpec


class Youtu(Decoder):
    """An MLP in every layer."""

    keys = Keys(
        given={"tie_word_embeddings": True},
        only={"mlp_bias": False},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = cls.keys.over(config)
        return cls.read_more(
            replace(read_latent(config, architecture), **cls.keys.read(config)), config
        )

    def build_layer(self, source: Source, prefix: str, layer: int) -> AnyBlock:
        return build_latent_block(self.spec, source, prefix, layer, self.names)

    def attend(self, attn: AttnInputs, kv: KVCache) -> Attend:
        rope = self.rope
        assert rope is not None
        return (ExactTailPaged if self.is_exact else TailPaged)(attn, kv, rope(attn.pos_T))


class MiniCPM3(Youtu):
    """With MiniCPM's scales along the stream."""

    keys = Youtu.keys.but(
        given={
            "rms_norm_eps": 1e-5, "rope_interleave": False, "kv_lora_rank": 256,
            "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
            "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256,
        },
        numbers={"embed_scale": "scale_emb"},
    )  # fmt: skip

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        size = read_int(config, "hidden_size") // read_int(config, "num_attention_heads")
        return super().read_config(Defaulted(config, {"v_head_dim": size}), architecture)

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        depth = spec.num_layers**0.5
        return replace(
            spec,
            residual_scale=read_float(config, "scale_depth", depth) / depth,
            logits_scale=read_int(config, "dim_model_base", spec.width) / spec.width,
        )


class DeepseekV3(Youtu):
    """Experts chosen by sigmoid scores with a bias."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))
    keys = Keys(
        given={"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        only={"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
        experts=read_deepseek_experts,
    )


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: its config names its dense layers."""

    keys = DeepseekV3.keys.but(
        given={"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
        | {"first_k_dense_replace": 1}
    )


class DeepseekV32(DeepseekV3):
    """V3, where a second, small attention chooses a limited number of tokens for each token to see.
    Texts of up to that number see all of it, so they are served without it."""

    names = replace(DeepseekV3.names, unread=r"\.self_attn\.indexer\.")
    keys = DeepseekV3.keys.but(
        given={"first_k_dense_replace": 3},
        unused={"index_head_dim", "index_n_heads", "indexer_types", "indexer_rope_interleave"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        refuse(config, "layer_types", None, ["indexed_attention"] * spec.num_layers)
        num_seen = read_int(config, "index_topk", 2048)
        say_once(
            f"{spec.architecture}: texts of up to {num_seen} tokens are served (index_topk): in "
            "longer ones it chooses which tokens are seen"
        )
        return replace(spec, max_len=min(spec.max_len, num_seen))


class GlmMoeDsa(DeepseekV32):
    """GLM-5."""

    keys = DeepseekV32.keys.but(given={"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1})


class DeepseekV2(DeepseekV3):
    """Experts chosen by a softmax; the score of a group is that of its best expert."""

    keys = DeepseekV3.keys.but(
        given={"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
        only={"scoring_func": "softmax", "topk_method": ("greedy", "group_limited_greedy")},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        experts, is_grouped = spec.experts, config["topk_method"] == "group_limited_greedy"
        assert experts is not None
        routing = replace(
            experts.routing,
            scores="softmax",
            is_normed=False,  # as the family's own code has it, whatever norm_topk_prob says
            num_best=1,
            num_groups=experts.routing.num_groups if is_grouped else 1,
            num_groups_kept=experts.routing.num_groups_kept if is_grouped else 1,
        )
        return replace(spec, experts=replace(experts, routing=routing, has_choice_bias=False))

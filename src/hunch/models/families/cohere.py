"""Command R, R7B, A and A+: one norm without a bias for both branches, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, first_dense, read_experts
from hunch.models.families.stablelm import HEAD_NORMS
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import (
    STILL,
    Config,
    last_of,
    last_of_pattern,
    read_float,
    read_int,
    read_windows,
)
from hunch.models.spec import ModelSpec


class Cohere(Decoder):
    """Command R+ norms its heads too, each with weights of its own."""

    keys = Keys(
        given={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        unused={"model_length"},  # the context it was trained with
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias")
        | dict.fromkeys(HEAD_NORMS, "use_qk_norm"),
        numbers={"norm_eps": "layer_norm_eps", "logits_scale": "logit_scale"},
        fields={
            "norm": "layer",
            "has_norm_bias": False,
            "is_parallel": True,
            "has_mlp_norm": False,
            "is_rope_interleaved": True,
        },
    )


class Cohere2(Cohere):
    """Three of four layers have a window and turn their heads; the fourth does neither."""

    keys = Cohere.keys.but(
        given={"rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        named={"sliding_window_pattern": "layer_switch"},
        only={
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_embedding_sharing": True,
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "order_of_interleaved_layers": "local_attn_first",
        },
        sees_all=last_of_pattern,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return spec.with_rope(STILL, spec.sees_all)


class Cohere2Moe(Cohere2):
    """Command A+: experts in all layers but the first, which turn their heads with or without a
    window. The shared expert's output is added to the others', or averaged with it."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts.", is_turned=False))
    keys = Cohere2.keys.but(
        given={"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        only={
            "expert_selection_fn": ("softmax", "sigmoid"),
            "shared_expert_combination_strategy": ("average", "sum"),
            "rope_scaling": None,  # transformers does not read it for this family
        },
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        is_sparse = first_dense(config, spec.num_layers)
        num_dense = is_sparse.count(False)
        first = read_int(config, "prefix_dense_sliding_window_pattern", 1)
        every = read_int(config, "sliding_window_pattern")
        sees_all = last_of(first, num_dense) + last_of(every, spec.num_layers - num_dense)
        windows = read_windows(config, spec.num_layers, sees_all)
        is_still = [
            window is None and (sparse or first != 1)
            for window, sparse in zip(windows, is_sparse, strict=True)
        ]
        has_rms = config.get("rms_norm_eps") is not None
        num_shared = config.get("num_shared_experts") or 0
        is_mean = num_shared and config["shared_expert_combination_strategy"] != "sum"
        has_sigmoid = config["expert_selection_fn"] == "sigmoid"
        experts = read_experts(
            config,
            spec.ffn_width,
            is_sparse,
            shared_width=num_shared * spec.ffn_width,
            scores="chosen_sigmoid" if has_sigmoid else "chosen",
            is_normed=bool(config.get("norm_topk_prob")) and has_sigmoid,
            scale=0.5 if is_mean else 1.0,
        )
        shared = f"{cls.names.experts.shared}down_proj"
        return replace(
            spec.with_rope(STILL, is_still),
            windows=windows,
            norm="rms" if has_rms else "layer",
            norm_eps=read_float(config, "rms_norm_eps") if has_rms else spec.norm_eps,
            ffn_width=read_int(config, "prefix_dense_intermediate_size", spec.ffn_width),
            experts=experts,
            row_factors=((shared, ((spec.width, 0.5),)),) if is_mean else (),
        )

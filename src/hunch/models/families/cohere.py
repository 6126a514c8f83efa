"""Command R, R7B, A and A+: one norm without a bias for both branches, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, first_dense
from hunch.models.reading import (
    Config,
    Defaulted,
    read_attn_biases,
    read_float,
    read_int,
    refuse,
    windows_of,
)
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
_THETA = {"CohereForCausalLM": 500_000.0, "Cohere2ForCausalLM": 10_000.0}


class Cohere(Decoder):
    """Command R+ norms its heads too, each with weights of its own."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config.get("model_length")  # what it was trained at
        config = Defaulted(config, _DEFAULTS | {"rope_theta": _THETA.get(architecture)})
        common = read_common(config, architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps")
        has_head_norms = bool(config.get("use_qk_norm", False))
        return ModelSpec(
            **common,
            norm="layer",
            has_norm_bias=False,
            has_qk_norm=has_head_norms,
            is_qk_norm_centred=has_head_norms,
            is_qk_norm_own=has_head_norms,
            is_parallel=True,
            has_mlp_norm=False,
            is_rope_interleaved=True,
            **read_attn_biases(config),
            logits_scale=read_float(config, "logit_scale"),
        )


class Cohere2(Cohere):
    """Three of four layers have a window and turn their heads; the fourth does neither."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        for key in ("use_gated_activation", "use_parallel_block", "use_embedding_sharing"):
            refuse(config, key, True)
        refuse(config, "position_embedding_type", "rope_gptj")
        refuse(config, "rotary_pct", 1.0)
        refuse(config, "order_of_interleaved_layers", "local_attn_first")
        spec = super().read_config(config, architecture)
        config = Defaulted(config, {"sliding_window": 4096})
        every = read_int(config, "sliding_window_pattern", read_int(config, "layer_switch", 4))
        windows = windows_of(config, spec.num_layers, every)
        return replace(
            spec,
            windows=windows,
            more_ropes=(RopeSpec(rope_type="none"),),
            rope_of=tuple(int(window is None) for window in windows),
        )


class Cohere2Moe(Cohere2):
    """Command A+: experts in all layers but the first, which turn their heads with or without a
    window. What the shared expert says is added, or averaged with what the others say."""

    names = Names(experts=ExpertNames(shared="mlp.shared_experts.", is_turned=False))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "expert_selection_fn", "softmax", "sigmoid", None)
        refuse(config, "shared_expert_combination_strategy", "average", "sum", None)
        refuse(config, "rope_scaling", None)  # transformers does not read it for this family
        num_layers = read_int(config, "num_hidden_layers")
        is_sparse = first_dense(config, num_layers)
        num_dense = is_sparse.count(False)
        first = read_int(config, "prefix_dense_sliding_window_pattern", 1)
        every = read_int(config, "sliding_window_pattern", 4)
        layer_types = ("full_attention", "sliding_attention")
        turns = [(i + 1) % first for i in range(num_dense)]
        turns += [(i + 1) % every for i in range(num_layers - num_dense)]
        types = {"layer_types": [layer_types[turn > 0] for turn in turns], "head_dim": 128}
        spec = super().read_config(Defaulted(config, types), architecture)
        is_turned = [
            window is not None or (not sparse and first == 1)
            for window, sparse in zip(spec.windows, is_sparse, strict=True)
        ]
        has_rms = config.get("rms_norm_eps") is not None
        num_shared = config.get("num_shared_experts") or 0
        is_mean = num_shared and config.get("shared_expert_combination_strategy") != "sum"
        has_sigmoid = config.get("expert_selection_fn") == "sigmoid"
        routing = Routing(
            num_experts=read_int(config, "num_experts", 8),
            num_chosen=read_int(config, "num_experts_per_tok", 2),
            scores="chosen_sigmoid" if has_sigmoid else "chosen",
            is_normed=bool(config.get("norm_topk_prob", True)) and has_sigmoid,
            scale=0.5 if is_mean else 1.0,
        )
        shared = f"{cls.names.experts.shared}down_proj"
        return replace(
            spec,
            norm="rms" if has_rms else "layer",
            norm_eps=read_float(config, "rms_norm_eps") if has_rms else spec.norm_eps,
            rope_of=tuple(int(not turned) for turned in is_turned),
            ffn_width=read_int(config, "prefix_dense_intermediate_size", spec.ffn_width),
            experts=ExpertSpec(
                routing=routing,
                width=spec.ffn_width,
                layers=is_sparse,
                shared_width=num_shared * spec.ffn_width,
            ),
            row_factors=((shared, ((spec.width, 0.5),)),) if is_mean else (),
        )

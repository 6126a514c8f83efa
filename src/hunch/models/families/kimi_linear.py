"""Kimi Linear: most layers are delta nets that forget channel by channel, the others have latent
attention without positions; DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.kernels.delta import ChannelDeltaShape
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import AnyBlock
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.deepseek import DeepseekV3
from hunch.models.reading import Config, Defaulted, read_int, refuse
from hunch.models.recurrent import FULL, LINEAR, build_recurrent_block, is_of_type
from hunch.models.source import Source
from hunch.models.spec import ModelSpec

_MOE = "block_sparse_moe."
_DEFAULTS = {
    "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
    "rope_interleave": False, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1024,
}  # fmt: skip
_NAMED = {  # DeepSeek's keys, and its own for the same
    "max_position_embeddings": ("model_max_length", 1 << 20),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 1),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
}


class KimiLinear(DeepseekV3):
    """Nothing is turned: what other models turn of a key is one for all heads here too."""

    names = Names(
        recurrent="self_attn.",
        experts=ExpertNames(
            router=f"{_MOE}gate",
            choice_bias=f"{_MOE}gate.e_score_correction_bias",
            gate=f"{_MOE}experts.{{}}.w1",
            up=f"{_MOE}experts.{{}}.w3",
            down=f"{_MOE}experts.{{}}.w2",
            shared=f"{_MOE}shared_experts.",
        ),
        # As transformers saves the MLPs of layers without experts.
        aliases=tuple(
            (f"{_MOE}{part}_proj", f"mlp.{part}_proj") for part in ("gate", "up", "down")
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # of the convolutions too
        refuse(config, "mla_use_nope", True)
        refuse(config, "moe_router_activation_func", "sigmoid")
        refuse(config, "moe_layer_freq", 1)
        config.get("use_grouped_topk")  # the number of groups says it
        named = {
            ours: config.get(ours, config.get(theirs, given))
            for ours, (theirs, given) in _NAMED.items()
        }
        named["n_routed_experts"] = read_count(config, "num_experts", "num_local_experts")
        config.get("num_local_experts")  # the same again, where a file has both
        nested: dict[str, Any] = config.get("linear_attn_config") or {}
        spec = super().read_config(Defaulted(named, Defaulted(config, _DEFAULTS)), architecture)
        types = [FULL if i and i % 4 == 0 else LINEAR for i in range(spec.num_layers)]
        if "full_attn_layers" in nested and "kda_layers" in nested:
            full = nested["full_attn_layers"]  # counted from 1
            types = [FULL if i + 1 in full else LINEAR for i in range(spec.num_layers)]
        types = config.get("layer_types") or types
        shape = ChannelDeltaShape(
            num_heads=read_int(nested, "num_heads", read_int(config, "linear_num_heads", 32)),
            head_dim=read_int(nested, "head_dim", read_int(config, "linear_head_dim", 128)),
            num_taps=read_int(
                nested, "short_conv_kernel_size", read_int(config, "linear_conv_kernel_dim", 4)
            ),
        )
        return replace(
            spec,
            rope=RopeSpec(rope_type="none"),
            recurrence=shape,
            is_recurrent=is_of_type(types, LINEAR, spec.num_layers),
        )

    def build_layer(self, source: Source, prefix: str, layer: int) -> AnyBlock:
        if self.spec.is_recurrent[layer]:
            return build_recurrent_block(self.spec, source, prefix, layer, self.names)
        return super().build_layer(source, prefix, layer)

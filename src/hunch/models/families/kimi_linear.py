"""Kimi Linear: most layers are delta nets that forget channel by channel, the others have latent
attention without positions; DeepSeek's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.kernels.delta import ChannelDeltaShape
from hunch.models.build import Names
from hunch.models.decoder import AnyBlock
from hunch.models.experts import ExpertNames
from hunch.models.families.deepseek import DeepseekV3
from hunch.models.reading import FULL, LINEAR, STILL, Config, read_int
from hunch.models.recurrent import build_recurrent_block, is_of_type
from hunch.models.source import Source
from hunch.models.spec import ModelSpec

_MOE = "block_sparse_moe."


class KimiLinear(DeepseekV3):
    """Nothing is rotated; the part of keys that other models rotate is shared by all heads here
    too."""

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
        # transformers' names for the MLPs of layers without experts.
        aliases=tuple(
            (f"{_MOE}{part}_proj", f"mlp.{part}_proj") for part in ("gate", "up", "down")
        ),
    )

    keys = DeepseekV3.keys.but(
        given={
            "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
            "rope_interleave": False, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1024,
            "max_position_embeddings": 1 << 20, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 8, "n_shared_experts": 1,
        },
        named={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
            "n_routed_experts": "num_experts",
        },
        only={
            "hidden_act": "silu",  # of the convolutions too
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
        },
        unused={"use_grouped_topk", "num_local_experts"},  # follow from the numbers of groups
        fields={"rope": STILL},
    )  # fmt: skip

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        nested: dict[str, Any] = config.get("linear_attn_config") or {}
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
        is_recurrent = is_of_type(types, LINEAR, spec.num_layers)
        return replace(spec, recurrence=shape, is_recurrent=is_recurrent)

    def build_layer(self, source: Source, prefix: str, layer: int) -> AnyBlock:
        if self.spec.recurs(layer):
            return build_recurrent_block(self.spec, source, prefix, layer, self.names)
        return super().build_layer(source, prefix, layer)

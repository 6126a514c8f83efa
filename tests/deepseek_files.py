"""Small MTP heads of DeepSeek's own layer, as published, and transformers' numbers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from head_files import Study, normal, write
from plain_heads import rms

LAYER = 2  # the target has two layers before it


def deepseek_config(s: Study, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.width,
        "intermediate_size": 2 * s.width,
        "num_hidden_layers": LAYER,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 1,
        **more,
    }


def shapes(c: dict[str, Any], is_dense: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's matrices."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    q = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent, values = c["kv_lora_rank"], heads * c["v_head_dim"]
    found = {
        "self_attn.kv_a_proj_with_mqa": (latent + c["qk_rope_head_dim"], width),
        "self_attn.kv_b_proj": (heads * c["qk_nope_head_dim"] + values, latent),
        "self_attn.o_proj": (width, values),
    }
    if c["q_lora_rank"] is None:
        found["self_attn.q_proj"] = (q, width)
    else:
        found["self_attn.q_a_proj"] = (c["q_lora_rank"], width)
        found["self_attn.q_b_proj"] = (q, c["q_lora_rank"])
    inner = c["moe_intermediate_size"]
    mlps = {"mlp.": c["intermediate_size"]}
    if not is_dense:
        found["mlp.gate"] = (c["n_routed_experts"], width)
        mlps = {f"mlp.experts.{i}.": inner for i in range(c["n_routed_experts"])}
        mlps["mlp.shared_experts."] = inner * c["n_shared_experts"]
    for prefix, size in mlps.items():
        found |= {f"{prefix}{name}": (size, width) for name in ("gate_proj", "up_proj")}
        found[f"{prefix}down_proj"] = (width, size)
    return found


def make_deepseek(
    s: Study, path: Path, *, is_dense: bool = False, num_layers: int = 1, **more: Any
) -> DeepseekHead:
    """Random weights; several layers share nothing but the embedding and the output matrix."""
    c = deepseek_config(s, num_nextn_predict_layers=num_layers, **more)
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYER, LAYER + num_layers):
        prefix, seed = f"model.layers.{layer}.", 1000 * layer
        matrices = {"eh_proj": (s.width, 2 * s.width), **shapes(c, is_dense)}
        for i, (name, shape) in enumerate(matrices.items()):
            tensors[f"{prefix}{name}.weight"] = normal(*shape, seed=seed + i)
        norms = {
            "self_attn.kv_a_layernorm": c["kv_lora_rank"],
            **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), s.width),
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), s.width),
        }
        if c["q_lora_rank"] is not None:
            norms["self_attn.q_a_layernorm"] = c["q_lora_rank"]
        for i, (name, size) in enumerate(norms.items()):
            tensors[f"{prefix}{name}.weight"] = 1 + normal(size, seed=seed + 500 + i)
        if not is_dense:
            # As large as the scores: it must change the choice, and must not enter the weights.
            bias = normal(c["n_routed_experts"], seed=seed + 600, scale=1.5)
            tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = bias
        tensors[f"{prefix}embed_tokens.weight"] = s.embedding.clone()
        tensors[f"{prefix}shared_head.head.weight"] = s.lm_head.clone()
    write(path, c, tensors)
    return DeepseekHead(tensors, c, is_dense=is_dense)


class DeepseekHead:
    """norm(layer(project([norm(emb) ; norm(h)]))) with transformers' DeepSeek-V3 layer."""

    def __init__(self, p: dict[str, Tensor], c: dict[str, Any], *, is_dense: bool) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

        self.p, self.c = p, c
        self.ids = None  # all of the target's tokens, under its ids
        scaling = c.get("rope_scaling") or {}
        rope = {"rope_theta": c["rope_theta"], **scaling}
        rope["rope_type"] = rope.pop("type", "default")
        known = {
            key: value for key, value in c.items() if key not in ("rope_scaling", "rope_theta")
        }
        config = DeepseekV3Config(
            **known,
            rope_parameters=rope,
            first_k_dense_replace=LAYER + 1 if is_dense else 0,
            attn_implementation="eager",
        )
        self.rotary = published.DeepseekV3RotaryEmbedding(config)
        self.layer = published.DeepseekV3DecoderLayer(config, LAYER).eval()
        prefix = f"model.layers.{LAYER}."
        own = {key.removeprefix(prefix): value for key, value in p.items()}
        own = {key: own.get(key) for key in self.layer.state_dict()}
        if not is_dense:
            own |= self._stacked(f"{prefix}mlp.experts.")
        self.layer.load_state_dict(own)

    def _stacked(self, prefix: str) -> dict[str, Tensor]:
        def every(name: str) -> Tensor:
            total = self.c["n_routed_experts"]
            return torch.stack([self.p[f"{prefix}{i}.{name}.weight"] for i in range(total)])

        return {
            "mlp.experts.gate_up_proj": torch.cat([every("gate_proj"), every("up_proj")], 1),
            "mlp.experts.down_proj": every("down_proj"),
        }

    @torch.no_grad()
    def states(self, h: Tensor, following: Tensor) -> Tensor:
        p, prefix, eps = self.p, f"model.layers.{LAYER}.", self.c["rms_norm_eps"]
        emb = p[f"{prefix}embed_tokens.weight"][following]
        emb = torch.cat([torch.zeros_like(emb[:, :1]), emb[:, 1:]], 1)
        pair = [rms(emb, p[f"{prefix}enorm.weight"], eps), rms(h, p[f"{prefix}hnorm.weight"], eps)]
        x = torch.cat(pair, -1) @ p[f"{prefix}eh_proj.weight"].T
        length = x.shape[1]
        turned = self.rotary(x, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        x = self.layer(x, attention_mask=mask, position_embeddings=turned)
        return rms(x, p[f"{prefix}shared_head.norm.weight"], eps)

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.p[f"model.layers.{LAYER}.shared_head.head.weight"].T

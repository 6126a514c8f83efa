"""Small models with experts, made and saved by transformers."""

from pathlib import Path

import torch
import transformers

COMMON = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
QWEN = COMMON | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
CASES = {
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3-moe, some layers": (
        "Qwen3Moe",
        QWEN | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        QWEN | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
}
PHI = COMMON | {"num_local_experts": 6, "sliding_window": 7}
del PHI["head_dim"]
CASES |= {
    "phi-moe": ("Phimoe", PHI | {"router_jitter_noise": 0.2, "hidden_size": 64}),
    "phi-moe, biases": (
        "Phimoe",
        PHI | {"attention_bias": True, "lm_head_bias": True, "hidden_size": 64},
    ),
}
CASES["olmoe"] = (
    "Olmoe",
    QWEN | {"hidden_size": 64, "intermediate_size": 16, "num_key_value_heads": 2},
)
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
CASES |= {
    "granite-moe": (
        "GraniteMoe",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.3}
        | {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 3.0}
        | {"hidden_size": 64},
    ),
    "gpt-oss": ("GptOss", COMMON | OSS | {"initial_context_length": 4096}),
}
LATENT = COMMON | {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 2, "n_shared_experts": 2,
}  # fmt: skip
LATENT.pop("head_dim")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_4 = YARN | {"rope_theta": 1000.0}
YARN |= {"rope_theta": 1000.0, "mscale": 0.8, "mscale_all_dim": 1.0}
OSS_64 = ("GptOss", COMMON | OSS | {"hidden_size": 64, "intermediate_size": 64})
NARROW = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "v_head_dim": 20}
GROUPED = COMMON | {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 2, "pad_token_id": 0,
}  # fmt: skip
FEW = COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}
TORCH_CASES = {
    "hunyuan-moe": ("HunYuanMoEV1", COMMON | {"num_experts": 4, "moe_topk": 2}),
    "deepseek-v3, narrow": ("DeepseekV3", LATENT | NARROW | {"n_group": 4, "topk_group": 2}),
}
CASES |= {
    "deepseek-v3": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek-v3, biases, many heads": (
        "DeepseekV3",
        LATENT
        | {"attention_bias": True, "num_attention_heads": 66, "num_key_value_heads": 66}
        | {"n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3, yarn": (
        "DeepseekV3",
        LATENT | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek-v2, groups": (
        "DeepseekV2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}
        | {"rms_norm_eps": 1e-5, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
SPARSE = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 32}
CASES |= {
    "deepseek-v3.2": (
        "DeepseekV32",
        LATENT | SPARSE | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "glm-5": ("GlmMoeDsa", LATENT | SPARSE | {"indexer_types": ["full", "shared", "full"]}),
}
WHOLE = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 64}
TWO = {"num_experts_per_tok": 2}
CASES |= {
    "dots1": ("Dots1", GROUPED | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "solar-open": ("SolarOpen", GROUPED),
    "minimax-m2": ("MiniMaxM2", FEW | {"rotary_dim": 16}),
    "flex-olmo": ("FlexOlmo", WHOLE | TWO | {"pad_token_id": 0, "num_experts": 4}),
    "ernie-4.5-moe": (
        "Ernie4_5_Moe",
        WHOLE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        WHOLE
        | TWO
        | {"num_local_experts": 4}
        | {"shared_intermediate_size": 32, "attention_multiplier": 0.2, "residual_multiplier": 0.3},
    ),
}
CASES["glm-4.5"] = (
    "Glm4Moe",
    COMMON
    | {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    | {"use_qk_norm": True, "attention_bias": True, "head_dim": 64},
)
LLAMA4 = COMMON | {"num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 48}
LLAMA4 |= {"attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.7, "pad_token_id": 0}
FACTORS = {"rope_type": "longrope", "original_max_position_embeddings": 256, "rope_theta": 1e4}
FACTORS |= {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0] * 8}
CASES |= {
    "llama 4": ("Llama4", LLAMA4 | {"no_rope_layer_interval": 2}),
    "llama 4, yarn": (
        "Llama4",
        LLAMA4 | {"no_rope_layer_interval": 2, "rope_parameters": YARN_4},
    ),
    "llama 4, rope factors": (
        "Llama4",
        LLAMA4
        | {"no_rope_layer_interval": 2}
        | {
            "rope_parameters": FACTORS
            | {"factor": 3.0, "short_factor": [1.0, 1.4] * 8, "long_factor": [2.0] * 16}
        },
    ),
    "llama 4, as converted": (
        "Llama4",
        LLAMA4 | {"num_hidden_layers": 5, "floor_scale": 8192, "attn_scale": 0.1},
    ),
    "llama 4, experts in some layers": (
        "Llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2}
        | {"no_rope_layers": [1, 0, 1], "attn_temperature_tuning": False},
    ),
}
CASES["granite-moe"][1].pop("head_dim")
WINDOW, ALL = "sliding_attention", "full_attention"
MELLUM = QWEN | {"sliding_window": 7, "layer_types": [WINDOW, ALL, WINDOW]}
SWA = {"sliding_window": 7, "layer_rope_theta": [0, 500.0, 1000.0], "attention_multiplier": 0.2}
NO_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
)
DENSE = {k: v for k, v in LATENT.items() if k not in (*NO_EXPERTS, "first_k_dense_replace")}
CASES |= {
    "mellum": (
        "Mellum",
        MELLUM
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"rope_parameters": {ALL: YARN_4, WINDOW: {"rope_type": "default", "rope_theta": 99.0}}},
    ),
    "mellum, as it is": ("Mellum", MELLUM),
    "flint": (
        "Flint",
        QWEN
        | {"num_hidden_layers": 4, "sliding_window": 7, "mlp_only_layers": [1]}
        | {"shared_expert_intermediate_size": 32},
    ),
    "hy3": ("HYV3", QWEN | {"router_scaling_factor": 1.7, "num_shared_experts": 2}),
    "k-exaone": (
        "ExaoneMoe",
        QWEN
        | {"sliding_window": 7, "sliding_window_pattern": 3, "n_group": 2, "topk_group": 1}
        | {"num_shared_experts": 2},
    ),
    "kolibri": (
        "Kolibri1",
        {key: value for key, value in QWEN.items() if key != "intermediate_size"}
        | {"sliding_window": 7, "layer_types": [WINDOW, ALL, WINDOW]}
        | {"shared_expert_intermediate_size": 32},
    ),
    "kolibri, weights that add up to one": (
        "Kolibri1",
        QWEN | {"sliding_window": 7, "norm_topk_prob": True, "num_hidden_layers": 5},
    ),
    "afmoe": (
        "Afmoe",
        QWEN
        | {"sliding_window": 7, "global_attn_every_n_layers": 2, "num_shared_experts": 2}
        | {"route_scale": 1.7, "mup_enabled": True},
    ),
    "cohere 2, experts": (
        "Cohere2Moe",
        COMMON
        | {"num_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7, "pad_token_id": 0}
        | {"sliding_window_pattern": 2, "num_shared_experts": 2, "logit_scale": 0.4},
    ),
    "cohere 2, experts by sigmoids": (
        "Cohere2Moe",
        COMMON
        | {"num_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7, "pad_token_id": 0}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "expert_selection_fn": "sigmoid"}
        | {"layer_types": [ALL, WINDOW, ALL], "prefix_dense_intermediate_size": 80}
        | {"shared_expert_combination_strategy": "sum", "num_shared_experts": 1}
        | {"rms_norm_eps": 1e-5, "logit_scale": 0.4},
    ),
    "granite-moe, windows": (
        "GraniteMoeSWA",
        WHOLE
        | TWO
        | SWA
        | {"num_local_experts": 4, "residual_multiplier": 0.3, "shared_intermediate_size": 32},
    ),
    "granite, windows": ("GraniteSWA", WHOLE | SWA | {"embedding_multiplier": 3.0}),
    "youtu": ("Youtu", DENSE | {"rope_parameters": YARN}),
    "minicpm 3": (
        "MiniCPM3",
        DENSE | {"rope_parameters": FACTORS, "scale_depth": 1.1, "dim_model_base": 48},
    ),
}
PHI_LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e4}
PHI_LONG |= {"short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [2.0] * 16}
PHI_LONG |= {"short_mscale": 1.3, "long_mscale": 1.6}
ALONE = {
    "gpt-oss, 64": OSS_64,
    "phi-moe, long": ("Phimoe", PHI | {"hidden_size": 64, "rope_parameters": PHI_LONG}),
}
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


def make(name: str, folder: Path) -> torch.nn.Module:
    """A random model of transformers, saved as it saves."""
    family, settings = (CASES | TORCH_CASES | ALONE)[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        kind = "TextConfig" if family == "Llama4" else "Config"
        config = getattr(transformers, f"{family}{kind}")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model

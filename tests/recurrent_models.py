"""Small models with recurrent layers, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from builders import plain_logits
from hunch.kernels import native_library
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights

COMMON: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 32}
MIXED = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", COMMON | EXPERTS),
    "qwen3-next, some dense": ("Qwen3Next", COMMON | EXPERTS | {"mlp_only_layers": [1, 3]}),
    "qwen3.5": ("Qwen3_5", COMMON),
    "qwen3.5, other layers": (
        "Qwen3_5",
        COMMON
        | {"layer_types": MIXED, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 16},
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", COMMON | EXPERTS),
}
PLAIN = {name: value for name, value in COMMON.items() if not name.startswith("linear_")}
LFM2 = PLAIN | {"layer_types": ["conv", "full_attention", "conv", "conv"]}
LFM2 |= {"block_auto_adjust_ff_dim": False}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
# One group, as published files have: transformers up to 5.17 norms several groups as one.
GRANITE = PLAIN | MAMBA | {
    "mamba_n_groups": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "logits_scaling": 0.7,
    "residual_multiplier": 0.6, "attention_multiplier": 0.1,
}  # fmt: skip
del GRANITE["head_dim"]
# transformers reads prompts with steps of time_step_min at least, and goes on without that bound.
HALVES = PLAIN | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
HALVES |= {"time_step_min": 1e-9}
del HALVES["num_hidden_layers"]
CASES |= {
    "lfm2": ("Lfm2", LFM2),
    "lfm2-moe": (
        "Lfm2Moe",
        LFM2
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "granite 4 h": ("GraniteMoeHybrid", GRANITE | {"num_local_experts": 0}),
    "granite 4 h, experts": (
        "GraniteMoeHybrid",
        GRANITE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 16}
        | {"mamba_d_conv": 3, "mamba_conv_bias": False},
    ),
    "bamba": ("Bamba", PLAIN | MAMBA | {"attn_layer_indices": [1], "mamba_n_groups": 1}),
    "falcon h1": (
        "FalconH1",
        PLAIN
        | MAMBA
        | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.3, "key_multiplier": 0.7}
        | {"embedding_multiplier": 3.0, "attention_in_multiplier": 1.5, "ssm_in_multiplier": 1.2}
        | {"attention_out_multiplier": 0.6, "ssm_out_multiplier": 0.4}
        | {"mlp_multipliers": [0.8, 0.5], "ssm_multipliers": [0.5, 1.3, 0.7, 1.1, 0.9]},
    ),
    "falcon h1, normed": (
        "FalconH1",
        PLAIN | MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "tie_word_embeddings": True},
    ),
    "nemotron h": ("NemotronH", HALVES | {"hybrid_override_pattern": "M-MM*-"}),
    "nemotron h, experts": (
        "NemotronH",
        HALVES
        | {"hybrid_override_pattern": "ME*EM", "n_routed_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32}
        | {"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    ),
    "nemotron h, narrow experts": (
        "NemotronH",
        HALVES
        | {"hybrid_override_pattern": "ME*EM", "n_routed_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32}
        | {"n_group": 1, "topk_group": 1, "moe_latent_size": 32},
    ),
    "nemotron h, other order": (
        "NemotronH",
        HALVES
        | {"hybrid_override_pattern": "-*M", "mlp_bias": True}
        | {"conv_kernel": 3, "use_conv_bias": False, "n_groups": 1, "mamba_head_dim": 32},
    ),
}
MAMBA_1 = {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 16, "time_step_rank": 5}
CASES |= {
    "mamba": ("Mamba", MAMBA_1 | {"use_bias": True, "conv_kernel": 3}),
    "falcon mamba": ("FalconMamba", MAMBA_1 | {"tie_word_embeddings": False}),
    "mamba 2": (
        "Mamba2",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16}
        | {"n_groups": 2, "state_size": 16},
    ),
}
JAMBA = PLAIN | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}
del JAMBA["head_dim"]
CASES |= {
    "jamba": ("Jamba", JAMBA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "jamba, no experts": (
        "Jamba",
        JAMBA
        | {"num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": True}
        | {"mamba_conv_bias": False, "mamba_dt_rank": 7, "tie_word_embeddings": True},
    ),
}
MINIMAX = PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16}
CASES |= {
    "minimax": ("MiniMax", MINIMAX),
    "minimax, scaled": (
        "MiniMax",
        MINIMAX
        # transformers counts positions by the first layer's keys.
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_hidden_layers": 3, "sliding_window": 7, "tie_word_embeddings": True}
        | {"full_attn_alpha_factor": 1.7, "full_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.3}
        | {"linear_attn_alpha_factor": 2.1, "linear_attn_beta_factor": 0.6, "mlp_beta_factor": 0.9},
    ),
}
# As wide as keys: transformers saves the taps of all three in parts of one size.
OLMO = COMMON | {"linear_num_value_heads": 2, "linear_value_head_dim": 16, "pad_token_id": 0}
OLMO |= {"num_key_value_heads": 2, "eos_token_id": 1}
CASES |= {
    "olmo hybrid": ("OlmoHybrid", OLMO),
    "olmo hybrid, not turned": (
        "OlmoHybrid",
        OLMO
        | {"layer_types": MIXED, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        | {"linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3, "attention_bias": True},
    ),
}
KIMI = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
KIMI |= {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
KIMI |= {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
KIMI |= {"linear_head_dim": 16, "linear_num_heads": 3, "moe_intermediate_size": 16}
KIMI |= {"num_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 256}
KIMI |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
CASES |= {
    "kimi linear": ("KimiLinear", KIMI | {"layer_types": MIXED}),
    "kimi linear, as published": (
        "KimiLinear",
        KIMI
        | {"q_lora_rank": 24, "n_group": 3, "topk_group": 2, "num_shared_experts": 2}
        | {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3, 4],
                "head_dim": 32,
                "num_heads": 2,
                "short_conv_kernel_size": 3,
            }
        },
    ),
}
# What the kernels do not know.
BY_TORCH = ("mamba", "falcon mamba", "nemotron h, narrow experts", "jamba", "jamba, no experts")
BY_TORCH += ("minimax", "minimax, scaled", "olmo hybrid", "olmo hybrid, not turned")
BY_TORCH += ("kimi linear", "kimi linear, as published")
# transformers in float32 is up to 4e-4 away from itself in float64 on some CPUs.
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


def make(name: str, folder: Path, vocab_size: int = 90) -> torch.nn.Module:
    """A random model of transformers, saved as it saves."""
    family, settings = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        text = "Text" if family.startswith("Qwen3_5") else ""
        config = getattr(transformers, f"{family}{text}Config")(
            **settings | {"vocab_size": vocab_size}
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def check_logits(path: Path, theirs: torch.nn.Module, *, is_native: bool = True) -> None:
    """The files' model computes what transformers' does, by torch and by the CPU's kernels."""
    expected = theirs(torch.tensor([IDS])).logits[0]
    weights = open_weights(path)
    torch.testing.assert_close(plain_logits(load_decoder(weights), IDS), expected, **CLOSE)
    if native_library.is_available():
        fast = load_native(weights, dtype="float32", num_threads=1)
        assert (fast is not None) == is_native
        if fast is not None:
            torch.testing.assert_close(plain_logits(fast, IDS), expected, **CLOSE)

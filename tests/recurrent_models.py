"""Small models with recurrent layers, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

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
# transformers in float32 is up to 4e-4 away from itself in float64 on some CPUs.
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


def make(name: str, folder: Path, vocab_size: int = 90) -> torch.nn.Module:
    """A random model of transformers, saved as it saves."""
    family, settings = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        text = "" if family == "Qwen3Next" else "Text"
        config = getattr(transformers, f"{family}{text}Config")(
            **settings | {"vocab_size": vocab_size}
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model

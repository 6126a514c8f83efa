"""Small random models as files on disk, for tests that go through the front door."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = [" the", " and", " of", " to", " in", " model", " guess", " fast", " token", "ing"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(path: Path) -> int:
    """A byte-level tokenizer: 256 bytes, a few words, end-of-text. Returns its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        symbols = list(word.replace(" ", "\u0120"))
        while len(symbols) > 1:
            pair = (symbols[0], symbols[1])
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault("".join(pair), len(vocab))
            symbols[:2] = ["".join(pair)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    return tokenizer.get_vocab_size()


def write_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    max_len: int = 512,
    num_experts: int = 0,
) -> Path:
    """A random Llama whose greedy text wanders and repeats, as drafters like it.

    With experts it is a Mixtral: two of them for every token.
    """
    path.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(path)
    heads, kv_heads, head_dim, ffn = 4, 2, 32, 2 * width
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, width, scale=3.0),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": normal(vocab_size, width, scale=4.0),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(width),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(width),
            f"{prefix}.self_attn.q_proj.weight": normal(heads * head_dim, width),
            f"{prefix}.self_attn.k_proj.weight": normal(kv_heads * head_dim, width),
            f"{prefix}.self_attn.v_proj.weight": normal(kv_heads * head_dim, width),
            f"{prefix}.self_attn.o_proj.weight": normal(width, heads * head_dim),
        }
        if num_experts:
            moe = f"{prefix}.block_sparse_moe"
            tensors[f"{moe}.gate.weight"] = normal(num_experts, width)
            names = {f"{moe}.experts.{e}": ("w1", "w3", "w2") for e in range(num_experts)}
        else:
            names = {f"{prefix}.mlp": ("gate_proj", "up_proj", "down_proj")}
        for stem, (gate, up, down) in names.items():
            tensors |= {
                f"{stem}.{gate}.weight": normal(ffn, width),
                f"{stem}.{up}.weight": normal(ffn, width),
                f"{stem}.{down}.weight": normal(width, ffn),
            }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": vocab_size - 1,
        "torch_dtype": "float32",
    }
    if num_experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": 2}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_recurrent(path: Path, *, seed: int = 0) -> Path:
    """A random Qwen3.5: two recurrent layers, then one with attention."""
    path.mkdir(parents=True, exist_ok=True)
    vocab_size, width, ffn, k_dim, v_dim = write_tokenizer(path), 32, 32, 8, 16
    channels = 2 * k_dim + 2 * v_dim
    every = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (ffn, width), "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
    }  # fmt: skip
    recurrent = {
        "A_log": (2,), "dt_bias": (2,), "conv1d.weight": (channels, 1, 4),
        "in_proj_qkv.weight": (channels, width), "in_proj_z.weight": (2 * v_dim, width),
        "in_proj_a.weight": (2, width), "in_proj_b.weight": (2, width), "norm.weight": (v_dim,),
        "out_proj.weight": (width, 2 * v_dim),
    }  # fmt: skip
    attention = {
        "q_proj.weight": (4 * v_dim, width), "k_proj.weight": (v_dim, width),
        "v_proj.weight": (v_dim, width), "o_proj.weight": (width, 2 * v_dim),
        "q_norm.weight": (v_dim,), "k_norm.weight": (v_dim,),
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "lm_head.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    for layer, parts in enumerate((recurrent, recurrent, attention)):
        stem = "self_attn" if parts is attention else "linear_attn"
        named = every | {f"{stem}.{name}": size for name, size in parts.items()}
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in named.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(size, generator=generator) * 2 / size[-1] ** 0.5
        for name, size in sizes.items()
    }
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "vocab_size": vocab_size, "hidden_size": width, "intermediate_size": ffn,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": v_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": k_dim, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_value_head_dim": v_dim,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "float32",
        "eos_token_id": vocab_size - 1,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4},
    }  # fmt: skip
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path

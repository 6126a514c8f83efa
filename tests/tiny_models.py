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

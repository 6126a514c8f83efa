"""Small random models of transformers, and what it would save of them."""

import json
from typing import Any

import torch
import transformers

from builders import plain_logits
from hunch.models.decoder import Decoder

COMMON = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GATED = COMMON | {"intermediate_size": 56, "num_key_value_heads": 2}
PLAIN = COMMON | {"intermediate_size": 56}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
}
GPT2 = {"vocab_size": 90, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
MPT = {"vocab_size": 90, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
GPTJ = GPT2 | {"n_embd": 64, "rotary_dim": 8}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
}
GEMMA = GATED | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
GEMMA4 = GATED | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 7}
GEMMA4 |= {"num_hidden_layers": 5, "vocab_size_per_layer_input": 90}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "pad_token_id": 0}
WINDOW, WHOLE = "sliding_attention", "full_attention"
GEMMA4 |= {"layer_types": [WINDOW, WINDOW, WHOLE, WINDOW, WHOLE]}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
GEMMA4_EXPERTS |= {"moe_intermediate_size": 20, "hidden_size_per_layer_input": 0}
GEMMA3N = GATED | {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5}
GEMMA3N |= {"layer_types": GEMMA4["layer_types"], "num_kv_shared_layers": 2}
GEMMA3N |= {"vocab_size_per_layer_input": 80, "hidden_size_per_layer_input": 8, "laurel_rank": 6}
GEMMA3N |= {"activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0]}
CASES = {
    "granite": (
        "Granite",
        GATED
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "minicpm": (
        "Granite",
        GATED
        | {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 * 3**-0.5}
        | {"attention_multiplier": 8**-0.5, "logits_scaling": 32 / 256},
    ),
    "phi-3, part of a head turned": (
        "Phi3",
        GATED
        | {
            "pad_token_id": 0,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi-3, long": (
        "Phi3",
        GATED
        | {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONG},
    ),
    "gpt-2": ("GPT2", GPT2),
    "gpt-bigcode": ("GPTBigCode", GPT2 | {"n_inner": 72}),
    "gemma": ("Gemma", GATED | {"head_dim": 16}),
    "gemma 2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    # llama.cpp knows the scale of scores and the pattern of windows by the architecture.
    "gemma 2 as converted": (
        "Gemma2",
        GEMMA
        | {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3 as converted": ("Gemma3", GEMMA | {"query_pre_attn_scalar": 16}),
    "gemma 3": (
        "Gemma3",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma 4": (
        "Gemma4",
        GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma 4, keys as values": (
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 4, experts": ("Gemma4", GEMMA4 | GEMMA4_EXPERTS),
    "gemma 4, unified": (
        "Gemma4Unified",
        {key: value for key, value in GEMMA4.items() if "per_layer_input" not in key},
    ),
    "gemma 3n": ("Gemma3n", GEMMA3N | {"intermediate_size": [56, 40, 56, 48, 56]}),
    "gemma 3n, another stream": (
        "Gemma3n",
        GEMMA3N
        | {"altup_active_idx": 1, "altup_num_inputs": 3, "altup_correct_scale": False}
        | {"final_logit_softcapping": 3.0, "num_kv_shared_layers": 0},
    ),
    "llama": ("Llama", GATED | {"num_key_value_heads": 4}),
    "llama, grouped heads, tied": ("Llama", GATED | {"tie_word_embeddings": True}),
    "llama, one kv head, wide heads": ("Llama", GATED | {"num_key_value_heads": 1, "head_dim": 12}),
    "llama, biases": ("Llama", GATED | {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", GATED | {"rope_parameters": LLAMA3}),
    "llama, linear": (
        "Llama",
        GATED | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "llama, yarn": ("Llama", GATED | {"rope_parameters": YARN}),
    "llama, yarn, betas": (
        "Llama",
        GATED
        | {"rope_parameters": YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3}},
    ),
    "mistral": ("Mistral", GATED | {"sliding_window": 7}),
    "mistral, no window": ("Mistral", GATED | {"sliding_window": None}),
    "qwen2": ("Qwen2", GATED | {"tie_word_embeddings": True}),
    "qwen2, windows above": (
        "Qwen2",
        GATED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", GATED | {"head_dim": 16}),
    "qwen3, biases": ("Qwen3", GATED | {"head_dim": 8, "attention_bias": True}),
    "smollm 3": ("SmolLM3", GATED | {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    # llama.cpp knows the layers by the architecture: every fourth.
    "smollm 3, as converted": ("SmolLM3", GATED | {"pad_token_id": 0, "num_hidden_layers": 3}),
    "smollm 3, windows": (
        "SmolLM3",
        GATED
        | {"pad_token_id": 0, "no_rope_layers": [1, 0, 1]}
        | {"use_sliding_window": True, "sliding_window": 7},
    ),
    "stablelm": ("StableLm", GATED | {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", GATED | {"use_parallel_residual": True}),
    "starcoder 2": ("Starcoder2", GATED | {"sliding_window": 7}),
    "starcoder 2, no biases": ("Starcoder2", GATED | {"use_bias": False}),
    "cohere": ("Cohere", GATED | {"logit_scale": 0.4, "pad_token_id": 0}),
    "cohere 2": ("Cohere2", GATED | {"logit_scale": 0.4, "sliding_window": 7, "pad_token_id": 0}),
    "glm": ("Glm", GATED | {"head_dim": 16, "pad_token_id": 0}),
    "glm 4": ("Glm4", GATED | {"head_dim": 16, "pad_token_id": 0}),
    "granite 4": (
        "GraniteMoeHybrid",
        GATED
        | {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "mamba_n_heads": 4}
        | {"shared_intermediate_size": 40, "position_embedding_type": "rope"}
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.3},
    ),
    "seed-oss": ("SeedOss", GATED | {"head_dim": 16}),
    "ernie 4.5": ("Ernie4_5", GATED | {"head_dim": 16}),
    "ministral 3": (
        "Ministral3",
        GATED
        | {"head_dim": 16}
        | {
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    "gpt-neox": ("GPTNeoX", PLAIN),
    "gpt-neox, one after the other": ("GPTNeoX", PLAIN | {"use_parallel_residual": False}),
    "falcon": ("Falcon", COMMON | {"ffn_hidden_size": 56}),
    "falcon, grouped heads": (
        "Falcon",
        COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon, one norm": (
        "Falcon",
        COMMON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, many heads": (
        "Falcon",
        COMMON | {"multi_query": False, "parallel_attn": False},
    ),
    "phi": ("Phi", PLAIN | {"num_key_value_heads": 2}),
    "nemotron": ("Nemotron", GATED | {"head_dim": 8}),
    "arcee": ("Arcee", GATED | {"head_dim": 8}),
    "olmo 2": ("Olmo2", GATED),
    "olmo 3": ("Olmo3", GATED | {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo 3, stretched": (
        "Olmo3",
        GATED
        | {"sliding_window": 7, "layer_types": [WINDOW, WHOLE, WHOLE]}
        | {"rope_parameters": {WINDOW: {"rope_type": "default", "rope_theta": 500.0}, WHOLE: YARN}},
    ),
    "exaone 4": ("Exaone4", GATED | {"sliding_window": None, "layer_types": [WHOLE] * 3}),
    "exaone 4, windows": (
        "Exaone4",
        GATED | {"sliding_window": 7, "sliding_window_pattern": 2, "rope_parameters": LLAMA3},
    ),
    "olmo": ("Olmo", GATED),
    "olmo, limits": ("Olmo", GATED | {"clip_qkv": 0.7}),
    "helium": ("Helium", GATED | {"head_dim": 8}),
    "apertus": ("Apertus", GATED | {"pad_token_id": 0}),
    "hunyuan": ("HunYuanDenseV1", GATED | {"head_dim": 16}),
    "hunyuan, alpha": ("HunYuanDenseV1", GATED | {"head_dim": 16, "rope_parameters": ALPHA}),
    "hunyuan, yarn": ("HunYuanDenseV1", GATED | {"head_dim": 16, "rope_parameters": YARN}),
    "hunyuan, yarn and a large epsilon": (
        "HunYuanDenseV1",
        GATED | {"head_dim": 16, "rope_parameters": YARN, "rms_norm_eps": 0.3},
    ),
    "bitnet": ("BitNet", GATED | {"head_dim": 8}),
    "ministral": (
        "Ministral",
        GATED | {"head_dim": 16, "sliding_window": 7, "layer_types": [WINDOW, WHOLE, WINDOW]},
    ),
    "cwm": ("Cwm", GATED | {"head_dim": 16, "sliding_window": 7}),
    "jais 2": ("Jais2", GATED),
    "vaultgemma": ("VaultGemma", GEMMA),
    "nanochat": ("NanoChat", GATED),
    "nanochat, yarn": ("NanoChat", GATED | {"rope_parameters": YARN, "rms_norm_eps": 0.3}),
    "hyperclovax": (
        "HyperCLOVAX",
        GATED
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
        | {"attention_multiplier": 0.2, "logits_scaling": 0.5},
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": 90, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    ),
    "bloom, six heads": (
        "Bloom",
        {"vocab_size": 90, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    ),
    "mpt": ("Mpt", MPT),
    "mpt, limits": (
        "Mpt",
        MPT | {"n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.2}},
    ),
    "falcon, alibi": (
        "Falcon",
        COMMON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "cohere, head norms": (
        "Cohere",
        GATED | {"logit_scale": 0.4, "pad_token_id": 0, "use_qk_norm": True},
    ),
    "stablelm, head norms": (
        "StableLm",
        GATED | {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "phi, head norms": ("Phi", PLAIN | {"num_key_value_heads": 2, "qk_layernorm": True}),
    "persimmon": ("Persimmon", PLAIN),
    "persimmon, no head norms": ("Persimmon", PLAIN | {"qk_layernorm": False}),
    "gpt-j": ("GPTJ", GPTJ),
    "codegen": ("CodeGen", GPTJ),
    "gpt-neo": (
        "GPTNeo",
        {"vocab_size": 90, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
        | {"max_position_embeddings": 128, "window_size": 7}
        | {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    ),
    "opt": ("OPT", COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 32}),
    "biogpt": ("BioGpt", PLAIN),
    "gpt 1": ("OpenAIGPT", GPT2),
    "opt, norms after": (
        "OPT",
        COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "opt, no biases": (
        "OPT",
        COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 32, "enable_bias": False},
    ),
}

IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


def make(name: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """The model of a case in float32, its config.json, its tensors."""
    family, settings = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        names = family + (
            "TextConfig" if family in ("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified") else "Config"
        )
        config = getattr(transformers, names)(**settings)
        # Others leave caps out; Falcon's adds its slopes twice.
        config._attn_implementation = "sdpa" if settings.get("alibi") else "eager"
        kind = f"{family}{'LMHeadModel' if family in ('GPT2', 'OpenAIGPT') else 'ForCausalLM'}"
        theirs = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
            for buffer_name, buffer in theirs.named_buffers():
                if buffer_name.endswith("layer_scalar"):
                    buffer.mul_(torch.rand_like(buffer) + 0.5)
    saved = json.loads(theirs.config.to_json_string())
    saved["architectures"] = [kind]
    tensors = {name: t.detach() for name, t in theirs.state_dict().items()}
    if family == "GPTNeoX":  # its files have another name than its code
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    return theirs, saved, tensors


def check_logits(ours: Decoder, theirs: Any) -> None:
    expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=1e-4, rtol=1e-4)

"""A small random checkpoint of every family, as files on disk."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from builders import tiny_config, tiny_weights
from tiny_models import write_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
}
GPT2 = {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 256}
GPTJ = dict.fromkeys({*SIZES, "rms_norm_eps", "rope_theta"}) | GPT2 | {"rotary_dim": 16}
OPT = {**SIZES, "intermediate_size": None, "num_key_value_heads": None, "hidden_size": 128}
OPT |= {"head_dim": None, "ffn_dim": 96, "word_embed_proj_dim": 128}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
CAPS = {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 30.0}
GEMMA = {**SIZES, "query_pre_attn_scalar": 24, "sliding_window": 24, "sliding_window_pattern": 2}
WINDOW, WHOLE = "sliding_attention", "full_attention"
GEMMA4 = {**SIZES, "sliding_window": 24, "global_head_dim": 64, "num_hidden_layers": 4}
GEMMA4 |= {"layer_types": [WINDOW, WHOLE, WINDOW, WHOLE], "hidden_size_per_layer_input": 32}
GEMMA4 |= {"rope_theta": None, "vocab_size_per_layer_input": 320}
GEMMA3N = {**SIZES, "sliding_window": 24, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
GEMMA3N |= {"layer_types": [WINDOW, WHOLE, WINDOW, WHOLE], "hidden_size_per_layer_input": 16}
GEMMA3N |= {"vocab_size_per_layer_input": 64, "laurel_rank": 8}
GEMMA3N |= {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0]}
EXPERTS = {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED = {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
LATENT = {**GROUPED, "head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 32}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "granite": ("GraniteForCausalLM", {**SIZES, **SCALES, "logits_scaling": 0.5}),
    "phi-3": ("Phi3ForCausalLM", {**SIZES, "partial_rotary_factor": 0.5}),
    "gpt-2": ("GPT2LMHeadModel", GPT2),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gemma": ("GemmaForCausalLM", SIZES),
    "gemma 2": ("Gemma2ForCausalLM", {**GEMMA, **CAPS}),
    "gemma 3": ("Gemma3ForCausalLM", {**GEMMA, "rope_local_base_freq": 300.0}),
    "gemma 3n": ("Gemma3nForCausalLM", GEMMA3N),
    "gemma 4": (
        "Gemma4ForCausalLM",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma 4, experts": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma 4, keys as values": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "cohere 2": (
        "Cohere2ForCausalLM",
        {**SIZES, "sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.5},
    ),
    "glm 4": ("Glm4ForCausalLM", SIZES),
    "ministral 3": (
        "Ministral3ForCausalLM",
        {
            **SIZES,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "smollm 3": ("SmolLM3ForCausalLM", {**SIZES, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLmForCausalLM", {**SIZES, "use_parallel_residual": True}),
    "starcoder 2": ("Starcoder2ForCausalLM", {**SIZES, "sliding_window": 24}),
    "opt": ("OPTForCausalLM", OPT),
    "mixtral": ("MixtralForCausalLM", {**LOCAL, "sliding_window": 24}),
    "phi-moe": (
        "PhimoeForCausalLM",
        {**LOCAL, "router_jitter_noise": 0.2, "sliding_window": 24, "attention_bias": True}
        | {"head_dim": None},
    ),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "granite-moe": ("GraniteMoeForCausalLM", {**LOCAL, **SCALES}),
    "gpt-oss": ("GptOssForCausalLM", {**LOCAL, "sliding_window": 24}),
    "glm 4.5": (
        "Glm4MoeForCausalLM",
        {**GROUPED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    ),
    "deepseek v2": ("DeepseekV2ForCausalLM", {**LATENT, "n_group": 1, "topk_group": 1}),
    "deepseek v3": ("DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": 48}),
    "glm 4.7 flash": ("Glm4MoeLiteForCausalLM", {**LATENT, "q_lora_rank": 48}),
    "llama 4": (
        "Llama4ForCausalLM",
        {**LOCAL, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 96}
        | {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 24, "floor_scale": 16},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "falcon": (
        "FalconForCausalLM",
        {**SIZES, "intermediate_size": None, "ffn_hidden_size": 96, "num_key_value_heads": 1},
    ),
    "phi": ("PhiForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "nemotron": ("NemotronForCausalLM", SIZES),
    "minicpm": ("MiniCPMForCausalLM", {**SIZES, "scale_emb": 3, "scale_depth": 1.4}),
    "olmo 2": ("Olmo2ForCausalLM", SIZES),
    "olmo 3": (
        "Olmo3ForCausalLM",
        {**SIZES, "sliding_window": 24, "layer_types": [WINDOW, WHOLE]},
    ),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "intermediate_size": 32}),
    "exaone 4": (
        "Exaone4ForCausalLM",
        {**SIZES, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "olmo": ("OlmoForCausalLM", SIZES | {"rms_norm_eps": None}),
    "olmo, limits": ("OlmoForCausalLM", SIZES | {"rms_norm_eps": None, "clip_qkv": 0.9}),
    "helium": ("HeliumForCausalLM", SIZES),
    "apertus": ("ApertusForCausalLM", SIZES),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", SIZES),
    "vaultgemma": ("VaultGemmaForCausalLM", GEMMA),
    "gpt-j": ("GPTJForCausalLM", GPTJ),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {**OPT, "ffn_dim": None, "word_embed_proj_dim": None, "intermediate_size": 96}
        | {"num_hidden_layers": None, "num_attention_heads": None, "rms_norm_eps": None}
        | {"num_layers": 2, "num_heads": 4, "window_size": 24, "rope_theta": None}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "dots1": ("Dots1ForCausalLM", {**GROUPED, "sliding_window": 24, "max_window_layers": 1}),
    "minimax m2": ("MiniMaxM2ForCausalLM", {**LOCAL, "rotary_dim": 16}),
    "ernie 4.5, experts": (
        "Ernie4_5_MoeForCausalLM",
        {**SIZES, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "granite, experts and more": (
        "GraniteMoeSharedForCausalLM",
        {**LOCAL, **SCALES, "shared_intermediate_size": 48},
    ),
    "hunyuan, experts": ("HunYuanMoEV1ForCausalLM", {**SIZES, "num_experts": 4, "moe_topk": 2}),
    "granite, windows": (
        "GraniteSWAForCausalLM",
        {**SIZES, **SCALES, "head_dim": None, "sliding_window": 24, "layer_rope_theta": [0, 1e4]},
    ),
    "minicpm 3": (
        "MiniCPM3ForCausalLM",
        {**LATENT, "q_lora_rank": 48, "scale_emb": 3, "tie_word_embeddings": False}
        | dict.fromkeys(k for k in LATENT if "expert" in k or k in ("n_group", "topk_group"))
        | dict.fromkeys(("moe_intermediate_size", "first_k_dense_replace")),
    ),
    "flint": (
        "FlintForCausalLM",
        {**EXPERTS, "sliding_window": 24, "layer_types": [WINDOW, WHOLE], "mlp_only_layers": [0]}
        | {"shared_expert_intermediate_size": 48},
    ),
    "k-exaone": (
        "ExaoneMoeForCausalLM",
        {**EXPERTS, "sliding_window": 24, "sliding_window_pattern": 2, "num_shared_experts": 1},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {**EXPERTS, "sliding_window": 24, "global_attn_every_n_layers": 2, "num_shared_experts": 1},
    ),
    "cohere 2, experts": (
        "Cohere2MoeForCausalLM",
        {**EXPERTS, "moe_intermediate_size": None, "sliding_window": 24, "logit_scale": 0.5}
        | {"sliding_window_pattern": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "bitnet": (
        "BitNetForCausalLM",
        {**SIZES, "hidden_size": 128, "hidden_act": "relu2", "product_input_bits": 8},
    ),
    "nanochat": ("NanoChatForCausalLM", SIZES),
    "opt, norms after": ("OPTForCausalLM", {**OPT, "do_layer_norm_before": False}),
    "cohere, head norms": ("CohereForCausalLM", {**SIZES, "use_qk_norm": True, "logit_scale": 0.5}),
    "persimmon": ("PersimmonForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "bloom": (
        "BloomForCausalLM",
        dict.fromkeys({*SIZES, "rms_norm_eps", "rope_theta"})
        | {"hidden_size": 64, "n_head": 4, "n_layer": 2},
    ),
    "mpt": (
        "MptForCausalLM",
        dict.fromkeys({*SIZES, "rms_norm_eps", "rope_theta"})
        | {"d_model": 64, "n_heads": 4, "n_layers": 2},
    ),
}
# What the kernels do not know is computed by torch.
BY_TORCH = ("olmo, limits", "apertus", "hunyuan", "hunyuan, experts")
BY_TORCH += ("cohere, head norms", "persimmon", "bloom", "mpt", "nanochat", "bitnet", "gemma 3n")


def write_family(path: Path, name: str, seed: int = 0) -> Path:
    """Scores are far enough apart for text that wanders and repeats, as drafters like it."""
    path.mkdir(parents=True, exist_ok=True)
    architecture, changes = FAMILIES[name]
    vocab_size = write_tokenizer(path)
    config = tiny_config(architecture, **changes, vocab_size=vocab_size)
    config |= {"eos_token_id": vocab_size - 1, "torch_dtype": "float32"}
    weights = tiny_weights(config, seed=seed, scale=2.0)
    save_file(weights.tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path

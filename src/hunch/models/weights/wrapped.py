"""The config of the text model inside a model for pictures or sound, of whichever family."""

from __future__ import annotations

from typing import Any

from hunch.errors import UnsupportedModelError

# Architectures whose text_config names a family by its model_type.
WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("AyaVision", "Cohere2Vision", "DeepseekVL", "DeepseekVLHybrid", "Exaone4_5_", "FastVlm"),
        *("GotOcr2", "HyperCLOVAXVisionV2", "Idefics2", "Idefics3", "InternVL", "Janus"),
        *("KimiK25", "Kimi_K25", "Lfm2Vl", "LightOnOcr", "Llava", "LlavaNext", "LlavaNextVideo"),
        *("LlavaOnevision", "MiniCPMV4_6", "MiniCPMV4_7", "Ovis2", "PerceptionLM", "QianfanOCR"),
        *("Qwen2_5Omni", "Qwen2_5OmniThinker", "Qwen3OmniMoe", "Qwen3OmniMoeThinker"),
        *("SmolVLM", "VideoLlama3", "VideoLlava", "VipLlava", "Voxtral"),
    )
) | {"Qwen2_5OmniModel"}
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = _SIZES | {"vocab_size": 151_936, "intermediate_size": 22_016}
_QWEN |= {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
# model_type -> architecture, and what its files leave out where it is transformers' default.
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "hyperclovax": ("HyperCLOVAXForCausalLM", {}),
    "kimi_k2": ("DeepseekV3ForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _SIZES | {"vocab_size": 32_000, "intermediate_size": 11_008}),
    "mistral": (
        "MistralForCausalLM",
        _SIZES
        | {"vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8}
        | {"max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_omni_moe_text": ("Qwen3VLMoeForConditionalGeneration", {}),
}
_OF_BOTH = (
    *("transformers_version", "torch_dtype", "dtype", "auto_map", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def text_inside(outer: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model. Whether the output matrix is the embedding is left to the
    files: the two configs may contradict each other."""
    model_type = str(text.get("model_type", "llama"))
    if model_type not in TEXT_MODELS:
        known = ", ".join(sorted(TEXT_MODELS))
        raise UnsupportedModelError(f"text_config: model_type {model_type!r} is not one of {known}")
    name, defaults = TEXT_MODELS[model_type]
    kept = {key: outer[key] for key in _OF_BOTH if outer.get(key) is not None}
    config = {**defaults, **kept, **text, "architectures": [name]}
    config.pop("tie_word_embeddings", None)
    return config

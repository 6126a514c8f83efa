"""Architectures that hunch does not support, and the reasons that its errors give."""

from __future__ import annotations

_CAUSAL = {
    "its layers share blocks of attention; known are those with blocks of their own": (
        *("Zamba", "Zamba2"),
    ),
    "it has recurrent layers of a kind that is not known here": (
        *("BailingHybrid", "RecurrentGemma", "Rwkv"),
        "xLSTM",
    ),
    "its layers convolve over tokens": ("Inkling", "Lfm3"),
    "it subtracts one attention from another": ("DiffLlama",),
    "it chooses which tokens are seen": (
        *("AXK2", "DeepseekV4", "Doge", "Dots3Note", "HYV4", "Qwen4Exp"),
    ),
    "its experts are heads of attention": ("JetMoe",),
    "its layers have different numbers of heads, and turn different parts of them": ("Laguna",),
    "it norms what experts give, and what MLPs give it does not": ("AXK1",),
    "it is written for another model's states, not for text alone": (
        *("Gemma4Assistant", "Gemma4UnifiedAssistant", "Moshi", "Musicgen", "MusicgenMelody"),
        *("TrOCR", "Whisper"),
    ),
}
_BOTH = "it reads a text before it writes one (encoder and decoder)"
_ENCODERS = (
    *("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "MBart", "Mvp", "Pegasus"),
    *("PLBart", "ProphetNet"),
)
REFUSED: dict[str, str] = {
    f"{name}ForCausalLM": reason for reason, names in _CAUSAL.items() for name in names
}
REFUSED |= {f"{name}ForCausalLM": _BOTH for name in _ENCODERS}
REFUSED |= {
    f"{name}ForConditionalGeneration": _BOTH
    for name in (*_ENCODERS, "LongT5", "MT5", "T5", "T5Gemma", "T5Gemma2", "UMT5", "Florence2")
}
REFUSED |= {
    "MarianForCausalLM": _BOTH,
    "PaliGemmaForConditionalGeneration": "tokens of its prompt see those after them",
    "DiffusionGemmaForBlockDiffusion": "its text is not written from left to right",
    "MllamaForCausalLM": "its layers read pictures where others read text",
    "MllamaForConditionalGeneration": "its layers read pictures where others read text",
}

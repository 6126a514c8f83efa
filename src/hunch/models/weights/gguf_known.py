"""GGUF's architectures: those that are read, by Hugging Face's names, and why others are not."""

from __future__ import annotations

from hunch.models.refused import REFUSED

ARCHITECTURES = {  # general.architecture -> (architectures, model_type)
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2"),  # the text model; pictures are read by other files
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3"),  # V2 too; told apart by its router
    "granite": ("GraniteForCausalLM", "granite"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1"),
    "mamba": ("MambaForCausalLM", "mamba"),  # FalconMamba too; told apart by its norms
    "mamba2": ("Mamba2ForCausalLM", "mamba2"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "phimoe": ("PhimoeForCausalLM", "phimoe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "starcoder": ("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "stablelm": ("StableLmForCausalLM", "stablelm"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
    "arcee": ("ArceeForCausalLM", "arcee"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "chatglm": ("GlmForCausalLM", "glm"),  # GLM-4 of 2024
    "exaone": ("LlamaForCausalLM", "llama"),  # EXAONE 3, by Llama's names
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox"),
    "minicpm": ("GraniteForCausalLM", "granite"),  # the same scales
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "nemotron": ("NemotronForCausalLM", "nemotron"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),  # 3 too, where there are windows
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "phi2": ("PhiForCausalLM", "phi"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "dots1": ("Dots1ForCausalLM", "dots1"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "olmo": ("OlmoForCausalLM", "olmo"),
    "apertus": ("ApertusForCausalLM", "apertus"),
    "bloom": ("BloomForCausalLM", "bloom"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "internlm2": ("LlamaForCausalLM", "llama"),  # its fused tensors are separate here
    "mpt": ("MptForCausalLM", "mpt"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), ("NemotronHForCausalLM", "nemotron_h")),
}
# Files of these store the rows of q and k so that rotary pairs are neighbours.
_LLAMAS = ("llama", "mistral", "mistral3", "smollm3", "arcee")
INTERLEAVED = (*_LLAMAS, "granite", "granitemoe", "minicpm", "olmo", "internlm2")

REASONS: dict[str, str] = {  # general.architecture -> why it is not computed
    **dict.fromkeys(("rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"), REFUSED["RwkvForCausalLM"]),
    **dict.fromkeys(
        (
            *("bert", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "eurobert"),
            *("jina-bert-v2", "jina-bert-v3", "gemma-embedding", "llama-embed", "t5encoder"),
        ),
        "it gives texts as vectors and writes none",
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "it does not write left to right"),
    **dict.fromkeys(
        ("bitnet", "deepseek32", "gemma3n", "glm-dsa", "jamba", "kimi-linear"),
        "it is not read from GGUF files; use its safetensors",
    ),
    "t5": REFUSED["T5ForConditionalGeneration"],
    "clip": "this file reads pictures for a model that is in another one: give that file",
}

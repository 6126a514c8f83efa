"""Names to classes, resolved lazily: all the rest of hunch knows of a method is its line here."""

from __future__ import annotations

import difflib
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

ENTRY_POINTS = "hunch.drafters"  # the group by which other packages offer drafters

DRAFTERS = {
    "off": "hunch.drafting.off:OffDrafter",
    "ngram": "hunch.drafting.ngram:NgramDrafter",
    "suffix": "hunch.drafting.suffix:SuffixDrafter",
    "prediction": "hunch.drafting.prediction:PredictionDrafter",
    "recycling": "hunch.drafting.recycling:RecyclingDrafter",
    "draft": "hunch.drafting.draft_model:DraftModelDrafter",
    "text": "hunch.drafting.text_draft:TextDrafter",
    "mlp": "hunch.drafting.mlp:MlpDrafter",
    "medusa": "hunch.drafting.medusa:MedusaDrafter",
    "eagle": "hunch.drafting.eagle:EagleDrafter",
    "eagle3": "hunch.drafting.eagle:Eagle3Drafter",
    "mtp": "hunch.drafting.eagle:MtpDrafter",
    "dflash": "hunch.drafting.block:DflashDrafter",
    "dspark": "hunch.drafting.block:DsparkDrafter",
    "dflash2": "hunch.drafting.block:Dflash2Drafter",
    "auto": "hunch.drafting.auto:AutoDrafter",
    "merge": "hunch.drafting.merge:MergeDrafter",
    "synthetic": "hunch.drafting.synthetic:SyntheticDrafter",
}
MOST_NAMED = 40  # names a sentence lists; more nobody reads
SYNTHETIC = frozenset({"synthetic"})  # for benchmarks of the engine: their guesses are made up

VERIFIERS = {
    "exact": "hunch.verify.exact:exact",
    "rejection": "hunch.verify.rejection:rejection",
    "block": "hunch.verify.block:block",
    "typical": "hunch.verify.typical:typical",
}
LOSSY = frozenset({"typical"})  # verifiers whose text no longer follows the target's distribution

BACKENDS = {  # what computes a model's passes; nothing else compares names of kernels
    "torch": "hunch.models.backends:TORCH",
    "native": "hunch.models.backends:NATIVE",
    "triton": "hunch.models.backends:TRITON",
}

MODELS = {  # keys: `architectures` of config.json, and GGUF's general.architecture
    "LlamaForCausalLM": "hunch.models.families.llama:Llama",
    "Llama4ForCausalLM": "hunch.models.families.llama4:Llama4",
    "Llama4ForConditionalGeneration": "hunch.models.families.llama4:Llama4",
    "CohereForCausalLM": "hunch.models.families.cohere:Cohere",
    "Cohere2ForCausalLM": "hunch.models.families.cohere:Cohere2",
    "Ernie4_5ForCausalLM": "hunch.models.families.ernie:Ernie",
    "GlmForCausalLM": "hunch.models.families.glm:Glm",
    "Glm4ForCausalLM": "hunch.models.families.glm:Glm4",
    "Glm4vForConditionalGeneration": "hunch.models.families.glm:Glm4v",
    "Glm46VForConditionalGeneration": "hunch.models.families.glm:Glm4v",
    "Glm4vMoeForConditionalGeneration": "hunch.models.families.glm:Glm4vMoe",
    "GraniteMoeHybridForCausalLM": "hunch.models.families.granite:GraniteHybrid",
    "Ministral3ForCausalLM": "hunch.models.families.mistral:Ministral3",
    "Mistral3ForConditionalGeneration": "hunch.models.families.mistral:Ministral3",
    "SeedOssForCausalLM": "hunch.models.families.llama:SeedOss",
    "MistralForCausalLM": "hunch.models.families.mistral:Mistral",
    "Qwen2VLForConditionalGeneration": "hunch.models.families.qwen:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "hunch.models.families.qwen:Qwen2VL",
    "Qwen3VLForConditionalGeneration": "hunch.models.families.qwen:Qwen3VL",
    "Qwen2ForCausalLM": "hunch.models.families.qwen:Qwen2",
    "Qwen3ForCausalLM": "hunch.models.families.qwen:Qwen3",
    "DeepseekV2ForCausalLM": "hunch.models.families.deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "hunch.models.families.deepseek:DeepseekV3",
    "DeepseekV32ForCausalLM": "hunch.models.families.deepseek:DeepseekV32",
    "GlmMoeDsaForCausalLM": "hunch.models.families.deepseek:GlmMoeDsa",
    "Glm4MoeForCausalLM": "hunch.models.families.glm:Glm4Moe",
    "Glm4MoeLiteForCausalLM": "hunch.models.families.deepseek:Glm4MoeLite",
    "GptOssForCausalLM": "hunch.models.families.gpt_oss:GptOss",
    "GraniteMoeForCausalLM": "hunch.models.families.granite:GraniteMoe",
    "MixtralForCausalLM": "hunch.models.families.mistral:Mixtral",
    "Qwen2MoeForCausalLM": "hunch.models.families.qwen:Qwen2Moe",
    "Qwen3MoeForCausalLM": "hunch.models.families.qwen:Qwen3Moe",
    "Qwen3NextForCausalLM": "hunch.models.families.qwen3_next:Qwen3Next",
    "Qwen3_5ForCausalLM": "hunch.models.families.qwen3_next:Qwen35",
    "Qwen3_5ForConditionalGeneration": "hunch.models.families.qwen3_next:Qwen35",
    "Qwen3_5MoeForCausalLM": "hunch.models.families.qwen3_next:Qwen35Moe",
    "Qwen3_5MoeForConditionalGeneration": "hunch.models.families.qwen3_next:Qwen35Moe",
    "GraniteForCausalLM": "hunch.models.families.granite:Granite",
    "Phi3ForCausalLM": "hunch.models.families.phi:Phi3",
    "GPT2LMHeadModel": "hunch.models.families.gpt2:Gpt2",
    "GPTBigCodeForCausalLM": "hunch.models.families.gpt2:GptBigCode",
    "GemmaForCausalLM": "hunch.models.families.gemma:Gemma",
    "Gemma2ForCausalLM": "hunch.models.families.gemma:Gemma2",
    "Gemma3ForCausalLM": "hunch.models.families.gemma:Gemma3",
    "Gemma3ForConditionalGeneration": "hunch.models.families.gemma:Gemma3",
    "Gemma3nForCausalLM": "hunch.models.families.gemma3n:Gemma3n",
    "Gemma3nForConditionalGeneration": "hunch.models.families.gemma3n:Gemma3n",
    "Gemma4ForCausalLM": "hunch.models.families.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "hunch.models.families.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "hunch.models.families.gemma4:Gemma4Unified",
    "Gemma4UnifiedForConditionalGeneration": "hunch.models.families.gemma4:Gemma4Unified",
    "ArceeForCausalLM": "hunch.models.families.nemotron:Arcee",
    "Exaone4ForCausalLM": "hunch.models.families.olmo:Exaone4",
    "ExaoneForCausalLM": "hunch.models.families.llama:Exaone",
    "InternLM2ForCausalLM": "hunch.models.families.llama:InternLM2",
    "InternLM3ForCausalLM": "hunch.models.families.llama:InternLM3",
    "RWForCausalLM": "hunch.models.families.falcon:Falcon",
    "FalconForCausalLM": "hunch.models.families.falcon:Falcon",
    "GPTNeoXForCausalLM": "hunch.models.families.gpt_neox:GptNeoX",
    "MiniCPMForCausalLM": "hunch.models.families.granite:MiniCPM",
    "NemotronForCausalLM": "hunch.models.families.nemotron:Nemotron",
    "NemotronHForCausalLM": "hunch.models.families.nemotron_h:NemotronH",
    "Olmo2ForCausalLM": "hunch.models.families.olmo:Olmo2",
    "Olmo3ForCausalLM": "hunch.models.families.olmo:Olmo3",
    "OlmoeForCausalLM": "hunch.models.families.olmo:Olmoe",
    "PhiForCausalLM": "hunch.models.families.phi:Phi",
    "OPTForCausalLM": "hunch.models.families.opt:Opt",
    "BioGptForCausalLM": "hunch.models.families.opt:BioGpt",
    "OpenAIGPTLMHeadModel": "hunch.models.families.gpt2:Gpt1",
    "SmolLM3ForCausalLM": "hunch.models.families.llama:SmolLM3",
    "StableLmForCausalLM": "hunch.models.families.stablelm:StableLM",
    "Starcoder2ForCausalLM": "hunch.models.families.starcoder2:Starcoder2",
    "BloomForCausalLM": "hunch.models.families.alibi:Bloom",
    "MptForCausalLM": "hunch.models.families.alibi:Mpt",
    "MPTForCausalLM": "hunch.models.families.alibi:Mpt",
    "PhimoeForCausalLM": "hunch.models.families.phi:PhiMoe",
    "PersimmonForCausalLM": "hunch.models.families.phi:Persimmon",
    "ApertusForCausalLM": "hunch.models.families.apertus:Apertus",
    "CodeGenForCausalLM": "hunch.models.families.gptj:CodeGen",
    "CwmForCausalLM": "hunch.models.families.llama:Cwm",
    "Dots1ForCausalLM": "hunch.models.families.qwen:Dots1",
    "Ernie4_5_MoeForCausalLM": "hunch.models.families.ernie:ErnieMoe",
    "FlexOlmoForCausalLM": "hunch.models.families.olmo:FlexOlmo",
    "GPTJForCausalLM": "hunch.models.families.gptj:GptJ",
    "GPTNeoForCausalLM": "hunch.models.families.gpt2:GptNeo",
    "GraniteMoeSharedForCausalLM": "hunch.models.families.granite:GraniteMoeShared",
    "BitNetForCausalLM": "hunch.models.families.llama:BitNet",
    "HeliumForCausalLM": "hunch.models.families.llama:Helium",
    "HunYuanDenseV1ForCausalLM": "hunch.models.families.hunyuan:HunYuan",
    "HunYuanMoEV1ForCausalLM": "hunch.models.families.hunyuan:HunYuanMoe",
    "HyperCLOVAXForCausalLM": "hunch.models.families.granite:HyperClovaX",
    "Jais2ForCausalLM": "hunch.models.families.nemotron:Jais2",
    "MiniMaxForCausalLM": "hunch.models.families.minimax:MiniMax",
    "MiniMaxM2ForCausalLM": "hunch.models.families.minimax:MiniMaxM2",
    "MinistralForCausalLM": "hunch.models.families.mistral:Mistral",
    "OlmoForCausalLM": "hunch.models.families.olmo:Olmo",
    "Qwen3VLMoeForConditionalGeneration": "hunch.models.families.qwen:Qwen3VLMoe",
    "SolarOpenForCausalLM": "hunch.models.families.glm:SolarOpen",
    "ExaoneMoeForCausalLM": "hunch.models.families.olmo:ExaoneMoe",
    "Kolibri1ForCausalLM": "hunch.models.families.olmo:Kolibri",
    "FlintForCausalLM": "hunch.models.families.qwen:Flint",
    "GraniteMoeSWAForCausalLM": "hunch.models.families.granite:GraniteMoeSWA",
    "GraniteSWAForCausalLM": "hunch.models.families.granite:GraniteSWA",
    "HYV3ForCausalLM": "hunch.models.families.qwen:Hy3",
    "MellumForCausalLM": "hunch.models.families.qwen:Mellum",
    "MiniCPM3ForCausalLM": "hunch.models.families.deepseek:MiniCPM3",
    "YoutuForCausalLM": "hunch.models.families.deepseek:Youtu",
    "BambaForCausalLM": "hunch.models.families.bamba:Bamba",
    "JambaForCausalLM": "hunch.models.families.jamba:Jamba",
    "FalconMambaForCausalLM": "hunch.models.families.mamba:FalconMamba",
    "OlmoHybridForCausalLM": "hunch.models.families.olmo:OlmoHybrid",
    "KimiLinearForCausalLM": "hunch.models.families.kimi_linear:KimiLinear",
    "MambaForCausalLM": "hunch.models.families.mamba:Mamba1",
    "Mamba2ForCausalLM": "hunch.models.families.mamba:Mamba2",
    "FalconH1ForCausalLM": "hunch.models.families.falcon_h1:FalconH1",
    "Lfm2ForCausalLM": "hunch.models.families.lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "hunch.models.families.lfm2:Lfm2Moe",
    "VaultGemmaForCausalLM": "hunch.models.families.gemma:VaultGemma",
    "Cohere2MoeForCausalLM": "hunch.models.families.cohere:Cohere2Moe",
    "AfmoeForCausalLM": "hunch.models.families.olmo:Afmoe",
    "NanoChatForCausalLM": "hunch.models.families.nemotron:NanoChat",
}

RECIPES = {
    "draft": "hunch.train.recipes.draft:RECIPE",
    "eagle3": "hunch.train.recipes.eagle3:RECIPE",
    "medusa": "hunch.train.recipes.medusa:RECIPE",
    "mlp": "hunch.train.recipes.mlp:RECIPE",
    "block": "hunch.train.recipes.block:RECIPE",
    "phrases": "hunch.train.recipes.phrases:RECIPE",
}


def resolve(table: dict[str, str], name: str) -> Any:
    """The object behind `name`; KeyError text names the nearest known entry."""
    place = table.get(name) or (find_drafter(name) if table is DRAFTERS else None)
    if place is None:
        raise KeyError(unknown(name, table))
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


def find_drafter(name: str) -> str | None:
    """Where a drafter is: hunch's own, one another package offers, or 'package.module:Class'."""
    module, colon, attribute = name.partition(":")
    if colon and attribute.isidentifier() and all(map(str.isidentifier, module.split("."))):
        return name
    return DRAFTERS.get(name) or _offered().get(name)


def names_module(name: str) -> bool:
    """Whether a name before a colon is a module's: one in a package, or one that can be imported
    and is no method's."""
    if "." in name or name in known_drafters() or not name.isidentifier():
        return "." in name
    return name in sys.modules or find_spec(name) is not None


def known_drafters() -> set[str]:
    """Every name `speculate` takes, besides 'package.module:Class'."""
    return {*DRAFTERS, *_offered()}


@cache
def _offered() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def unknown(name: str, known: Any) -> str:
    """One sentence for a name nobody knows: what is known, and what was probably meant."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if len(known) > MOST_NAMED:
        return f"{name!r} is not known{hint}"
    return f"{name!r} is not one of {', '.join(sorted(known))}{hint}"

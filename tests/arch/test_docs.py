"""What the docs promise can be had: no pair of a target that does not load."""

from pathlib import Path

from hunch.registry import MODELS

DOCS = Path(__file__).parents[2] / "docs"
NAMED_BY = {  # words of a target's name -> the architecture that must load for it
    "MiMo": "MiMoForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "20B-code": "GPTBigCodeForCausalLM",
    "34B-code": "GPTBigCodeForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "DeepSeek": "DeepseekV3ForCausalLM",
    "OPT": "OPTForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Llama": "LlamaForCausalLM",
    "Qwen2.5": "Qwen2ForCausalLM",
}


def test_known_pairs_are_of_targets_that_load() -> None:
    text = (DOCS / "methods.md").read_text()
    table = text.partition("## Known pairs")[2].partition("## ")[0]
    targets = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    assert len(targets) > 8
    for word, architecture in NAMED_BY.items():
        named = any(word in target for target in targets)
        assert not named or architecture in MODELS, f"{word} needs {architecture}"


def test_every_family_is_in_the_table_of_models() -> None:
    text = (DOCS / "models.md").read_text()
    assert [name for name in MODELS if f"`{name}`" not in text] == []

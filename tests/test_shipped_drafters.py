"""The drafters that come with hunch: found by method, worth having, no token changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import hunch.drafters
from hunch import LLM, SamplingParams
from hunch.config import DEFAULT_MODEL
from hunch.drafters import shipped
from hunch.errors import ConfigError
from hunch.hub import ModelFiles
from tiny_models import write_llama

PROMPT = "Write a Python function that returns the n-th Fibonacci number."
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def plain(default_files: ModelFiles) -> list[int]:
    return answer("off")[0]


def answer(speculate: str) -> tuple[list[int], float]:
    with LLM(speculate=speculate, max_model_len=512, max_num_seqs=1) as llm:
        (output,) = llm.chat([{"role": "user", "content": PROMPT}], GREEDY)
    return list(output.outputs[0].token_ids), output.outputs[0].stats["tokens_per_pass"]


def test_by_name_alone(plain: list[int], caplog: pytest.LogCaptureFixture) -> None:
    tokens, per_pass = answer("draft:adaptive=false")
    assert tokens == plain
    assert per_pass > 1.8
    assert not caplog.messages  # what it does is on its card


def test_suffix_lookup_takes_the_phrase_table(plain: list[int]) -> None:
    always = "suffix:num_nodes=3:adaptive=false"
    with_table, per_pass = answer(always)
    without, alone = answer(f"{always}:phrases=off")
    assert with_table == without == plain
    assert per_pass > alone + 0.2


@pytest.mark.parametrize("method", ["draft", "phrases"])
def test_every_one_has_a_card(method: str) -> None:
    folder = shipped(method, DEFAULT_MODEL, Path("model.gguf"))
    assert folder is not None
    card = (folder / "README.md").read_text()
    for words in ("Measured", "Data", "Recipe", "icence"):
        assert words in card


def test_together_they_are_small() -> None:
    files = Path(hunch.drafters.__file__).parent.rglob("*.safetensors")
    assert 0 < sum(path.stat().st_size for path in files) <= 16_000_000


def test_another_target_needs_a_path(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    with pytest.raises(ConfigError, match="draft:PATH"):
        LLM(str(target), speculate="draft")


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mlp"])
def test_a_head_without_a_path_names_the_command_that_trains_one(
    method: str, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "target")
    with pytest.raises(ConfigError, match=f"hunch train {method} --target MODEL"):
        LLM(str(target), speculate=method)

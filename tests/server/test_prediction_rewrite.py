"""A rewrite with the default model: an expected text comes in a few passes, checked as ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hunch import LLM, SamplingParams, Speculation
from hunch.errors import RequestError
from hunch.hub import ModelFiles

STORY = (
    "Alice walked to the market early in the morning. The sky was grey and the streets were quiet. "
    "She bought three apples, a loaf of bread and a small jar of honey. On the way home she met "
    "her neighbour, who was carrying a heavy basket. Alice offered to help, and together they "
    "walked along the river. They talked about the weather, the harvest and the old bridge that "
    "had been closed since spring. When they reached the house, the neighbour thanked her and gave "
    "her a handful of cherries. Alice sat down in the garden, opened the jar of honey and cut two "
    "slices of bread. The sun came out at last, and the bees began to hum around the roses. It was "
    "a good day. In the evening Alice wrote a letter to her brother, who lived in the city. She "
    "told him about the market, the cherries and the bees, and asked when he would come to visit."
)
NUM_TOKENS = 90
PROMPT = (  # a small model needs to be shown once what is asked of it
    f"With the name Alice:\n{STORY}\n\n"
    f"With the name Susan:\n{STORY.replace('Alice', 'Susan')}\n\nWith the name Maria:\n"
)


@pytest.fixture(scope="module")
def llm(default_files: ModelFiles) -> Iterator[LLM]:
    # Drafts of full length: how many nodes pay depends on the machine, and on who else uses it.
    spec = "auto:adaptive=false"
    with LLM("smollm2-135m", speculate=spec, max_model_len=768, max_num_seqs=2) as made:
        yield made


@pytest.mark.slow  # every day: tests/drafting/test_prediction.py
def test_changing_one_name_takes_a_third_of_the_passes_at_most(llm: LLM) -> None:
    base = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    off = SamplingParams(**base, speculation=Speculation(mode="off"))
    told = SamplingParams(**base, prediction=STORY)
    only = SamplingParams(**base, prediction=STORY, speculation=Speculation(mode="prediction"))
    plain, auto, alone = (llm.generate(PROMPT, p)[0].outputs[0] for p in (off, told, only))
    assert auto.token_ids == alone.token_ids == plain.token_ids
    assert "Maria offered to help" in plain.text, "the model no longer rewrites: choose a text"
    assert plain.stats["steps"] == NUM_TOKENS
    assert auto.stats["steps"] <= NUM_TOKENS / 3
    assert alone.stats["steps"] <= NUM_TOKENS / 3
    assert auto.stats["drafters"]["prediction"]["accepted"] > NUM_TOKENS / 2
    assert set(alone.stats["drafters"]) == {"prediction"}


def test_a_method_that_is_not_loaded_is_told_with_those_that_are(llm: LLM) -> None:
    wish = SamplingParams(speculation=Speculation(mode="medusa"))
    with pytest.raises(RequestError, match="auto, off, suffix, prediction, ngram"):
        llm.generate(PROMPT, wish)

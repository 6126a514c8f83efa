"""Drafters do what their options and the row's rules ask, and change no token."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hunch import LLM, SamplingParams

PROMPTS = ["the model and the guess", "fast token fast token fast token fast"]
PLAIN = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
RULES = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "logit bias": {"logit_bias": {36: -30.0, 82: -30.0, 110: 8.0}},
    "bad words": {"bad_words": ["e", "a", "o", "th"]},
}


@pytest.fixture(scope="module")
def perfect(tiny_model: Path) -> Iterator[LLM]:
    """The target as its own draft: a guess is right where it is chosen as the target chooses."""
    given = {"always_draft": True, "dtype": "float32", "max_model_len": 256}
    with LLM(str(tiny_model), speculate=f"draft:{tiny_model}", **given) as llm:
        yield llm


@pytest.mark.parametrize("method", ["mlp", "medusa"])
def test_a_fixed_tree_of_heads(tiny_llm: Callable[..., LLM], method: str) -> None:
    llm, plain = tiny_llm(f"{method}:tree=fixed"), tiny_llm("off")
    texts = [
        [out.outputs[0].token_ids for out in one.generate(PROMPTS, PLAIN)] for one in (llm, plain)
    ]
    assert texts[0] == texts[1]
    assert llm.stats()["drafted"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_perfect_draft_stays_perfect_under_rules(
    tiny_llm: Callable[..., LLM], perfect: LLM, rule: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **RULES[rule])
    before = perfect.stats()
    outputs = perfect.generate(PROMPTS, params)
    after = perfect.stats()
    drafted, accepted = (after[key] - before[key] for key in ("drafted", "accepted"))
    plain = tiny_llm("off").generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert accepted > 0.95 * drafted > 0

"""Log-probabilities, raw and processed: for plain, accepted and bonus tokens alike."""

import math
from collections.abc import Callable

import pytest

from hunch import LLM, SamplingParams

PROMPTS = ["fast token fast token fast", "in the model of the guess in the model of the"]
PARAMS = SamplingParams(
    temperature=0.7, top_k=12, repetition_penalty=1.3, seed=4, max_tokens=24, logprobs=20
)
GRAMMAR = SamplingParams(
    temperature=1.5, seed=2, max_tokens=30, logprobs=280, structured_outputs={"regex": "[a-f]{9}x+"}
)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("params", [PARAMS, GRAMMAR], ids=["filters", "grammar"])
def test_scores_do_not_depend_on_speculation(
    mode: str, params: SamplingParams, tiny_llm: Callable[..., LLM]
) -> None:
    plain, drafted = (
        tiny_llm(name, logprobs_mode=mode).generate(PROMPTS, params) for name in ("off", "draft")
    )
    assert sum(output.stats["accepted"] for output in drafted) > 0
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs is not None
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs or [], strict=True)
        for token, (scores, others) in zip(one.outputs[0].token_ids, pairs, strict=True):
            assert list(scores) == list(others)
            assert next(iter(scores)) == token
            for name, score in scores.items():
                assert score.logprob == pytest.approx(others[name].logprob, abs=1e-4)
                assert score.rank == others[name].rank


def test_processed_scores_are_the_chances_of_the_draw(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("suffix", logprobs_mode="processed_logprobs")
    for output in llm.generate(PROMPTS, PARAMS):
        for scores in output.outputs[0].logprobs or []:
            assert len(scores) == 12  # top_k
            assert sum(math.exp(s.logprob) for s in scores.values()) == pytest.approx(1)
    (output,) = llm.generate(PROMPTS[:1], GRAMMAR)
    for scores in (output.outputs[0].logprobs or [])[:9]:
        assert {s.decoded_token for s in scores.values()} == set("abcdef")
        assert sum(math.exp(s.logprob) for s in scores.values()) == pytest.approx(1)


def test_raw_scores_are_the_models_own(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("suffix", logprobs_mode="raw_logprobs")
    size = llm.tokenizer.vocab_size
    (output,) = llm.generate(
        PROMPTS[:1],
        SamplingParams(
            temperature=3.0, top_k=2, seed=1, max_tokens=8, logprobs=size, prompt_logprobs=size
        ),
    )
    for scores in [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]:
        assert scores is not None
        assert len(scores) == size
        assert sum(math.exp(s.logprob) for s in scores.values()) == pytest.approx(1)


def test_prompt_scores_are_whole_though_the_prefix_is_cached(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("ngram")
    prompt = "the model of the guess, the model of the token, and the model of the model"
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3)
    (first,) = llm.generate(prompt, params)
    llm.generate(prompt, SamplingParams(max_tokens=4))  # the blocks are there, and used
    hits = llm.stats()["prefix_hits"]
    (again,) = llm.generate(prompt, params)
    (longer,) = llm.generate(prompt + " and more", params)
    assert hits > 0
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    for other in (again, longer):
        assert other.prompt_logprobs is not None
        assert len(other.prompt_logprobs) == len(other.prompt_token_ids)
        for one, two in zip(first.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=False):
            assert one is not None
            assert two is not None
            assert set(one) == set(two)
            assert all(one[t].logprob == pytest.approx(two[t].logprob, abs=1e-4) for t in one)

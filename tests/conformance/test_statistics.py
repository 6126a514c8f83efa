"""Sampling follows the target's distribution, measured end to end with the engine's own noise."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from scipy.stats import chisquare

from hunch import LLM, SamplingParams
from hunch.verify.base import RowDraft, TargetChoices, Verifier
from hunch.verify.exact import exact

PROMPT = "01230123012301230123"  # a lookup always has a guess here
TEMPERATURE = 1.5
NUM_SAMPLES = 4000
LENGTH = 3


def allowed(llm: LLM) -> list[int]:
    return llm.tokenizer.encode("0123")


def expected(llm: LLM) -> dict[tuple[int, ...], float]:
    """The joint distribution of the next tokens, from the target's scores of every continuation."""
    tokens, prompt = allowed(llm), llm.tokenizer.encode(PROMPT)
    score = SamplingParams(max_tokens=1, prompt_logprobs=llm.tokenizer.vocab_size)
    joint: dict[tuple[int, ...], float] = {}
    for path in product(tokens, repeat=LENGTH):
        (output,) = llm.generate([[*prompt, *path]], score)
        probability = 1.0
        for position, token in enumerate(path, len(prompt)):
            scores = output.prompt_logprobs[position]
            weights = {t: math.exp(scores[t].logprob / TEMPERATURE) for t in tokens}
            probability *= weights[token] / sum(weights.values())
        joint[path] = probability
    return joint


def p_value(llm: LLM, joint: dict[tuple[int, ...], float]) -> float:
    params = SamplingParams(
        temperature=TEMPERATURE,
        max_tokens=LENGTH,
        n=NUM_SAMPLES,
        seed=1,
        allowed_token_ids=allowed(llm),
    )
    (output,) = llm.generate(PROMPT, params)
    assert sum(answer.stats["drafted"] for answer in output.outputs) > NUM_SAMPLES / 2
    seen = Counter(tuple(answer.token_ids) for answer in output.outputs)
    assert sum(seen.values()) == NUM_SAMPLES
    observed = [seen[path] for path in joint]
    return float(chisquare(observed, [p * NUM_SAMPLES for p in joint.values()]).pvalue)


def believes_the_draft(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """A planted fault: one guess in four is taken whatever the target says."""
    tokens, nodes = exact.walk(draft, target)
    is_taken = int(target.sampling.sample_X[draft.row]) % 4 == 0
    if is_taken and draft.tokens and nodes[0] < 0:
        tokens[0] = draft.tokens[0]
    return tokens, nodes


@pytest.mark.parametrize("name", [pytest.param("ngram", marks=pytest.mark.slow), "suffix"])
def test_joint_distribution(name: str, tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm(name)
    joint = expected(tiny_llm("off"))
    assert abs(sum(joint.values()) - 1) < 1e-6
    assert p_value(llm, joint) > 1e-3


@pytest.mark.slow  # test_verifiers.py plants faults daily
def test_a_planted_bias_is_seen(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm("ngram")
    joint = expected(tiny_llm("off"))
    monkeypatch.setattr(llm.engine.runner.host, "verify", Verifier(believes_the_draft))
    assert p_value(llm, joint) < 1e-6

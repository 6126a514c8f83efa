"""Many requests of every kind in a KV cache for a few: preempted, recomputed, the same."""

from collections.abc import Callable
from typing import Any

import pytest

from hunch import LLM, RequestOutput, SamplingParams, Speculation

SLOW = pytest.mark.slow
NUM_REQUESTS, NUM_ROWS = 120, 12
TIGHT = {"num_blocks": 18, "block_size": 8, "max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 96}
PREFIXES = [
    "the model and the guess of the model in the token",
    "fast token fast token fast token fast",
    "0123456789 0123456789 0123",
    "",
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 30, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "max_tokens": 26},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "max_tokens": 24},
    {"temperature": 1.0, "top_k": 30, "logprobs": 3, "max_tokens": 18},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1, "max_tokens": 12},
    {"temperature": 0.9, "structured_outputs": {"regex": "[a-f]{4,20}( token)?"}},
    {"temperature": 0.6, "structured_outputs": {"choice": ["the model", "the guess of it"]}},
    {"temperature": 1.0, "n": 3, "max_tokens": 14, "stop": ["e", "of "], "min_tokens": 2},
    {"temperature": 0.5, "bad_words": ["the"], "logit_bias": {5: 2.0}, "max_tokens": 22},
    {"temperature": 0, "presence_penalty": 1.0, "max_tokens": 28, "ignore_eos": True},
]
WISHES = [None, None, Speculation(mode="off"), Speculation(max_nodes=2)]


def requests() -> tuple[list[str], list[SamplingParams]]:
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        prompts.append(f"{PREFIXES[number % 4]} {number % 7} of {number % 23}")
        asked = KINDS[number * 7 % len(KINDS)] | {"seed": number}
        if number % 11 == 3:
            asked["prediction"] = "fast token fast token fast"
        if (wish := WISHES[number % len(WISHES)]) is not None:
            asked["speculation"] = wish
        params.append(SamplingParams(**asked))
    return prompts, params


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(a.token_ids, a.text, a.finish_reason, a.stop_reason) for a in output.outputs]
        for output in outputs
    ]


def scores(outputs: list[RequestOutput]) -> list[float]:
    """Every log-probability that was asked for."""
    places = [
        place
        for output in outputs
        for part in (output.prompt_logprobs or [], *(a.logprobs or [] for a in output.outputs))
        for place in part
        if place is not None
    ]
    return [one.logprob for place in places for _, one in sorted(place.items())]


def finished_order(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[int]:
    """In which order the requests end."""
    ids = llm._requests.add(prompts, params, stream=False)
    order = [output.request_id for output in llm._requests.run(ids) if output.finished]
    return [ids.index(one) for one in order]


@pytest.fixture(scope="module")
def ample(tiny_llm: Callable[..., LLM]) -> list[RequestOutput]:
    prompts, params = requests()
    llm = tiny_llm("off")
    outputs = llm.generate(prompts, params)
    assert llm.stats()["num_preemptions"] == 0
    return outputs


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("off", 0),
        ("suffix", 1),
        ("draft", 0),
        *(pytest.param(name, 1, marks=SLOW) for name in ("auto", "draft", "eagle3", "recycling")),
    ],
)
def test_every_answer_is_that_of_an_ample_cache(
    name: str, depth: int, tiny_llm: Callable[..., LLM], ample: list[RequestOutput]
) -> None:
    llm = tiny_llm(name, depth=depth, **TIGHT)
    before = llm.stats()["num_preemptions"]
    prompts, params = requests()
    found = llm.generate(prompts, params)
    assert llm.stats()["num_preemptions"] > before + 5
    assert answers(found) == answers(ample)
    expected = scores(ample)
    assert len(expected) > 1000
    assert scores(found) == pytest.approx(expected, abs=1e-4)
    while llm.engine.has_work():  # a step that was planned before the last answer ended
        llm.engine.step()
    pool = llm.engine._scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not llm.engine.has_work()


def test_nobody_starves(tiny_llm: Callable[..., LLM]) -> None:
    """Whoever is preempted comes back before those that came after: none ends far too late."""
    prompts, params = requests()
    order = finished_order(tiny_llm("ngram", **TIGHT), prompts, params)
    assert sorted(order) == list(range(NUM_REQUESTS))
    assert max(place - number for place, number in enumerate(order)) <= 2 * NUM_ROWS

"""The law, for every registered drafter: the text is decided by the target and the seed alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from drafters import NETWORKS
from hunch import LLM, RequestOutput, SamplingParams, Speculation
from hunch.registry import DRAFTERS

SLOW = pytest.mark.slow
PROMPTS = [
    "the model and the guess",
    "fast token fast token fast token fast",
    "a",
    "in the model of the guess in the model of the",
    "0123456789 0123456789 0123",
    "to be or not to be, to be or",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7),
    "hot": SamplingParams(temperature=1.0, max_tokens=24, seed=11),
    "processors": SamplingParams(
        temperature=0.7,
        top_k=40,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={5: 2.0, 9: -50.0},
        bad_words=["the"],
        min_tokens=6,
        max_tokens=24,
        seed=3,
    ),
    "greedy processors": SamplingParams(
        temperature=0,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        allowed_token_ids=list(range(30, 200)),
        max_tokens=24,
    ),
    "stops": SamplingParams(temperature=0, max_tokens=32, stop=["e", "of "], min_tokens=2),
    "samples": SamplingParams(temperature=1.0, top_k=20, n=3, max_tokens=16, seed=5),
}
ENGINES: dict[str, dict[str, object]] = {
    "one at a time": {"max_num_seqs": 1},
    "batch of 16": {},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "middling chunks": {"max_num_batched_tokens": 17},
    "few blocks": {"num_blocks": 16, "block_size": 8, "max_num_seqs": 6},
    "no prefix cache": {"enable_prefix_caching": False},
    "depth 1": {"depth": 1},
    "torch kernels": {"kernels": "torch", "max_num_seqs": 4},
    "depth 1, few blocks": {"depth": 1, "num_blocks": 18, "block_size": 8, "max_num_seqs": 5},
}


def answers(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str, str | None]]]:
    return [
        [(answer.token_ids, answer.text, answer.finish_reason) for answer in output.outputs]
        for output in outputs
    ]


def run(llm: LLM, params: SamplingParams) -> list[list[tuple[list[int], str, str | None]]]:
    return answers(llm.generate(PROMPTS, params))


@pytest.fixture(scope="module")
def plain(tiny_llm: Callable[..., LLM]) -> dict[str, list[list[tuple[list[int], str, str | None]]]]:
    llm = tiny_llm("off", max_num_seqs=1)
    return {name: run(llm, params) for name, params in PARAMS.items()}


# Networks take their time on small models too: some of their pairs are left to the slow run.
DAILY = ("batch of 16", "small chunks", "depth 1, few blocks")
# What differs from another method in little that engines matter to: one engine a day is enough.
ALIKE = ("dflash", "dflash2", "eagle", "mtp", "text", "merge", "synthetic")
# Of methods without a network: the default one, and one that drafts trees. The others reach no
# further into an engine.
EVERYWHERE = ("auto", "recycling")


def is_daily(name: str, engine: str) -> bool:
    if name in ALIKE:
        return engine == DAILY[-1]
    if engine == "small chunks" and name in NETWORKS:
        return name in ("draft", "eagle3")  # chunks reach networks by one way with KV
    return name in EVERYWHERE or engine in DAILY


PAIRS = [
    pytest.param(name, engine, marks=[] if is_daily(name, engine) else SLOW)
    for name in sorted(DRAFTERS)
    for engine in sorted(ENGINES)
]


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_text_does_not_depend_on_the_drafter(
    name: str, engine: str, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    llm = tiny_llm(name, **ENGINES[engine])
    kinds = PARAMS if engine == "batch of 16" else ("greedy", "seeded", "processors")
    for kind in kinds:
        assert run(llm, PARAMS[kind]) == plain[kind], kind


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"off"}))
def test_drafts_are_made_and_some_are_accepted(
    name: str, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    """Equality means little if nothing was ever guessed."""
    fresh = {"max_model_len": 250}  # `auto` may have learned from other tests that it is hopeless
    if name == "auto":  # and of random texts that come together none would gain
        fresh["max_num_seqs"] = 1
    params = [PARAMS["greedy"]] * len(PROMPTS)
    if name == "prediction":  # it guesses what it is told to
        params = [replace(PARAMS["greedy"], prediction=a[0][0]) for a in plain["greedy"]]
    llm = tiny_llm(name, **fresh)
    if name == "synthetic":  # it guesses what it has seen once
        llm.generate(PROMPTS, params)
    outputs = llm.generate(PROMPTS, params)
    drafted = sum(answer.stats["drafted"] for output in outputs for answer in output.outputs)
    assert drafted > 0
    if name != "auto":
        steps = sum(output.outputs[0].stats["steps"] for output in outputs)
        assert sum(output.outputs[0].stats["accepted"] for output in outputs) > 0
        assert steps < 32 * len(PROMPTS)


def test_preemption_happens_where_blocks_are_few(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("ngram", **ENGINES["few blocks"])
    llm.generate(PROMPTS, PARAMS["greedy"])
    assert llm.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"off"}))
def test_a_request_may_switch_speculation_off_and_on_again(
    name: str, tiny_llm: Callable[..., LLM]
) -> None:
    llm = tiny_llm(name)
    base = {"temperature": 0.9, "seed": 4, "max_tokens": 24}
    wishes = [Speculation(mode="off"), Speculation(max_nodes=1), Speculation()]
    texts = []
    for wish in wishes:
        outputs = llm.generate(PROMPTS, SamplingParams(**base, speculation=wish))
        texts.append(answers(outputs))
        if wish.mode == "off":
            assert all(output.outputs[0].stats["drafted"] == 0 for output in outputs)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_logprobs_do_not_depend_on_the_drafter(name: str, tiny_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=24, logprobs=3, prompt_logprobs=2)
    expected = tiny_llm("off", max_num_seqs=1).generate(PROMPTS, params)
    for one, other in zip(expected, tiny_llm(name).generate(PROMPTS, params), strict=True):
        assert_close(one.outputs[0].logprobs, other.outputs[0].logprobs)
        assert one.prompt_logprobs[0] is None
        assert_close(one.prompt_logprobs[1:], other.prompt_logprobs[1:])


def assert_close(expected: list, found: list) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert set(one) == set(other)
        for token, score in one.items():
            assert abs(score.logprob - other[token].logprob) < 1e-4


def test_a_request_without_a_seed_reports_the_one_it_got(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("ngram")
    (first,) = llm.generate("the model", SamplingParams(temperature=1.0, max_tokens=24))
    seed = first.outputs[0].seed
    (again,) = llm.generate("the model", SamplingParams(temperature=1.0, max_tokens=24, seed=seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[SLOW] * (name in ALIKE))
        for name in sorted(set(DRAFTERS) - {"off"})
    ],
)
def test_a_prediction_changes_the_time_and_never_the_text(
    name: str, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    """Right, wrong, right from the middle on, and of another request: beside every method."""
    llm = tiny_llm(name, always_draft=True)  # no measured time decides who drafts
    for kind in ("greedy", "seeded", "processors"):
        right = [answer[0][0] for answer in plain[kind]]
        told = [right[0], right[1][::-1], right[2][7:] + right[2][:7], right[0], [5, 6], ()]
        params = [replace(PARAMS[kind], prediction=tokens) for tokens in told]
        outputs = llm.generate(PROMPTS, params)
        assert answers(outputs) == plain[kind]
        if kind == "greedy":
            counts = outputs[0].outputs[0].stats["drafters"]["prediction"]
            assert counts["accepted"] > 20
            assert outputs[0].outputs[0].stats["steps"] < 20

"""Any request gets an answer or a clear error, and the same one with speculation on and off."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hunch import LLM, HunchError, SamplingParams

VOCAB = 287
WORDS = [
    "the",
    " model",
    "fast",
    " token",
    "ing",
    "0",
    "é",
    "\n",
    " ",
    "{",
    '"',
    "世",
    "\u0000",
    "🙂",
]

texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
ids = st.integers(-1, VOCAB)  # both ends are outside
prompts = st.one_of(
    texts, texts.map(lambda text: text * 3), st.lists(ids, max_size=8), st.just("the " * 150)
)
numbers = st.one_of(
    st.floats(-1, 3), st.sampled_from([0, 1, 1e-6, 0.7, 2.0, float("nan"), float("inf"), 1e30])
)
grammars = st.sampled_from(
    [
        None,
        None,
        None,
        {"regex": "[a-f]{2,5}( token)?"},
        {"regex": "("},
        {"choice": ["the model", "the guess"]},
        {"json": {"type": "object", "properties": {"a": {"enum": [1, "é"]}}, "required": ["a"]}},
        {"json": {"type": "array", "items": {"type": "boolean"}}},
        {"json": "no"},
        {"grammar": 'root ::= "x" root?'},
        {"grammar": "start: start"},
        {"json_object": True},
        {"nothing": 1},
    ]
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.5, 1, 1.7]),
    "max_tokens": st.integers(1, 12),
    "seed": st.integers(0, 2**63 - 1),
}
possible: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([1, 2, 3, 0]),
    "top_p": numbers,
    "top_k": st.integers(-2, 400),
    "min_p": numbers,
    "repetition_penalty": numbers,
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "logit_bias": st.dictionaries(ids, st.floats(-101, 101), max_size=3),
    "bad_words": st.lists(st.sampled_from(WORDS), max_size=3),
    "allowed_token_ids": st.lists(ids, max_size=4),
    "min_tokens": st.integers(-1, 14),
    "stop": st.one_of(st.sampled_from(WORDS), st.lists(st.sampled_from(WORDS), max_size=2)),
    "stop_token_ids": st.lists(ids, max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(-1, 5),
    "prompt_logprobs": st.integers(-1, 3),
    "structured_outputs": grammars,
    "max_tokens": st.sampled_from([None, 0, 1, 20]),
    "temperature": numbers,
    "prediction": st.one_of(texts, st.lists(ids, max_size=4)),
}
requests = st.builds(
    lambda base, more: {**base, **more},
    st.fixed_dictionaries(likely),
    st.fixed_dictionaries({}, optional=possible),
)


def outcome(llm: LLM, prompt: Any, asked: dict[str, Any]) -> Any:
    """What the user sees: the answers, or the error's kind and text."""
    try:
        (output,) = llm.generate([prompt], SamplingParams(**asked), use_tqdm=False)
    except HunchError as error:
        return type(error).__name__, str(error)
    answers = [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason, [list(s) for s in a.logprobs or []])
        for a in output.outputs
    ]
    for tokens, _, reason, *_ in answers:
        assert reason in ("stop", "length", "abort")
        assert tokens or reason == "abort"
    json.dumps(answers)
    return answers


def check(tiny_llm: Callable[..., LLM], prompt: Any, asked: dict[str, Any]) -> None:
    expected = outcome(tiny_llm("off", max_num_seqs=2), prompt, asked)
    for drafter in ("suffix:adaptive=false", "draft:num_nodes=3"):
        assert outcome(tiny_llm(drafter, max_num_seqs=2), prompt, asked) == expected


common = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=200, **common)
@given(prompt=prompts, asked=requests)
def test_any_request(tiny_llm: Callable[..., LLM], prompt: Any, asked: dict[str, Any]) -> None:
    check(tiny_llm, prompt, asked)


@pytest.mark.slow
@settings(max_examples=2000, **{**common, "derandomize": False})
@given(prompt=prompts, asked=requests)
def test_many_requests(tiny_llm: Callable[..., LLM], prompt: Any, asked: dict[str, Any]) -> None:
    check(tiny_llm, prompt, asked)

"""Hostile grammars end in an error in time, and a request beside them goes on as if alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hunch import LLM, SamplingParams
from hunch.errors import GrammarError
from tiny_models import write_llama


def exponential(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [{"properties": {"a": schema}}, {"properties": {"b": schema}}]}
    return schema


# Each of them is an error; `test_compile.py` has more, some of which compile after all.
HOSTILE: dict[str, dict[str, Any]] = {
    "exponential": {"json": exponential(18)},
    "10 MB": {"regex": "|".join(["abcdefghi"] * 1_000_000)},
    "10 MB of grammar": {"grammar": "root ::= " + '"a" | ' * 1_700_000 + '"a"'},
    "invalid": {"regex": "(((("},
    "invalid schema": {"json": {"$ref": "#/nowhere"}},
}
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=200, ignore_eos=True)
PROMPT = [5, 9, 30, 31]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("hostile") / "target")
    with LLM(str(path), speculate="suffix", max_model_len=256, kv_bytes=8_000_000) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], LONG)[0].outputs[0].token_ids


@pytest.mark.parametrize("name", HOSTILE)
def test_an_error_offline(name: str, llm: LLM, undisturbed: list[int]) -> None:
    began = time.perf_counter()
    with pytest.raises(GrammarError) as caught:
        llm.generate([PROMPT], SamplingParams(structured_outputs=HOSTILE[name]))
    assert time.perf_counter() - began < 60
    assert len(str(caught.value)) < 500
    assert llm.generate([PROMPT], LONG)[0].outputs[0].token_ids == undisturbed


@pytest.mark.parametrize("name", HOSTILE)
def test_another_request_goes_on_meanwhile(name: str, llm: LLM, undisturbed: list[int]) -> None:
    """As a server does it: requests are checked in a thread while the engine steps in another."""
    refused: list[str] = []
    took: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        began = time.perf_counter()
        try:
            llm.engine.check(name, PROMPT, SamplingParams(structured_outputs=HOSTILE[name]))
        except GrammarError as error:
            refused.append(str(error))
        took.append(time.perf_counter() - began)
        is_over.set()

    asking = threading.Thread(target=ask)
    asking.start()
    while True:  # at least one whole answer, and answers for as long as the other one asks
        is_last, tokens = is_over.is_set(), list[int]()
        for output in llm.stream(PROMPT, LONG):
            tokens = output.outputs[0].token_ids
        assert tokens == undisturbed
        if is_last:
            break
    asking.join()
    assert refused
    assert took[0] < 60

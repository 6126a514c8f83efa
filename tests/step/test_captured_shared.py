"""Lookups in the answers of other requests, in captured steps: plain decoding's tokens.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from hunch import LLM, RequestOutput, SamplingParams
from hunch.config import say_once
from stand_in import lead_by_host, lead_noted, stand_in
from tiny_models import write_llama

SMALL: dict[str, Any] = {
    "device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9, 4], list(range(10, 31))]
SAMPLED = SamplingParams(temperature=1.2, seed=3, max_tokens=40, ignore_eos=True)
SHARED = "suffix:shared=true:shared_tokens=300"


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("shared") / "model", width=32, layers=2)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            return tokens(llm.generate(PROMPTS, SAMPLED))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.outputs[0].stats["accepted"] for output in outputs)


@pytest.mark.parametrize("given", [{}, {"max_num_seqs": 1}], ids=["together", "one by one"])
def test_an_answer_is_found_the_second_time(
    given: dict[str, Any],
    model: Path,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(str(model), speculate=f"{SHARED}:adaptive=false", **SMALL, **given) as llm:
        first = llm.generate(PROMPTS, SAMPLED)
        by_host = lead_noted(monkeypatch)
        second = llm.generate(PROMPTS, SAMPLED)
        assert tokens(first) == tokens(second) == plain
        assert sum(len(plan.work) for plan in by_host) == len(PROMPTS), "prompts alone"
        assert accepted(second) > accepted(first) + 40
        llm.reset_cache()  # which forgets answers, too
        third = llm.generate(PROMPTS, SAMPLED)
        assert tokens(third) == plain
        assert accepted(third) == accepted(first)
    assert "the host drafts" not in caplog.text


def test_the_host_drafts_for_rows_that_captured_steps_cannot_serve(
    model: Path, plain: list[list[int]]
) -> None:
    """From their own texts."""
    repeated = [[5, 6, 7, 8] * 5, [4] * 9]
    with LLM(str(model), speculate=f"{SHARED}:adaptive=false", **SMALL) as llm:
        lead_by_host(llm.engine.runner)
        assert tokens(llm.generate(PROMPTS, SAMPLED)) == plain
        assert llm.generate(repeated, SAMPLED)[0].outputs[0].stats["drafted"] > 0


def test_beside_other_drafters_the_host_looks_up(
    model: Path, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    for method in (
        f"{SHARED}+draft:{model}:num_nodes=2",
        f"auto:shared=true:shared_tokens=300:draft={model}",
    ):
        with LLM(str(model), speculate=method, **SMALL) as llm:
            for _ in range(2):
                assert tokens(llm.generate(PROMPTS, SAMPLED)) == plain
    assert "the host drafts" in caplog.text

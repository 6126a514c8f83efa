"""Synthetic drafts in captured steps: the wished tokens per pass, and plain decoding's tokens.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from hunch import LLM, RequestOutput, SamplingParams
from hunch.bench import loads
from hunch.bench.offline import EngineSubject
from stand_in import lead_noted, stand_in
from tiny_models import write_llama

SMALL: dict[str, Any] = {
    "device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 4, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=32, ignore_eos=True)
SPECULATE = "synthetic:tokens_per_pass=2.5"


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("synthetic") / "model", width=32, layers=2)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            kinds = {"greedy": GREEDY, "sampled": SAMPLED}
            return {kind: tokens(llm.generate(PROMPTS, p)) for kind, p in kinds.items()}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def steps(outputs: list[RequestOutput]) -> int:
    return sum(output.outputs[0].stats["steps"] for output in outputs)


@pytest.mark.parametrize("given", [{}, {"max_num_seqs": 2}], ids=["all", "two rows"])
def test_a_second_run_has_the_wished_tokens_per_pass(
    given: dict[str, Any], model: Path, plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with LLM(str(model), speculate=SPECULATE, **SMALL, **given) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        assert tokens(first) == plain["greedy"]
        assert all(output.outputs[0].stats["drafted"] == 0 for output in first)
        by_host = lead_noted(monkeypatch)
        second = llm.generate(PROMPTS, GREEDY)
        assert tokens(second) == plain["greedy"]
        assert sum(len(plan.work) for plan in by_host) == len(PROMPTS), "prompts alone"
        assert 64 * len(PROMPTS) / steps(second) == pytest.approx(2.5, rel=0.12)
        assert all(output.outputs[0].stats["synthetic"] for output in second)
        for _ in range(2):
            sampled = llm.generate(PROMPTS, SAMPLED)
            assert tokens(sampled) == plain["sampled"]
        assert steps(sampled) < 0.6 * 32 * len(PROMPTS)
    assert "for the first time" in caplog.text
    assert "the host drafts" not in caplog.text


def test_other_rules_and_lengths_than_the_first_time(
    model: Path, plain: dict[str, list[list[int]]]
) -> None:
    with LLM(str(model), speculate=SPECULATE, **SMALL) as llm:
        short = replace(GREEDY, max_tokens=12)
        assert tokens(llm.generate(PROMPTS, short)) == [a[:12] for a in plain["greedy"]]
        longer = llm.generate(PROMPTS, GREEDY)  # drafted for as far as the first time went
        assert tokens(longer) == plain["greedy"]
        assert 64 * len(PROMPTS) > steps(longer) > 44 * len(PROMPTS)
        assert steps(llm.generate(PROMPTS, short)) < 10 * len(PROMPTS)
        assert steps(llm.generate(PROMPTS, GREEDY)) < 32 * len(PROMPTS)
        banned = replace(GREEDY, logit_bias={plain["greedy"][1][6]: -100.0})
        departed = llm.generate(PROMPTS[1], banned)[0].outputs[0]
    with LLM(str(model), speculate="off", **SMALL) as llm:
        assert departed.token_ids == llm.generate(PROMPTS[1], banned)[0].outputs[0].token_ids
    assert departed.stats["drafted"] < 20


def test_requests_that_come_and_go_are_each_remembered(
    model: Path, plain: dict[str, list[list[int]]]
) -> None:
    """Also when rows are preempted, as blocks are few."""
    few = {**SMALL, "kv_bytes": None, "num_blocks": 40, "max_num_seqs": 3}
    with LLM(str(model), speculate=SPECULATE, **few) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, GREEDY)
            assert tokens(found) == plain["greedy"]
        assert steps(found) < 0.6 * 64 * len(PROMPTS)


def test_a_bench_runs_every_request_once_before_it_measures(
    model: Path, plain: dict[str, list[list[int]]]
) -> None:
    with LLM(str(model), speculate=SPECULATE, **SMALL) as llm:
        jobs = [loads.Job(str(p), "", p, GREEDY, {}) for p in PROMPTS]
        subject = EngineSubject("synthetic", llm)
        subject.warm(jobs, load := loads.Load(concurrency=4))
        found = subject.drive(jobs, load)
    counts = found.counts["captured"]["shapes"]
    assert any(name.startswith("4 rows, ") for name in counts)
    assert found.counts["accepted"] > 0.4 * 64 * len(PROMPTS)

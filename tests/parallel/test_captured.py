"""Captured steps of a target over two ranks: the text of steps run by the host.

The device's kernels are replaced by their specification, and its memory by messages;
tests/kernels/test_gpu_exchange.py holds what passes through shared memory.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from drafters import NETWORKS, TEXTS, speculate_for
from hunch import LLM, SamplingParams
from hunch.compat import config_from_vllm
from hunch.errors import EngineError
from hunch.parallel import executor
from hunch.parallel.split_target import load_split
from hunch.parallel.step_parts import LedPasses
from parallel.captured_rank import split_stand_in
from stand_in import lead_by_host, lead_noted, stand_in
from tiny_models import write_llama

TESTS = Path(__file__).parents[1]
PROMPTS = list(TEXTS[:2])
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, max_tokens=8, seed=5),
    "rules": SamplingParams(temperature=0.7, presence_penalty=0.7, max_tokens=8, seed=8),
}
SMALL: dict[str, Any] = {
    "device": "cpu", "num_blocks": 80, "max_model_len": 128, "block_size": 4, "max_num_seqs": 2,
}  # fmt: skip
TREE = "draft:{}:tree=dynamic:depth=3:num_nodes=6:adaptive=false"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("split") / "model", width=32, layers=2))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    """Over two ranks, of which the other is a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        split_stand_in(patch)
        patch.setattr(executor, "FOLLOWER", "parallel.captured_rank")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, [*sys.path, str(TESTS)])))
        config = config_from_vllm(
            model=model, speculate="off", tensor_parallel_size=2, threads=1, **SMALL
        )
        llm = LLM.__new__(LLM)
        llm._open(config, None, lambda *given: load_split(given[0], given[1].path, given[2]))
        yield llm
        llm.engine.runner.target.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """Every step run by the host."""
    runner: Any = llm.engine.runner
    captured = runner.captured
    lead_by_host(runner)
    found = texts(llm)
    runner.captured = runner.host.captured = captured
    return found


def texts(llm: LLM) -> list[list[int]]:
    llm.reset_cache()
    params = [given for given in PARAMS.values() for _ in PROMPTS]
    outputs = llm.generate(PROMPTS * len(PARAMS), params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("off", marks=pytest.mark.slow),  # first: the engine that was made last draws
        TREE,
        pytest.param("suffix:adaptive=false", marks=pytest.mark.slow),
        pytest.param("draft:{}:num_nodes=3:adaptive=false", marks=pytest.mark.slow),
        # Heads that score by the target's output matrix, parts of which other ranks hold.
        pytest.param("eagle", marks=pytest.mark.slow),
        pytest.param("medusa", marks=pytest.mark.slow),
        pytest.param("dspark", marks=pytest.mark.slow),
    ],
)
def test_text_is_that_of_steps_led_by_the_host(
    method: str,
    model: str,
    llm: LLM,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if method in NETWORKS:
        method = speculate_for(method, Path(model), tmp_path)
    by_host = lead_noted(monkeypatch)
    other = llm if method == "off" else llm.sibling(method.format(model))
    assert isinstance(other.engine.runner.host.passes, LedPasses)  # type: ignore[attr-defined]
    assert texts(other) == plain
    assert sum(len(plan.work) for plan in by_host) == len(plain)  # their prompts, nothing else
    assert method == "off" or other.stats()["accepted"] > 0


def test_a_dead_rank_ends_a_captured_step(llm: LLM) -> None:
    """The last test: nothing can be asked after it."""
    ranks = llm.engine.runner.target.ranks  # type: ignore[attr-defined]
    process: subprocess.Popen[bytes] = ranks._processes[0]
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
    next(stream)
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - began < 300

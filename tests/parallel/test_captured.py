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

import torch

import hunch.step.captured_step
import hunch.step.step_graphs
from drafters import NETWORKS, TEXTS, speculate_for
from hunch import LLM, SamplingParams
from hunch.compat import config_from_vllm
from hunch.errors import EngineError
from hunch.parallel import executor
from hunch.parallel.split_target import load_split
from hunch.parallel.step_lead import LedPasses
from hunch.step.host_step import HostStep
from parallel.captured_rank import split_stand_in
from parallel.failing_rank import PLANTED
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
def num_to_fail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How many graphs of rank 1 find no memory from now on."""
    file = tmp_path_factory.mktemp("planted") / "planted"
    file.write_text("0")
    return file


@pytest.fixture(scope="module")
def llm(model: str, num_to_fail: Path) -> Iterator[LLM]:
    """Over two ranks, of which the other is a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLANTED, str(num_to_fail))
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
    with monkeypatch.context() as patch:
        patch.setattr(HostStep, "run", None)  # also of prompts, the host only launches the passes
        assert texts(other) == plain
    assert sum(len(plan.work) for plan in by_host) == len(plain)  # their prompts, nothing else
    assert method == "off" or other.stats()["accepted"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_graphs_for_which_a_rank_lacks_memory_are_on_none(
    rank: int,
    llm: LLM,
    plain: list[list[int]],
    num_to_fail: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host runs those steps, with the same text; later the graphs are captured."""
    monkeypatch.setattr(hunch.step.captured_step, "MAX_PREPARED", 1)  # others as they are needed
    other = llm.sibling("suffix:adaptive=false")
    by_host, pack, left = lead_noted(monkeypatch), hunch.step.step_graphs.pack, [2]

    def planted(*given: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        pack(*given)

    if rank == 0:
        monkeypatch.setattr(hunch.step.step_graphs, "pack", planted)
    else:
        num_to_fail.write_text("2")
    assert texts(other) == plain
    num_left = left[0] if rank == 0 else int(num_to_fail.read_text())
    assert num_left == 0
    num_steps = sum(len(plan.work) for plan in by_host)
    assert num_steps > len(plain)
    assert texts(other) == plain
    assert sum(len(plan.work) for plan in by_host) == num_steps + len(plain)


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

"""Starts an engine as on a GPU that is not there, and prints what its rehearsal noted, as JSON.

    TRITON_INTERPRET=0 PYTHONPATH=src:tests python tests/rehearsed_start.py MODEL METHOD...

Nothing is launched or compiled, but for a few of the noted kernels, by workers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

import compile_only
import hunch.loading
import hunch.step.calibrate
from hunch import LLM
from hunch.kernels.gpu_compile import CompileWorkers, Job, Noter, Unwritten
from hunch.models.cuda import CudaDecoder
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.step.ahead import Ahead
from hunch.step.capture import rehearsed
from hunch.step.row_extras import with_extras
from hunch.step.runner import Runner

SMALL: dict[str, Any] = {
    "device": "cpu", "kv_bytes": 2_000_000, "max_model_len": 64, "max_num_seqs": 2,
}  # fmt: skip

COMPILED = 2


def load_target(config: Any, files: Any, device: torch.device) -> CudaDecoder:
    return CudaDecoder(load_decoder(open_weights(files), dtype="bfloat16", device=device))


class Launches:
    """Kernels that a start asks for; none is compiled."""

    def __init__(self) -> None:
        self.found: set[Job] = set()

    def __call__(self, *, fn: Any, compile: Any, **_: Any) -> bool:
        source = fn.jit_function.cache_key
        self.found.add(Job(fn.module, fn.name, source, compile["specialization_data"]))
        return True


def memory_of(runner: Runner) -> list[Tensor]:
    """What steps read and write."""
    rows = runner.captured.device_rows
    kv = [tensor for cache in runner.host.kv for tensor in (cache.k_LCMH, cache.v_LCMH)]
    return [rows.state.flat, rows.inputs_3R, *kv]


def rehearse(runner: Runner) -> list[Job]:
    """What the runner's preparations will launch; it leaves the runner as it was."""
    noted: list[Job] = []
    before = [tensor.clone() for tensor in memory_of(runner)]
    steps = runner.captured.steps
    num_steps, tables = len(steps._steps), steps.rules._tables
    with rehearsed(Noter(noted.append)):
        for prepare in runner.preparations(is_rehearsal=True):
            prepare()
    assert all(map(torch.equal, before, memory_of(runner))), "a rehearsal wrote"
    assert len(steps._steps) == num_steps, "a rehearsal captured"
    assert steps.rules._tables is tables, "a rehearsal took memory"
    return noted


def unwritten(body: Callable[[], Any]) -> Any:
    with Unwritten():
        return body()


def note_start(launches: Launches) -> Callable[..., None]:
    """In place of `Ahead.prepare`."""

    def prepare(ahead: Ahead, runner: Runner, bar: Any, *, is_greedy: bool) -> None:
        launches.found.clear()
        noted = rehearse(runner)
        assert not launches.found, "a rehearsal launched"
        with rehearsed(unwritten):  # there are no numbers here that could be read
            for one in runner.preparations(is_greedy=is_greedy):
                one()
            in_start = len(launches.found)
            captured = runner.captured
            for kind in with_extras(captured.usual_kinds(is_greedy=is_greedy)):
                captured.steps.step(kind)
        report = {
            "noted": len(noted),
            "in_start": in_start,
            "missed": sorted(job.name for job in launches.found.difference(noted)),
            "needless": sorted(job.name for job in set(noted) - launches.found),
            "compiled": compiled(noted[:COMPILED]),
            "found": len(noted) - len(rehearse(runner)),  # in the cache, since then
        }
        print(json.dumps(report))

    return prepare


def compiled(jobs: list[Job]) -> list[bool]:
    workers = CompileWorkers(2)
    try:
        for job in jobs:
            workers.submit(job)
        return list(workers.results())
    finally:
        workers.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("methods", nargs="+")
    given = parser.parse_args()
    compile_only.pytest_configure(None)  # type: ignore[arg-type]
    launches = Launches()
    knobs.runtime.jit_cache_hook = launches
    hunch.loading.load_target_of = load_target
    hunch.step.calibrate.is_finite = lambda runner: True
    Ahead.prepare = note_start(launches)
    assert JITFunction.run is compile_only.compile_only
    for method in given.methods:
        LLM(given.model, speculate=method, **SMALL).close()


if __name__ == "__main__":
    main()

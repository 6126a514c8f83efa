"""A step that runs out of memory in its middle: no other request is lost, and no text changes.

Failures are planted in steps of several rows. Steps run by the host and captured ones (by plain
Python here, see stand_in) fail in a layer of the target, where states of the layers before it have
already changed, or in what follows the pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hunch import LLM, SamplingParams
from hunch.kernels.kv_store import KVCache
from hunch.sampling.dense import DeviceProcessors
from hunch.step import prompts
from hunch.step.captured_step import CapturedSteps
from hunch.step.host_step import HostStep
from hunch.step.passes import PassGraphs
from hunch.step.prompts import PromptSteps
from hunch.step.upload import DeviceRows
from stand_in import lead_by_host, stand_in
from tiny_models import write_llama, write_recurrent

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, presence_penalty=0.9, frequency_penalty=0.4, seed=8),
    replace(GREEDY, repetition_penalty=1.5, logprobs=2),
    replace(GREEDY, temperature=1.1, seed=4, max_tokens=7),
]
PROMPTS = [[5, 6, 7, 8] * 3, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]
SMALL = {"device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4}
CHUNKS = {"max_num_batched_tokens": 12}  # prompts take several steps
MODELS = ("dense", "recurrent")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("memory")
    dense = write_llama(folder / "dense", width=32, layers=3)
    return {"dense": dense, "recurrent": write_recurrent(folder / "recurrent")}


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield


def answers(llm: LLM) -> list[tuple[list[int], str | None]]:
    outs = [out.outputs[0] for out in llm.generate(PROMPTS, PARAMS)]
    return [(out.token_ids, out.finish_reason) for out in outs]


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[str, list[tuple[list[int], str | None]]]:
    """Every answer without a failure, one request at a time."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        for name, path in models.items():
            with LLM(str(path), speculate="off", max_num_seqs=1, **SMALL) as llm:
                lead_by_host(llm.engine.runner)
                found[name] = answers(llm)
    return found


class Planted:
    """Fails in every second call of a place, while a step of several rows is under way."""

    def __init__(self, patch: pytest.MonkeyPatch, every: int = 2) -> None:
        self.patch, self.every = patch, every
        self.num_rows = self.num_calls = self.num_failed = 0
        self._steps_of(HostStep, "run", lambda plan: len(plan.work))
        self._steps_of(CapturedSteps, "launch", lambda work, *_: len(work))
        self._steps_of(PromptSteps, "launch", lambda plan, _: len(plan.work))

    def _steps_of(self, owner: type, name: str, count: Callable[..., int]) -> None:
        call = getattr(owner, name)

        def noted(own: Any, *given: Any) -> Any:
            before, self.num_rows = self.num_rows, count(*given)
            try:
                return call(own, *given)
            finally:
                self.num_rows = before

        self.patch.setattr(owner, name, noted)

    def at(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def planted(*given: Any, **options: Any) -> Any:
            self.fail()
            return call(*given, **options)

        self.patch.setattr(owner, name, planted)

    def in_layer(self, runner: Any, number: int) -> None:
        layers = runner.target.decoder.layers
        layer = layers[number]

        def planted(*given: Any) -> Any:
            self.fail()
            return layer(*given)

        layers[number] = planted

    def fail(self) -> None:
        if self.num_rows > 1:
            self.num_calls += 1
            if self.num_calls % self.every == 0:
                self.num_failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory")


def check_nothing_leaked(llm: LLM) -> None:
    scheduler = llm.engine._scheduler
    while llm.engine.has_work():  # a step may be pending after the last answer
        llm.engine.step()
    assert llm.stats()["kv_usage"] == 0
    assert len(scheduler._free_rows) == scheduler.max_rows
    snapshots, count = scheduler.pool.snapshots, llm.engine.capacity.num_snapshots
    if snapshots is not None:
        assert len(snapshots._free) + len(snapshots._numbers) == count
    runner = llm.engine.runner
    assert not runner._queue
    if runner.captured is not None:
        assert runner.captured._num_unreceived == 0


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_a_failure_in_a_layer(
    name: str,
    is_captured: bool,
    number: int,
    models: dict[str, Path],
    plain: dict[str, list[tuple[list[int], str | None]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(str(models[name]), speculate="ngram:adaptive=false", **SMALL, **CHUNKS) as llm:
        if not is_captured:
            lead_by_host(llm.engine.runner)
        planted = Planted(monkeypatch, every=5)
        planted.in_layer(llm.engine.runner, number)
        for _ in range(2):  # the second time with prefixes that are found, from snapshots
            assert answers(llm) == plain[name]
        assert planted.num_failed > 2
        assert (llm.stats()["num_preemptions"] > 0) == (name == "recurrent")
        check_nothing_leaked(llm)


PLACES = {
    "logits": (None, "logits"),  # of the target
    "move": (KVCache, "move"),  # of accepted nodes, in a tree
    "counts": (DeviceProcessors, "commit"),  # of tokens, for penalties
    "observe": (HostStep, "_target_step"),
    "pass": (PassGraphs, "forward"),
    "upload": (DeviceRows, "_send"),
    "states": (prompts, "copy_last_states"),  # of the prompts' last tokens
}
BY_HOST = ("move", "counts", "observe")  # these are not called in captured steps
CASES = [("dense", place) for place in PLACES]
CASES += [("recurrent", "logits"), ("recurrent", "states")]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_failure_beside_the_layers(
    name: str,
    place: str,
    models: dict[str, Path],
    plain: dict[str, list[tuple[list[int], str | None]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = f"draft:{models[name]}:tree=dynamic:depth=3:num_nodes=6"
    method = tree if place == "move" else "ngram"
    with LLM(str(models[name]), speculate=f"{method}:adaptive=false", **SMALL, **CHUNKS) as llm:
        if place in BY_HOST:
            lead_by_host(llm.engine.runner)
        planted = Planted(monkeypatch, every=3 if place == "move" else 2)
        owner, method = PLACES[place]
        planted.at(owner or llm.engine.runner.target, method)
        assert answers(llm) == plain[name]
        assert planted.num_failed > 0
        check_nothing_leaked(llm)

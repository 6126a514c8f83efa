"""`auto` with a draft model in steps that fly: the same tokens, whoever drafts and when.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import hunch.spec.device_auto
from deep_models import write_deep, write_shallow
from hunch import LLM, SamplingParams
from hunch.runner.gpu_runner import GraphRunner
from hunch.spec.pace import Gait
from hunch.types import StepPlan
from plain_steps import stand_in

PROMPTS = [[5, 6, 7, 8] * 4, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    "stops": SamplingParams(temperature=1.2, max_tokens=16, seed=3, stop_token_ids=[9, 21, 40]),
    "filters": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=16, seed=5),
}
SMALL = {"device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "one": {"max_num_seqs": 1},
    "all": {},
    "few blocks": {"kv_bytes": None, "num_blocks": 28, "max_num_seqs": 4},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep(tmp_path_factory.mktemp("flying") / "model")


@pytest.fixture(scope="module")
def draft(model: Path) -> Path:
    return write_shallow(model, model.parent / "draft", noise=0.1)


@pytest.fixture(scope="module")
def exact(model: Path) -> Path:
    return write_shallow(model, model.parent / "exact")


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    """One request at a time, every step by the host, on the same products."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            llm.engine.runner.can_fly = False
            return {name: tokens(llm, params) for name, params in PARAMS.items()}


@pytest.fixture(autouse=True)
def flying() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


def graph_runner(llm: LLM) -> GraphRunner:
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    return runner


def watch(runner: GraphRunner, patch: pytest.MonkeyPatch) -> list[Gait | None]:
    """How every step goes; None: by the host."""
    gaits: list[Gait | None] = []
    decide = runner._gait

    def note(plan: StepPlan) -> Gait | None:
        gaits.append(decide(plan))
        return gaits[-1]

    patch.setattr(runner, "_gait", note)
    return gaits


@pytest.mark.parametrize("engine", ENGINES)
def test_text_does_not_depend_on_who_drafts(
    engine: str,
    model: Path,
    draft: Path,
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hunch.spec.device_auto, "SURE", 2)  # or so short texts repeat too little
    kinds = {"one": ["greedy"], "all": list(PARAMS), "few blocks": ["filters"]}[engine]
    given = {**SMALL, **ENGINES[engine]}
    with LLM(str(model), speculate=f"auto:draft={draft}", **given) as llm:
        for kind in kinds:
            assert tokens(llm, PARAMS[kind]) == plain[kind], kind
        drafters = llm.stats()["drafters"]
        assert drafters["draft"]["accepted"] > 0
        if engine == "all":
            assert drafters["suffix"]["accepted"] > 0
            mixed = [*PARAMS.values(), PARAMS["greedy"]]
            want = [plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
            assert tokens(llm, mixed) == want

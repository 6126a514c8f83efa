"""The law on a GPU, in bfloat16: the same token ids with speculation on and off, in any batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.test_laws import PARAMS, PROMPTS, run
from deep_models import write_deep, write_shallow
from hunch import LLM
from hunch.registry import DRAFTERS
from tiny_models import write_llama

pytestmark = pytest.mark.gpu
GPU = {"device": "cuda", "dtype": "bfloat16", "kv_bytes": 50_000_000}


@pytest.fixture(scope="module")
def plain(tiny_llm: Callable[..., LLM]) -> dict[str, list]:
    llm = tiny_llm("off", max_num_seqs=1, **GPU)
    assert llm.engine.capacity.kernels == "triton"
    return {name: run(llm, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_text_does_not_depend_on_the_drafter(
    name: str, batch: int, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    llm = tiny_llm(name, max_num_seqs=batch, **GPU)
    for kind, params in PARAMS.items():
        assert run(llm, params) == plain[kind], kind


def test_a_wider_model(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "wide", width=576, layers=4))
    plain = run(LLM(path, speculate="off", max_num_seqs=1, **GPU), PARAMS["greedy"])
    for name in (
        "ngram:adaptive=false",
        "suffix:adaptive=false:tree=true",
        "recycling:adaptive=false",
        "auto",
    ):
        assert (
            run(LLM(path, speculate=name, max_num_seqs=len(PROMPTS), **GPU), PARAMS["greedy"])
            == plain
        )


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize(
    "speculate",
    ["auto:draft=PATH", "suffix+draft:PATH", "ngram+draft:PATH:tree=dynamic+merge:adaptive=true"],
)
def test_a_lookup_and_a_draft_model(speculate: str, batch: int, tmp_path: Path) -> None:
    target = write_deep(tmp_path / "target", width=64)
    draft = write_shallow(target, tmp_path / "draft", noise=0.1)
    with LLM(str(target), speculate="off", max_num_seqs=1, **GPU) as llm:
        plain = {name: run(llm, params) for name, params in PARAMS.items()}
    speculate = speculate.replace("PATH", str(draft))
    with LLM(str(target), speculate=speculate, max_num_seqs=batch, **GPU) as llm:
        assert llm.engine.runner.captured.drafter is not None
        for name, params in PARAMS.items():
            assert run(llm, params) == plain[name], name
        assert llm.engine.capacity.methods.keys() & {"draft", "merge"}


@pytest.mark.parametrize("batch", [1, 6])
def test_answers_of_other_requests_are_looked_up_in_captured_steps(
    batch: int, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    llm = tiny_llm("suffix:shared=true:adaptive=false", max_num_seqs=batch, **GPU)
    assert llm.engine.runner.captured.drafter is not None
    for kind, params in PARAMS.items():
        accepted = []
        for _ in range(2):
            before = llm.stats()["accepted"]
            assert run(llm, params) == plain[kind], kind
            accepted.append(llm.stats()["accepted"] - before)
        assert accepted[1] > accepted[0]


@pytest.mark.parametrize("batch", [1, 6])
def test_synthetic_drafts_in_captured_steps(
    batch: int, tiny_llm: Callable[..., LLM], plain: dict[str, list]
) -> None:
    llm = tiny_llm("synthetic:tokens_per_pass=2.5", max_num_seqs=batch, **GPU)
    assert llm.engine.runner.captured.drafter is not None
    for _ in range(2):
        before = llm.stats()
        assert run(llm, PARAMS["greedy"]) == plain["greedy"]
    after = llm.stats()
    drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
    assert drafted > 0
    assert 0.3 < accepted / drafted < 0.8  # 1.5 of 3

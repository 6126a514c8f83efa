"""Recycling in captured steps: plain decoding's tokens, from a table that all requests share.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from hunch import LLM, Speculation
from hunch.drafting.policy import ShapeChoice
from hunch.drafting.step_shapes import DraftSource, StepShape
from small_requests import PARAMS, PROMPTS, SMALL, tokens
from stand_in import lead_noted, stand_in
from tiny_models import write_llama


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("recycling") / "model", width=32, layers=2)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            return {kind: tokens(llm, params) for kind, params in PARAMS.items()}


@pytest.mark.parametrize(
    ("speculate", "given"),
    [
        ("recycling:adaptive=false:num_nodes=12", {}),
        ("suffix:num_nodes=4+recycling:num_nodes=8", {}),
        ("recycling", {"kv_bytes": None, "num_blocks": 40, "max_num_seqs": 3}),
    ],
    ids=["always", "merged", "where it pays, few blocks"],
)
def test_text_does_not_depend_on_recycling(
    speculate: str, given: dict[str, Any], model: Path, plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with LLM(str(model), speculate=speculate, **{**SMALL, **given}) as llm:
        by_host = lead_noted(monkeypatch)
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == plain[kind], kind
        if not given:
            assert sum(len(plan.work) for plan in by_host) == len(PROMPTS) * len(PARAMS)
            (name,) = llm.stats()["drafters"]
            assert llm.stats()["drafters"][name]["accepted"] > 0


def test_what_was_learned_serves_later_requests_until_it_is_cleared(model: Path) -> None:
    """A successor that comes again is in the tree. The same requests bring the same counts."""
    steps = []
    with LLM(str(model), speculate="recycling:adaptive=false:num_nodes=12", **SMALL) as llm:
        drafter = llm.engine.runner.captured.drafter
        assert drafter.shapes == (StepShape(12, DraftSource.TREE),)
        for is_cleared in (False, False, True):
            if is_cleared:
                llm.reset_cache()
            outputs = llm.generate(PROMPTS, PARAMS["greedy"])
            steps.append(sum(out.outputs[0].stats["steps"] for out in outputs))
    assert steps[1] < steps[0] < 40 * len(PROMPTS)
    assert steps[2] == steps[0]


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have one shape after the other, the largest first, each for three steps."""
    turns = 0

    def in_turn(choice: ShapeChoice, row_R: object, num_rows: int, extras: int = 0) -> StepShape:
        nonlocal turns
        turns += 1
        shapes = choice.shapes.at(num_rows)
        return shapes[-1 - turns // 3 % len(shapes)]

    monkeypatch.setattr(ShapeChoice, "best", in_turn)


def test_successors_beside_lookups(
    model: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the policy chooses, and however often it changes its mind."""
    take_turns(monkeypatch)
    with LLM(str(model), speculate="auto", **SMALL) as llm:
        drafter = llm.engine.runner.captured.drafter
        assert [tuple(shape) for shape in drafter.shapes if shape.source > 0] == [
            (7, DraftSource.MERGED), (15, DraftSource.MERGED), (31, DraftSource.MERGED),
        ]  # fmt: skip
        assert [drafter.sees_in(source) for source in (-1, 0, 3)] == [False, False, True]
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == plain[kind], kind
        drafters = llm.stats()["drafters"]
        assert min(drafters[name]["accepted"] for name in ("recycling", "suffix")) > 0


def test_a_row_that_names_the_lookup_has_no_successors(
    model: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are captured, beside others that have them."""
    take_turns(monkeypatch)
    params = [
        replace(PARAMS["greedy"], speculation=Speculation(mode=mode, trace=True))
        for mode in ("suffix", "auto", "suffix", "auto")
    ]
    with LLM(str(model), speculate="auto", max_num_seqs=2, **SMALL) as llm:
        by_host = lead_noted(monkeypatch)
        outputs = llm.generate(PROMPTS, params)
        assert sum(len(plan.work) for plan in by_host) == len(PROMPTS)
    assert [out.outputs[0].token_ids for out in outputs] == plain["greedy"]
    methods = [{one.method for one in out.outputs[0].trace if one.tokens} for out in outputs]
    assert methods[0] == methods[2] == {"suffix"}
    assert "recycling" in methods[1] | methods[3]


@pytest.mark.parametrize(
    ("options", "largest"),
    [(":num_nodes=16", 15), (":num_nodes=7", 7), (":num_nodes=4", 0), (":adaptive=false", 0)],
)
def test_successors_are_within_the_nodes_asked_for(model: Path, options: str, largest: int) -> None:
    with LLM(str(model), speculate=f"auto{options}", **SMALL) as llm:
        shapes = llm.engine.runner.captured.drafter.shapes
        assert max((shape.num_nodes for shape in shapes if shape.source > 0), default=0) == largest
        asked = int(options.rpartition("=")[2]) if "num_nodes" in options else 16
        assert max(shape.num_nodes for shape in shapes) <= asked

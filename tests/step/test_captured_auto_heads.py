"""`auto` with heads of every kind: trees beside lookups, in captured steps of each shape.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

from captured_heads import GREEDY, PARAMS, SMALL, World, tokens
from hunch import LLM
from hunch.drafting import auto_device, with_lookups
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.kernels.step import CHECKED
from stand_in import stand_in

BY_LEVEL = {  # trees that grow level by level
    StepShape(7, DraftSource.TREE), StepShape(15, DraftSource.TREE),
    StepShape(31, DraftSource.MERGED), StepShape(63, DraftSource.LARGE),
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for module in (auto_device, with_lookups):  # lookups do not take a network's place
        monkeypatch.setattr(module, "SURE_MATCH", 99)


def force(llm: LLM, shape: StepShape, patch: pytest.MonkeyPatch) -> list[int]:
    """Let all steps have this shape; returns how many nodes they check, as they run."""
    policy, checked = llm.engine.runner.captured.policy, list[int]()
    learn = policy.learn

    def note(row_R: Any, lines: list[list[int]], graph: Any) -> list[str] | None:
        checked.extend(line[CHECKED] for line in lines)
        return learn(row_R, lines, graph)

    patch.setattr(policy, "choose", lambda *_, **__: shape)
    patch.setattr(policy, "learn", note)
    return checked


@pytest.mark.parametrize(
    "name", ["eagle3", "medusa", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mtp", "mlp"))]
)
def test_trees_of_heads(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is plain decoding's with each of them, and the head's guesses are accepted."""
    with LLM(str(world.model), speculate=f"auto:draft={world.model.parent / name}", **SMALL) as llm:
        shapes = llm.engine.runner.captured.policy.shapes.all
        trees = [shape for shape in shapes if shape.source >= DraftSource.TREE]
        if name in ("eagle3", "mtp"):
            assert set(trees) == BY_LEVEL
        else:
            assert {shape.source for shape in trees} == {DraftSource.TREE, DraftSource.MERGED}
        for shape in trees:
            with monkeypatch.context() as patch:
                checked = force(llm, shape, patch)
                before = llm.stats()["accepted"]
                for kind in ("greedy", "filters"):
                    assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], shape
                assert max(checked) > 4
                assert llm.stats()["accepted"] > before
        assert llm.stats()["drafters"][name]["accepted"] > 0


def test_a_tree_finds_at_least_what_its_chain_finds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the chain's guesses, and others beside them; passes with all states take them in."""
    spec = f"auto:draft={world.model.parent / 'eagle3'}:phrases=off"
    params, steps = replace(GREEDY, max_tokens=40), dict[int, int]()
    with LLM(str(world.model), speculate=spec, **SMALL, max_num_seqs=1) as llm:
        for shape in (StepShape(3, DraftSource.CHAIN), StepShape(15, DraftSource.TREE)):
            with monkeypatch.context() as patch:
                force(llm, shape, patch)
                outputs = llm.generate(world.prompts, params)
                steps[shape.num_nodes] = sum(out.outputs[0].stats["steps"] for out in outputs)
    assert steps[15] < steps[3]

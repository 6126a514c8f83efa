"""`A+B` in captured steps: plain decoding's tokens, with the guesses of both parts in every draft.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import head_files
from captured_heads import GREEDY, PARAMS, SMALL, World, tokens
from deep_models import write_deep, write_shallow
from hunch import LLM
from hunch.config import say_once
from hunch.drafting.costs import StepKey
from hunch.drafting.merge import cuts_of, within
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.drafting.with_lookups import TreeSize
from hunch.kernels.step import CHECKED, TOKENS
from hunch.types import Speculation
from stand_in import lead_by_host, lead_noted, stand_in

HEADS = ("eagle3", "mtp", "dspark", "medusa", "mlp")


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def steps_of(llm: LLM, patch: pytest.MonkeyPatch) -> list[tuple[StepShape, list[list[int]]]]:
    """The shapes and results of all captured steps from here on."""
    policy, found = llm.engine.runner.captured.policy, []
    learn = policy.learn

    def note(row_R: Any, lines: list[list[int]], graph: Any) -> list[str] | None:
        found.append((graph.key.shape, lines))
        return learn(row_R, lines, graph)

    patch.setattr(policy, "learn", note)
    return found


def rate(steps: list[tuple[StepShape, list[list[int]]]]) -> float:
    lines = [line for _, some in steps for line in some if line[CHECKED] > 0]
    return sum(line[TOKENS] for line in lines) / max(len(lines), 1)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("mtp", "mlp"))) for n in HEADS]
)
def test_a_head_drafts_as_it_would_alone_beside_a_lookup(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has read the target's states of accepted tokens, whichever part guessed them."""
    speculate = f"suffix:num_nodes=4+{name}:{world.model.parent / name}:num_nodes=3"
    traced = replace(GREEDY, speculation=Speculation(trace=True))
    with LLM(str(world.model), speculate=speculate, **SMALL) as llm:
        by_host, steps = lead_noted(monkeypatch), steps_of(llm, monkeypatch)
        answers = [out.outputs[0] for out in llm.generate(world.prompts, traced)]
        assert [answer.token_ids for answer in answers] == world.plain["greedy"]
        assert sum(len(plan.work) for plan in by_host) == len(world.prompts), "prompts alone"
        assert {shape.source for shape, _ in steps} == {DraftSource.MERGED}
        assert max(shape.num_nodes for shape, _ in steps) == 7
        assert llm.stats()["drafters"]["merge"]["accepted"] > 0
        assert tokens(llm, world.prompts, PARAMS["penalties"]) == world.plain["penalties"]
    num_drafts = num_same = num_after = 0
    for prompt, answer in zip(world.prompts, answers, strict=True):
        text, rest, is_after = list(prompt), list(answer.token_ids), False
        for trace in answer.trace or []:
            if len(trace.tokens) >= 3 and len(rest) > 3:
                hidden, features = head_files.states_of(world.study.target, text)
                expected = world.heads[name](text, hidden, features, len(text), 3)
                num_drafts, num_same = num_drafts + 1, num_same + (trace.tokens[:3] == expected)
                num_after += is_after
            is_after = any(node >= 3 for node in trace.accepted)
            count = len(trace.accepted) + 1
            text, rest = text + rest[:count], rest[count:]
        assert not rest
    assert num_drafts > 20
    assert num_same >= 0.99 * num_drafts, (num_same, num_drafts)
    assert num_after, "of these, some after tokens that the lookup alone had guessed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep(tmp_path_factory.mktemp("merged") / "model")


@pytest.fixture(scope="module")
def exact(model: Path) -> Path:
    return write_shallow(model, model.parent / "exact")


PROMPTS = [[5, 6, 7, 8] * 4, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            lead_by_host(llm.engine.runner)
            return {kind: tokens(llm, PROMPTS, params) for kind, params in PARAMS.items()}


@pytest.mark.parametrize(
    ("options", "given"),
    [("", {}), (":tree=dynamic:num_nodes=12:depth=3", {"max_num_seqs": 2})],
    ids=["chain", "tree"],
)
def test_an_exact_copy_is_always_right_beside_a_lookup(
    options: str, given: dict[str, Any], model: Path, exact: Path,
    plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """So its KV is whole, whichever part's guesses were accepted before."""
    with LLM(str(model), speculate=f"suffix+draft:{exact}{options}", **SMALL, **given) as llm:
        by_host, steps = lead_noted(monkeypatch), steps_of(llm, monkeypatch)
        for kind in PARAMS:
            assert tokens(llm, PROMPTS, PARAMS[kind]) == plain[kind], kind
        assert sum(len(plan.work) for plan in by_host) == len(PROMPTS) * len(PARAMS)
        drafter = llm.engine.runner.captured.drafter
    (shape,) = {shape for shape, _ in steps if shape.num_nodes}
    levels = drafter.levels(*reversed(shape))
    whole = [line for _, some in steps for line in some if line[CHECKED] >= levels]
    going_on = [line for line in whole if not line[1]]
    assert len(going_on) > 10
    assert all(line[TOKENS] > levels for line in going_on)


def test_an_adaptive_merge_checks_what_pays(
    model: Path, exact: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing if a node costs as much as a pass, everything if nodes cost nothing."""
    speculate = f"suffix+draft:{exact}+merge:adaptive=true"
    sizes = {}
    for per_node in (1.0, 0.0):
        with LLM(str(model), speculate=speculate, **SMALL, max_num_seqs=1) as llm:
            steps, costs = steps_of(llm, monkeypatch), llm.engine.runner.captured.policy.costs

            def seconds(kind: StepKey, each: float = per_node) -> float:
                return 1.0 + each * kind[1].num_nodes

            monkeypatch.setattr(costs, "seconds", seconds)
            monkeypatch.setattr(costs, "target", seconds)
            assert tokens(llm, PROMPTS, GREEDY) == plain["greedy"]
            sizes[per_node] = [shape.num_nodes for shape, _ in steps]
            monkeypatch.undo()
            stand_in(monkeypatch)
    assert sum(size > 0 for size in sizes[1.0]) < len(sizes[1.0]) / 2
    assert sum(size > 0 for size in sizes[0.0]) > len(sizes[0.0]) / 2


@pytest.mark.parametrize("speculate", ["ngram+suffix", "ngram+suffix+draft:PATH"])
def test_other_parts_are_merged_by_the_host_which_says_so(
    speculate: str, model: Path, exact: Path, plain: dict[str, list[list[int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    say_once.cache_clear()
    with LLM(str(model), speculate=speculate.replace("PATH", str(exact)), **SMALL) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == plain["greedy"]
        assert llm.engine.runner.captured.drafter is None
        assert llm.stats()["accepted"] > 0
    assert "the host drafts" in caplog.text


def test_a_bound_is_shared_by_both() -> None:
    whole = TreeSize(1, 5, 16)
    assert within(whole, 21) == whole
    assert within(whole, 16) == TreeSize(1, 5, 11)
    assert within(whole, 6) == TreeSize(1, 3, 3)
    assert within(TreeSize(1, 10, 2), 8) == TreeSize(1, 6, 2)
    assert within(TreeSize(4, 5, 16), 6) == TreeSize(4, 1, 2)
    assert [size.num_nodes for size in cuts_of(whole)] == [7, 9, 21]
    assert cuts_of(TreeSize(1, 1, 1)) == [TreeSize(1, 1, 1)]


def test_a_bound_is_kept(model: Path, exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a lookup that would draft more alone, and by predictions."""
    speculate = f"suffix:num_nodes=48+draft:{exact}+merge:num_nodes=6"
    params = replace(GREEDY, max_tokens=12)
    with LLM(str(model), speculate=speculate, **SMALL) as llm:
        steps, drafter = steps_of(llm, monkeypatch), llm.engine.runner.captured.drafter
        assert drafter.num_nodes <= llm.engine.capacity.max_nodes
        answer = tokens(llm, PROMPTS, params)[0]
        expected = replace(params, prediction=answer)
        assert tokens(llm, PROMPTS[:1], expected) == [answer]
    assert {shape for shape, _ in steps if shape.num_nodes} == {StepShape(6, DraftSource.MERGED)}
    assert rate(steps) > 3

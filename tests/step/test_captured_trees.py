"""Best-first trees and trees of one shape, in captured steps: plain decoding's tokens, the host's
trees, and more of them accepted than of a chain.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

from captured_heads import GREEDY, PARAMS, SMALL, Drafts, World, load, tokens
from hunch import LLM, Speculation
from hunch.drafting.step_shapes import DraftSource, StepShape
from stand_in import lead_by_host, stand_in

TREES = {
    "dspark": "dspark:tree=dynamic:num_nodes=15",
    "medusa": "medusa:tree=dynamic:num_nodes=15",
    "medusa, static": "medusa:tree=static:num_nodes=12",
    "mlp": "mlp:tree=dynamic:num_nodes=12:width=3",
    "medusa, fixed": "medusa:tree=fixed:num_nodes=8:branch=4",
    "mlp, fixed": "mlp:tree=fixed:num_nodes=9:branch=3",
    "eagle3, fixed": "eagle3:tree=fixed:num_nodes=10:branch=2",
}
LATER = {"medusa, fixed", "mlp, fixed", "mlp"}
DAILY = [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in TREES]


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def start(world: World, spec: str, **given: Any) -> Any:
    name, _, options = spec.partition(":")
    return load(world.model, name, f":{options}" if options else "", **given)


@pytest.mark.parametrize("tree", DAILY)
def test_text_and_acceptance(tree: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name, spec = TREES[tree].partition(":")[0], f"{TREES[tree]}:adaptive=false"
    with start(world, spec) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert sum(map(len, drafts.by_host)) == len(world.prompts)
        per_pass = llm.stats()["tokens_per_pass"]
        mixed = [*PARAMS.values(), GREEDY]
        want = [world.plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
        assert tokens(llm, world.prompts, mixed) == want
    with start(world, f"{name}:adaptive=false") as llm:
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert per_pass >= llm.stats()["tokens_per_pass"]


@pytest.mark.parametrize("tree", [pytest.param("mlp", marks=pytest.mark.slow), "dspark"])
def test_few_blocks(tree: str, world: World) -> None:
    few = {"num_blocks": 30, "kv_bytes": None, "max_num_seqs": 4}
    with start(world, f"{TREES[tree]}:adaptive=false", **few) as llm:
        for kind in ("greedy", "penalties"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
        assert llm.stats()["num_preemptions"] > 0


def trees_of(llm: Any, world: World) -> dict[int, tuple[list[int], list[int]]]:
    """The first text's drafts, by its length."""
    params = replace(GREEDY, max_tokens=48, speculation=Speculation(trace=True))
    (out,) = llm.generate(world.prompts[:1], params)
    found, known = {}, len(world.prompts[0])
    for one in out.outputs[0].trace:
        if one.tokens:
            found[known] = list(one.tokens), list(one.parents)
        known += len(one.accepted) + 1
    return found


@pytest.mark.parametrize("tree", DAILY)
def test_the_host_grows_the_same(tree: str, world: World) -> None:
    spec = f"{TREES[tree]}:adaptive=false"
    with start(world, spec) as llm:
        captured = trees_of(llm, world)
    with start(world, spec) as llm:
        lead_by_host(llm.engine.runner)
        by_host = trees_of(llm, world)
    end = len(world.prompts[0]) + 32  # near the row's end the host drafts fewer nodes
    shared = sorted(known for known in captured.keys() & by_host.keys() if known < end)
    assert len(shared) > 4
    assert [captured[known] for known in shared] == [by_host[known] for known in shared]


def test_steps_check_as_many_nodes_as_the_policy_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(world, TREES["dspark"]) as llm:
        policy, tree = llm.engine.runner.captured.policy, DraftSource.TREE
        assert policy.shapes.all == (StepShape(0), StepShape(7, tree), StepShape(15, tree))
        drafter = llm.engine.runner.captured.drafter
        assert drafter.levels(tree, 7) < drafter.levels(tree, 15)
        drafts = Drafts(llm, monkeypatch)
        walk = [policy.shapes.all[i % 3] for i in range(300)]
        monkeypatch.setattr(policy, "choose", lambda row_R, **_: walk.pop())
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert {len(guesses) for _, guesses in drafts.found} >= {7, 15}


@pytest.mark.parametrize("tree", ["dspark", "medusa, static"])
def test_few_nodes_of_a_tree_are_checked(tree: str, world: World) -> None:
    params = replace(GREEDY, speculation=Speculation(max_nodes=3, trace=True))
    with start(world, f"{TREES[tree]}:adaptive=false") as llm:
        outputs = llm.generate(world.prompts, params)
        assert [out.outputs[0].token_ids for out in outputs] == world.plain["greedy"]
        sizes = {len(step.tokens) for out in outputs for step in out.outputs[0].trace}
        assert max(sizes) == 3


@pytest.mark.parametrize("tree", ["dspark", "medusa, static"])
def test_a_lookup_beside_a_tree(tree: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, options = TREES[tree].partition(":")
    spec = f"suffix:num_nodes=4+{name}:{world.model.parent / name}:{options}"
    with LLM(str(world.model), speculate=spec, **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        for kind in ("greedy", "penalties"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
        assert sum(map(len, drafts.by_host)) == 2 * len(world.prompts)
        assert llm.stats()["drafters"]["merge"]["accepted"] > 0


def test_a_lookup_follows_two_matches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chain is right where the first begins with a wrong token."""
    traced = replace(GREEDY, max_tokens=60, speculation=Speculation(trace=True))
    spec = "suffix:tree=true:adaptive=false:num_nodes=9"
    with LLM(str(world.model), speculate=spec, **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        outputs = llm.generate(world.prompts, traced)
        assert sum(map(len, drafts.by_host)) == len(world.prompts)
    assert [out.outputs[0].token_ids[:24] for out in outputs] == world.plain["greedy"]
    traces = [trace for out in outputs for trace in out.outputs[0].trace or []]
    assert sum(trace.parents.count(-1) == 2 for trace in traces) > 10
    assert any(6 in trace.accepted for trace in traces), "the first node of a second chain"

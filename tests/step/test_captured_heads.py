"""Heads that continue the target's states, in captured steps: plain decoding's tokens, and at
every step the draft that an offline replay of the same head makes.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import head_files
from captured_heads import GREEDY, PARAMS, SMALL, Drafts, World, load, tokens
from deepseek_files import make_deepseek
from hunch import LLM, Speculation
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.step.captured_step import CapturedSteps
from hunch.step.host_step import HostStep
from hunch.step.runner import Runner
from hunch.types import GroupInfo
from mtp_files import make_stages
from stand_in import stand_in

NAMES = ("eagle", "eagle3", "mtp", "dspark")
FEW_BLOCKS = {"kv_bytes": None, "num_blocks": 28, "max_num_seqs": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "one": {"max_num_seqs": 1},
    "all": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "few blocks": FEW_BLOCKS,
    "no prefix cache": {"enable_prefix_caching": False},
}
DAILY = {("eagle3", "few blocks"), ("mtp", "chunks"), ("dspark", "few blocks")}
CASES = [
    pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.slow])
    for case in ((name, engine) for name in NAMES for engine in ENGINES)
]
ONE_A_DAY = [
    pytest.param(name, marks=[] if name == "eagle3" else [pytest.mark.slow]) for name in NAMES
]


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_text_and_drafts(
    name: str,
    engine: str,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with load(world.model, name, always_draft=True, **ENGINES[engine]) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        drafts.check(world.heads[name], world.study, 30)
        assert llm.stats()["tokens_per_pass"] > 1.5
        if engine == "few blocks":
            assert llm.stats()["num_preemptions"] > 0
        for kind in ("stops", "filters"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
        mixed = [*PARAMS.values(), GREEDY]
        want = [world.plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
        assert tokens(llm, world.prompts, mixed) == want


@pytest.mark.parametrize("name", ONE_A_DAY)
def test_the_host_reads_prompts_and_no_more(
    name: str,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows come and go, one says one token, one two."""
    lengths = [24, 1, 17, 2, 20]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    with load(world.model, name, max_num_seqs=2) as llm:
        drafts = Drafts(llm, monkeypatch)
        want = [answer[:n] for answer, n in zip(world.plain["greedy"], lengths, strict=True)]
        assert tokens(llm, world.prompts, params) == want
        assert sum(map(len, drafts.by_host)) == len(world.prompts)
        drafts.check(world.heads[name], world.study)
        assert llm.stats()["drafted"] > llm.stats()["accepted"] > 0


@pytest.mark.parametrize("name", ONE_A_DAY)
def test_nobody_waits_for_a_prompt_that_a_head_reads(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads a prompt behind the target's pass, chunk by chunk; the next step is launched
    before the first token is received."""
    did: list[str] = []
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 9}
    with load(world.model, name, always_draft=True, **sizes) as llm:
        runner = llm.engine.runner
        captured, launch, receive = runner.captured, runner.captured.launch, runner.captured.receive

        def note_launch(*given: Any) -> Any:
            pending = launch(*given)
            did.append("launched" if pending is not None else "nothing")
            return pending

        def note_receive(pending: Any) -> Any:
            if pending.follows_prompts and pending.received is None:
                did.append("first token")
            return receive(pending)

        drafts = Drafts(llm, monkeypatch)
        monkeypatch.setattr(runner, "_run_on_host", None)
        monkeypatch.setattr(captured, "launch", note_launch)
        monkeypatch.setattr(captured, "receive", note_receive)
        monkeypatch.setattr(captured.steps.download, "is_there", lambda buffer: False)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        drafts.check(world.heads[name], world.study, 30)
    places = [place for place, name in enumerate(did) if name == "first token"]
    assert len(places) == len(world.prompts)
    assert {did[place - 1] for place in places} == {"launched"}


@pytest.mark.parametrize("name", ONE_A_DAY)
def test_texts_that_go_on_from_earlier_ones(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What captured steps wrote, to the last token, is taken from the blocks it left."""
    prompts = world.prompts
    with load(world.model, name) as llm:
        drafts = Drafts(llm, monkeypatch)
        for length in (18, 7, 9):
            params = replace(GREEDY, max_tokens=length)
            answers = tokens(llm, prompts, params)
            prompts = [[*p, *answer, 3] for p, answer in zip(prompts, answers, strict=True)]
        # A block that would reach past a text's end has fewer places, and says other things.
        share = 0.8 if name == "dspark" else 0.99
        drafts.check(world.heads[name], world.study, 30, share)
        assert sum(map(len, drafts.by_host)) == 3 * len(world.prompts)
        assert llm.stats()["prefix_hits"] > 100


@pytest.mark.parametrize(
    "name", [*ONE_A_DAY, "medusa", pytest.param("mlp", marks=pytest.mark.slow)]
)
def test_steps_of_every_size_and_steps_without_drafts(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a head keeps of a text has no hole after steps in which it did not draft."""
    with load(world.model, name) as llm:
        runner, seen = llm.engine.runner, Drafts(llm, monkeypatch)
        sizes = [shape.num_nodes for shape in runner.captured.policy.shapes.all]
        num_levels = runner.captured.drafter.num_levels
        assert sizes == [0, *sorted({min(size, num_levels) for size in (1, 3, 5, num_levels)})]
        walk = Random(0).choices(runner.captured.policy.shapes.all, k=200)
        monkeypatch.setattr(runner.captured.policy, "choose", lambda row_R, **_: walk.pop())
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert {len(guesses) for _, guesses in seen.found} >= set(sizes)
        seen.check(world.heads[name], world.study, 30)
        assert sum(map(len, seen.by_host)) == len(world.prompts)


@pytest.mark.parametrize("name", ONE_A_DAY)
def test_rows_that_leave_captured_steps_and_come_back(
    name: str,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in every other row, or all but one."""
    turns, is_ready = iter([1, 1, 1, 2, 2, 1, 1, 1, 99] * 100), CapturedSteps._are_ready
    monkeypatch.setattr(
        CapturedSteps,
        "_are_ready",
        lambda self, rows, *given: (
            is_ready(self, rows, *given) & (np.array(rows) % next(turns) == 0)
        ),
    )
    with load(world.model, name) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert len(drafts.by_host) > 2
        drafts.check(world.heads[name], world.study)


def test_a_row_with_a_hole_stays_with_the_host_and_the_others_do_not(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last block that two texts share holds the head's view of the first one's next token."""
    monkeypatch.setattr(  # else the block would be computed again
        "hunch.drafting.feature.GroupInfo",
        lambda *, has_no_holes, **given: GroupInfo(**given),
    )
    shared = world.prompts[2][:8]
    others = [[*shared, 5, 6, 7], world.prompts[0], world.prompts[4]]
    with load(world.model, "eagle3") as llm:
        llm.generate([[*shared, 11, 12]], GREEDY)
        drafts = Drafts(llm, monkeypatch)
        got = tokens(llm, others, GREEDY)
        assert {len(rows) for rows in drafts.by_host[1:]} == {1}
        assert len(drafts.by_host) > 5
        drafts.check(world.heads["eagle3"], world.study)
    with LLM(str(world.model), speculate="off", **SMALL) as llm:
        assert got == tokens(llm, others, GREEDY)


def test_a_row_that_goes_on_otherwise_after_a_shared_block_is_captured(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = world.prompts[2][:8]
    with load(world.model, "eagle3", always_draft=True) as llm:
        llm.generate([[*shared, 11, 12]], GREEDY)
        drafts = Drafts(llm, monkeypatch)
        got = tokens(llm, [[*shared, 5, 6, 7]], GREEDY)
        assert llm.stats()["prefix_hits"] == 4
        assert len(drafts.by_host) == 1
        drafts.check(world.heads["eagle3"], world.study, 5)
    with LLM(str(world.model), speculate="off", **SMALL) as llm:
        assert got == tokens(llm, [[*shared, 5, 6, 7]], GREEDY)


def test_rows_that_want_no_drafts_are_captured_too(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off = replace(GREEDY, speculation=Speculation(mode="off"))
    with load(world.model, "eagle3", always_draft=True) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, [off, GREEDY, off, off, off]) == world.plain["greedy"]
        assert len(drafts.by_host) == 1
        assert tokens(llm, world.prompts, off) == world.plain["greedy"]
        drafted = llm.stats()["drafted"]
        longer = [[*p, *a, 3] for p, a in zip(world.prompts, world.plain["greedy"], strict=True)]
        llm.generate(longer, replace(GREEDY, max_tokens=9))  # from blocks that nobody drafted for
        drafts.check(world.heads["eagle3"], world.study)
        assert llm.stats()["drafted"] > drafted


def test_what_only_the_host_can_draft(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(world.model, "eagle3", ":draft_temperature=0.5:adaptive=false") as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert not drafts.found
        assert llm.stats()["accepted"] > 0


@pytest.mark.parametrize("name", ONE_A_DAY[:3])
def test_trees_in_captured_steps(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first path is the chain; of unlikely guesses fewer are sent."""
    options = ":tree=dynamic:depth=3:num_nodes=9:width=2:adaptive=false"
    with load(world.model, name, options) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert sum(map(len, drafts.by_host)) == len(world.prompts)
        drafts.found = [(text, nodes[:3]) for text, nodes in drafts.found if len(nodes) == 9]
        drafts.check(world.heads[name], world.study, 20)
        rate = llm.stats()["level_acceptance"]
        for kind in ("stops", "filters", "penalties"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
    with load(world.model, name, f"{options}:min_confidence=0.4") as llm:
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert llm.stats()["level_acceptance"] > rate


@pytest.mark.parametrize("kind", [pytest.param("latent", marks=pytest.mark.slow), "stages"])
def test_networks_that_need_the_host(
    kind: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "latent":
        make_deepseek(world.study, tmp_path)
    else:
        make_stages(world.study, tmp_path, "mimo", 2, num_steps=0)
    with LLM(str(world.model), speculate=f"mtp:{tmp_path}:adaptive=false", **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert not drafts.found  # of latent ones, those in 16 bits alone have kernels
        assert llm.stats()["drafted"] > 0


@pytest.mark.parametrize("is_auto", [False, True], ids=["alone", "auto"])
def test_an_adaptive_head_drafts_right_after_the_prompt(
    is_auto: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first step of its own checks a draft; if nodes do not pay, nobody drafts."""
    head = world.model.parent / "eagle3"
    speculate = f"auto:draft={head}" if is_auto else f"eagle3:{head}"
    for num_nodes, source in ((3, DraftSource.CHAIN), (0, DraftSource.LOOKUP)):
        with LLM(str(world.model), speculate=speculate, **SMALL) as llm:
            policy, shape = llm.engine.runner.captured.policy, StepShape(num_nodes, source)
            monkeypatch.setattr(policy, "choose", lambda row_R, shape=shape, **_: shape)
            drafts = Drafts(llm, monkeypatch)
            params = replace(GREEDY, max_tokens=12)
            texts = tokens(llm, world.prompts, params)
            assert texts == [answer[:12] for answer in world.plain["greedy"]]
            lengths = {len(prompt) + 1 for prompt in world.prompts}
            first = [guesses for text, guesses in drafts.found if len(text) in lengths]
            assert sum(map(bool, first)) >= (5 if num_nodes else 0)
            assert (llm.stats()["drafted"] > 0) == bool(num_nodes)
            steps = policy.counts.shapes
            assert sum(count.steps for (_, one), count in steps.items() if one == shape) > 2
            if num_nodes:  # every step of rows that decode
                assert {one for _, one in steps} == {shape}


def test_a_short_row_is_captured_beside_one_past_the_window(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [24, 10]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    with load(world.model, "eagle", ":window=20:adaptive=false") as llm:
        drafts = Drafts(llm, monkeypatch)
        monkeypatch.setattr(HostStep, "run", None)
        got = tokens(llm, world.prompts[:2], params)
        assert got == [world.plain["greedy"][i][:length] for i, length in enumerate(lengths)]
        assert {text[:5] == world.prompts[1][:5] for text, some in drafts.found if some} == {True}
        drafts.check(world.heads["eagle"], world.study, 2)


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_head_drafts_past_its_own_context(
    name: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also after prompts that are longer; the host runs no step for it."""
    short = shutil.copytree(world.model.parent / name, tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 12}
    (short / "config.json").write_text(json.dumps(config))
    with LLM(str(world.model), speculate=f"{name}:{short}:adaptive=false", **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        monkeypatch.setattr(HostStep, "run", None)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        drafts.found = [(text, some) for text, some in drafts.found if len(text) > 12]
        drafts.check(world.heads[name], world.study, 20)
    assert caplog.text.count(f"longer than the context of {name}, 12 tokens") == 1


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_heads_beside_lookups_in_captured_steps(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"auto:draft={world.model.parent / name}"
    with LLM(str(world.model), speculate=spec, always_draft=True, **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        for kind in ("greedy", "filters"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
        assert sum(map(len, drafts.by_host)) == 2 * len(world.prompts)
        assert llm.stats()["drafters"][name]["accepted"] > 0


def test_a_head_that_is_left_drafts_again_for_later_requests(world: World) -> None:
    """Lookups go on without it, and new rows beside those it left are followed; texts are equal."""
    spec = f"auto:draft={world.model.parent / 'eagle3'}"
    with LLM(str(world.model), speculate=spec, always_draft=True, **SMALL) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, Runner)
        assert runner.captured is not None
        network_rows = runner.captured.policy.network_rows
        for num_steps, is_asked in ((10_000, False), (3, False), (0, True)):
            before = _accepted(llm, "eagle3")
            network_rows.dropped_steps = num_steps
            assert tokens(llm, world.prompts, PARAMS["greedy"]) == world.plain["greedy"]
            assert (_accepted(llm, "eagle3") > before) == is_asked


def _accepted(llm: LLM, name: str) -> int:
    return int(llm.stats()["drafters"].get(name, {}).get("accepted", 0))


@pytest.mark.parametrize("kind", ["padded", "crossed"])
def test_draft_models_of_another_vocabulary_in_captured_steps(
    kind: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the target's last rows, and one with its tokens in another order."""
    head_files.make_draft(world.model, tmp_path / "draft", noise=0.0)
    options = ":adaptive=false"
    if kind == "padded":
        head_files.cut_vocab(tmp_path / "draft", 8)
    else:
        head_files.shuffle_vocab(tmp_path / "draft")
        options += ":cross_vocab=true"
    spec = f"draft:{tmp_path / 'draft'}{options}"
    with LLM(str(world.model), speculate=spec, **SMALL) as llm:
        drafts = Drafts(llm, monkeypatch)
        outputs = llm.generate(world.prompts, GREEDY)
        assert [out.outputs[0].token_ids for out in outputs] == world.plain["greedy"]
        assert tokens(llm, world.prompts, PARAMS["filters"]) == world.plain["filters"]
        assert sum(map(len, drafts.by_host)) == 2 * len(world.prompts)
    # A copy of the target is right about every text without a token that it lacks.
    missing = set(range(280, 288)) if kind == "padded" else set()
    pairs = zip(world.prompts, outputs, strict=True)
    whole = [out for ids, out in pairs if not missing & {*ids, *out.outputs[0].token_ids}]
    assert 0 < len(whole) <= len(outputs) - len(missing) // 8
    for out in whole:
        stats = out.outputs[0].stats
        assert stats["accepted"] == stats["drafted"] >= 15

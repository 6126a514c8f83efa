"""`auto` with a draft model in captured steps: the same tokens, whoever drafts and when.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

pytest.importorskip("triton")

from deep_models import write_deep, write_shallow
from hunch import LLM, SamplingParams
from hunch.bench import loads
from hunch.bench.metrics import figures
from hunch.bench.offline import EngineSubject
from hunch.bench.records import Run
from hunch.drafting import auto_device, with_lookups
from hunch.drafting.auto_device import BY_LEVEL
from hunch.drafting.step_shapes import StepShape, StepShapes
from hunch.drafting.with_lookups import TreeSize
from hunch.kernels.step import CHECKED, REASON, TOKENS
from hunch.step import captured_step
from hunch.step.capture import Graph
from hunch.step.captured_step import StepGroup
from hunch.step.host_step import HostStep
from hunch.step.runner import Runner
from hunch.step.step_kinds import StepGraph, StepKind
from hunch.train.job import Job, build_student, write_student
from hunch.train.texts import Texts
from phrase_tables import table_of
from stand_in import lead_by_host, stand_in
from tiny_families import write_family

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep(tmp_path_factory.mktemp("captured") / "model")


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
            lead_by_host(llm.engine.runner)
            return {name: tokens(llm, params) for name, params in PARAMS.items()}


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


def graph_runner(llm: LLM) -> Runner:
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    return runner


def sure_from(length: int, patch: pytest.MonkeyPatch) -> None:
    """Lookups go before the network from matches of this length on."""
    for module in (auto_device, with_lookups):
        patch.setattr(module, "SURE_MATCH", length)


def watch(runner: Runner, patch: pytest.MonkeyPatch) -> list[StepShape]:
    """The shape of every step."""
    shapes: list[StepShape] = []
    assert runner.captured is not None
    decide = runner.captured._shape

    def note(group: StepGroup, apply: Any) -> StepShape:
        shapes.append(decide(group, apply))
        return shapes[-1]

    patch.setattr(runner.captured, "_shape", note)
    return shapes


@pytest.mark.parametrize("engine", ENGINES)
def test_text_does_not_depend_on_who_drafts(
    engine: str,
    model: Path,
    draft: Path,
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sure_from(2, monkeypatch)  # or so short texts repeat too little
    kinds = {"one": ["greedy"], "all": list(PARAMS), "few blocks": ["filters"]}[engine]
    given = {**SMALL, **ENGINES[engine]}
    with LLM(str(model), speculate=f"auto:draft={draft}", **given) as llm:
        costs = graph_runner(llm).captured.policy.costs
        monkeypatch.setattr(costs, "seconds", lambda *_, **__: 1.0)
        for kind in kinds:
            assert tokens(llm, PARAMS[kind]) == plain[kind], kind
        drafters = llm.stats()["drafters"]
        assert drafters["draft"]["accepted"] > 0
        if engine == "all":
            assert drafters["suffix"]["accepted"] > 0
            mixed = [*PARAMS.values(), PARAMS["greedy"]]
            want = [plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
            assert tokens(llm, mixed) == want


(FEW, TREE), (MERGED,), (LARGE,) = BY_LEVEL.values()
WALKS = {
    "off and on": [  # the first of two is taken when the host reads rows to the network
        *[StepShape(15, 2)] * 2,
        *[StepShape(0), StepShape(3)],
        *[StepShape(7, 1)] * 3,
        StepShape(0),
    ],
    "sizes": [
        StepShape(1, 1),
        StepShape(15, 2),
        StepShape(15, 2),
        StepShape(3, 1),
        StepShape(7, 1),
    ],
    "a long hole": [*[StepShape(0)] * 5, *[StepShape(7, 1)] * 3],
    "merged": [*[StepShape(MERGED.num_nodes, 3)] * 3, StepShape(15, 2), StepShape(0)],
    "large": [
        *[StepShape(LARGE.num_nodes, 4)] * 2,
        StepShape(15, 2),
        StepShape(MERGED.num_nodes, 3),
        StepShape(0),
    ],
}


@pytest.mark.parametrize(
    "walk", [pytest.param(w, marks=[pytest.mark.slow] * (w == "off and on")) for w in WALKS]
)
def test_nothing_stale_is_drafted_from_after_steps_without_it(
    walk: str,
    model: Path,
    exact: Path,
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exact copy is always right, if it has read every token."""
    sure_from(99, monkeypatch)
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL) as llm:
        runner, turns = graph_runner(llm), iter(WALKS[walk] * 100)
        waiting: list[StepShape] = []

        def choose(row_R: Any, *, extras: int = 0, is_host: bool = False) -> StepShape:
            """A shape that must wait for the host is asked for until it comes."""
            shape = waiting.pop() if waiting else next(turns)
            if not runner.captured.policy.is_ready(shape, row_R):
                waiting.append(shape)
            return shape

        monkeypatch.setattr(runner.captured.policy, "choose", choose)
        landed: list[tuple[int, list[int]]] = []
        learn = runner.captured.policy.learn

        def note(row_R: Any, lines: list[list[int]], graph: Any) -> list[str] | None:
            sources = [runner.captured.policy.line_shapes[row].source for row in row_R.tolist()]
            landed.extend(zip(sources, lines, strict=True))
            return learn(row_R, lines, graph)

        monkeypatch.setattr(runner.captured.policy, "learn", note)
        for kind in ("greedy", "filters"):
            assert tokens(llm, PARAMS[kind]) == plain[kind]
    drafts = [
        (source, line) for source, line in landed if source and line[CHECKED] and not line[REASON]
    ]
    chains = [line for source, line in drafts if source == 1]
    assert [line[TOKENS] - 1 for line in chains] == [line[CHECKED] for line in chains]
    trees = [line for source, line in drafts if source == 2 and line[CHECKED] == 15]
    assert {line[TOKENS] - 1 for line in trees} <= {TREE.num_levels}
    merged = [(source, line) for source, line in drafts if source >= 3]
    for source, line in merged:  # a tree's first nodes are those that the target takes
        levels = (MERGED if source == 3 else LARGE).num_levels
        assert line[TOKENS] - 1 >= min(line[CHECKED], levels)
    assert len(merged if walk in ("merged", "large") else chains) > 2
    assert trees or merged or walk == "a long hole"
    if walk == "large":
        assert 4 in {source for source, _ in merged}


@pytest.mark.parametrize("size", [FEW, TREE, MERGED, LARGE], ids=["7", "15", "31", "63"])
def test_trees_keep_their_nodes_where_fewer_tokens_are_to_come(
    size: TreeSize, model: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact copy is right on every level, up to the last token but one."""
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL, max_num_seqs=1) as llm:
        policy, lines = graph_runner(llm).captured.policy, list[list[int]]()
        shape = StepShape(size.num_nodes, {7: 2, 15: 2, 31: 3, 63: 4}[size.num_nodes])
        learn = policy.learn

        def note(row_R: Any, some: list[list[int]], graph: Any) -> list[str] | None:
            lines.extend(some)
            return learn(row_R, some, graph)

        monkeypatch.setattr(policy, "choose", lambda *_, **__: shape)
        monkeypatch.setattr(policy, "learn", note)
        params = replace(PARAMS["greedy"], max_tokens=2 + 4 * (1 + size.num_levels))
        llm.generate(PROMPTS[1], params)
    checked = [line[TOKENS] for line in lines if line[CHECKED] > 0]
    # The last pass may have as many tokens to give as it has levels, and none beyond. A first draft
    # is the smallest tree of its source.
    first = FEW if size is TREE else size
    assert checked == [1 + first.num_levels, *[1 + size.num_levels] * 3]


@pytest.mark.parametrize(("num_nodes", "of_model"), [(7, 4), (3, 3)])
def test_a_phrase_table_goes_on_where_the_chain_ends(
    model: Path, exact: Path, plain: dict[str, list[list[int]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, of_model: int,
) -> None:  # fmt: skip
    """Of a long chain; the table knows the greedy texts by heart. A short one is the model's."""
    entries, vocab_size = {}, json.loads((model / "config.json").read_text())["vocab_size"]
    for prompt, answer in zip(PROMPTS, plain["greedy"], strict=True):
        text = [*prompt, *answer]
        entries |= {tuple(text[i - 3 : i]): (text[i], 15) for i in range(3, len(text))}
    trust = dict.fromkeys(("guess_trust_V", "last_trust_V"), np.zeros(vocab_size))
    save_file(table_of(entries, **trust).files(), tmp_path / "model.safetensors")
    sure_from(99, monkeypatch)
    speculate = f"auto:draft={exact}:phrases={tmp_path}"
    with LLM(str(model), speculate=speculate, **SMALL) as llm:
        policy = graph_runner(llm).captured.policy
        monkeypatch.setattr(policy, "choose", lambda *_, **__: StepShape(num_nodes, 1))
        learn, steps = policy.learn, []

        def note(row_R: Any, lines: list[list[int]], graph: Any) -> list[str] | None:
            steps.extend(line[TOKENS] for line in lines)
            return learn(row_R, lines, graph)

        monkeypatch.setattr(policy, "learn", note)
        assert tokens(llm, PARAMS["filters"]) == plain["filters"]
        assert of_model < max(steps) < 8  # the model's, and what the target says
        assert tokens(llm, PARAMS["greedy"]) == plain["greedy"]
        assert max(steps) == num_nodes + 1


def test_a_measurement_says_what_captured_steps_did(model: Path, exact: Path) -> None:
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL) as llm:
        graph_runner(llm)
        jobs = [loads.Job(str(p), "", p, PARAMS["greedy"], {}) for p in PROMPTS]
        rounds = [
            EngineSubject("auto", llm).drive(jobs, loads.Load(concurrency=4)) for _ in range(2)
        ]
    for one in rounds:
        did = one.counts["captured"]
        assert any(name.startswith("4 rows, ") for name in did["shapes"])
        assert any(not name.endswith(" 0") for name in did["shapes"]), "the draft is never wrong"
        num_tokens = sum(counts["tokens"] for counts in did["shapes"].values())
        assert num_tokens == len(PROMPTS) * 23, "their prompts' passes bring the first of 24"
    run = Run("auto", {"concurrency": 4}, rounds)
    assert figures(run)["captured"]["num_read"] >= len(PROMPTS)


def test_the_host_chooses_while_the_device_reads_prompts_and_not_after_that(
    model: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    params = [replace(PARAMS["greedy"], max_tokens=n) for n in (24, 6, 9, 7)]
    with LLM(str(model), speculate=f"auto:draft={exact}", max_num_seqs=2, **SMALL) as llm:
        runner = graph_runner(llm)
        assert runner.captured is not None
        policy = runner.captured.policy
        monkeypatch.setattr(policy.costs, "seconds", lambda *_, **__: 1.0)
        for owner, name in (
            (policy.choice, "best"),
            (runner.prompts, "launch"),
            (policy, "is_ready"),
        ):
            call = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *given, call=call, name=name: did.append(name) or call(*given)
            )
        tokens(llm, params)
    reads = [place for place, name in enumerate(did) if name == "launch"]
    assert len(reads) > 2
    for place in reads:
        assert did[place + 1 : place + 3] == ["best", "is_ready"], "the next is not chosen anew"


def test_a_pause_without_requests_is_no_time_of_a_step(
    model: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that ended, a last step may be read when the next ones come."""
    pause = 0.0
    monkeypatch.setattr(captured_step, "perf_counter", lambda: perf_counter() + pause)
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL) as llm:
        jobs = [loads.Job(str(p), "", p, PARAMS["greedy"], {}) for p in PROMPTS]
        subject = EngineSubject("auto", llm)
        for _ in range(2):
            found = subject.drive(jobs, loads.Load(concurrency=4))
            shapes = found.counts["captured"]["shapes"].values()
            assert sum(counts["late_seconds"] for counts in shapes) < 100.0
            pause += 1000.0


def test_load_takes_the_draft_model_out_and_lets_it_in_again(
    model: Path, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one row are cheap beside a draft; steps of four cost by the token."""
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL) as llm:
        runner = graph_runner(llm)
        for size, seconds in ((1, 1.0), (2, 1.0), (8, 1.05), (16, 1.1), (32, 9.0), (128, 40.0)):
            runner.captured.policy.costs.curve.record(size, seconds)
        monkeypatch.setattr(runner.captured.policy, "timed", lambda *_: (0.0, 0.0))
        few = StepShapes([StepShape(0), StepShape(7), StepShape(7, 1)])
        for owner in (runner.captured.policy, runner.captured.policy.choice):
            monkeypatch.setattr(owner, "shapes", few)
        shapes = watch(runner, monkeypatch)
        monkeypatch.setattr(HostStep, "run", None)  # what it missed is read between two steps
        llm.generate(PROMPTS[1], long)
        assert set(shapes[:-2]) == {StepShape(7, 1)}  # the last steps have nothing left to draft
        shapes.clear()
        answers = llm.generate(PROMPTS, [short, long, short, short])
        assert [len(out.outputs[0].token_ids) for out in answers] == [12, 60, 12, 12]
    # All four at first, without it; then one is left, and it drafts.
    assert shapes[0] == StepShape(0)
    back = shapes.index(StepShape(7, 1))
    assert set(shapes[:back]) == {StepShape(0)}
    assert set(shapes[back:-2]) == {StepShape(7, 1)}


def test_a_draft_model_drafts_past_its_own_context(
    model: Path,
    plain: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    short = write_shallow(model, tmp_path / "short")
    with_context(short, 8)
    for method in (f"auto:draft={short}:any_size=true", f"draft:{short}:adaptive=false"):
        with (
            LLM(str(model), speculate=method, always_draft=True, **SMALL) as llm,
            monkeypatch.context() as patch,
        ):
            patch.setattr(HostStep, "run", None)
            assert tokens(llm, PARAMS["greedy"]) == plain["greedy"]
            drafted = llm.stats()["drafters"]["draft"]
            assert drafted["accepted"] > 40  # few are before position 8
    assert caplog.text.count("longer than the context of draft, 8 tokens") == 1


def test_rows_too_long_for_learned_positions(
    model: Path,
    plain: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They take captured steps, by lookup or without drafts; shorter rows are drafted for."""
    opt = write_family(tmp_path / "opt", "opt")
    with_context(opt, 24)
    tensors = load_file(opt / "model.safetensors")
    (name,) = [name for name in tensors if "embed_positions" in name]
    save_file(tensors | {name: tensors[name][:26]}, opt / "model.safetensors")
    lengths = [24, 4, 24, 24]  # the second is short enough
    params = [replace(PARAMS["greedy"], max_tokens=length) for length in lengths]
    said = [answer[:length] for answer, length in zip(plain["greedy"], lengths, strict=True)]
    alone, beside = f"draft:{opt}:adaptive=false", f"auto:any_size=true:draft={opt}"
    for method, others in ((alone, set()), (beside, {"suffix"})):
        with (
            LLM(str(model), speculate=method, always_draft=True, **SMALL) as llm,
            monkeypatch.context() as patch,
        ):
            patch.setattr(HostStep, "run", None)
            assert tokens(llm, PARAMS["greedy"]) == plain["greedy"]
            assert set(llm.stats()["drafters"]) == others
            assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)] == said
            assert others or "draft" in llm.stats()["drafters"]
    assert caplog.text.count("rows that may get longer go on without its network") == 2


def with_context(draft: Path, length: int) -> None:
    config = json.loads((draft / "config.json").read_text()) | {"max_position_embeddings": length}
    (draft / "config.json").write_text(json.dumps(config))


def test_drafting_that_seemed_slower_than_a_whole_step(model: Path) -> None:
    """Another process may sit on the device while one of the two is timed."""
    with LLM(str(model), speculate="suffix", **SMALL) as llm:
        policy = graph_runner(llm).captured.policy
        nothing = Graph(lambda: None, torch.device("cpu"), None)
        graph = StepGraph(StepKind(1, 3, 0, 0), nothing, nothing, nothing, 1e-3, 9.0)
        seconds = [policy.timed(graph, 1e-3) for _ in range(20)]
        assert all(0 < plain <= target <= 1e-3 for target, plain in seconds)
        assert len(llm.generate(PROMPTS[0], PARAMS["greedy"])[0].outputs[0].token_ids) == 24


def test_texts_that_go_on_from_ended_ones(model: Path, exact: Path) -> None:
    """A draft model that is always right stays so on the blocks that ended rows left."""
    for length in (11, 12, 13):
        with LLM(str(model), speculate=f"draft:{exact}:num_nodes=4", **SMALL) as llm:
            params = replace(PARAMS["greedy"], max_tokens=length)
            said = tokens(llm, params)
            llm.generate([[*p, *s, 3] for p, s in zip(PROMPTS, said, strict=True)], params)
            stats = llm.stats()
            assert stats["prefix_hits"] > 0
            assert stats["accepted"] == stats["drafted"] > 0


@pytest.mark.slow
def test_a_draft_with_layers_side_by_side(
    model: Path, plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """It has other heads and units than its target."""
    options = {"layers": "1", "abreast": "2", "precision": "float32"}
    job = Job("draft", str(model), "", tmp_path, options, {"device": "cpu"})
    texts = Texts(np.arange(64) % 40, np.array([0, 64]), np.array([8]))
    write_student(job, build_student(job, texts)[0], job.out)
    with LLM(str(model), speculate=f"auto:draft={tmp_path}:any_size=true", **SMALL) as llm:
        assert not llm.engine.runner.is_host_drafting
        assert {name: tokens(llm, params) for name, params in PARAMS.items()} == plain
        assert llm.stats()["per_position"][0] > 0.9

"""hunch train without a method: what it chooses, what it says, and that `auto` finds the result."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train_command import run
from train_setup import ENGINE, OPTIONS, write_target

import hunch.loading
import hunch.train.auto
import hunch.train.costs
import hunch.train.phrase_job
import hunch.train.plan
import hunch.train.trials
from builders import tiny_config, tiny_weights
from hunch import LLM
from hunch.config import ModelConfig, SpecConfig
from hunch.drafter_files import find_files
from hunch.drafting.auto_device import BY_LEVEL
from hunch.errors import TrainingError
from hunch.hub.drafters import digest_of, find_trained, trained_drafters
from hunch.hub.names import resolve
from hunch.kernels.phrases import read_phrases
from hunch.models.load_target import load_target
from hunch.models.spec import ModelSpec
from hunch.train.clock import Clock
from hunch.train.costs import Costs, cut_draft, measure_costs
from hunch.train.expect import (
    TREES,
    answering_share,
    best_draft,
    chain_tokens,
    chance_of,
    expect,
    learning_seconds,
    rank,
    still_missed,
    tokens_answered,
    tokens_seen,
    usual_coverage,
)
from hunch.train.job import Job
from hunch.train.outcome import Outcome, outcome_of
from hunch.train.phrase_job import PhraseCount, stored_texts, write_table
from hunch.train.phrases import count_bytes
from hunch.train.plan import Asked, Plan
from hunch.train.regenerate import SHARD, write_shard
from hunch.train.replay import Curve
from hunch.train.serving import Serving
from hunch.train.sizes import METHODS, Ground, Size, sizes_for
from hunch.train.speeds import Speeds
from hunch.train.texts import Texts
from hunch.train.trials import Run, with_columns

LONG = 1e6  # seconds of training in which every size gets as good as it can
COSTS = Costs(
    passes=((1, 10e-3), (2, 10e-3), (8, 11e-3), (12, 12e-3)),
    node=1e-5,
    per_layer=3e-4,
    per_column=1e-8,
    products=1e14,
)


def ground(spec: ModelSpec, device: str = "cuda", **changes: Any) -> Ground:
    return Ground(replace(COSTS, **changes), spec, device)


FAMILIES = [("LlamaForCausalLM", 49_152), ("Qwen2ForCausalLM", 151_936)]


def wide_spec(architecture: str, vocab_size: int) -> ModelSpec:
    config = tiny_config(architecture, vocab_size=vocab_size, num_hidden_layers=24)
    return ModelSpec.from_config(config)


@pytest.mark.parametrize(("architecture", "vocab_size"), FAMILIES)
def test_the_choice_follows_the_costs(architecture: str, vocab_size: int) -> None:
    spec = wide_spec(architecture, vocab_size)

    def best(**changes: Any) -> Size:
        return rank(ground(spec, **changes), seconds=LONG)[0].size

    usual = best()
    assert best(per_column=3e-7).columns < usual.columns < vocab_size + 1
    assert best(per_column=0.0).columns == vocab_size
    slow = tuple((rows, 20 * seconds) for rows, seconds in COSTS.passes)
    assert best(passes=slow).layers > usual.layers > best(per_layer=3e-3).layers


def test_a_drafter_that_has_no_time_to_learn_is_expected_to_guess_badly() -> None:
    spec = wide_spec(*FAMILIES[0])
    size = Size(method="draft", layers=4, columns=8192)
    chances = [
        expect(ground(spec), size, seconds=seconds, answered=1e12).chance
        for seconds in (1e-3, 1.0, LONG)
    ]
    assert chances[0] < 0.1 < chances[1] < chances[2] < 0.7


def test_a_wide_target_gives_layers_with_fewer_units() -> None:
    """Where units are most of what a layer costs, and only there."""
    spec = ModelSpec.from_config(tiny_config(num_hidden_layers=24, intermediate_size=4096))
    for per_units, is_fewer in ((0.0, False), (2.5e-4, True)):
        sizes = sizes_for(spec, ["draft"], can_lose_units=True)
        best = rank(ground(spec, per_units=per_units), seconds=LONG, sizes=sizes)[0]
        assert (best.size.units < 1) == is_fewer
        assert ("units" in best.size.text()) == is_fewer


def test_few_answers_teach_less_however_long() -> None:
    spec, size = wide_spec(*FAMILIES[0]), Size(method="draft", layers=4, columns=8192)
    seen = [tokens_seen(ground(spec), size, n, LONG) for n in (1e5, 1e6)]
    assert 1e5 < seen[0] < 17e5
    assert seen[1] == pytest.approx(10 * seen[0])
    block = replace(size, method="block")
    grounds = ground(spec), ground(spec, room=1e9)
    kept, anew = (tokens_seen(one, block, 1e7, 100.0) for one in grounds)
    assert anew < kept  # what has no room is computed at every visit


def test_answers_get_more_of_the_time_the_faster_learning_is() -> None:
    """So that learning goes over them several times, neither once nor dozens of times."""
    spec, size = wide_spec(*FAMILIES[0]), Size(method="draft", layers=2, columns=8192)
    shares = []
    for products in (1e11, 1e13, 1e15):
        here = ground(spec, products=products)
        share = answering_share(here, size, 300.0)
        answered = tokens_answered(here, 300.0 * share)
        seen = 300.0 * (1 - share) / learning_seconds(here, size)
        assert 3 < seen / answered < 20 or share == 0.75
        shares.append(share)
    assert shares[0] < shares[1] < shares[2]  # a host keeps up with so many answers, not more


def test_tokens_per_pass_are_those_that_were_measured() -> None:
    """docs/training.md: the first guess of 4 and 10 layers is right so often, with chains of 5."""
    assert chain_tokens(0.68, 5) == pytest.approx(2.81, rel=0.02)
    assert chain_tokens(0.71, 5) == pytest.approx(3.03, rel=0.02)
    assert usual_coverage(16_384, 49_152) == pytest.approx(0.966)
    assert usual_coverage(151_936, 151_936) == 1.0


def test_trees_are_those_that_the_engine_grows() -> None:
    grown = {one for sizes in BY_LEVEL.values() for one in sizes}
    engine = {(one.level_size, one.num_levels, one.num_nodes) for one in grown}
    assert {(one.width, one.num_levels, one.num_nodes) for one in TREES} == engine
    passes = ((1, 1.5e-3), (6, 1.52e-3), (45, 1.7e-3))
    spec = wide_spec(*FAMILIES[0])
    chain, tree = (
        best_draft(ground(spec, on, passes=passes), 0.7, 1e-4, METHODS["draft"])
        for on in ("cpu", "cuda")
    )
    assert chain.num_nodes == chain.num_levels
    assert tree.num_nodes > tree.num_levels
    assert 1.05 < tree.speedup / chain.speedup < 1.2
    assert tree.step > 1 + tree.num_levels * 0.1 / 1.5  # a level of several nodes takes longer


def test_no_guesses_where_rows_cost_as_much_as_passes() -> None:
    here = ground(wide_spec(*FAMILIES[0]), passes=((1, 1.0), (12, 12.0)))
    found = best_draft(here, 0.7, 0.01, METHODS["draft"])
    assert (found.num_nodes, found.speedup) == (0, 1.0)
    ranked = rank(here, seconds=LONG)
    assert ranked[0].speedup == 1.0
    assert ranked[0].size.method == "draft"  # whoever forces one gets the best guesses for a cost


@pytest.mark.parametrize(("architecture", "vocab_size"), [*FAMILIES, ("GPT2LMHeadModel", 50_000)])
def test_costs_are_measured(architecture: str, vocab_size: int) -> None:
    """Of a target that no draft can be cut from too."""
    sizes = {} if architecture.startswith("GPT2") else {"head_dim": 32}
    weights = tiny_weights(tiny_config(architecture, vocab_size=vocab_size, **sizes))
    target = load_target(ModelConfig(), weights, torch.device("cpu"))
    costs = measure_costs(target, weights, seconds=0.1)
    seconds = [seconds for _, seconds in costs.passes]
    assert 0 < seconds[0] <= seconds[-1]
    assert min(costs.per_layer, costs.per_column, costs.products) > 0
    assert costs.of_node(1, 4096) < costs.of_node(2, 32_768)


def test_drafts_to_be_timed_are_as_wide_as_those_that_are_trained() -> None:
    weights = tiny_weights(tiny_config("Qwen2ForCausalLM", head_dim=32))
    target = load_target(ModelConfig(), weights, torch.device("cpu"))
    few, many = (cut_draft(target, weights, 1, 64, 1.0, abreast) for abreast in (1, 3))
    assert many.spec.num_heads == 3 * few.spec.num_heads
    assert many.weight_bytes > few.weight_bytes
    costs = replace(COSTS, per_abreast=1e-5)
    assert costs.of_node(2, 64, 1.0, 3) == pytest.approx(costs.of_node(2, 64) + 4e-5)
    weights = tiny_weights(tiny_config("Qwen2ForCausalLM", intermediate_size=512))
    target = load_target(ModelConfig(), weights, torch.device("cpu"))
    cut = cut_draft(target, weights, 1, 64, 0.5, 2)
    assert (cut.spec.num_heads, cut.spec.ffn_width) == (2 * target.spec.num_heads, 512)
    fewer = replace(costs, abreast_units=6e-6)
    assert fewer.of_node(2, 64, 0.5, 3) == pytest.approx(fewer.of_node(2, 64, 0.5) + 2.8e-5)


def test_layers_stand_side_by_side_where_that_costs_little() -> None:
    """A draft whose layers cost what launching them takes gets more in each."""
    spec = wide_spec(*FAMILIES[0])
    for per_abreast, is_wide in ((1e-6, True), (3e-4, False)):
        sizes = sizes_for(spec, ["draft"], can_stand_abreast=True)
        best = rank(ground(spec, per_abreast=per_abreast), seconds=LONG, sizes=sizes)[0]
        assert (best.size.abreast > 1) == is_wide
        assert ("side by side" in best.size.text()) == is_wide


def test_one_layer_of_two_is_weighed_with_fewer_units() -> None:
    """Where a layer costs its launches, two of the target's in one are nearly as good as one after
    the other, and half as dear."""
    spec = wide_spec(*FAMILIES[0])
    here = ground(spec, per_units=3e-6, per_abreast=2e-6, abreast_units=1.5e-6)
    sizes = sizes_for(spec, ["draft"], can_lose_units=True, can_stand_abreast=True)
    few = [one for one in sizes if one.units == 0.25 and one.columns == sizes[0].columns]
    found = {
        (one.layers, one.abreast): expect(here, one, seconds=LONG, answered=1e9)
        for one in few
        if one.layers * one.abreast <= 2
    }
    one, beside, after = (found[form] for form in ((1, 1), (1, 2), (2, 1)))
    assert one.chance < beside.chance < after.chance
    assert after.chance - beside.chance < (after.chance - one.chance) / 3
    assert beside.node_seconds < (one.node_seconds + after.node_seconds) / 2


def test_a_trial_that_went_better_than_expected_is_not_promised_everything() -> None:
    """An H200 promised 4.9x of 2.4 tokens per pass, as chances were multiplied."""
    chance = chance_of(2.36, 5)
    in_the_end = 1 - still_missed(0.3, 0.5) * (1 - chance)
    assert chance < in_the_end < 0.75
    assert still_missed(0.5, 0.4) == 1.0


def test_a_flat_curve_is_seen() -> None:
    curve = Curve()
    for second in range(1, 13):
        curve.add(second, 1.0 + 0.1 * min(second, 7))
        assert not curve.is_flat or second > 9
    assert curve.is_flat


class CountHere:
    """Counts in this process, however busy the machine is."""

    def __init__(self, texts: Texts, vocab_size: int, seconds: float) -> None:
        self.data, self.vocab_size = stored_texts(texts, vocab_size), vocab_size

    def finish(self, folder: Path, seconds: float) -> bool:
        write_table(folder, count_bytes(self.data), self.vocab_size)
        return True

    def stop(self) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hunch.train.auto, "PhraseCount", CountHere)
    return tmp_path / "cache"


WORDS = [
    f"{key}={OPTIONS[key]}" for key in ("batch", "context", "max_tokens", "shard", "held_out", "lr")
]
SMALL = [*WORDS, "steps=6", "--device", "cpu", "--max-model-len", "96", "--minutes", "1"]


def speeds_of(lookups: float, drafter: float, phrases: float = 1.0) -> Any:
    def compare(llm: LLM, methods: dict[str, str], prompts: list[Any], **_: Any) -> Speeds:
        figures = {"lookups": lookups, "drafter": drafter, "phrases": phrases}
        figures |= {"draft": 1.2, "block": 1.4}  # of trials
        own = {name: figures[name] for name in methods}
        return Speeds(
            num_prompts=len(prompts), num_tokens=10, plain=100.0, speedup=own,
            tokens_per_pass=dict.fromkeys(methods, 1.75),
            per_position={key: [0.5] for key in methods},
            acceptance_rate=dict.fromkeys(methods, 0.5), node_cost=dict.fromkeys(methods, 0.1),
        )  # fmt: skip

    return compare


def test_it_says_beforehand_that_no_drafter_will_pay(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slow = replace(COSTS, passes=((1, 1.0), (12, 12.0)))
    monkeypatch.setattr(hunch.train.plan, "least_costs", lambda _: COSTS)
    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: slow)
    monkeypatch.setattr(hunch.train.auto, "_has_table", lambda _: True)
    out = tmp_path / "out"
    given = ["--target", target, "--prompts", prompts, "--out", out, *SMALL]
    code, text, _ = run(capsys, "train", *given)
    assert code == 3
    assert "No drafter is expected to pay" in text
    assert "--force" in text
    assert not (out / "model.safetensors").exists()


def test_it_says_so_before_it_loads_the_target_where_computing_is_slow(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hunch.train.costs, "_products", lambda *_: 1e6)
    monkeypatch.setattr(hunch.train.auto, "_has_table", lambda _: True)
    monkeypatch.setattr(hunch.train.plan, "_measure", None)  # not reached
    given = ["--target", target, "--prompts", prompts, "--out", tmp_path / "out", *SMALL]
    code, text, _ = run(capsys, "train", *given)
    assert code == 3
    (line,) = text.splitlines()
    assert line.startswith("No drafter is expected to pay")
    assert "here in 1 minute: this CPU is too slow to train one;" in line


def test_a_drafter_that_pays_is_found_by_auto(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(hunch.train.plan, "compare_speeds", speeds_of(1.1, 0.0))
    monkeypatch.setattr(hunch.train.trials, "compare_speeds", speeds_of(1.1, 1.9))
    loads, load = list[Any](), hunch.loading.load_target_of
    monkeypatch.setattr(hunch.loading, "load_target_of", lambda *of: loads.append(of) or load(*of))
    out = tmp_path / "out"
    given = ["--target", target, "--prompts", prompts, "--out", out, *SMALL, "--force"]
    code, text, _ = run(capsys, "train", *given)
    assert code == 0, text
    assert len(loads) == 1, "measuring, answering and comparing have one copy"
    assert "the drafter 1.90x (1.75 tokens per pass)" in text
    assert "lookups alone 1.10x" in text
    assert "The drafter alone was promised" in text
    assert "with lookups the engine's steps took 0.92." in text
    stored = json.loads((out / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForCausalLM"]
    lines = text.splitlines()
    assert lines[-4].startswith("trains draft of 2 layers")  # before it starts
    assert lines[-1].startswith("of ")  # where the time went
    spent = Clock(out / "work" / "clock.json", 1.0).account()
    named = {"measure", "regenerate", "train", "compare", "load", "capture", "read", "write"}
    assert named <= spent.keys()
    assert min(spent.values()) >= 0
    assert "of plain decoding expected" in text
    assert {one.path for one in trained_drafters()} == {str(out), str(out / "phrases")}
    files = resolve(str(target))
    spec = find_files(SpecConfig.parse("auto"), files, "cpu")
    assert spec.options == {
        "draft": str(out), "phrases": str(out / "phrases"), "any_size": "true",
    }  # fmt: skip
    with LLM(str(target), **ENGINE) as llm:  # large beside this target, and loaded all the same
        assert {"draft", "dspark"} & set(llm.engine.capacity.methods)
    assert "draft" not in find_files(SpecConfig.parse("auto"), files, "cuda").options
    _, listed, _ = run(capsys, "drafters", "--json")
    assert [one["speedup"] for one in json.loads(listed)] == [1.0, 1.9]
    assert run(capsys, "drafters", "rm", out)[0] == 0
    assert run(capsys, "drafters", "rm", out)[0] == 2
    assert find_trained(str(target), files.path, "cpu") is None


@pytest.mark.slow
def test_the_faster_drafter_of_two_trials_goes_on(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(hunch.train.plan, "compare_speeds", speeds_of(1.1, 0.0))
    monkeypatch.setattr(hunch.train.trials, "compare_speeds", speeds_of(1.1, 1.9))
    monkeypatch.setattr(hunch.train.trials, "LONG", 0.0)
    monkeypatch.setattr(hunch.train.trials, "CLOSE", 0.0)
    out = tmp_path / "out"
    given = ["--target", target, "--prompts", prompts, "--out", out, *SMALL, "--force"]
    code, text, _ = run(capsys, "train", *given)
    assert code == 0, text
    assert "trial of draft of" in text
    assert "trial of block of" in text
    (drafter,) = (one for one in trained_drafters() if one.path == str(out))
    assert drafter.method == "dspark"
    spec = find_files(SpecConfig.parse("auto"), resolve(str(target)), "cpu")
    assert (spec.method, spec.options["draft"]) == ("auto", str(out))
    with LLM(str(target), **ENGINE) as llm:
        assert "dspark" in llm.engine.capacity.methods


def test_phrases_are_counted_where_no_network_pays(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slow = replace(COSTS, passes=((1, 1.0), (12, 12.0)))
    monkeypatch.setattr(hunch.train.plan, "least_costs", lambda _: COSTS)
    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: slow)
    monkeypatch.setattr(hunch.train.plan, "compare_speeds", speeds_of(1.1, 0.0))
    monkeypatch.setattr(hunch.train.trials, "compare_speeds", speeds_of(1.1, 0.0, 1.3))
    out = tmp_path / "out"
    given = ["train", "--target", target, "--prompts", prompts, "--out", out, *SMALL]
    with monkeypatch.context() as slow_machine:
        slow_machine.setattr(hunch.train.auto, "MIN_ANSWERS", 10**6)
        code, text, _ = run(capsys, *given)
    assert code == 3  # nothing pays, which is no error
    assert "1000000 are needed; give more --minutes" in text
    code, text, _ = run(capsys, *given)
    assert code == 0, text
    assert "counts phrases alone" in text
    assert "a phrase table of its answers 1.30x" in text
    spec = find_files(SpecConfig.parse("auto"), resolve(str(target)), "cpu")
    assert spec.options == {"phrases": str(out / "phrases")}
    with LLM(str(target), **ENGINE) as llm:  # and the engine reads it
        assert llm.generate("the model", use_tqdm=False)


@pytest.mark.parametrize(
    ("error", "table"),
    [
        *((TrainingError("3 of 40 steps"), table) for table in ("counted", "late", "shipped")),
        (torch.OutOfMemoryError("no"), "counted"),
    ],
)
def test_a_network_that_cannot_be_trained_is_left_out(
    error: Exception, table: str, target: Path, prompts: Path, tmp_path: Path, cache: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a slow machine, or a GPU with little memory: the job goes on, and says so."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(hunch.train.plan, "compare_speeds", speeds_of(1.1, 0.0))
    monkeypatch.setattr(hunch.train.trials, "compare_speeds", speeds_of(1.1, 0.0, 1.3))
    monkeypatch.setattr(hunch.train.auto, "_has_table", lambda _: table == "shipped")
    monkeypatch.setattr(hunch.train.trials, "build_student", fail)
    if table == "late":
        monkeypatch.setattr(CountHere, "finish", lambda *_: False)
    given = ["--target", target, "--prompts", prompts, "--out", tmp_path / "out", *SMALL, "--force"]
    code, text, _ = run(capsys, "train", *given)
    assert code == (0 if table == "counted" else 3)
    assert ("3 of 40 steps" if isinstance(error, TrainingError) else "too little memory") in text
    assert ("a phrase table of its answers 1.30x" in text) is (table == "counted")
    assert ("time to count a phrase table" in text) is (table == "late")


def test_a_job_that_goes_on_keeps_its_vocabulary(tmp_path: Path) -> None:
    """With no time left, fewer tokens to guess would seem enough."""
    spec = wide_spec(*FAMILIES[0])
    asked, clock = Asked(target="t", out=tmp_path, prompts="p"), Clock(tmp_path / "c.json", 4.0)
    texts = Texts(np.arange(40_000), np.array([0, 20_000, 40_000]), np.array([1, 1]))
    plan = Plan(ground(spec, "cpu"), 1.1, rank(ground(spec, "cpu"), seconds=100.0))
    run_ = Run(asked, plan, tmp_path, texts, [], Serving("t", clock))
    found = []
    for spent in (10.0, 239.0):
        clock.spent = {"regenerate": spent}
        found.append(with_columns(run_, plan.best.size)[0].options["draft_vocab"])
    stored = json.loads((tmp_path / "columns.json").read_text())
    assert found == [str(count) for count in stored.values()] * 2
    (tmp_path / "columns.json").write_text(json.dumps(dict.fromkeys(stored, 2048)))
    job, chosen = with_columns(run_, plan.best.size)
    assert job.options["draft_vocab"] == "2048" == str(chosen.size.columns)


def test_loading_that_takes_all_of_the_time_is_said_so(tmp_path: Path) -> None:
    asked, clock = Asked(target="big", out=tmp_path, prompts="p"), Clock(tmp_path / "c.json", 4.0)
    hunch.train.plan._check_loading(asked, clock)
    clock.spent["measure"] = 150.0
    with pytest.raises(TrainingError, match=r"loading big took 150 s of 240.*--minutes 13"):
        hunch.train.plan._check_loading(asked, clock)


def test_what_came_of_it_is_said_by_the_clock(tmp_path: Path) -> None:
    target = str(write_target(tmp_path / "target"))
    asked = Asked(target=target, out=tmp_path / "out", prompts="p", is_listed=False)
    job = Job("draft", target, "p", asked.out)
    plan = Plan(ground(wide_spec(*FAMILIES[0])), 1.1, [])

    def said(drafter: float, phrases: float) -> Outcome:
        methods = dict.fromkeys(("lookups", "drafter", "phrases"), "")
        speeds = speeds_of(1.1, drafter, phrases)(None, methods, [[1]])
        return outcome_of(asked, job, plan, speeds)

    none = said(1.1, 1.0)
    assert not none.pays
    assert "It does not pay here" in none.text
    assert f"is kept: --speculate auto:phrases={asked.out / 'phrases'} takes it" in none.text
    table = said(1.3, 1.4)
    assert table.pays
    assert "The network brings no more than the phrase table alone" in table.text
    assert f"--speculate auto:phrases={asked.out / 'phrases'}" in table.text
    network = said(1.9, 1.4)
    assert f"The drafter pays: use --speculate auto:draft={asked.out}" in network.text


@pytest.mark.slow
def test_a_drafter_that_does_not_pay_is_said_so(
    target: Path, prompts: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a target this small none can: everything here is measured."""
    out = tmp_path / "out"
    given = ["--target", target, "--prompts", prompts, "--out", out, *SMALL, "--force", "--json"]
    code, text, _ = run(capsys, "train", *given)
    found = json.loads(text)
    assert {"train", "compare", "capture"} <= found["seconds"].keys()
    learning = found["learning"]
    assert learning["steps"] > 0 < learning["tokens_a_step"]
    assert learning["tokens_per_second"] > 0 < learning["read_per_second"]
    speeds = found["speeds"]["speedup"]
    for name, words in (("drafter", "the drafter"), ("lookups", "lookups alone")):
        assert f"{words} {speeds[name]:.2f}x" in found["text"]
    assert (code == 0) is found["pays"] is bool(trained_drafters())
    best = max(speeds["drafter"], speeds["phrases"])
    assert (best >= 1.02 * max(speeds["lookups"], 1.0)) is found["pays"]
    assert (out / "model.safetensors").is_file()


def test_held_out_answers_are_few_beside_those_that_teach(tmp_path: Path) -> None:
    answers = [list(range(8))] * 30
    write_shard(tmp_path / "held" / SHARD.format(0), list(range(30)), [[1, 2]] * 30, answers)

    def held(num_tokens: int) -> int | None:
        texts = Texts(np.zeros(num_tokens), np.array([0, num_tokens]), np.array([1]))
        found = hunch.train.auto._held(tmp_path, texts)
        return None if found is None else len(found)

    assert [held(count) for count in (500, 1000, 100_000)] == [None, 20, 30]


def test_phrases_are_counted_of_as_many_answers_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = Texts(np.arange(4000) % 7, np.arange(101) * 40, np.full(100, 5))
    monkeypatch.setattr(hunch.train.phrase_job, "MIN_TOKENS", 400)
    monkeypatch.setattr(hunch.train.phrase_job, "PER_SECOND", 100)

    def num_texts(seconds: float) -> int:
        with np.load(io.BytesIO(stored_texts(texts, 7, seconds))) as stored:
            return len(stored["prompt_len"])

    assert [num_texts(seconds) for seconds in (0.0, 20.0, 1000.0)] == [10, 50, 100]


@pytest.mark.slow
def test_phrases_are_counted_by_another_process(target: Path, tmp_path: Path) -> None:
    texts = Texts(np.arange(400) % 7, np.arange(11) * 40, np.full(10, 5))
    count = PhraseCount(texts, 300)
    assert count.finish(tmp_path, 120.0)
    count.stop()
    assert len(read_phrases(tmp_path, 300).hash_E) > 0
    late = PhraseCount(texts, 300)
    assert not late.finish(tmp_path / "late", 0.0)


def test_another_model_has_another_digest(target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in target.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert digest_of(copy) == digest_of(target)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert digest_of(copy) != digest_of(target)

"""hunch train from=MODEL without a method: cuts of a smaller model are weighed beside the rest."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smaller_models import write_wide
from test_train_auto import COSTS, LONG, SMALL, cache, speeds_of
from test_train_command import run

import hunch.train.plan
import hunch.train.trials
from builders import tiny_config
from hunch.config import ModelConfig
from hunch.hub.drafters import trained_drafters
from hunch.models.load import load_decoder
from hunch.models.load_target import load_target
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.train.costs import cut_draft, measure_costs, measure_cuts
from hunch.train.expect import expect, rank, wholeness
from hunch.train.job import read_settings
from hunch.train.origin import agreement, open_origin
from hunch.train.plan import Asked, Plan
from hunch.train.sizes import Ground, Size, Smaller, sizes_for, sizes_from
from hunch.train.trials import _candidates, job_for

__all__ = ["cache"]  # a fixture
SPEC = ModelSpec.from_config(tiny_config(vocab_size=49_152, num_hidden_layers=24, hidden_size=256))
NARROW = ModelSpec.from_config(tiny_config(vocab_size=49_152, num_hidden_layers=12, hidden_size=32))


def smaller(agrees: float, **changes: Any) -> Smaller:
    """A model whose layers cost a tenth of the target's."""
    costs = replace(COSTS, per_layer=3e-5, per_column=1e-9, per_abreast=1e-5, **changes)
    return Smaller(name="small", spec=NARROW, costs=costs, agrees=agrees, num_known=49_152)


def best_of(one: Smaller, seconds: float = LONG) -> Size:
    sizes = [*sizes_for(SPEC), *sizes_from(one)]
    return rank(Ground(COSTS, SPEC, "cuda", one), seconds=seconds, sizes=sizes)[0].size


def test_a_smaller_model_is_taken_where_it_knows_the_target() -> None:
    found = best_of(smaller(0.8))
    assert found.cut_from == "small"
    assert "of small" in found.text()
    assert best_of(smaller(0.1)).cut_from == ""
    slow = smaller(0.8, node=3e-2)  # a guess takes longer than a pass
    assert best_of(slow).cut_from == ""


def test_what_holds_all_layers_begins_as_the_smaller_model() -> None:
    one, whole = smaller(0.6), Size(method="draft", layers=12, columns=49_152, cut_from="small")
    assert [wholeness(replace(whole, layers=n), 12) for n in (6, 9, 12)] == [0.0, 0.5, 1.0]
    assert wholeness(replace(whole, layers=4, abreast=3), 12) < 0.5
    ground = Ground(COSTS, SPEC, "cuda", one)
    chances = [
        expect(ground, replace(whole, layers=layers), seconds=seconds, answered=1e12).chance
        for layers in (12, 6)
        for seconds in (1e-6, LONG)
    ]
    assert chances[0] == pytest.approx(0.6, abs=0.01)
    assert chances[1] == pytest.approx(0.72, abs=0.01)  # misses three tenths less
    assert chances[2] < 0.01
    assert chances[3] < chances[1]


def test_learning_takes_what_the_smaller_model_takes() -> None:
    """A target's own layers learn from fewer tokens in the same time."""
    size = Size(method="draft", layers=4, columns=8192)
    ground = Ground(COSTS, SPEC, "cuda", smaller(1.0))
    found = [
        expect(ground, replace(size, cut_from=name), seconds=1.0, answered=1e12)
        for name in ("", "small")
    ]
    assert found[0].chance < found[1].chance
    assert found[0].node_seconds > found[1].node_seconds


def test_a_smaller_model_is_a_kind_of_its_own_in_trials() -> None:
    one = smaller(0.9)
    sizes = [*sizes_for(SPEC, ["draft"]), *sizes_from(one)]
    ground = Ground(COSTS, SPEC, "cuda", one)
    ranked = rank(ground, seconds=LONG, sizes=sizes)
    plan = Plan(ground, 1.0, [replace(each, speedup=2.0) for each in ranked])
    kinds = _candidates(plan)
    assert set(kinds) == {"draft", "draft-smaller", "draft-smaller-abreast"}
    asked = Asked("target", Path("out"), "", options={"from": "small", "lr": "0.1"})
    for name, each in kinds.items():
        job = job_for(asked, each.size)
        assert ("from" in job.options) == (name != "draft")
        assert read_settings(job.method, job.options).loop.lr == 0.1


@pytest.fixture(scope="module")
def wide(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(target, tmp_path_factory.mktemp("wide") / "model")


def test_cuts_of_a_smaller_model_are_timed_beside_the_target(wide: Path, target: Path) -> None:
    weights, small = open_weights(str(wide)), open_weights(str(target))
    served = load_target(ModelConfig(), weights, torch.device("cpu"))
    costs = measure_costs(served, weights, seconds=0.1)
    cuts = measure_cuts(served, small, costs, seconds=0.1)
    assert cuts.passes == costs.passes
    assert min(cuts.per_layer, cuts.per_column, cuts.products) > 0
    spec = ModelSpec.from_config(small.config)
    draft = cut_draft(served, small, 2, 64, other=spec)
    assert (draft.spec.width, draft.spec.num_layers) == (32, 2)
    assert draft.weight_bytes < served.weight_bytes


def test_what_it_says_by_itself_is_counted(wide: Path, target: Path) -> None:
    origin = open_origin(str(target), open_weights(str(wide)))
    model = load_decoder(origin.weights, device="cpu")
    ids, last = [5, 9, 290], origin.num_known - 1  # the third is none of its own
    logits = model.logits
    model.logits = lambda hidden_MD: logits(hidden_MD).index_fill(1, torch.tensor([7]), 1e9)  # type: ignore[method-assign]
    assert agreement(origin, model, [(ids, [7, 7, 8, 7]), (ids, [last])]) == pytest.approx(0.6)


def test_the_draft_of_a_smaller_model_is_trained_and_listed(
    wide: Path, target: Path, prompts: Path, tmp_path: Path, cache: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hunch.train.plan, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(hunch.train.plan, "measure_cuts", lambda *_: smaller(1.0).costs)
    monkeypatch.setattr(hunch.train.plan, "compare_speeds", speeds_of(1.1, 0.0))
    monkeypatch.setattr(hunch.train.trials, "compare_speeds", speeds_of(1.1, 1.9))
    out = tmp_path / "out"
    given = ["--target", wide, "--prompts", prompts, "--out", out, *SMALL, f"from={target}"]
    code, text, _ = run(capsys, "train", *given)
    assert code == 0, text
    assert f"cut from {target}: a drafted node 0.030 ms per layer" in text
    assert f"trains draft of 4 layers of {target.name}" in text
    stored = json.loads((out / "work" / "plan.json").read_text())["smaller"]
    assert stored["name"] == str(target)
    assert stored["agrees"] > 0.95  # the target has its function
    assert stored["costs"].keys() == asdict(COSTS).keys()
    config = json.loads((out / "config.json").read_text())
    assert (config["cut_from"], config["drafts_for"]) == (str(target), str(wide))
    assert str(out) in {one.path for one in trained_drafters()}
    other = [word for word in given if not str(word).startswith("from=")]
    code, _, err = run(capsys, "train", *other)
    assert code == 2
    assert f"holds a job with from={target}" in err


def test_another_smaller_model_is_refused_before_anything_is_made(
    wide: Path, tmp_path: Path, prompts: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["--target", wide, "--prompts", prompts, "--out", out, *SMALL, "from=/no/such/model"]
    code, _, err = run(capsys, "train", *given)
    assert code == 2
    assert "/no/such/model: no such file" in err
    assert not out.exists()

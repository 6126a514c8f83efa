"""Every recipe: what it learns is what the engine then drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_setup import ENGINE, new_job, read_texts

from builders import tiny_config, tiny_model, tiny_weights
from hunch import LLM, SamplingParams
from hunch.errors import UnsupportedModelError
from hunch.models.decoder import Decoder
from hunch.models.load import load_decoder
from hunch.registry import RECIPES, resolve
from hunch.train.cut import UNITS, layers_text
from hunch.train.go_on import GoOn, job_for
from hunch.train.job import Job, build_student, drafts_as, read_settings, run_job, write_student
from hunch.train.loop import CANDIDATE, LAST, Loop
from hunch.train.packs import Laid
from hunch.train.progress import Progress
from hunch.train.recipes.draft import choose_layers, read_layers
from hunch.train.regenerate import read_answers
from hunch.train.states import TopOpinions
from hunch.train.student import StepInputs, Student, check_target
from hunch.train.texts import Texts
from hunch.train.vocab import count_columns
from tiny_families import write_family
from tiny_models import write_llama

CASES: list[tuple[str, dict[str, Any]]] = [
    ("draft", {"layers": "0,1,3", "draft_vocab": 160}),
    ("eagle3", {"unroll": 2, "lr": 0.02}),
    ("medusa", {"heads": 3, "draft_vocab": 160, "lr": 0.02}),
    ("medusa", {"heads": 3, "layers": 2, "draft_vocab": 160, "lr": 0.02, "share_tables": True}),
    ("mlp", {"stages": 3, "inner": 32, "lr": 0.02}),
    ("block", {"layers": 2, "block": 4, "draft_vocab": 160, "lr": 0.02, "rank": 16}),
]


def _name(case: tuple[str, dict[str, Any]]) -> str:
    return case[0] + "-share_tables" * ("share_tables" in case[1])


@pytest.fixture(
    params=[pytest.param(c, marks=[pytest.mark.slow] * ("share_tables" in c[1])) for c in CASES],
    ids=map(_name, CASES),
)
def trained(request: pytest.FixtureRequest, train: Callable[..., Any]) -> tuple[Any, Any]:
    method, options = request.param
    found: tuple[Any, Any] = train(method, **options)
    return found


def test_every_recipe_is_tried() -> None:
    assert {method for method, _ in CASES} == set(RECIPES) - {"phrases"}  # counted, not trained


def test_replay_and_engine_agree(trained: tuple[Any, Any], target: Path) -> None:
    """Wrong templates, layers, shifts or maps would all show here."""
    job, _ = trained
    texts = read_answers(job.out / "work" / "answers")
    student, decoder = build_student(job, texts)
    loop = Loop(student, decoder, job.out / "work" / "train", job.settings.loop, 1.0)
    few = texts.take(torch.arange(16).numpy())
    replay = loop.test(few)
    prompts = [few.text(i)[: few.prompt_len[i]].tolist() for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=20)
    depth = min(len(replay.tried), 5)
    # The last candidate is what the loop ended with.
    folder = max((job.out / "work" / "select").glob("candidate-*"))
    method = drafts_as(job.method)
    with LLM(
        str(target), speculate=f"{method}:{folder}:num_nodes={depth}:adaptive=false", **ENGINE
    ) as llm:
        outputs = llm.generate(prompts, params)
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    steps = sum(output.outputs[0].stats["steps"] - 1 for output in outputs)
    assert replay.num_tokens == tokens
    assert tokens / steps == pytest.approx(replay.tokens_per_pass, rel=0.02)


def test_training_helps(trained: tuple[Any, Any]) -> None:
    job, _ = trained
    texts = read_answers(job.out / "work" / "answers")
    found = []
    for place in ("work/train", "nowhere"):  # restored from its checkpoint, and fresh
        student, decoder = build_student(job, texts)
        loop = Loop(student, decoder, job.out / place, job.settings.loop, 1.0)
        found.append(loop.test(texts).tokens_per_pass)
    assert found[0] > found[1] + 0.01


def test_a_target_that_does_not_fit() -> None:
    with pytest.raises(UnsupportedModelError, match="learned positions"):
        check_target(tiny_model("OPTForCausalLM").spec, "eagle3")


def test_a_draft_of_a_target_with_learned_positions(tmp_path: Path) -> None:
    """OPT's: they are the target's, and are written with its layers."""
    target = write_family(tmp_path / "target", "opt")
    lines = [json.dumps({"prompt": text}) for text in ("the model and", "fast token", "a b c", "e")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = {"steps": "2", "batch": "64", "layers": "1", "held_out": "1", "max_tokens": "8"}
    engine = {"dtype": "float32", "max_model_len": 64}
    job = Job(
        "draft", str(target), str(tmp_path / "prompts.jsonl"), tmp_path / "out",
        {**options, "context": "48"}, engine,
    )  # fmt: skip
    run_job(job, Progress(is_quiet=True))
    params, texts = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for speculate in ("off", f"draft:{job.out}"):
        with LLM(str(target), speculate=speculate, always_draft=True, **engine) as llm:
            texts.append(llm.generate("the model and", params)[0].outputs[0].token_ids)
            assert (llm.stats()["drafted"] > 0) == (speculate != "off")
    assert texts[0] == texts[1]


@torch.no_grad()
def loss_of(student: Student, target: Decoder) -> float:
    ids = np.arange(48) % target.spec.vocab_size
    laid = Laid(Texts(ids, np.array([0, 24, 48]), np.array([4, 4])), student.columns.column_V, 24)
    inputs, states, p_MC = read_texts(student, target, laid.pack(np.arange(2), anchors=24))
    return float(student.loss_on(StepInputs(inputs, states, TopOpinions.of(p_MC))).loss)


@pytest.mark.parametrize(("method", "options"), [("draft", {}), ("block", {"rank": "8"})])
def test_units_that_add_nothing_are_left_out(method: str, options: dict[str, str]) -> None:
    """Half of each layer's write nothing: without them a drafter says the same."""
    config = tiny_config("LlamaForCausalLM", intermediate_size=512)
    weights = tiny_weights(config)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.tensors.items():
        if name.endswith("down_proj.weight"):
            tensor[:, torch.randperm(512, generator=generator)[:256]] = 0.0
    target = load_decoder(weights, dtype="float32", device="cpu")
    columns = count_columns(np.ones(target.spec.vocab_size, dtype=np.int64), None)
    losses = []
    for units in ("1", "0.5"):
        recipe = read_settings(method, {"layers": "1", "units": units, **options}).recipe
        student = resolve(RECIPES, method).student(recipe, target, columns, weights)
        losses.append(loss_of(student, target))
        written, tensors = student.files()
        assert written["intermediate_size"] == round(512 * float(units))
        assert written.get(UNITS, 1.0) == float(units)
        assert sum(256 in tensor.shape for tensor in tensors.values()) == 3 * (units == "0.5")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_layers_side_by_side_add_what_each_writes() -> None:
    """Two layers that differ by what their norms do alone: together they write twice as much."""
    config = tiny_config("Qwen2ForCausalLM", num_hidden_layers=4)
    weights = tiny_weights(config)
    scale_D = torch.linspace(0.5, 2.0, weights.config["hidden_size"])
    for name in [name for name in weights.tensors if ".layers.0." in name]:
        tensor = weights.tensors[name]
        if name.endswith("layernorm.weight"):
            tensor = tensor / scale_D
        elif name.endswith(".weight") and not name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = tensor * scale_D
        weights.tensors[name.replace(".0.", ".1.")] = tensor
    target = load_decoder(weights, dtype="float32", device="cpu")
    columns = count_columns(np.ones(target.spec.vocab_size, dtype=np.int64), None)
    losses = []
    for layers, abreast in (("0,", "1"), ("0,1", "2")):
        recipe = read_settings("draft", {"layers": layers, "abreast": abreast}).recipe
        student = resolve(RECIPES, "draft").student(recipe, target, columns, weights)
        for name, tensor in student.tensors.items():
            if abreast == "2" and name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.data *= 0.5
        losses.append(loss_of(student, target))
        written, _ = student.files()
        assert written["num_attention_heads"] == int(abreast) * config["num_attention_heads"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("draft", {"units": "0.5"}),
        ("block", {"units": "0.5"}),
        ("draft", {"abreast": "2"}),
        ("draft", {"units": "0.5", "abreast": "2"}),
    ],
)
def test_the_engine_drafts_with_layers_of_another_width(
    method: str, more: dict[str, str], tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "target", layers=3, width=256, max_len=128)
    given = {"layers": "1", "precision": "float32", "draft_vocab": "160", **more}
    job = new_job(target, tmp_path, tmp_path / "out", method, **given)
    texts = Texts(np.arange(64) % 160, np.array([0, 64]), np.array([8]))
    write_student(job, build_student(job, texts)[0], job.out)
    params, found = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for speculate in ("off", f"{drafts_as(method)}:{job.out}"):
        with LLM(str(target), speculate=speculate, always_draft=True, **ENGINE) as llm:
            found.append(llm.generate("the model", params)[0].outputs[0].token_ids)
            assert (llm.stats()["drafted"] > 0) == (speculate != "off")
    assert found[0] == found[1]
    with LLM(str(target), speculate=f"auto:draft={job.out}:any_size=true", **ENGINE) as llm:
        assert llm.generate("the model", params)[0].outputs[0].token_ids == found[0]
    asked = GoOn(target=str(target), drafter=str(job.out), out="", device="cpu")
    assert job_for(asked).options.items() >= more.items()


def test_a_small_target_gives_half_of_its_layers() -> None:
    assert [len(read_layers("", num_layers)) for num_layers in (2, 5, 8, 30)] == [1, 2, 4, 4]
    assert [read_layers(layers_text(layers), 30) for layers in ([0], [0, 7])] == [[0], [0, 7]]


def test_layers_are_chosen_from_both_ends() -> None:
    assert choose_layers(4, 30) == [0, 1, 15, 29]
    for count in range(2, 30):
        layers = choose_layers(count, 30)
        assert len(layers) == count
        assert layers == sorted(set(layers))
        assert layers[0] == 0


def test_started_again_with_no_time_left_it_keeps_what_it_has(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    job, _ = train("draft", **CASES[0][1])
    texts = read_answers(job.out / "work" / "answers")
    student, decoder = build_student(job, texts)
    (tmp_path / LAST).write_bytes((job.out / "work" / "train" / LAST).read_bytes())
    loop = Loop(student, decoder, tmp_path, job.settings.loop, 1.0)
    loop.place.num_candidates = 0  # it was killed before any was put aside
    loop.marks = (1.0,)
    loop.run(*texts.split(2, 0), Progress(is_quiet=True))
    assert (tmp_path / CANDIDATE.format(0)).is_file()


@pytest.mark.parametrize("method", ["block", "eagle3"])
def test_auto_drafts_with_a_head_beside_lookups(
    method: str, train: Callable[..., Any], target: Path
) -> None:
    job, _ = train(method, **next(case for name, case in CASES if name == method))
    texts = read_answers(job.out / "work" / "answers")
    prompts = [texts.text(i)[: texts.prompt_len[i]].tolist() for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20)
    found = {}
    for way in ("off", f"auto:draft={job.out}:any_size=true"):
        with LLM(str(target), speculate=way, **ENGINE) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[way] = [output.outputs[0].token_ids for output in outputs]
            stats = llm.stats()
    first, second = found.values()
    assert first == second
    assert stats["accepted"] > 0

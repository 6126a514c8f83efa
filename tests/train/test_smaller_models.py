"""Drafts cut from a smaller model than their target: train draft from=MODEL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from smaller_models import PADDING, write_shuffled, write_wide
from test_train_command import ENGINE as ENGINE_WORDS
from test_train_command import run
from train_setup import ENGINE, new_job, write_prompts

from hunch import LLM, SamplingParams
from hunch.config import SpecConfig
from hunch.drafter_files import find_files
from hunch.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, VocabMismatchError
from hunch.hub import resolve
from hunch.hub.drafters import TrainedDrafter, add_trained, digest_of
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.train.attend import Packed
from hunch.train.go_on import GoOn, job_for
from hunch.train.job import Job, build_student, job_of, run_job, write_student
from hunch.train.loop import Loop
from hunch.train.packs import Spans
from hunch.train.progress import Progress
from hunch.train.recipes.draft import read_layers
from hunch.train.regenerate import read_answers
from hunch.train.texts import Texts
from hunch.train.vocab import count_columns
from recurrent_models import make
from tiny_families import write_family
from tiny_gguf import VOCAB, random_tensors, write_gguf
from tiny_models import write_llama, write_tokenizer

QUIET = Progress(is_quiet=True)
TEXTS = Texts(np.arange(64) % 160, np.array([0, 64]), np.array([8]))


@pytest.fixture(scope="module")
def wide(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose smaller model is the one that other tests train for."""
    return write_wide(target, tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def trained(
    wide: Path, target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Job:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("trained")
    options = {"from": target, "layers": "0,1,3", "draft_vocab": 160}
    job = new_job(wide, prompts, out, "draft", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "marks", (1.0,))
        run_job(job, QUIET)
    return job


def untrained(target: Path, small: Path, out: Path, **options: Any) -> Path:
    """A draft as it is before it learns anything."""
    job = new_job(target, out, out, "draft", **{"from": small, **options})
    write_student(job, build_student(job, TEXTS)[0], out)
    return out


def accepted(target: Path, draft: Path, prompt: str | list[int] = "the model") -> float:
    """Of the guesses, the share that the target takes; the text is the target's in any case."""
    params, texts = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for speculate in ("off", f"draft:{draft}:num_nodes=4:adaptive=false"):
        with LLM(str(target), speculate=speculate, **ENGINE) as llm:
            texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
            rate = llm.stats()["acceptance_rate"]
    assert texts[0] == texts[1]
    return float(rate)


@torch.no_grad()
def compare_scores(target: Path, small: Path, num_layers: int) -> None:
    """A draft of all layers against the small model, over tokens of both and some of the target's
    alone: for those it reads the small model's last one."""
    job = new_job(target, Path(), Path(), "draft", **{"from": small, "layers": num_layers})
    student, teacher = build_student(job, TEXTS)
    model, size = load_decoder(open_weights(str(small)), device="cpu"), teacher.spec.vocab_size
    ids_T = torch.cat((torch.arange(40), torch.arange(size - 24, size)))
    spans = Spans.of([32, 32], teacher.device)
    states_TD = student.normed(student.stream(ids_T, spans))  # type: ignore[attr-defined]
    mine_TC = states_TD @ student.head_CD.T  # type: ignore[attr-defined]
    known_T = ids_T.clamp(max=model.spec.vocab_size - 1)
    hidden = model.read(known_T, spans.pos_T, Packed(spans, model.ropes))
    theirs_TC = model.logits(hidden.last_TD)[:, student.columns.ids_C]
    torch.testing.assert_close(mine_TC, theirs_TC, rtol=1e-4, atol=1e-4)
    assert int(student.columns.ids_C.max()) < model.spec.vocab_size


def test_before_training_it_says_what_the_small_model_says(wide: Path, target: Path) -> None:
    compare_scores(wide, target, 4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "granite", "mistral", "opt"])
def test_a_smaller_model_of_any_family_like_llama(family: str, wide: Path, tmp_path: Path) -> None:
    """Biases, norms of heads, scales, windows, learned positions."""
    compare_scores(wide, write_family(tmp_path / family, family), 2)


def test_beside_a_target_that_gives_no_layers_itself(tmp_path: Path) -> None:
    big = write_llama(tmp_path / "big", num_experts=4)
    small = write_family(tmp_path / "small", "qwen2")
    assert accepted(big, untrained(big, small, tmp_path / "out", layers=1, context=96)) < 1


def test_tokens_it_lacks_are_never_guessed_however_frequent() -> None:
    count_V = np.arange(20)
    columns = count_columns(count_V, 4, num_known=16)
    assert columns.ids_C.tolist() == [15, 14, 13, 12]
    assert columns.column_V.tolist()[16:] == [-1] * 4
    with pytest.raises(ConfigError, match="from 2 to the target's 16"):
        count_columns(count_V, 17, num_known=16)


def test_the_files_say_what_it_was_cut_from(trained: Job, wide: Path, target: Path) -> None:
    config = json.loads((trained.out / "config.json").read_text())
    assert (config["cut_from"], config["drafts_for"]) == (str(target), str(wide))
    assert config["hidden_size"] == 32
    assert config["cut_layers"] == [0, 1, 3]
    card = (trained.out / "README.md").read_text()
    assert f"draft drafter for {wide}" in card
    assert f"cut from {target}" in card
    assert f"- from: {target}" in card


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_changes_no_text(trained: Job, wide: Path, temperature: float) -> None:
    size = json.loads((wide / "config.json").read_text())["vocab_size"]
    prompts = [
        "the model",
        "a guess",
        [5, size - 1, 9, size - PADDING],
    ]  # some it has never heard of
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=7, ignore_eos=True)
    found = []
    for speculate in (
        "off",
        f"draft:{trained.out}",
        f"draft:{trained.out}:tree=dynamic:num_nodes=6",
    ):
        with LLM(str(wide), speculate=speculate, always_draft=True, **ENGINE) as llm:
            outputs = llm.generate(prompts, params)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.stats()["accepted"] > 0) == (speculate != "off")
    assert found[0] == found[1] == found[2]


def test_replay_and_engine_agree(trained: Job, wide: Path) -> None:
    texts = read_answers(trained.out / "work" / "answers")
    student, teacher = build_student(trained, texts)
    loop = Loop(student, teacher, trained.work / "train", trained.settings.loop, 1.0)
    few = texts.take(np.arange(16))
    replay = loop.test(few)
    prompts = [few.text(i)[: few.prompt_len[i]].tolist() for i in range(16)]
    speculate = f"draft:{trained.out}:num_nodes=5:adaptive=false"
    with LLM(str(wide), speculate=speculate, **ENGINE) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    steps = sum(output.outputs[0].stats["steps"] - 1 for output in outputs)
    assert replay.tokens_per_pass > 1.5
    assert tokens / steps == pytest.approx(replay.tokens_per_pass, rel=0.02)


def test_all_layers_are_the_small_model(wide: Path, target: Path, tmp_path: Path) -> None:
    """Here that is the target's function: every guess is right. As a whole model too."""
    draft = untrained(wide, target, tmp_path / "cut", layers=4)
    assert accepted(wide, draft) > 0.95
    draft = untrained(wide, target, tmp_path / "whole", layers=4, share_tables="false")
    assert (draft / "tokenizer.json").is_file()
    assert "cut_from" not in json.loads((draft / "config.json").read_text())
    assert accepted(wide, draft) > 0.95


@pytest.mark.parametrize(("layers", "rate"), [("4", 0.3), ("3", 1.0)])
def test_a_whole_model_learns_at_a_lower_rate(
    layers: str, rate: float, wide: Path, target: Path, tmp_path: Path
) -> None:
    """At the rate for cut layers it would forget what it knows."""
    job = new_job(wide, Path(), tmp_path, "draft", **{"from": target, "layers": layers})
    job.options.pop("lr")
    student, teacher = build_student(job, TEXTS)
    assert Loop(student, teacher, tmp_path, job.settings.loop, 1e-3).lr == pytest.approx(
        rate * 1e-3
    )


def test_tables_are_the_small_models_where_those_of_the_target_would_fit(
    target: Path, tmp_path: Path
) -> None:
    small = write_shuffled(target, tmp_path / "shuffled")
    assert accepted(target, untrained(target, small, tmp_path / "out", layers=4)) > 0.95


@pytest.mark.parametrize("block_format", ["F32", "Q8_0"])
def test_a_gguf_file_gives_layers(block_format: str, tmp_path: Path) -> None:
    tensors = {name: value * 0.2 for name, value in random_tensors(is_tied=False).items()}
    small = write_gguf(tmp_path / "small.gguf", tensors, block_format=block_format)
    config = {**open_weights(str(small)).config, "hidden_size": 64, "torch_dtype": "float32"}
    assert config["vocab_size"] == VOCAB
    (tmp_path / "same").mkdir()
    write_tokenizer(tmp_path / "same")
    stored = {name: torch.from_numpy(value) for name, value in tensors.items()}
    save_file(stored, tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    config.pop("from_gguf", None)
    (tmp_path / "same" / "config.json").write_text(json.dumps(config))
    big = write_wide(tmp_path / "same", tmp_path / "big", width=128, padding=0)
    draft = untrained(big, small, tmp_path / "out", layers=2)
    stored_config = json.loads((draft / "config.json").read_text())
    assert stored_config["cut_from"] == str(small)
    assert accepted(big, draft, [3, 9, 27]) > 0.8


def test_a_small_model_with_more_tokens_than_the_target(target: Path, tmp_path: Path) -> None:
    small = write_wide(target, tmp_path / "small", width=64)
    draft = untrained(target, small, tmp_path / "out", layers=4, draft_vocab=100_000)
    assert accepted(target, draft) > 0.95


def test_it_goes_on_from_its_job_and_from_its_files(
    trained: Job, wide: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = run(capsys, "train", "draft", "--resume", trained.out, *ENGINE_WORDS)
    assert code == 0
    assert f"--speculate draft:{trained.out}" in text
    bare = tmp_path / "bare"
    shutil.copytree(trained.out, bare, ignore=shutil.ignore_patterns("work"))
    found = job_of(bare, None)
    assert found is not None
    assert (found["target"], found["options"]["from"]) == (str(wide), str(target))
    asked = GoOn(target=str(wide), drafter=str(bare), out=str(tmp_path / "new"), device="cpu")
    assert job_for(asked).options["from"] == str(target)
    new = write_prompts(tmp_path / "new.jsonl", count=12)
    words = ["lr=1e-5", "steps=3", "batch=256", "max_tokens=12", "context=96", "precision=float32"]
    given = ["--resume", bare, "--prompts", new, "--out", tmp_path / "tuned", *ENGINE_WORDS]
    code, text, err = run(capsys, "train", "draft", *words, *given)
    assert code == 0, err
    maps = [load_file(path / "model.safetensors")["d2t"] for path in (bare, tmp_path / "tuned")]
    assert torch.equal(*maps)


def test_auto_finds_it_by_the_targets_files(
    trained: Job, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path / "cache"))
    line = TrainedDrafter(
        target="another name", digest=digest_of(wide), method="draft", path=str(trained.out),
        device="cpu", speedup=1.5, tokens_per_pass=2.0,
    )  # fmt: skip
    add_trained(line)
    spec = find_files(SpecConfig.parse("auto"), resolve(str(wide)), "cpu")
    assert spec.options["draft"] == str(trained.out)
    with LLM(str(wide), **ENGINE) as llm:
        assert "draft" in llm.engine.capacity.methods


def test_the_doctor_examines_it(
    trained: Job, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "few.jsonl", count=2)
    words = ["--drafter", trained.out, "--target", wide, "--prompts", prompts, "--json"]
    code, text, _ = run(capsys, "doctor", *words)
    assert code in (0, 1)
    assert json.loads(text)["method"] == "draft"


def test_another_vocabulary_is_named(wide: Path, target: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(target, small)
    stored = json.loads((small / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (small / "tokenizer.json").write_text(json.dumps(stored))
    job = new_job(wide, tmp_path, tmp_path / "out", "draft", **{"from": small})
    with pytest.raises(VocabMismatchError, match=r"2 ids .*target 'a', draft 'b'.*smaller model"):
        run_job(job, QUIET)
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"layers": "5"}, ConfigError, "the model to cut from has 4 layers"),
        ({"layers": "2", "abreast": "3"}, ConfigError, "of 3 side by side"),
        ({"context": "1024"}, ConfigError, "give context=128"),
        ({"from": "/no/such/model"}, ModelNotFoundError, "no such file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(
    options: dict[str, str], kind: type[Exception], words: str, target: Path, tmp_path: Path
) -> None:
    big = write_llama(tmp_path / "big", width=64, max_len=512)
    job = new_job(big, tmp_path, tmp_path / "out", "draft", **{"from": target, **options})
    with pytest.raises(kind, match=words):
        run_job(job, QUIET)
    assert not job.out.exists()


def test_models_that_give_no_layers(wide: Path, trained: Job, tmp_path: Path) -> None:
    job = new_job(wide, tmp_path, tmp_path / "out", "draft", **{"from": trained.out})
    with pytest.raises(ConfigError, match="--resume"):
        run_job(job, QUIET)
    recurrent = tmp_path / "recurrent"
    make("qwen3.5", recurrent)
    job = new_job(wide, tmp_path, tmp_path / "out", "draft", **{"from": recurrent})
    with pytest.raises(UnsupportedModelError, match=r"from=.*has .*recurrent layers"):
        run_job(job, QUIET)


def test_a_job_stays_with_its_small_model(trained: Job, wide: Path) -> None:
    options = {**trained.options, "from": str(wide)}
    job = Job("draft", trained.target, trained.prompts, trained.out, options, trained.engine)
    with pytest.raises(ConfigError, match="holds a job with from="):
        run_job(job, QUIET)


def test_a_draft_whose_small_model_is_gone(trained: Job, wide: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained.out, moved, ignore=shutil.ignore_patterns("work"))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "cut_from": "/no/such/model"}))
    with pytest.raises(ModelNotFoundError, match=r"was cut from /no/such/model.*in config.json"):
        LLM(str(wide), speculate=f"draft:{moved}", **ENGINE)


def test_a_count_of_all_layers_is_for_other_models_alone() -> None:
    assert read_layers("6", 6, is_target=False) == list(range(6))
    assert read_layers("2", 6, 3, is_target=False) == list(range(6))
    with pytest.raises(ConfigError, match="a count below that"):
        read_layers("6", 6)

"""A training job from prompts to a drafter's directory: four stages, each resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hunch.config import read_options
from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.models.decoder import Decoder
from hunch.models.heads.draft_model import CUT_FROM, DRAFTS_FOR
from hunch.models.load import load_decoder
from hunch.models.native import ID_MAP
from hunch.models.source import EXPAND
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights, open_weights
from hunch.registry import RECIPES, resolve, unknown
from hunch.train.answering import answer_for, room_for
from hunch.train.clock import LOAD
from hunch.train.cut import cut_options
from hunch.train.export import card, write_drafter
from hunch.train.files import read_json, write_json, write_whole
from hunch.train.loop import CANDIDATE, Loop, LoopOptions, restore
from hunch.train.loss import check_loss
from hunch.train.origin import Origin, check_context, open_origin
from hunch.train.pretrain import PretrainOptions, pretrain, store_text
from hunch.train.progress import Progress
from hunch.train.prompts import BUILTIN, check_prompts, read_prompts, split_prompts
from hunch.train.regenerate import AnswerOptions, for_answers, give_back, read_answers, regenerate
from hunch.train.select import Measured, measure, select
from hunch.train.serving import Serving
from hunch.train.student import CountRecipe, Recipe, Student, option_names
from hunch.train.texts import Texts
from hunch.train.vocab import columns_of, count_columns, enough_columns

JOB, PROMPTS = "job.json", "prompts.json"
MIN_ANSWERING = 0.4  # share of the seconds for answers, whatever starting and encoding took
_TEXT = 512  # tokens of plain text that are read as one text
WORSE = 0.02  # tokens per pass a new drafter may lose by chance before it is called worse


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options that belong to no single stage."""

    draft_vocab: int | None = None  # tokens the drafter may guess; None: the recipe's number
    held_out: int = 32  # prompts kept aside for the selection
    precision: str = "float16"  # of the written weights: float16, bfloat16, float32, int8
    licence: str = ""  # of the prompts, for the card


@dataclass(slots=True)
class Job:
    """A job as it was ordered. `options` are KEY=VALUE for the recipe, the loop, the answers or
    this."""

    method: str
    target: str
    prompts: str
    out: Path
    options: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of the LLM that serves

    @property
    def settings(self) -> Settings:
        return read_settings(self.method, self.options)

    @property
    def work(self) -> Path:
        """The folder of intermediate files, from which a stopped job continues."""
        return self.out / "work"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}


@dataclass(slots=True)
class Settings:
    """The options, sorted by what reads them."""

    recipe: Any
    loop: LoopOptions
    answers: AnswerOptions
    job: JobOptions
    pretrain: PretrainOptions

    @property
    def cut_from(self) -> str:
        """Another model than the target whose layers the drafter takes over; empty: none."""
        return getattr(self.recipe, "from_", "")


def drafts_as(method: str) -> str:
    """The `speculate=` name of what a recipe makes."""
    return getattr(resolve(RECIPES, method), "drafts_as", "") or method


def read_settings(method: str, options: Mapping[str, str]) -> Settings:
    """Sort KEY=VALUE options by what reads them; the error for an unknown key names the nearest
    one."""
    if method not in RECIPES:
        raise ConfigError(f"train: {unknown(method, RECIPES)}")
    recipe: Recipe | CountRecipe = resolve(RECIPES, method)
    classes: list[Any] = [recipe.options, LoopOptions, AnswerOptions, JobOptions, PretrainOptions]
    names = [option_names(each) for each in classes]
    every = set().union(*names)
    for key in options:
        if key not in every:
            raise ConfigError(f"train {method}: option {unknown(key, every)}")
    if isinstance(recipe, CountRecipe) and "minutes" in options:
        raise ConfigError(
            f"train {method}: minutes are for training, and this counts the target's answers: "
            "fewer prompts, or max_tokens=N for each answer, take less time"
        )
    read = [
        read_options(each, {own[k]: v for k, v in options.items() if k in own}, f"train {method}")
        for each, own in zip(classes, names, strict=True)
    ]
    check_loss(getattr(read[0], "loss", "ce"))
    settings = Settings(*read)
    settings.pretrain.check(method, bool(getattr(settings.recipe, "from_scratch", False)))
    return settings


@contextmanager
def enough_memory() -> Iterator[None]:
    """If a GPU has too little memory for training, raise an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU has too little memory to train a drafter beside the target; leave it more, or "
            "give a smaller batch="
        ) from None


@enough_memory()
def run_job(job: Job, show: Progress | None = None, before: Path | None = None) -> Measured:
    """Run all stages, from where an earlier run was stopped.

    `before` is a drafter to continue from; the new one is written only if it is no worse than that.
    """
    settings, work, show = job.settings, job.work, show or Progress()
    recipe: Recipe | CountRecipe = resolve(RECIPES, job.method)
    if isinstance(recipe, Recipe):
        weights = open_weights(find_files(job.target))
        recipe.check(settings.recipe, ModelSpec.from_config(weights.config))
        origin_of(settings, weights)
    if read_json(work / PROMPTS) is None:
        check_prompts(job.prompts)  # a typo must not leave a job behind
    keep_job(job)
    train_ids, test_ids = answer_prompts(job, show)
    give_back()
    texts = read_answers(work / "answers")
    if isinstance(recipe, CountRecipe):
        if before is not None:
            raise ConfigError(
                f"{job.method} is counted anew each time: give all prompts, no --resume"
            )
        words = {"target": job.target, "engine": job.engine}
        words["data"] = _data(job, len(train_ids))
        found: Measured = recipe.count(settings.recipe, texts, test_ids, job.out, **words)
        return found
    student, target = build_student(job, texts, before)
    if before is not None:
        start_from(student, before)
    reading, answering = settings.pretrain.split(settings.loop)
    if settings.pretrain.is_asked:
        pretrain(student, target, work, reading, recipe.lr, show)
    loop = Loop(student, target, work / "train", answering, recipe.lr)
    learn, held = texts.hold_out(64, settings.loop.seed)
    loop.run(learn, held, show)
    give_back()
    best, measured = _select(job, student, test_ids)
    if before is not None:
        old = measure(job.target, drafts_as(job.method), before, test_ids, arguments=job.engine)
        if measured.tokens_per_pass < old.tokens_per_pass - WORSE:
            raise TrainingError(
                f"the new drafter is worse on held-out prompts ({measured.tokens_per_pass:.2f} "
                f"tokens per pass, before {old.tokens_per_pass:.2f}): {before} stays as it is. "
                "Give more prompts or a lower lr"
            )
    publish(job, student, work / "train" / best, measured, len(train_ids))
    return measured


def origin_of(settings: Settings, target: Weights) -> Origin | None:
    """The model a drafter is cut from, if it is not the target; raises if that is impossible."""
    if not settings.cut_from:
        return None
    origin = open_origin(settings.cut_from, target)
    check_context(origin, settings.loop.context, ModelSpec.from_config(target.config))
    return origin


def keep_job(job: Job) -> None:
    """Note what is being made; raise if another job is in the same place."""
    work = job.work
    there = read_json(work / JOB)
    if there is not None:
        has_begun = (work / PROMPTS).is_file()
        known, asked = ({**one, **one["options"]} for one in (there, job.to_json()))
        for key in ("method", "target", "prompts", "from"):
            if has_begun and known.get(key) != asked.get(key):
                raise ConfigError(
                    f"{job.out} holds a job with {key}={known.get(key)!r}, not "
                    f"{asked.get(key)!r}; choose another --out"
                )
    write_json(work / JOB, job.to_json())


def answer_prompts(
    job: Job, show: Progress, seconds: float | None = None, serving: Serving | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts to learn from and of those held out, and answers to the former.

    `seconds` include starting the engine and encoding prompts.
    """
    began, settings, work = perf_counter(), job.settings, job.work
    answers = settings.answers
    is_greedy = not any(answers.read_temperatures())
    stored = read_json(work / PROMPTS)
    prompts = None if stored else read_prompts(job.prompts)
    engine = for_answers(job.target, job.engine, settings.loop.context)
    with (serving or Serving(job.target)).engine(engine, is_greedy=is_greedy) as llm:
        context = min(settings.loop.context, llm.engine.capacity.max_len)
        if prompts is not None:
            room, count = room_for(answers, context), settings.job.held_out
            stored = split_prompts(llm, job.prompts, prompts, room, count, settings.loop.seed)
            write_json(work / PROMPTS, stored, indent=None)
        assert stored is not None
        store_text(llm, settings.pretrain, work, min(settings.loop.context, _TEXT))
        if seconds is None:
            regenerate(llm, stored["train"], work / "answers", answers, show)
        else:
            keep = partial(write_json, work / PROMPTS, stored, indent=None)
            keep_more = keep if job.prompts == BUILTIN else None
            left = max(seconds - (perf_counter() - began), MIN_ANSWERING * seconds)
            answer_for(left, llm, stored, work, answers, context, show, keep_more)
    return stored["train"], stored["held_out"]


def build_student(
    job: Job,
    texts: Texts,
    before: Path | None = None,
    target: Decoder | None = None,
    serving: Serving | None = None,
) -> tuple[Student, Decoder]:
    """The target and an untrained student. The target is loaded unless it is given, or serves in a
    form that training can read. The student may guess the tokens that `before` could."""
    weights: Weights = open_weights(find_files(job.target))
    settings = job.settings
    is_cpu = job.engine.get("device") == "cpu" or not torch.cuda.is_available()
    device = torch.device("cpu" if is_cpu else "cuda")
    if target is None and serving is not None:
        target = serving.decoder(weights)
    if target is None:
        if serving is not None:
            serving.make_room()
            give_back()
        with (serving or Serving(job.target)).clock.part(LOAD):
            # For products of thousands of rows matrices are best held as numbers.
            target = load_decoder(weights, device=device, hold=EXPAND)
    recipe: Recipe = resolve(RECIPES, job.method)
    size = settings.job.draft_vocab or recipe.draft_vocab
    if size is None and recipe.has_few_columns and getattr(settings.recipe, "share_tables", True):
        size = enough_columns(texts, target.spec.vocab_size)
    origin = origin_of(settings, weights)
    num_known = target.spec.vocab_size if origin is None else origin.num_known
    if size is not None:
        size = min(size, num_known)
    if before is None:
        columns = count_columns(texts.count(target.spec.vocab_size), size, num_known)
    else:
        columns = columns_of(_known_tokens(open_weights(before)), target.spec.vocab_size)
    columns = columns.to(device)
    return recipe.student(settings.recipe, target, columns, weights), target


def _known_tokens(stored: Weights) -> Tensor:
    """The target's id for each column of a drafter's logits, from its files."""
    names = set(stored.names())
    if "token_map" in names:
        return stored.tensor("token_map", torch.int64)
    if ID_MAP in names:
        offset_C = stored.tensor(ID_MAP, torch.int64)
        return offset_C + torch.arange(len(offset_C))
    return torch.arange(int(stored.config["vocab_size"]))


def start_from(student: Student, folder: Path) -> None:
    stored = open_weights(folder)
    known = set(stored.names())
    missing = [
        name
        for name, tensor in student.tensors.items()
        if name not in known or tuple(stored.shape(name)) != tuple(tensor.shape)
    ]
    if missing:
        raise ConfigError(
            f"{folder} has another shape than the drafter to train (say {missing[0]}); give the "
            "options it was made with"
        )
    student.start({name: stored.tensor(name) for name in student.tensors})


def _select(job: Job, student: Student, test_ids: list[list[int]]) -> tuple[str, Measured]:
    """The name of the best candidate's checkpoint, and what it does in the engine."""
    folders, work = [], job.work
    for path in sorted((work / "train").glob(CANDIDATE.format("*"))):
        folder = work / "select" / path.stem
        if not (folder / "model.safetensors").is_file():
            restore(student, path)
            write_student(job, student, folder)
        folders.append(folder)
    notes = work / "select" / "measured.json"
    context = job.settings.loop.context
    engine = for_answers(job.target, job.engine, context, len(test_ids))
    best, measured = select(job.target, drafts_as(job.method), folders, test_ids, notes, engine)
    return f"{best.name}.pt", measured


def write_student(job: Job, student: Student, folder: Path) -> None:
    (config, tensors), settings = student.files(), job.settings
    write_drafter(
        folder,
        config,
        tensors,
        target=job.target,
        precision=settings.job.precision,
        tokenizer_from=Path(find_files(settings.cut_from or job.target).path),
    )


def publish(
    job: Job, student: Student, checkpoint: Path, measured: Measured, num_prompts: int
) -> None:
    settings = job.settings
    restore(student, checkpoint)
    words = card(
        method=drafts_as(job.method),
        target=job.target,
        cut_from=settings.cut_from,
        recipe={
            **{
                key: getattr(settings.recipe, name)
                for key, name in option_names(type(settings.recipe)).items()
            },
            **{f.name: getattr(settings.loop, f.name) for f in fields(settings.loop)},
            **student.settled(),
            "draft_vocab": len(student.columns),
        },
        data=_data(job, num_prompts),
        measured=measured,
        num_parameters=sum(tensor.numel() for tensor in student.tensors.values()),
    )
    write_whole(job.out / "README.md", lambda part: part.write_text(words, "utf-8"))
    write_student(job, student, job.out)


def _data(job: Job, num_prompts: int) -> str:
    settings = job.settings
    licence = f" Licence of the prompts: {settings.job.licence}." if settings.job.licence else ""
    return (
        f"{num_prompts} prompts of {Path(job.prompts).name}, answered by the target itself at "
        f"temperature {settings.answers.temperatures}.{licence}"
    )


def job_of(folder: Path, target: str | None) -> dict[str, Any] | None:
    """The job that would have made a cut draft, for files that came without their job."""
    config = read_json(folder / "config.json") or {}
    if CUT_FROM not in config:
        return None
    return {
        "method": "draft",
        "target": target or config.get(DRAFTS_FOR) or config[CUT_FROM],
        "prompts": "",
        "options": {**cut_options(config), "share_tables": "true", "precision": "int8"},
    }

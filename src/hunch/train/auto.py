"""`hunch train` without a method: measure, choose, train, and say whether it pays.

The drafter is chosen by expected speed: tokens per pass by a stated model (`expect`) over measured
seconds (`costs`). All stages together keep to the given minutes. The result is compared in the
engine with plain decoding and with lookups alone, and `auto` uses it only if it is the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.hub.drafters import PHRASES, find_trained
from hunch.hub.wheel import KNOWN
from hunch.kernels import native_library
from hunch.kernels.phrases import FILE
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.registry import RECIPES, resolve
from hunch.train.answering import ANSWERS, HELD
from hunch.train.clock import OTHER, WRITE, Clock, in_words
from hunch.train.expect import Draft
from hunch.train.files import read_json
from hunch.train.job import (
    JOB,
    PROMPTS,
    Job,
    answer_prompts,
    keep_job,
    origin_of,
    publish,
    read_settings,
    write_student,
)
from hunch.train.loop import CANDIDATE
from hunch.train.outcome import (
    BEFORE,
    DRAFTER,
    Outcome,
    is_beside,
    measured_of,
    outcome_of,
    speculate_text,
)
from hunch.train.phrase_job import PhraseCount
from hunch.train.plan import (
    COUNTED,
    LOOKUPS,
    PLAN,
    WITHOUT,
    Asked,
    Plan,
    Say,
    device_of,
    expectation,
    make_plan,
    smaller_of,
    trained_share,
)
from hunch.train.progress import Progress
from hunch.train.prompts import check_prompts
from hunch.train.regenerate import give_back, read_answers
from hunch.train.select import Measured
from hunch.train.serving import Serving
from hunch.train.sizes import possible
from hunch.train.student import Student
from hunch.train.texts import Texts
from hunch.train.trials import LEAST, Run, choose, compare, job_for, promised, train, with_columns

MIN_ANSWERS, MIN_HELD = 8, 16
LAST = Path("select") / "last"  # in the work folder: the drafter that is compared
COUNTS_UNTIL = 0.9  # share of all minutes for the table, if no network is trained


def train_best(asked: Asked, show: Progress, say: Say) -> Outcome:
    """Run all stages. Started again after a stop, it continues where it was."""
    work = asked.out / "work"
    spec = _check(asked, work)
    if device_of(asked) == "cpu":
        native_library.is_available()  # built once per machine, before the clock starts
    clock = Clock(work / "clock.json", asked.minutes)
    with clock.stage(OTHER):
        outcome = _train(asked, spec, Serving(asked.target, clock), show, say)
    outcome.seconds = clock.account()
    return outcome


def _train(asked: Asked, spec: ModelSpec, serving: Serving, show: Progress, say: Say) -> Outcome:
    work, clock = asked.out / "work", serving.clock
    with clock.stage("measure"):
        plan = make_plan(asked, spec, work, serving, say)
    is_training, has_table = plan.is_worth_it or asked.is_forced, _has_table(asked)
    if not is_training and has_table:
        return Outcome(pays=False, plan=plan, text=_not_worth_it(asked, plan))
    why = f"no network is expected to pay ({plan.why})"
    if not is_training:
        say(f"counts phrases alone: {why}")
    job = job_for(asked, plan.best.size)
    keep_job(job)
    ends = trained_share(clock, device_of(asked))
    with clock.stage("regenerate"):
        seconds = clock.until(COUNTED)
        if is_training:
            seconds = _answering(clock, ends, plan.answering)
        try:
            num_prompts, test_ids, texts = _answers(job, show, serving, seconds)
        except TrainingError as error:
            text = f"Nothing was trained: {error}"
            if not is_training:
                text = f"{_not_worth_it(asked, plan)} ({error})"
            return Outcome(pays=False, plan=plan, text=text)
    count, table = None, asked.out / PHRASES
    if not (has_table or (table / FILE).is_file()):
        seconds = clock.until(ends if is_training else COUNTS_UNTIL)
        count = PhraseCount(texts, spec.vocab_size, seconds)
    network = None
    try:
        if is_training:
            run = Run(asked, plan, work, texts, test_ids, serving, held=_held(work, texts))
            network, why = _network(run, show, say)
            run.release()
            if network is None:
                say(f"goes on without a network: {why}")
        with clock.stage("compare"):
            seconds = max(clock.until(0.95 if network else COUNTS_UNTIL), 10.0)
            if count is not None and not count.finish(table, seconds):
                why += "; nor was there time to count a phrase table"
            methods = _compared(asked, network, table)
            if not {DRAFTER, PHRASES} & methods.keys():
                return Outcome(pays=False, plan=plan, text=f"Nothing was trained: {why}")
            say("compares in the engine; kernels for the drafter are compiled once per machine")
            seconds = max(clock.until(1.0) - 2.0, 2.0)
            categories = (read_json(work / PROMPTS) or {}).get("categories", ())
            speeds = compare(asked, serving, methods, test_ids, seconds, categories)
    finally:
        if count is not None:
            count.stop()
    if network is None:
        return outcome_of(asked, job, plan, speeds)
    with clock.stage(WRITE):
        network.publish(measured_of(speeds), num_prompts)
    return outcome_of(asked, network.job, plan, speeds, network.promise, network.learning)


@dataclass(frozen=True, slots=True)
class Network:
    """A drafter that was trained."""

    job: Job
    student: Student
    promise: Draft  # what held-out answers promise of it
    learning: dict[str, Any]

    def publish(self, measured: Measured, num_prompts: int) -> None:
        checkpoint = self.job.work / "train" / CANDIDATE.format(0)
        publish(self.job, self.student, checkpoint, measured, num_prompts)


def _network(run: Run, show: Progress, say: Say) -> tuple[Network | None, str]:
    """Train the most promising drafter; returns it, or None and the reason."""
    clock, work = run.clock, run.work
    try:
        with clock.stage("trials"):
            best, before = choose(run, show, say)
        job, chosen = with_columns(run, best)
        say(f"trains {chosen.size.text()}: {expectation(chosen)}")
        with clock.stage("train"):
            student, replay = train(job, best, run, work / "train", show, before)
    except TrainingError as error:
        return None, str(error)
    with clock.stage(WRITE):
        write_student(job, student, work / LAST)
    promise = promised(run, chosen.size, replay)
    return Network(job, student, promise, run.learning), ""


def _compared(asked: Asked, network: Network | None, table: Path) -> dict[str, str]:
    """What is compared with plain decoding: lookups, the drafter, the phrase table alone and with
    the drafter, and `auto` as it was."""
    found = {LOOKUPS: WITHOUT}
    if network is not None:
        found[DRAFTER] = speculate_text(network.job.method, asked.out / "work" / LAST)
    if (table / FILE).is_file():
        found[PHRASES] = f"{WITHOUT}:phrases={table}"
        if network is not None and is_beside(network.job.method):
            found[DRAFTER] += f":phrases={table}"
    if _has_other(asked):
        found[BEFORE] = "auto"
    return found


def _check(asked: Asked, work: Path) -> ModelSpec:
    """The target's shape. Raises for a job that cannot work, before anything is made."""
    weights = open_weights(find_files(asked.target))
    spec = ModelSpec.from_config(weights.config)
    for key in ("layers", "units", "abreast", "draft_vocab", "minutes"):
        if key in asked.options:
            raise ConfigError(f"{key}= belongs to a method: hunch train draft {key}=...")
    recipe = resolve(RECIPES, "draft")
    settings = read_settings("draft", asked.options)
    if asked.smaller or not possible(spec):
        recipe.check(settings.recipe, spec)
    origin_of(settings, weights)
    if read_json(work / PROMPTS) is None:
        check_prompts(asked.prompts)
    there = read_json(work / JOB)
    if there is not None and there["target"] != asked.target:
        raise ConfigError(f"{asked.out} holds a job for {there['target']}; choose another --out")
    smaller = smaller_of(read_json(work / PLAN) or {})
    if there is not None and (work / PROMPTS).is_file() and smaller != asked.smaller:
        raise ConfigError(f"{asked.out} holds a job with from={smaller}; choose another --out")
    return spec


def _not_worth_it(asked: Asked, plan: Plan) -> str:
    return (
        f"No drafter is expected to pay for {asked.target} here in {in_words(asked.minutes)}: "
        f"{plan.why}. auto goes on with lookups; nothing was trained. More --minutes, "
        "or a machine that computes faster, may change that; --force trains all the same"
    )


def _answering(clock: Clock, trained: float, share: float) -> float:
    """Seconds for answers, out of those that measuring left. A job that continues has used some of
    them."""
    measured = clock.of("measure")
    ends = measured + share * (trained * clock.seconds - measured)
    return clock.until(ends / clock.seconds)


def _answers(
    job: Job, show: Progress, serving: Serving, seconds: float
) -> tuple[int, list[list[int]], Texts]:
    clock, work = serving.clock, job.work
    # However long measuring took, there must be something to learn from.
    if not list((work / ANSWERS).glob("*.npz")):
        seconds = max(seconds, LEAST * clock.seconds)
    seconds /= 1.25
    train_ids, test_ids = answer_prompts(job, show, seconds, serving)
    give_back()
    texts = read_answers(work / ANSWERS)
    if len(texts) < MIN_ANSWERS:
        raise TrainingError(
            f"too few answers to learn from in {in_words(clock.gone / 60)}: {len(texts)}, and "
            f"{MIN_ANSWERS} are needed; give more --minutes (now {clock.seconds / 60:g}). What is "
            "there is kept"
        )
    return min(len(train_ids), len(texts)), test_ids, texts


def _held(work: Path, texts: Texts) -> Texts | None:
    """Answers to the held-out prompts, if there was time for enough of them. They have at most a
    fifth of the tokens that are learned from, as looking at them takes time too."""
    if not list((work / HELD).glob("*.npz")):
        return None
    found = read_answers(work / HELD)
    count = int(np.searchsorted(found.offset[1:], len(texts.tokens) / 5, side="right"))
    return found.take(np.arange(count)) if count >= MIN_HELD else None


def _has_table(asked: Asked) -> bool:
    """Whether a phrase table comes with hunch. It was counted from more answers than there are
    here."""
    name = Path(find_files(asked.target).path).name
    return any(name == Path(wheel.member).name for wheel in KNOWN.values())


def _has_other(asked: Asked) -> bool:
    """Whether `auto` already drafts with another network for this target."""
    files = find_files(asked.target)
    trained = find_trained(asked.target, Path(files.path), device_of(asked))
    if trained is not None:
        return trained.path != str(asked.out.resolve())
    return _has_table(asked)

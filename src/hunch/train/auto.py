"""`hunch train` without a method: measure, choose, train, and say whether it pays.

The drafter is chosen by expected speed: tokens per pass by a stated model (`expect`) over measured
seconds (`costs`). All stages together keep to the minutes given. What comes out is measured in the
engine against plain decoding and against lookups alone, and `auto` takes it only where it wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.hub.drafters import PHRASES, find_trained
from hunch.hub.wheel import KNOWN
from hunch.kernels.phrases import FILE
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.registry import RECIPES, resolve
from hunch.train.batches import Texts
from hunch.train.clock import Clock
from hunch.train.expect import (
    METHODS,
    Expected,
    Size,
    batch_for,
    best_chain,
    chain_tokens,
    node_seconds,
    possible,
    rank,
)
from hunch.train.files import read_json, write_json
from hunch.train.job import (
    JOB,
    PROMPTS,
    Job,
    Settings,
    answer_prompts,
    build_student,
    keep_job,
    publish,
    read_settings,
    write_student,
)
from hunch.train.loop import CANDIDATE, LAST, Loop, restore
from hunch.train.outcome import BEFORE, DRAFTER, Outcome, is_beside, measured_of, outcome_of, way
from hunch.train.phrase_job import PhraseCount
from hunch.train.plan import (
    ANSWERING,
    COUNTED,
    LOOKUPS,
    NUM_TRIED,
    TRAINED,
    WITHOUT,
    Asked,
    Plan,
    Say,
    context_of,
    device_of,
    expectation,
    make_plan,
)
from hunch.train.progress import Progress
from hunch.train.prompts import read_prompts
from hunch.train.regenerate import give_back, read_answers
from hunch.train.replay import Replay
from hunch.train.speeds import Speeds, compare_speeds, engine_for_one
from hunch.train.vocab import coverage_of

MIN_ANSWERS = 8
TRIALS, COLUMNS = "trials.json", "columns.json"
TRIED = ("draft", "block")  # kinds of drafters of which neither is the faster one everywhere
CLOSE = 0.8  # of the best expected speed, to be tried beside it
LONG = 420.0  # seconds of a job that has time for trials,
TRIAL = 0.045  # and the share of them that each is trained for
COUNTS_UNTIL = 0.9  # share of all minutes at which a table must be there, without a network
LEAST = 0.15  # share of all minutes that answering, and training, get whatever was spent before


def train_best(asked: Asked, show: Progress, say: Say) -> Outcome:
    """All of it; started again after a stop, it goes on where it was."""
    work = asked.out / "work"
    spec = _check(asked, work)
    clock = Clock(work / "clock.json", asked.minutes)
    with clock.stage("measure"):
        plan = make_plan(asked, spec, work, clock, say)
    is_training, has_table = plan.is_worth_it or asked.is_forced, _has_table(asked)
    if not is_training and has_table:
        return Outcome(pays=False, plan=plan, text=_not_worth_it(asked, plan))
    job = _job(asked, plan.best.size)
    settings = read_settings(job.method, job.options)
    keep_job(work, job)
    with clock.stage("regenerate"):
        seconds = _answering(clock) if is_training else clock.until(COUNTED)
        try:
            num_prompts, test_ids, texts = _answers(job, settings, work, show, clock, seconds)
        except TrainingError as error:
            if is_training:
                raise
            return Outcome(pays=False, plan=plan, text=f"{_not_worth_it(asked, plan)} ({error})")
    count, table = None, asked.out / PHRASES
    if not (has_table or (table / FILE).is_file()):
        seconds = clock.until(TRAINED if is_training else COUNTS_UNTIL)
        count = PhraseCount(texts, spec.vocab_size, seconds)
    ways = {LOOKUPS: WITHOUT}
    try:
        if is_training:
            run = Run(asked, plan, spec, work, texts, test_ids, clock)
            with clock.stage("trials"):
                best, before = _choose(run, show, say)
            job, settings, chosen = _with_columns(run, best)
            say(f"trains {chosen.size.text()}: {expectation(chosen)}")
            with clock.stage("train"):
                student = _train(job, settings, run, work / "train", show, before)
            give_back()
            write_student(job, settings, student, work / "select" / "last")
            ways[DRAFTER] = way(job.method, work / "select" / "last")
        else:
            say(f"no network is expected to pay ({expectation(plan.best)}): counts phrases alone")
        with clock.stage("compare"):
            seconds = max(clock.until(0.95 if is_training else COUNTS_UNTIL), 5.0)
            if count is not None:
                count.finish(table, seconds)
            if (table / FILE).is_file():
                ways[PHRASES] = f"{WITHOUT}:phrases={table}"
                if DRAFTER in ways and is_beside(job.method):
                    ways[DRAFTER] += f":phrases={table}"
            if _has_other(asked):
                ways[BEFORE] = "auto"
            speeds = _compare(asked, ways, test_ids, max(clock.until(1.0) - 2.0, 2.0))
    finally:
        if count is not None:
            count.stop()
    measured = None
    if is_training:
        measured = measured_of(speeds)
        checkpoint = work / "train" / CANDIDATE.format(0)
        publish(job, settings, student, checkpoint, measured, num_prompts)
    return outcome_of(asked, job, plan, speeds, measured)


def _check(asked: Asked, work: Path) -> ModelSpec:
    """The target's shape; raises for what cannot work, before anything is made."""
    spec = ModelSpec.from_config(open_weights(find_files(asked.target)).config)
    for key in ("layers", "units", "draft_vocab", "minutes"):
        if key in asked.options:
            raise ConfigError(f"{key}= belongs to a method: hunch train draft {key}=...")
    recipe = resolve(RECIPES, "draft")
    settings = read_settings("draft", asked.options)
    if not possible(spec):
        recipe.check(settings.recipe, spec)
    if read_json(work / PROMPTS) is None:
        read_prompts(asked.prompts)
    there = read_json(work / JOB)
    if there is not None and there["target"] != asked.target:
        raise ConfigError(f"{asked.out} holds a job for {there['target']}; choose another --out")
    return spec


def _not_worth_it(asked: Asked, plan: Plan) -> str:
    return (
        f"No drafter is expected to pay for {asked.target} here in {asked.minutes:g} minutes: the "
        f"best, {plan.best.size.text()}: {expectation(plan.best)}; lookups alone have "
        f"{plan.lookups:.2f}x, and auto uses them already. Nothing was trained. More --minutes, "
        "or a machine that computes faster, may change that; --force trains all the same"
    )


def _job(asked: Asked, size: Size) -> Job:
    options = {"layers": str(size.layers), **asked.options}
    if size.units < 1:
        options["units"] = str(size.units)
    if size.method == "medusa":
        options.pop("layers")
    return Job(size.method, asked.target, asked.prompts, asked.out, options, asked.engine)


def _answering(clock: Clock) -> float:
    """Seconds for answers, of what measuring left: a job that goes on has had some of them."""
    measured = clock.spent.get("measure", 0.0)
    ends = measured + ANSWERING * (TRAINED * clock.seconds - measured)
    return clock.until(ends / clock.seconds)


def _answers(
    job: Job, settings: Settings, work: Path, show: Progress, clock: Clock, seconds: float
) -> tuple[int, list[list[int]], Texts]:
    # However long measuring took, there must be something to learn from.
    seconds = max(seconds, LEAST * clock.seconds) / 1.25
    train_ids, test_ids = answer_prompts(job, settings, work, show, seconds)
    give_back()
    texts = read_answers(work / "answers")
    if len(texts) < MIN_ANSWERS:
        raise TrainingError(
            f"only {len(texts)} answers in {clock.gone / 60:.1f} minutes: too few to learn from; "
            f"give more --minutes (now {clock.seconds / 60:g}). What is there is kept"
        )
    return min(len(train_ids), len(texts)), test_ids, texts


@dataclass(slots=True)
class Run:
    """What training has to go by."""

    asked: Asked
    plan: Plan
    spec: ModelSpec
    work: Path
    texts: Texts
    test_ids: list[list[int]]
    clock: Clock


def _choose(run: Run, show: Progress, say: Say) -> tuple[Size, Path | None]:
    """The drafter to train, and the checkpoint of its trial.

    Where there is time, the most promising drafter of each kind is trained for a while and then
    tried in the engine: the faster one goes on. What was only expected is no reason to take one.
    """
    plan, notes = run.plan, run.work / TRIALS
    kinds: dict[str, Expected] = {}
    for one in plan.expected:
        if one.speedup > CLOSE * plan.best.speedup and one.size.method in TRIED:
            kinds.setdefault(one.size.method, one)
    if len(kinds) < 2 or run.clock.seconds < LONG:
        return plan.best.size, None
    ways, names = {}, {name: run.work / "trials" / name for name in kinds}
    found: dict[str, float] = read_json(notes) or {}
    for name, one in kinds.items():
        if found:
            break
        job, settings, _ = _with_columns(run, one.size, TRIAL)
        student = _train(job, settings, run, names[name], show)
        write_student(job, settings, student, names[name] / "files")
        ways[name] = way(name, names[name] / "files")
        del student
        give_back()
    if not found:
        speeds = _compare(run.asked, ways, run.test_ids, TRIAL * run.clock.seconds / 3)
        found = speeds.speedup
        write_json(notes, found)
        give_back()
    for name, speedup in found.items():
        say(f"trial of {kinds[name].size.text()}: {speedup:.2f}x of plain decoding so far")
    best = max(found, key=lambda name: found[name])
    return kinds[best].size, names[best] / CANDIDATE.format(0)


def _with_columns(
    run: Run, best: Size, share: float | None = None
) -> tuple[Job, Settings, Expected]:
    """The job with the draft vocabulary that pays best, now that there are answers to count; for a
    share of all minutes, or as long as there is time."""
    asked, plan, spec, clock = run.asked, run.plan, run.spec, run.clock
    coverage = coverage_of(run.texts, spec.vocab_size)
    # A job that goes on keeps to what it began with, whatever time is left.
    chosen, name = read_json(run.work / COLUMNS) or {}, f"{best.method}-{best.layers}-{best.units}"
    columns = [chosen[name]] if name in chosen else [one.size.columns for one in plan.expected]
    sizes, device = {replace(best, columns=count) for count in columns}, device_of(asked)
    left = max(TRAINED * clock.seconds - _before_training(clock), LEAST * clock.seconds)
    ranked = rank(
        plan.costs,
        spec,
        seconds=left,
        device=device,
        answered=float(len(run.texts.tokens)),
        coverage=coverage,
        sizes=sizes,
    )
    write_json(run.work / COLUMNS, {**chosen, name: ranked[0].size.columns})
    job = _job(asked, best)
    job.options |= {"draft_vocab": str(ranked[0].size.columns)}
    batch = batch_for(plan.costs, spec, ranked[0].size, device)
    job.options |= {} if batch is None else {"batch": str(batch)}
    job.options |= {"stops_flat": "true", "precision": asked.options.get("precision", "float16")}
    minutes = (left if share is None else share * clock.seconds) / 60
    job.options |= {"minutes": f"{minutes:.4f}"}
    every = max(3.6 * minutes, 2.0)  # a look at held-out answers costs little beside that
    job.options |= {"test_every": f"{every:.1f}", **asked.options}
    return job, read_settings(job.method, job.options), ranked[0]


def _before_training(clock: Clock) -> float:
    return sum(clock.spent.get(name, 0.0) for name in ("measure", "regenerate", "trials"))


def _train(
    job: Job, settings: Settings, run: Run, folder: Path, show: Progress, before: Path | None = None
) -> Any:
    """A student after its time; it goes on from the checkpoint `before` where that is there."""
    student, target = build_student(job, settings, run.texts)
    size = Size(
        method=job.method,
        layers=int(job.options.get("layers", "1")),
        columns=len(student.columns),
        units=float(job.options.get("units", "1")),
    )
    node, method = node_seconds(run.plan.costs, run.spec, size), METHODS[job.method]

    def remark(replay: Replay) -> str:
        _, speedup = best_chain(
            run.plan.costs,
            _chance(replay),
            node,
            depth=method.depth,
            sequential=method.is_sequential,
        )
        return f"about {speedup:.2f}x of plain"

    recipe = resolve(RECIPES, job.method)
    if before is not None and before.is_file() and not (folder / LAST).is_file():
        restore(student, before)
    loop = Loop(student, target, folder, settings.loop, recipe.lr, remark=remark)
    loop.marks = (1.0,)  # one candidate: what each costs to compare is better spent on learning
    num_held = min(max(len(run.texts) // 10, 1), 32)
    learn, held = run.texts.split(num_held, settings.loop.seed)
    loop.run(learn, held, show)
    return student


def _chance(replay: Replay) -> float:
    """The chance of a guess that gives these tokens per pass."""
    depth, low, high = len(replay.tried), 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if chain_tokens(middle, depth) < replay.tokens_per_pass:
            low = middle
        else:
            high = middle
    return low


def _compare(
    asked: Asked, ways: dict[str, str], test_ids: list[list[int]], seconds: float
) -> Speeds:
    from hunch import LLM

    engine = engine_for_one(asked.target, asked.engine, context_of(asked))
    with LLM(asked.target, speculate="off", **engine) as llm:
        return compare_speeds(llm, ways, test_ids[:NUM_TRIED], seconds=seconds)


def _has_table(asked: Asked) -> bool:
    """Whether a phrase table comes with hunch: more answers were counted for it than here."""
    name = Path(find_files(asked.target).path).name
    return any(name == Path(wheel.member).name for wheel in KNOWN.values())


def _has_other(asked: Asked) -> bool:
    """Whether `auto` drafts with another network for this target as it is."""
    files = find_files(asked.target)
    trained = find_trained(asked.target, Path(files.path), device_of(asked))
    if trained is not None:
        return trained.path != str(asked.out.resolve())
    return _has_table(asked)

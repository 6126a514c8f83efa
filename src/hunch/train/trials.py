"""Trains the chosen drafter; if there is time, after trials of the best of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hunch.errors import TrainingError
from hunch.models.decoder import Decoder
from hunch.registry import RECIPES, resolve
from hunch.train.clock import REPLAY, WRITE, Clock
from hunch.train.expect import (
    Draft,
    Expected,
    best_draft,
    chance_of,
    expect,
    node_seconds,
    rank,
    still_missed,
)
from hunch.train.files import read_json, write_json
from hunch.train.job import Job, build_student, enough_memory, write_student
from hunch.train.kept import Kept
from hunch.train.loop import CANDIDATE, LAST, Loop, restore
from hunch.train.outcome import speculate_text
from hunch.train.plan import LONG, NUM_TRIED, Asked, Plan, Say, context_of, trained_share
from hunch.train.progress import Progress
from hunch.train.regenerate import give_back
from hunch.train.replay import Replay
from hunch.train.select import without_advice
from hunch.train.serving import Serving
from hunch.train.sizes import METHODS, Ground, Size
from hunch.train.speeds import Speeds, compare_speeds, engine_for_one
from hunch.train.texts import Texts
from hunch.train.vocab import coverage_of

TRIALS, COLUMNS = "trials.json", "columns.json"
TRIED = ("draft", "block")  # kinds of drafters, neither of which is always the faster one
SMALLER = "-smaller"  # a draft whose layers are those of a smaller model is a kind of its own
CLOSE = 0.93  # share of the best expected speed that a drafter needs for a trial
TRIAL = 0.045  # share of a job's seconds for which each trial is trained
LEAST = 0.15  # share of all minutes that answering gets at least, as does training


def _name(size: Size) -> str:
    name = f"{size.method}-{size.layers}-{size.units}-{size.abreast}"
    return f"{name}-{size.cut_from}" if size.cut_from else name


def job_for(asked: Asked, size: Size) -> Job:
    options = {"layers": str(size.layers), **asked.of_any}
    if size.cut_from:
        options["from"] = size.cut_from
    if size.units < 1:
        options["units"] = str(size.units)
    if size.abreast > 1:
        options["abreast"] = str(size.abreast)
    if size.method == "medusa":
        options.pop("layers")
    return Job(size.method, asked.target, asked.prompts, asked.out, options, asked.engine)


@dataclass(slots=True)
class Run:
    """The state of training, which trials and the last run share."""

    asked: Asked
    plan: Plan
    work: Path
    texts: Texts
    test_ids: list[list[int]]
    serving: Serving
    # Left by trials for later: the target, and its outputs for students of each kind.
    target: Decoder | None = None
    kept: dict[tuple[Any, ...], Kept] = field(default_factory=dict)
    held: Texts | None = None  # answers to held-out prompts; None: some of `texts` are held out
    learning: dict[str, Any] = field(default_factory=dict)  # of the last student

    @property
    def clock(self) -> Clock:
        return self.serving.clock

    @property
    def ground(self) -> Ground:
        return self.plan.ground

    def release(self) -> None:
        """Release what training needed."""
        self.target = None
        self.kept.clear()
        give_back()


def choose(run: Run, show: Progress, say: Say) -> tuple[Size, Path | None]:
    """The drafter to train, and the checkpoint of its trial.

    Where there is time, the most promising drafter of each kind is trained for a while.
    Among drafters whose cost was measured, the one that does best on held-out answers goes on;
    different methods are tried in the engine. An expected figure alone is no reason to take one.
    """
    plan, notes = run.plan, run.work / TRIALS
    candidates = _candidates(plan)
    if len(candidates) < 2 or run.clock.seconds < LONG:
        return plan.best.size, None
    names = {name: run.work / "trials" / name for name in candidates}
    found: dict[str, float] = read_json(notes) or {}
    if not found:
        found = _try(run, candidates, names, show, say)
        write_json(notes, found)
        give_back()
    if not found:
        return plan.best.size, None
    best = max(found, key=lambda name: found[name])
    return candidates[best].size, names[best] / CANDIDATE.format(0)


def _candidates(plan: Plan) -> dict[str, Expected]:
    """The best of each kind, if it comes close to the best of all."""
    found: dict[str, Expected] = {}
    for one in plan.expected:
        if one.speedup > CLOSE * plan.best.speedup and one.size.method in TRIED:
            form = SMALLER if one.size.cut_from else ""
            form += "-abreast" if one.size.abreast > 1 else ""
            found.setdefault(one.size.method + form, one)
    return found


def _try(
    run: Run, candidates: dict[str, Expected], names: dict[str, Path], show: Progress, say: Say
) -> dict[str, float]:
    """The speed over plain decoding of the best of each method, after a trial."""
    best, seconds = dict[str, tuple[float, str]](), TRIAL * run.clock.seconds
    methods, columns = dict[str, str](), dict[str, int]()
    for name, one in candidates.items():
        # If they guess the same tokens, they learn from the same pass over the answers.
        same = columns.get(one.size.cut_from)
        job, chosen = with_columns(run, one.size, seconds, same)
        columns.setdefault(one.size.cut_from, chosen.size.columns)
        try:
            student, replay = train(job, one.size, run, names[name], show, is_trial=True)
        except TrainingError as error:
            say(f"trial of {chosen.size.text()}: {error}")
            continue
        with run.clock.part(WRITE):
            write_student(job, student, names[name] / "files")
        methods[name] = speculate_text(one.size.method, names[name] / "files")
        answered = float(len(run.texts.tokens))
        so_far = expect(run.ground, chosen.size, seconds=seconds, answered=answered)
        # The fastest learner need not end best: the expected effect of the remaining time is added.
        missed = still_missed(so_far.chance, chosen.chance)
        speedup = promised(run, chosen.size, replay, missed).speedup
        say(
            f"trial of {chosen.size.text()}: {replay.tokens_per_pass:.2f} tokens per pass on "
            f"held-out answers so far, about {speedup:.2f}x of plain decoding in the end"
        )
        best[job.method] = max(best.get(job.method, (0.0, "")), (speedup, name))
        del student
        give_back()
    found = {name: speedup for speedup, name in best.values()}
    if len(found) < 2:
        return found
    methods = {name: text for name, text in methods.items() if name in found}
    speeds = compare(run.asked, run.serving, methods, run.test_ids, seconds / 3)
    for name, speedup in speeds.speedup.items():
        text = candidates[name].size.text()
        say(f"trial of {text}: {speedup:.2f}x of plain decoding in the engine")
    return speeds.speedup


def with_columns(
    run: Run, best: Size, seconds: float | None = None, num_columns: int | None = None
) -> tuple[Job, Expected]:
    """The job with the draft vocabulary that pays best, now that there are answers to count, or
    with `num_columns`; for so many seconds, or for the time that is left."""
    asked, clock, ground = run.asked, run.clock, run.ground
    coverage = coverage_of(run.texts, ground.spec.vocab_size)
    # A job that is continued keeps what it began with, whatever time is left.
    chosen, name = read_json(run.work / COLUMNS) or {}, _name(best)
    # The model that a draft is cut from may have a smaller vocabulary.
    alike = [one.size for one in run.plan.expected if one.size.cut_from == best.cut_from]
    columns = [size.columns for size in alike] if num_columns is None else [num_columns]
    columns = [chosen[name]] if name in chosen else columns
    sizes = {replace(best, columns=count) for count in columns}
    spent = sum(map(clock.of, ("measure", "regenerate", "trials")))
    left = trained_share(clock, ground.device) * clock.seconds - spent
    left = max(left, LEAST * clock.seconds)
    answered = float(len(run.texts.tokens))
    ranked = rank(ground, seconds=left, answered=answered, coverage=coverage, sizes=sizes)
    write_json(run.work / COLUMNS, {**chosen, name: ranked[0].size.columns})
    job = job_for(asked, best)
    job.options |= {"draft_vocab": str(ranked[0].size.columns)}
    job.options |= {"stops_flat": "true", "precision": asked.options.get("precision", "float16")}
    minutes = (left if seconds is None else seconds) / 60
    job.options |= {"minutes": f"{minutes:.4f}"}
    every = max(3.6 * minutes, 2.0)  # a look at held-out answers costs little beside that
    job.options |= {"test_every": f"{every:.1f}", **asked.of_any}
    return job, ranked[0]


@enough_memory()
def train(
    job: Job,
    size: Size,
    run: Run,
    folder: Path,
    show: Progress,
    before: Path | None = None,
    *,
    is_trial: bool = False,
) -> tuple[Any, Replay]:
    """Train a student; returns it, and how it does on held-out answers. It continues from the
    checkpoint `before`, if there is one."""
    options = job.settings.loop
    student, run.target = build_student(job, run.texts, target=run.target, serving=run.serving)
    size = replace(size, columns=len(student.columns))

    def remark(replay: Replay) -> str:
        return f"about {promised(run, size, replay).speedup:.2f}x of plain"

    recipe = resolve(RECIPES, job.method)
    if before is not None and before.is_file() and not (folder / LAST).is_file():
        restore(student, before)
    loop = Loop(student, run.target, folder, options, recipe.lr, remark=remark)
    loop.kept, loop.is_trial = run.kept.get(student.asks), is_trial
    loop.marks = (1.0,)  # one candidate: the time to compare more is better spent on learning
    learn, held = run.texts, run.held
    if held is None:
        learn, held = run.texts.hold_out(32, options.seed)
    loop.run(learn, held, show)
    run.learning = {"answered_tokens": len(learn.tokens), **loop.to_json(show.peak)}
    if loop.kept is not None:
        run.kept[student.asks] = loop.kept
    for part, seconds in loop.rates.beside().items():
        run.clock.move(part, seconds)
    with run.clock.part(REPLAY):
        return student, loop.test(held)


def promised(run: Run, size: Size, replay: Replay, missed: float = 1.0) -> Draft:
    """The best draft, and its speed, of a drafter with these guesses.

    missed: the share of today's wrong guesses that will still be wrong.
    """
    node = node_seconds(run.ground, size)
    chance = 1 - missed * (1 - chance_of(replay.tokens_per_pass, len(replay.tried)))
    return best_draft(run.ground, chance, node, METHODS[size.method])


def compare(
    asked: Asked,
    serving: Serving,
    methods: dict[str, str],
    test_ids: list[list[int]],
    seconds: float,
    categories: Sequence[str] = (),
) -> Speeds:
    engine, clock = engine_for_one(asked.target, asked.engine, context_of(asked)), serving.clock
    with without_advice(), serving.engine(engine) as llm:
        tried = test_ids[:NUM_TRIED]
        return compare_speeds(
            llm, methods, tried, seconds=seconds, categories=categories, clock=clock
        )

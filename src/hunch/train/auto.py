"""`hunch train` without a method: measure, choose, train, and say whether it pays.

The drafter is chosen by expected speed: tokens per pass by a stated model (`expect`) over measured
seconds (`costs`). All stages together keep to the minutes given. What comes out is measured in the
engine against plain decoding and against lookups alone, and `auto` takes it only where it wins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.hub.drafters import TrainedDrafter, add_trained, digest_of, find_trained
from hunch.hub.wheel import KNOWN
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.registry import RECIPES, resolve
from hunch.train.batches import Texts
from hunch.train.clock import Clock
from hunch.train.costs import Costs
from hunch.train.expect import Expected, Size, best_chain, chain_tokens, rank
from hunch.train.files import read_json
from hunch.train.job import (
    JOB,
    PROMPTS,
    Job,
    Settings,
    answer_prompts,
    build_student,
    drafts_as,
    keep_job,
    publish,
    read_settings,
    write_student,
)
from hunch.train.loop import CANDIDATE, Loop
from hunch.train.plan import (
    ANSWERED,
    LOOKUPS,
    NUM_TRIED,
    PAYS,
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
from hunch.train.select import Measured
from hunch.train.speeds import Speeds, compare_speeds, engine_for_one
from hunch.train.vocab import coverage_of

DRAFTER, BEFORE = "drafter", "before"
MIN_ANSWERS = 8


@dataclass(slots=True)
class Outcome:
    """What became of it."""

    pays: bool
    plan: Plan
    text: str  # for the user
    speeds: Speeds | None = None  # None: nothing was trained
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "pays": self.pays,
            "expected": asdict(self.plan.best),
            "lookups": self.plan.lookups,
            "speeds": None if self.speeds is None else self.speeds.to_json(),
            "measured": None if self.measured is None else self.measured.to_json(),
            "text": self.text,
        }


def train_best(asked: Asked, show: Progress, say: Say) -> Outcome:
    """All of it; started again after a stop, it goes on where it was."""
    work = asked.out / "work"
    spec = _check(asked, work)
    clock = Clock(work / "clock.json", asked.minutes)
    with clock.stage("measure"):
        plan = make_plan(asked, spec, work, clock, say)
    if not plan.is_worth_it and not asked.is_forced:
        return Outcome(pays=False, plan=plan, text=_not_worth_it(asked, plan))
    job = _job(asked, plan.best.size)
    settings = read_settings(job.method, job.options)
    keep_job(work, job)
    with clock.stage("regenerate"):
        num_prompts, test_ids, texts = _answers(job, settings, work, show, clock)
    job, settings, chosen = _with_columns(asked, plan, spec, texts, clock)
    say(f"trains {chosen.size.text()}: {expectation(chosen)}")
    with clock.stage("train"):
        student = _train(job, settings, plan.costs, work, texts, show, clock)
    give_back()
    folder = work / "select" / "last"
    write_student(job, settings, student, folder)
    with clock.stage("compare"):
        speeds = _compare(asked, job, folder, test_ids, clock)
    measured = _measured(speeds, speeds.num_tokens)
    publish(job, settings, student, work / "train" / CANDIDATE.format(0), measured, num_prompts)
    return _outcome(asked, job, plan, speeds, measured)


def _check(asked: Asked, work: Path) -> ModelSpec:
    """The target's shape; raises for what cannot work, before anything is made."""
    spec = ModelSpec.from_config(open_weights(find_files(asked.target)).config)
    for key in ("layers", "draft_vocab", "minutes"):
        if key in asked.options:
            raise ConfigError(f"{key}= belongs to a method: hunch train draft {key}=...")
    recipe = resolve(RECIPES, "draft")
    recipe.check(read_settings("draft", asked.options).recipe, spec)
    if read_json(work / PROMPTS) is None:
        read_prompts(asked.prompts)
    there = read_json(work / JOB)
    if there is not None and there["target"] != asked.target:
        raise ConfigError(f"{asked.out} holds a job for {there['target']}; choose another --out")
    return spec


def _not_worth_it(asked: Asked, plan: Plan) -> str:
    return (
        f"No drafter is expected to pay for {asked.target} here in {asked.minutes:g} minutes: the "
        f"best, {plan.best.size.text()}, {expectation(plan.best)}; lookups alone have "
        f"{plan.lookups:.2f}x, and auto uses them already. Nothing was trained. More --minutes, "
        "or a machine that computes faster, may change that; --force trains all the same"
    )


def _job(asked: Asked, size: Size) -> Job:
    options = {"layers": str(size.layers), **asked.options}
    if size.method == "medusa":
        options.pop("layers")
    return Job(size.method, asked.target, asked.prompts, asked.out, options, asked.engine)


def _answers(
    job: Job, settings: Settings, work: Path, show: Progress, clock: Clock
) -> tuple[int, list[list[int]], Texts]:
    train_ids, test_ids = answer_prompts(job, settings, work, show, clock.until(ANSWERED) / 1.25)
    give_back()
    texts = read_answers(work / "answers")
    if len(texts) < MIN_ANSWERS:
        raise TrainingError(
            f"only {len(texts)} answers in {clock.gone / 60:.1f} minutes: too few to learn from; "
            f"give more --minutes (now {clock.seconds / 60:g}). What is there is kept"
        )
    return min(len(train_ids), len(texts)), test_ids, texts


def _with_columns(
    asked: Asked, plan: Plan, spec: ModelSpec, texts: Texts, clock: Clock
) -> tuple[Job, Settings, Expected]:
    """The job with the draft vocabulary that pays best, now that there are answers to count."""
    coverage, best = coverage_of(texts, spec.vocab_size), plan.best.size
    same = {one.size for one in plan.expected if one.size.method == best.method}
    sizes = [one for one in same if one.layers == best.layers]
    device, seconds = device_of(asked), max(clock.until(TRAINED), 1.0)
    ranked = rank(plan.costs, spec, seconds=seconds, device=device, coverage=coverage, sizes=sizes)
    job = _job(asked, best)
    job.options |= {"draft_vocab": str(ranked[0].size.columns)}
    job.options |= {"stops_flat": "true", "precision": asked.options.get("precision", "float16")}
    minutes = (TRAINED * clock.seconds - _before_training(clock)) / 60
    job.options |= {"minutes": f"{max(minutes, 0.01):.4f}"}
    every = max(3.6 * minutes, 2.0)  # a look at held-out answers costs little beside that
    job.options |= {"test_every": f"{every:.1f}", **asked.options}
    return job, read_settings(job.method, job.options), ranked[0]


def _before_training(clock: Clock) -> float:
    return clock.spent.get("measure", 0.0) + clock.spent.get("regenerate", 0.0)


def _train(
    job: Job,
    settings: Settings,
    costs: Costs,
    work: Path,
    texts: Texts,
    show: Progress,
    clock: Clock,
) -> Any:
    student, target = build_student(job, settings, texts)
    node = costs.of_node(float(job.options.get("layers", "1")), len(student.columns))

    def remark(replay: Replay) -> str:
        chance = _chance(replay)
        return f"about {best_chain(costs, chance, node)[1]:.2f}x of plain"

    recipe = resolve(RECIPES, job.method)
    loop = Loop(student, target, work / "train", settings.loop, recipe.lr, remark=remark)
    loop.marks = (1.0,)  # one candidate: what each costs to compare is better spent on learning
    num_held = min(max(len(texts) // 10, 1), 32)
    learn, held = texts.split(num_held, settings.loop.seed)
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


def _way(method: str, folder: Path) -> str:
    """How the engine is told to draft with it: a draft model beside lookups, a head alone."""
    return f"auto:draft={folder}" if method == "draft" else f"{drafts_as(method)}:{folder}"


def _compare(
    asked: Asked, job: Job, folder: Path, test_ids: list[list[int]], clock: Clock
) -> Speeds:
    from hunch import LLM

    ways = {LOOKUPS: WITHOUT, DRAFTER: _way(job.method, folder)}
    if _has_other(asked):
        ways[BEFORE] = "auto"
    engine = engine_for_one(asked.target, asked.engine, context_of(asked))
    with LLM(asked.target, speculate="off", **engine) as llm:
        seconds = max(clock.until(1.0) - 2.0, 2.0)
        return compare_speeds(llm, ways, test_ids[:NUM_TRIED], seconds=seconds)


def _has_other(asked: Asked) -> bool:
    """Whether `auto` drafts with another network for this target as it is."""
    files = find_files(asked.target)
    trained = find_trained(asked.target, Path(files.path), device_of(asked))
    if trained is not None:
        return trained.path != str(asked.out.resolve())
    return any(Path(files.path).name == Path(wheel.member).name for wheel in KNOWN.values())


def _measured(speeds: Speeds, num_tokens: int) -> Measured:
    return Measured(
        tokens_per_pass=speeds.tokens_per_pass[DRAFTER],
        acceptance_rate=speeds.acceptance_rate[DRAFTER],
        per_position=speeds.per_position[DRAFTER],
        cost_per_node=speeds.node_cost[DRAFTER],
        num_tokens=num_tokens,
    )


def _outcome(asked: Asked, job: Job, plan: Plan, speeds: Speeds, measured: Measured) -> Outcome:
    own, lookups = speeds.speedup[DRAFTER], speeds.speedup[LOOKUPS]
    before = speeds.speedup.get(BEFORE, lookups)
    pays = own > PAYS * max(lookups, 1.0) and own >= before
    other = "" if BEFORE not in speeds.speedup else f", auto with the drafter it has {before:.2f}x"
    facts = (
        f"{asked.out}: {measured.tokens_per_pass:.2f} tokens per pass, {own:.2f}x of plain "
        f"decoding; lookups alone {lookups:.2f}x{other} "
        f"({speeds.num_prompts} held-out prompts, one request at a time)."
    )
    if not pays:
        return Outcome(False, plan, f"{facts} {_remedy(asked, job)}", speeds, measured)
    use = f"--speculate {_way(job.method, asked.out)}"
    if asked.is_listed:
        files = find_files(asked.target)
        add_trained(
            TrainedDrafter(
                target=asked.target,
                digest=digest_of(Path(files.path)),
                method=drafts_as(job.method),
                path=str(asked.out.resolve()),
                device=device_of(asked),
                speedup=own,
                tokens_per_pass=measured.tokens_per_pass,
            )
        )
        use = f"auto takes it from now on for {asked.target} (hunch drafters lists it)"
    return Outcome(True, plan, f"{facts} It pays: {use}.", speeds, measured)


def _remedy(asked: Asked, job: Job) -> str:
    return (
        f"It does not pay here, and auto goes on without it. Train longer (--minutes "
        f"{3 * asked.minutes:g}), on prompts like those you serve (--prompts), or keep to lookups; "
        f"it is kept: --speculate {drafts_as(job.method)}:{asked.out} drafts with it all the same."
    )

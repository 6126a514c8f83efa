"""Measures methods at points, in rounds in which each has its turn; it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from hunch import SamplingParams
from hunch.bench.envelope import MIN_ROUNDS, open_methods
from hunch.bench.loads import Job, Load, nobody
from hunch.bench.records import Report, Round, Run, load_report
from hunch.bench.workloads import Prompt, cycle
from hunch.errors import RequestError

OnAnswer = Callable[[str, str, Any], None]  # method, prompt id, the engine's output
OnTurn = Callable[
    [str, dict[str, Any], int, bool], None
]  # method, point, round, whether it was there
ROUNDS = ("rounds", "until_decided")  # settings that may change when a run is resumed


class Subject(Protocol):
    """What is measured: an engine with a method, or a server."""

    name: str

    def warm(self, jobs: Sequence[Job], load: Load) -> None: ...
    def drive(
        self, jobs: Sequence[Job], load: Load, on_answer: Callable[[str, Any], None] = nobody
    ) -> Round: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep: its axes' values, the load and the requests."""

    point: dict[str, Any]
    load: Load
    jobs: Sequence[Job]

    def turns(self) -> list[list[Job]]:
        """The requests of each turn of a method: all of them, or one if they come one by one."""
        is_one_by_one = self.load.concurrency == 1
        return [[job] for job in self.jobs] if is_one_by_one else [list(self.jobs)]


def make_jobs(
    prompts: Sequence[Prompt],
    encode: Callable[[Prompt], list[int]] | None,
    params: Mapping[str, Any],
    count: int | None = None,
) -> list[Job]:
    """Requests for prompts, repeated up to `count`. A prompt keeps its seed when it comes again."""
    many = cycle(list(prompts), count or len(prompts))
    jobs = []
    for place, prompt in enumerate(many):
        given = dict(params)
        if given.get("seed") is not None:
            given["seed"] += place % len(prompts)
        if prompt.max_tokens is not None:
            given["max_tokens"] = min(prompt.max_tokens, given["max_tokens"])
        if prompt.schema is not None:
            given |= {"structured_outputs": {"json": prompt.schema}, "ignore_eos": False}
        jobs.append(
            Job(
                id=prompt.id,
                category=prompt.category,
                token_ids=encode(prompt) if encode is not None else [],
                params=SamplingParams(prediction=prompt.prediction, **given),
                body=prompt.body(),
                conversation=prompt.conversation,
                later=prompt.later,
            )
        )
    return jobs


def open_report(path: Path | None, new: Report) -> Report:
    """The report of an earlier run, if it measured the same; else the new one.

    It may have been stopped, or have had fewer rounds.
    """
    if path is None or not path.exists():
        return new
    found = load_report(path)
    differing = sorted(
        name
        for name in found.settings.keys() | new.settings.keys()
        if found.settings.get(name) != new.settings.get(name) and name not in ROUNDS
    )
    if found.settings.get("rounds", 0) > new.settings.get("rounds", 0):
        differing.append("rounds")
    if differing:
        raise RequestError(
            f"{path} holds another measurement ({', '.join(differing)} differ): give another file, "
            "or remove it"
        )
    found.settings = new.settings
    return found


def measure(
    subjects: Sequence[Subject],
    cells: Sequence[Cell],
    num_rounds: int,
    report: Report,
    *,
    until_decided: bool = False,
    on_turn: OnTurn = nobody,
    on_answer: OnAnswer = nobody,
    save: Path | None = None,
) -> None:
    """Fill the report. Rounds it already holds are not measured again.

    With `until_decided`, later rounds have only the points and methods for which it is not known
    yet whether `auto` is within 2% of them. `on_turn` is called for every turn, also for those that
    were there before or are left out.
    """
    warmed: set[str] = set()
    busiest = max(cells, key=lambda one: len(one.jobs))
    for number, cell in product(range(num_rounds), cells):
        runs = [_run_of(report, subject.name, cell.point) for subject in subjects]
        wanted = {subject.name for subject in subjects}
        if until_decided and number >= MIN_ROUNDS:
            wanted = open_methods(report, cell.point)
        todo = [
            (subject, run)
            for subject, run in zip(subjects, runs, strict=True)
            if len(run.rounds) <= number and subject.name in wanted
        ]
        for subject, _ in todo:
            if subject.name not in warmed:
                subject.warm(busiest.jobs, busiest.load)
                warmed.add(subject.name)
        first = number % len(todo) if todo else 0  # so that no method is always the first
        listen = on_answer if number == 0 else nobody

        def hear(name: str, is_old: bool, cell: Cell = cell, number: int = number) -> None:
            on_turn(name, cell.point, number + 1, is_old)

        rounds = _turns([subject for subject, _ in todo], first, cell, hear, listen)
        for _, run in todo:
            run.rounds.append(rounds[run.method])
        if save is not None and todo:
            report.save(save)
        for run in runs:
            if run.method not in rounds:
                for _ in cell.turns():
                    hear(run.method, True)


def _turns(
    subjects: Sequence[Subject],
    first: int,
    cell: Cell,
    on_turn: Callable[[str, bool], None],
    on_answer: OnAnswer,
) -> dict[str, Round]:
    """One round; if requests come one by one, with a turn for each."""
    rounds = {subject.name: Round() for subject in subjects}
    for piece in cell.turns():
        for subject in [*subjects[first:], *subjects[:first]]:
            listen = partial(on_answer, subject.name)
            rounds[subject.name].add(subject.drive(piece, cell.load, listen))
            on_turn(subject.name, False)
    return rounds


def _run_of(report: Report, method: str, point: dict[str, Any]) -> Run:
    run = report.find(method, point)
    if run is None:
        run = Run(method, point)
        report.runs.append(run)
    return run

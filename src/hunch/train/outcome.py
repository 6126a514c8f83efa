"""The outcome of training: which method is fastest, and what `auto` uses from now on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hunch.hub import resolve as find_files
from hunch.hub.drafters import BESIDE_LOOKUPS, PHRASES, TrainedDrafter, add_trained, digest_of
from hunch.train.expect import Draft
from hunch.train.job import Job, drafts_as
from hunch.train.plan import LOOKUPS, PAYS, Asked, Plan, device_of
from hunch.train.select import Measured
from hunch.train.speeds import Speeds

DRAFTER, BEFORE = "drafter", "before"


@dataclass(slots=True)
class Outcome:
    """What training led to."""

    pays: bool
    plan: Plan
    text: str  # for the user
    speeds: Speeds | None = None  # None: nothing was trained
    measured: Measured | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by what they were spent on
    learning: dict[str, Any] = field(default_factory=dict)  # steps, speeds, tokens per pass by time

    def to_json(self) -> dict[str, Any]:
        return {
            "pays": self.pays,
            "expected": asdict(self.plan.best),
            "lookups": self.plan.lookups,
            "speeds": None if self.speeds is None else self.speeds.to_json(),
            "measured": None if self.measured is None else self.measured.to_json(),
            "text": self.text,
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
            "learning": self.learning,
        }


def speculate_text(method: str, folder: Path) -> str:
    """How the engine is told to draft with it: beside lookups where it can, else alone."""
    if is_beside(method):
        return f"auto:draft={folder}:any_size=true"
    return f"{drafts_as(method)}:{folder}"


def is_beside(method: str) -> bool:
    return drafts_as(method) in BESIDE_LOOKUPS


def measured_of(speeds: Speeds) -> Measured:
    return Measured(
        tokens_per_pass=speeds.tokens_per_pass[DRAFTER],
        acceptance_rate=speeds.acceptance_rate[DRAFTER],
        per_position=speeds.per_position[DRAFTER],
        cost_per_node=speeds.node_cost[DRAFTER],
        num_tokens=speeds.num_tokens,
    )


_NAMES = {
    DRAFTER: "the drafter",
    PHRASES: "a phrase table of its answers",
    LOOKUPS: "lookups alone",
    BEFORE: "auto as it was",
}


def outcome_of(
    asked: Asked,
    job: Job,
    plan: Plan,
    speeds: Speeds,
    promise: Draft | None = None,  # what training expected of the drafter by held-out answers
    learning: dict[str, Any] | None = None,  # what the training's time was spent on
) -> Outcome:
    """The fastest method, which is put on the list if it is new."""
    found = speeds.speedup
    rest: dict[str, Any] = {
        "speeds": speeds,
        "measured": measured_of(speeds) if DRAFTER in found else None,
        "learning": learning or {},
    }
    facts = ", ".join(
        f"{words} {found[name]:.2f}x ({speeds.tokens_per_pass[name]:.2f} tokens per pass)"
        for name, words in _NAMES.items()
        if name in found
    )
    facts = (
        f"{asked.out}, speed against plain decoding: {facts}; {speeds.num_prompts} held-out "
        "prompts, one request at a time."
    )
    if promise is not None:
        facts += f" {_against(promise, speeds)}"
    if by_category := speeds.by_category.get(DRAFTER if DRAFTER in found else PHRASES):
        each = ", ".join(f"{name} {tokens:.2f}" for name, tokens in by_category.items())
        facts += f" Tokens per pass by what prompts ask for: {each}."
    new = [name for name in (DRAFTER, PHRASES) if name in found]
    best = max(new, key=lambda name: found[name], default=LOOKUPS)
    if found[best] < PAYS * max(found[LOOKUPS], 1.0) or found[best] < found.get(BEFORE, 0.0):
        return Outcome(False, plan, f"{facts} {_remedy(asked, job, new)}", **rest)
    names = [PHRASES] if best == PHRASES else [name for name in new if name != PHRASES]
    if best == DRAFTER and PHRASES in new and is_beside(job.method):
        names.append(PHRASES)
    what = "The phrase table" if best == PHRASES else "The drafter"
    if DRAFTER in new and best == PHRASES:
        what = f"The network brings no more than the phrase table alone. {what}"
    text = f"{facts} {what} pays: use --speculate {_use(asked, job, names)}."
    if asked.is_listed:
        for name in names:
            _list(asked, job, name, speeds)
        text = f"{facts} {what} pays: auto takes it from now on for {asked.target}, without an "
        text += "option (hunch drafters lists it)."
    return Outcome(True, plan, text, **rest)


def _against(promise: Draft, speeds: Speeds) -> str:
    """Expected and measured figures side by side: tokens of a pass, and seconds of a step."""
    tokens, speedup = speeds.tokens_per_pass[DRAFTER], speeds.speedup[DRAFTER]
    return (
        f"The drafter alone was promised {promise.speedup:.2f}x by held-out answers "
        f"({promise.tokens_per_pass:.2f} tokens per pass in steps that take {promise.step:.2f} of "
        f"a plain one); with lookups the engine's steps took {tokens / speedup:.2f}."
    )


def _use(asked: Asked, job: Job, names: list[str]) -> str:
    if DRAFTER not in names:
        return f"auto:phrases={asked.out / PHRASES}"
    table = f":phrases={asked.out / PHRASES}" if PHRASES in names else ""
    return speculate_text(job.method, asked.out) + table


def _list(asked: Asked, job: Job, name: str, speeds: Speeds) -> None:
    path = asked.out if name == DRAFTER else asked.out / PHRASES
    add_trained(
        TrainedDrafter(
            target=asked.target,
            digest=digest_of(Path(find_files(asked.target).path)),
            method=drafts_as(job.method) if name == DRAFTER else PHRASES,
            path=str(path.resolve()),
            device=device_of(asked),
            speedup=speeds.speedup[name],
            tokens_per_pass=speeds.tokens_per_pass[name],
        )
    )


def _remedy(asked: Asked, job: Job, new: list[str]) -> str:
    words = (
        "It does not pay here, and auto goes on without it. Train longer (--minutes "
        f"{3 * asked.minutes:g}), on prompts like those you serve (--prompts), or keep to lookups."
    )
    if (asked.out / "model.safetensors").is_file():
        how = f"--speculate {drafts_as(job.method)}:{asked.out}"
        return f"{words} It is kept: {how} drafts with it all the same."
    if PHRASES in new:
        words += f" The table is kept: --speculate {_use(asked, job, [PHRASES])} takes it."
    return words

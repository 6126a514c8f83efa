"""`auto` under an open load is as fast as the best of plain decoding and fixed lengths.

Requests come at random moments, their texts differ in how well they can be guessed, and steps take
what they took on an H200, replayed by the policy itself. Speed is what those who ask see: the time
from the moment a request was due to its last token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from hunch.bench.loads import Load
from hunch.drafting import captured_policy
from hunch.drafting.captured_policy import CapturedPolicy
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.policy import ShapeChoice
from hunch.drafting.step_shapes import DraftSource, StepKey, StepShape
from policy_replay import SMALL, UNDER_LOAD, Drafter, Fixed, Replay, Text, buffers, seconds_of, text

LENGTH, MAX_ROWS = 64, 128
LOOKUPS = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=15, margin=0.01)
BOTH = Drafter(
    *LOOKUPS.shapes, *(StepShape(n, DraftSource.CHAIN) for n in (1, 3, 7)),
    StepShape(15, DraftSource.TREE), margin=0.01, num_levels=7,
)  # fmt: skip


class Host:
    """Milliseconds of the host's own for a step, during which the device waits after prompts.

    Now and then the host pauses: other programs have their turn.
    """

    def __init__(self, least: float) -> None:
        self.least, self.num_steps = least, 0

    def __call__(self, num_rows: int, shape: StepShape) -> float:
        self.num_steps += 1
        pause = 6.0 * self.least * (self.num_steps % 11 == 0)
        return self.least + num_rows * 0.045 * (1.4 if shape.num_nodes else 1.0) + pause


class Target(NamedTuple):
    """Milliseconds of steps, and of passes over prompts beside them."""

    costs: dict[int, dict[int, float]]
    drafter: Any
    source: DraftSource  # of fixed lengths
    prompt: tuple[float, float]
    seconds: float  # for which requests come
    host: float  # milliseconds of the host's that are not for rows


TARGETS = {
    "7B": Target(UNDER_LOAD, BOTH, DraftSource.CHAIN, (3.5, 3.5), 0.8, 1.0),
    "135M": Target(
        SMALL, LOOKUPS, DraftSource.LOOKUP, (0.6, 0.35), 0.2, 0.25,
    ),
}  # fmt: skip
# Chances of a network's guesses, and shares of copied text, from the worst text to the best.
TEXTS = {"good": ((0.4, 0.9), (0.1, 0.6)), "bad": ((0.05, 0.2), (0.0, 0.0))}
# Few rows, many, more than it can serve. By rate, how often the load is run: with few requests,
# each run differs by 5%.
RATES = {"7B": {8: 1, 48: 1, 140: 1}, "135M": {64: 3, 200: 3, 800: 1}}
LEAST = 0.98  # of the speed of the best fixed length


def some_texts(kind: str, count: int) -> list[Text]:
    (low, high), (least, most) = TEXTS[kind]
    shares = np.random.default_rng(0).permutation(np.linspace(0.0, 1.0, 27))
    made = [
        text(seed, LENGTH, least + share * (most - least), low + share * (high - low))
        for seed, share in enumerate(shares.tolist())
    ]
    return [made[place % 27].with_levels(7) for place in range(count)]


def new_policy(target: Target, num_rows: int = MAX_ROWS) -> tuple[CapturedPolicy, Any]:
    rows = buffers(num_rows)
    policy, seconds = CapturedPolicy(target.drafter, rows), seconds_of(target.costs, 0.11, 7)
    size = 1
    while size <= num_rows:
        for shape in policy.shapes.to_capture(size):
            policy.costs.capture(StepKey(size, shape), seconds(size, shape))
        size *= 2
    return policy, rows


def waited(target: Target, policy: Any, rows: Any, kind: str, rate: float, seed: int) -> float:
    """Milliseconds that requests took, which come at so many per second."""
    count = max(round(rate * target.seconds), 12)
    arrivals = [1e3 * due for due in Load(rate=rate, seed=seed).arrivals(count)]
    replay = Replay(
        some_texts(kind, count), policy, rows, seconds_of(target.costs, 0.11, 7), MAX_ROWS,
        arrivals, target.prompt, Host(target.host),
    )  # fmt: skip
    replay.run()
    return float(np.mean(replay.ended)) - float(np.mean(arrivals))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", TARGETS)
def test_at_any_load_it_is_as_fast_as_the_best_fixed_length(name: str, kind: str) -> None:
    """From an engine's first request on, as the load rises."""
    target = TARGETS[name]
    fixed = [StepShape(0, DraftSource.NOBODY), *(StepShape(n, target.source) for n in (3, 7))]
    policy, rows = new_policy(target)
    for rate, num_runs in RATES[name].items():
        seeds = range(rate, rate + num_runs)
        auto = sum(waited(target, policy, rows, kind, rate, seed) for seed in seeds)
        others = [
            sum(waited(target, Fixed(one), buffers(MAX_ROWS), kind, rate, seed) for seed in seeds)
            for one in fixed
        ]
        assert auto < min(others) / LEAST, (rate, auto, others)


def test_a_draft_that_does_not_pay_for_many_is_given_up_within_their_first_steps() -> None:
    """64 come together, of which some gain little: they are done when the last of them is."""
    target = TARGETS["7B"]._replace(
        costs={64: {1: 0.55, 6: 0.58, 64: 0.9, 128: 1.16, 256: 1.75, 512: 2.68}}
    )
    chances = np.random.default_rng(1).permutation(np.linspace(0.25, 0.55, 64)).tolist()
    some = [text(seed, LENGTH, 0.0, chance) for seed, chance in enumerate(chances)]
    policy, rows = new_policy(target, 64)

    def speed(policy: Any, rows: Any) -> float:
        return Replay(some, policy, rows, seconds_of(target.costs, 0.11, 7), 64).run()

    plain = speed(Fixed(StepShape(0, DraftSource.NOBODY)), buffers(64))
    assert [speed(policy, rows) > least * plain for least in (0.96, 0.98)] == [True, True]


def test_while_requests_come_and_go_not_every_step_is_thought_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's time for it is the device's where prompts are read beside every step."""
    target, best = TARGETS["7B"], ShapeChoice.best
    policy, rows = new_policy(target)
    asked: list[int] = []

    def note(self: ShapeChoice, row_R: np.ndarray, num_rows: int, extras: int) -> StepShape:
        asked.append(len(row_R))
        return best(self, row_R, num_rows, extras)

    monkeypatch.setattr(ShapeChoice, "best", note)
    waited(target, policy, rows, "good", 96, 0)
    steps = [counts["steps"] for counts in policy.counts.report()["shapes"].values()]
    many = [num_rows for num_rows in asked if num_rows >= captured_policy.MANY]
    assert len(many) < sum(steps) / 2

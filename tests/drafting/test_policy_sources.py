"""`auto` is never far from the best single source: texts and step times by table, replayed.

Each case replays one kind of text on one target: plain decoding, lookups alone, a network alone
and `auto` with both, by the same policy. Step times come from a table by packed tokens, so results
are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hunch.drafting.captured_policy import CapturedPolicy
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.step_shapes import DraftSource, StepKey, StepShape, shapes_of
from policy_replay import Drafter, Fixed, Replay, Text, buffers, text

# Milliseconds of a step by packed tokens, and of a network's level, measured on an H200.
TARGETS: dict[str, tuple[dict[int, float], float]] = {
    "135M": ({1: 0.61, 4: 0.63, 16: 0.68, 64: 0.95, 128: 1.16, 256: 1.75, 512: 2.68}, 0.09),
    "7B": ({1: 3.97, 8: 4.2, 32: 4.6, 64: 5.5, 128: 6.8, 256: 9.0, 512: 13.5}, 0.11),
    # Up to 8 rows have kernels of their own: one more takes as long as many.
    "7B in 4 bits": ({1: 1.76, 8: 2.03, 9: 3.2, 32: 4.0, 64: 5.45, 128: 7.2, 512: 23.5}, 0.09),
    # Experts: each token asks others, so that time grows with nodes from the first.
    "experts": ({1: 2.94, 4: 5.86, 8: 8.39, 16: 12.3, 64: 18.6, 128: 20.5, 512: 36.0}, 0.11),
    # A vocabulary of 152k: the head's product grows with rows while the layers' does not.
    "0.5B": ({1: 0.69, 8: 0.75, 16: 0.85, 64: 1.3, 128: 1.95, 256: 3.2, 512: 5.9}, 0.08),
}
# Share of copied text; chances of a network's first guess and of a further one.
TEXTS = {
    "a weak network": (0.25, 0.27, 0.1),
    "a fair network": (0.2, 0.6, 0.6),
    "a strong network": (0.1, 0.8, 0.75),
    "copies": (0.6, 0.3, 0.2),
    "nothing to guess": (0.0, 0.05, 0.1),
}
PLAIN = StepShape(0, DraftSource.NOBODY)
# Milliseconds that a head takes in every step that it follows, and for each token of it.
FOLLOWING, EACH_FOLLOWED = 0.12, 0.004


class Head(Drafter):
    """One that must follow every step, which costs time, or is left."""

    draft_model = None

    def writes_kv(self, source: int) -> bool:
        return source >= 0


LOOKUPS = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=15, margin=0.01)
NETWORK = Drafter(*shapes_of(DraftSource.CHAIN, 5, is_adaptive=True), margin=0.01)
CHAINS = [StepShape(n, DraftSource.CHAIN) for n in (1, 3, 5)]
TREE = StepShape(15, DraftSource.TREE)
BOTH = Drafter(*LOOKUPS.shapes, *CHAINS, TREE, margin=0.01)
HEAD = Head(*NETWORK.shapes, margin=0.01)
ALONE = [StepShape(n, DraftSource.HEAD_DROPPED) for n, _ in LOOKUPS.shapes]
WITH_HEAD = Head(*BOTH.shapes, *ALONE, margin=0.01)
MERGED = StepShape(43, DraftSource.MERGED)
WITH_MERGED = Drafter(*BOTH.shapes, MERGED, margin=0.01)


def texts(kind: str, count: int, length: int) -> list[Text]:
    copied, first, further = TEXTS[kind]
    made = []
    for seed in range(count):
        one, rng = text(seed, length, copied), np.random.default_rng(10_000 + seed)

        def runs(chance: float, rng: Any = rng) -> np.ndarray:
            more = np.minimum(rng.geometric(1.0 - further, length), 10)
            return np.where(rng.random(length) < chance, more, 0)

        one.network = runs(first)
        one.tree = np.minimum(np.maximum(one.network, runs(0.3 * first)), 5)
        made.append(one)
    return made


def seconds_of(target: str, *, has_head: bool = False) -> Callable[[int, StepShape], float]:
    """has_head: with what a head takes in every step that it follows."""
    table, level = TARGETS[target]
    sizes, times = list(table), list(table.values())

    def seconds(num_rows: int, shape: StepShape) -> float:
        packed, each = num_rows * (1 + shape.num_nodes), level * (1.0 + num_rows / 200)
        took = float(np.interp(packed, sizes, times)) * max(1.0, packed / sizes[-1])
        took += 0.006 * (shape.source != DraftSource.NOBODY)
        if has_head and shape.source >= 0:
            took += FOLLOWING + EACH_FOLLOWED * packed
        if shape.source == DraftSource.CHAIN:
            took += each * min(shape.num_nodes or 5, 5)
        return took + 1.5 * each * {DraftSource.TREE: 5, DraftSource.MERGED: 7}.get(shape.source, 0)

    return seconds


def replay(
    drafter: Any,
    some: list[Text],
    seconds: Callable[[int, StepShape], float],
    num_rows: int,
) -> Replay:
    rows = buffers(num_rows)
    policy = drafter if isinstance(drafter, Fixed) else CapturedPolicy(drafter, rows)
    size = 1
    while size <= num_rows and isinstance(policy, CapturedPolicy):
        for shape in policy.shapes.to_capture(size):
            policy.costs.capture(StepKey(size, shape), seconds(size, shape))
        size *= 2
    replayed = Replay(some, policy, rows, seconds, num_rows)
    replayed.run()
    return replayed


def rate(*asked: Any) -> float:
    return speed(replay(*asked))


def speed(replayed: Replay) -> float:
    """Tokens per millisecond."""
    assert replayed.while_full is not None  # who is last says more of the order than of the policy
    num_tokens, took = replayed.while_full
    return num_tokens / took


def test_after_a_network_has_caught_up_the_step_that_was_chosen_runs() -> None:
    replayed = replay(BOTH, texts("copies", 6, 96), seconds_of("7B"), 1)
    assert replayed.policy.counts.num_changes > 0
    assert all(isinstance(shape, StepShape) for shape in replayed.shapes)  # the host ran none


def share_of_best(target: str, kind: str, num_rows: int = 1, *, has_head: bool = False) -> float:
    """Speed of `auto` over that of the best source alone, trials of the others included."""
    some = texts(kind, 12 if num_rows == 1 else 5 * num_rows, 96)
    plainly, seconds = seconds_of(target), seconds_of(target, has_head=has_head)
    alone = [rate(one, some, plainly, num_rows) for one in (Fixed(PLAIN), LOOKUPS)]
    alone.append(rate(HEAD if has_head else NETWORK, some, seconds, num_rows))
    return rate(WITH_HEAD if has_head else BOTH, some, seconds, num_rows) / max(alone)


@pytest.mark.parametrize(
    ("target", "kind", "num_rows"),
    [
        pytest.param("135M", "a weak network", 1, marks=pytest.mark.slow),
        ("7B", "a strong network", 1),
        ("7B in 4 bits", "nothing to guess", 1),
        ("7B in 4 bits", "a fair network", 8),
        pytest.param("7B in 4 bits", "copies", 8, marks=pytest.mark.slow),
        ("experts", "a weak network", 1),
    ],
)
def test_it_is_within_two_percent_of_the_best_source_alone(
    target: str, kind: str, num_rows: int
) -> None:
    assert share_of_best(target, kind, num_rows) > 0.98


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [
        ("copies", 1),
        ("a fair network", 1),
        ("a weak network", 1),
        pytest.param("a weak network", 8, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_does_not_pay_is_left_and_one_that_does_is_kept(
    kind: str, num_rows: int
) -> None:
    """Following every step takes a sixth of a small target's, and more of one that checks many."""
    assert share_of_best("0.5B", kind, num_rows, has_head=True) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("target", TARGETS)
def test_it_is_near_the_best_source_everywhere(
    target: str, kind: str, has_head: bool, num_rows: int
) -> None:
    """From an engine's first request on: of few requests, trials are a larger part."""
    assert share_of_best(target, kind, num_rows, has_head=has_head) > 0.9


@pytest.mark.parametrize(
    ("found", "is_chosen"), [(0.5, True), (0.0, False)], ids=["short matches", "none"]
)
def test_guesses_of_both_are_checked_together_where_that_brings_more(
    found: float, is_chosen: bool
) -> None:
    """Settled within the first request, and kept for those that follow.

    found: how often a lookup is right after a token or two, where a tree is not replaced by it.
    """
    some = [text(seed, 96, 0.0, first=0.6) for seed in range(12)]
    for seed, one in enumerate(some):
        rng = np.random.default_rng(seed)
        more = np.where(rng.random(96) < found, np.minimum(rng.geometric(0.2, 96), 15), 0)
        one.right = np.where(one.matched > 0, more, 0)
    seconds = seconds_of("7B")
    alone = [rate(Fixed(shape), some, seconds, 1) for shape in (TREE, MERGED)]
    assert (alone[1] > 1.03 * alone[0]) == is_chosen
    replayed = replay(WITH_MERGED, some, seconds, 1)
    assert speed(replayed) > 0.96 * max(alone)
    chosen = [shape for shape in replayed.shapes[40:] if shape is not None and shape.num_nodes]
    share = sum(shape.source == DraftSource.MERGED for shape in chosen) / len(chosen)
    assert share > 0.6 if is_chosen else share < 0.2


def policy_of(drafter: Any) -> CapturedPolicy:
    policy = CapturedPolicy(drafter, buffers(1))
    policy.network_rows.is_current[:] = True
    return policy


def test_a_tree_that_waits_is_not_dropped_for_what_is_better_for_a_moment() -> None:
    policy, rows = policy_of(BOTH), np.array([0])
    chain = DraftSource.CHAIN

    def choose(rate: float) -> int:
        return policy.choice.choose_group(
            rows, {DraftSource.LOOKUP: 1.0, chain: rate, DraftSource.TREE: 3.0}
        )

    assert choose(2.0) == DraftSource.TREE
    assert policy.shape_to_launch(TREE, rows) == TREE
    assert choose(3.3) == DraftSource.TREE
    steps = 1
    while choose(3.3) == DraftSource.TREE:
        steps += 1
    assert 3 < steps < 30
    assert policy.shape_to_launch(CHAINS[1], rows) == StepShape(0, chain)  # what waited is lost
    assert choose(2.98) == chain
    assert policy.shape_to_launch(CHAINS[1], rows) == CHAINS[1]


def test_a_head_does_not_draft_for_rows_that_it_did_not_follow() -> None:
    rows = buffers(2)
    policy, row_R = CapturedPolicy(WITH_HEAD, rows), np.array([0, 1])
    policy.start([0, 1])
    for _ in range(40):
        for row in (0, 1):
            policy.network_estimate.learn(row, 5, 5, DraftSource.CHAIN)
    assert policy.choose(row_R).source > 0
    policy.network_rows.is_current[1] = False
    assert policy.choose(row_R).source == DraftSource.LOOKUP
    policy.network_rows.is_current[0] = False
    assert policy.choose(row_R).source == DraftSource.HEAD_DROPPED


def test_a_merged_tree_is_not_checked_without_its_lookup_for_a_moment() -> None:
    """A match that is long in every second step makes the smaller tree look better in those."""
    policy, rows = policy_of(WITH_MERGED), np.array([0])

    def choose(tree: float) -> int:
        rates = {DraftSource.LOOKUP: 1.0, DraftSource.TREE: tree, DraftSource.MERGED: 3.0}
        source = policy.choice.choose_group(rows, rates)
        policy.shape_to_launch(StepShape(15, source), rows)
        return source

    assert choose(2.0) == DraftSource.MERGED
    assert {choose(tree) for _ in range(20) for tree in (3.3, 2.6)} == {DraftSource.MERGED}
    assert [choose(3.4) for _ in range(40)][-1] == DraftSource.TREE


@pytest.mark.parametrize("num_rows", [1, 128])
@pytest.mark.parametrize("is_network", [True, False])
def test_there_is_a_shape_where_what_rows_name_cannot_draft(
    num_rows: int, is_network: bool
) -> None:
    """A drafter that is not adaptive has no plain steps, and its lookup's do not fit many rows."""
    rows = buffers(num_rows)
    drafter = Drafter(StepShape(7, DraftSource.LOOKUP), *CHAINS[:2])
    policy, row_R = CapturedPolicy(drafter, rows), np.arange(num_rows)
    policy.start(row_R.tolist())
    policy.network_rows.by_network[:num_rows] = [is_network] * num_rows
    rows.known[:], rows.computed[:], rows.end[:] = 400, 0, 402
    assert not policy.network_rows.can_draft(row_R)
    shape = policy.choose(row_R)
    assert shape in policy.shapes.at(num_rows)
    assert shape.source == (DraftSource.LOOKUP if num_rows == 1 else DraftSource.CHAIN)

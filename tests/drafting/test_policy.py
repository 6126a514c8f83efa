"""What is drafted follows what is accepted and what steps take; captured steps, replayed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hunch.drafting.acceptance import (
    NETWORK_PRIORS,
    NEW_MATCH,
    AcceptanceEstimate,
    log_match,
    relative_error,
)
from hunch.drafting.captured_policy import NO_LINE, CapturedPolicy
from hunch.drafting.costs import CostCurve
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.policy import (
    HostPolicy,
    best_count,
    best_rate,
    share_nodes,
)
from hunch.drafting.step_shapes import DraftSource, StepKey, StepShape, shapes_of
from hunch.kernels.step import CHECKED, FIRST, MATCHED, REASON, TOKENS
from policy_replay import (
    LARGE,
    SMALL,
    UNDER_LOAD,
    Drafter,
    Fixed,
    Replay,
    Text,
    buffers,
    seconds_of,
    text,
)

# --- the acceptance estimate ----------------------------------------------------------------------


def network() -> AcceptanceEstimate:
    return AcceptanceEstimate(4, NETWORK_PRIORS, rate=0.06, num_levels=5)


def expected(estimate: AcceptanceEstimate, row: int = 0, source: int = 1) -> float:
    return estimate.gains([row], (5,), source)[0][0]


def teach(estimate: AcceptanceEstimate, num_right: int, *, steps: int = 80, row: int = 0) -> None:
    """So many of five guesses are right, step after step."""
    for _ in range(steps):
        estimate.learn(row, num_right, min(num_right + 1, 5), 1)


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
def test_it_comes_to_expect_what_happens(num_right):
    estimate = network()
    teach(estimate, num_right, steps=300)
    assert abs(expected(estimate) - num_right) < 0.6


def test_what_is_learned_of_one_source_holds_for_the_other():
    estimate = network()
    before = expected(estimate, source=2)
    teach(estimate, 0)
    assert expected(estimate) < expected(estimate, source=2) < 0.3 * before


def test_other_requests_are_mostly_left_as_they_were():
    """Once enough was heard; of a source that nobody knew, the first request tells the others."""
    new, known = network(), network()
    teach(known, 2, steps=200)
    for estimate, least, most in ((new, 0.2, 0.7), (known, 0.75, 1.0)):
        estimate.start([0])
        before = expected(estimate, row=1)
        teach(estimate, 0, steps=20)
        assert expected(estimate) < 0.6 * before
        assert least * before < expected(estimate, row=1) < most * before


def test_without_guesses_hope_comes_back():
    estimate = network()
    hoped = expected(estimate)
    teach(estimate, 0)
    fallen = expected(estimate)
    for _ in range(2000):
        estimate.fade([0])
    assert fallen < 0.2 * hoped < 0.8 * hoped < expected(estimate)


def test_guesses_past_the_last_level_bring_nothing():
    estimate = network()
    teach(estimate, 5, steps=300)
    five, seven = estimate.gains([0], (5, 7), 1)[0]
    assert 4.2 < five == seven <= 5


def test_what_is_expected_is_corrected_by_what_came():
    """A tree that brings no more than a chain does is thought to bring no more."""
    estimate = network()
    for turn in range(300):
        run, source = turn % 3, 1 + turn % 2
        ((gain,),) = estimate.gains([0], (5,), source)
        estimate.calibrate(source, relative_error(gain, run))
        estimate.learn(0, run, run + 1, source)
    chain, tree = (expected(estimate, source=source) for source in (1, 2))
    assert chain == pytest.approx(1.0, abs=0.25)
    assert tree == pytest.approx(chain, rel=0.15)


def test_what_is_never_right_is_expected_to_stay_so():
    estimate = network()
    estimate.common_first = estimate.common_further = -1e4  # after very many steps
    assert expected(estimate) < 0.03
    estimate.learn(0, 0, 1, 1)


def test_what_a_match_foretold_says_nothing_of_the_row():
    """Rows whose guesses are right as often as their matches say are not thought better."""
    estimate = AcceptanceEstimate(
        2, {0: (0.1, 0.6)}, rate=0.06, num_levels=7, by_match=(1.0, 0.5)
    )  # fmt: skip
    rng, matches = np.random.default_rng(0), (1, 7)
    for _ in range(400):
        for row, matched in enumerate(matches):
            chance = 1.0 / (1.0 + 9.0 / (1.0 + matched) ** 1.4427)
            run = int(rng.random() < chance)
            estimate.match[row] = log_match(matched)
            estimate.learn(row, run, 1, match=log_match(matched))
    hinted = [gain for (gain,) in estimate.gains([0, 1], (7,))]
    estimate.match[:] = [NEW_MATCH] * 2
    plain = [gain for (gain,) in estimate.gains([0, 1], (7,))]
    assert hinted[1] > 2 * hinted[0]
    assert max(plain) < 2 * min(plain)


# --- the chooser and the host's steps -------------------------------------------------------------


def curve_of(points: dict[int, float]) -> CostCurve:
    curve = CostCurve()
    for num_tokens, seconds in points.items():
        curve.record(num_tokens, seconds)
    return curve


def test_plain_decoding_is_beaten_by_a_margin_or_kept():
    assert best_rate([1.0, 1.2, 1.3], [1.0, 1.1, 1.3]) == 1
    assert best_rate([1.0, 1.2, 1.3], [1.0, 1.1, 1.3], margin=0.1) == 0


@given(st.lists(st.floats(0.01, 1.0), max_size=80))
def test_the_count_is_the_best_of_all_counts(chances):
    curve = curve_of({1: 1.0, 4: 1.3, 16: 3.0, 32: 7.0})
    chances = sorted(chances, reverse=True)
    totals = itertools.accumulate(chances, initial=1.0)
    rates = [total / curve.seconds(1 + n) for n, total in enumerate(totals)]
    assert rates[best_count(chances, curve)] == pytest.approx(max(rates))


def test_a_busy_batch_buys_fewer_nodes():
    curve, chances = curve_of({1: 1.0, 64: 1.2, 128: 2.4, 256: 4.8}), [0.6**n for n in range(1, 9)]
    assert best_count(chances, curve) >= 4
    assert share_nodes([chances] * 128, [8] * 128, curve) == [0] * 128


def test_nodes_are_shared_out_over_rows_by_chance():
    cost = curve_of({n: 1 + 0.05 * (n - 1) for n in range(1, 17)})
    sure, vague = ([chance**n for n in range(1, 7)] for chance in (0.95, 0.2))
    assert share_nodes([sure, vague], [6, 6], cost) == [6, 1]
    assert share_nodes([sure, vague], [2, 6], cost) == [2, 1]
    assert share_nodes([sure], [3], cost) == [3]
    dear = curve_of({n: 1 + 0.25 * (n - 1) for n in range(1, 17)})
    assert share_nodes([sure, vague], [6, 6], dear) == [1, 0]
    assert share_nodes([vague], [6], dear) == [0]


def test_what_one_row_gains_counts_for_less_than_what_all_gain():
    """The others wait for its nodes. By the mean of the rows, it would have three of them."""
    cost = curve_of({n: 1 + 0.1 * (n - 1) for n in range(1, 17)})
    sure, vague = ([chance**n for n in range(1, 4)] for chance in (0.9, 0.2))
    rows = [sure, vague, vague, vague]
    assert share_nodes(rows, [3] * 4, cost, 0.03) == [0, 0, 0, 0]
    assert share_nodes([sure] * 4, [3] * 4, cost) == [3] * 4


def time_of(num_rows: int, texts: list[Text], cost: CostCurve) -> float:
    """Time of requests that came together, in plain steps' time; texts' chances are known."""
    at, spent = [0] * num_rows, 0.0
    while rows := [row for row in range(num_rows) if at[row] < len(texts[row])]:
        chances = []
        for row in rows:
            matched = texts[row].matched[at[row]]
            first, count = (0.9, 7) if matched > 2 else (0.125, 1)
            chances.append([first * 0.95**n for n in range(count)] if matched else [])
        limits = [len(texts[row]) - at[row] - 1 for row in rows]
        counts = share_nodes(chances, limits, cost, 0.03)
        spent += cost.seconds(len(rows) + sum(counts))
        for row, count in zip(rows, counts, strict=True):
            at[row] += 1 + min(int(texts[row].right[at[row]]), count)
    return spent / (max(map(len, texts)) * cost.seconds(num_rows))


@pytest.mark.parametrize("num_rows", [2, 4, 8])
@pytest.mark.parametrize("length", [16, 64])
def test_requests_that_come_together_lose_no_time(num_rows, length):
    """A CPU's costs; if the mean of the rows alone counted, eight would take a twentieth longer."""
    cost, taken = curve_of({1: 1.0, 8: 1.35, 32: 2.9}), 0.0
    for seed in range(20):
        texts = [text(50 * seed + row, length, 0.3) for row in range(num_rows)]
        taken += time_of(num_rows, texts, cost) / 20
    assert taken < 1.01


READS_WEIGHTS = {1: 1.0, 8: 1.02, 16: 1.1, 48: 1.4}  # a pass over few tokens takes as long as one
EACH_COSTS = {1: 1.0, 8: 2.0, 16: 4.0, 48: 12.0}


def host_policy(
    share: float, curve: dict[int, float], *, is_adaptive: bool = True, max_nodes: int = 5
) -> HostPolicy:
    return HostPolicy(
        curve_of(curve), num_rows=8, max_nodes=max_nodes, num_levels=5, share=share,
        is_adaptive=is_adaptive,
    )  # fmt: skip


def plan(policy: HostPolicy, num_rows: int, other: tuple[int, float] = (0, 0.0)) -> tuple[int, int]:
    """How many rows the network is asked for, and levels."""
    places, num_levels = policy.plan(range(num_rows), [32] * num_rows, [other] * num_rows)
    return len(places), num_levels


def test_a_cheap_network_is_asked_for_long_chains():
    assert plan(host_policy(0.01, READS_WEIGHTS), 1) == (1, 5)
    assert plan(host_policy(0.01, READS_WEIGHTS), 4) == (4, 5)


def test_a_dear_network_is_asked_for_short_chains_or_not_at_all():
    assert 0 < plan(host_policy(0.15, READS_WEIGHTS), 1)[1] < 5
    assert plan(host_policy(0.9, READS_WEIGHTS), 1) == (0, 0)


def test_where_rows_cost_a_network_is_not_asked_unless_it_must():
    assert plan(host_policy(0.05, EACH_COSTS), 8) == (0, 0)
    assert plan(host_policy(0.05, EACH_COSTS, is_adaptive=False), 8) == (8, 5)


def test_a_tree_is_drafted_whole_or_not_at_all():
    assert plan(host_policy(0.01, READS_WEIGHTS, max_nodes=16), 1) == (1, 5)
    assert plan(host_policy(0.01, EACH_COSTS, max_nodes=16), 1) == (0, 0)


def test_a_lookup_that_promises_more_is_left_alone():
    assert plan(host_policy(0.01, READS_WEIGHTS), 1, other=(8, 5.0)) == (0, 0)


def test_what_drafting_was_timed_at_counts():
    policy = host_policy(0.01, READS_WEIGHTS)
    for _ in range(20):
        policy.timed(1, 5, 5.0)
    assert plan(policy, 1) == (0, 0)
    fixed = HostPolicy(
        CostCurve(is_measured=False),
        num_rows=8,
        max_nodes=5,
        num_levels=5,
        share=0.01,
        is_adaptive=True,
    )
    fixed.timed(1, 5, 500.0)
    assert plan(fixed, 1)[1] > 1


def test_a_network_falls_silent_where_it_fails_and_is_tried_again_later():
    policy = host_policy(0.1, READS_WEIGHTS)
    for _ in range(30):
        policy.estimate.learn(0, 0, 1)
    assert plan(policy, 1) == (0, 0)
    for _ in range(1500):
        policy.estimate.fade([0])
    assert plan(policy, 1)[0] == 1


# --- captured steps -------------------------------------------------------------------------------

SHAPES = tuple(map(StepShape, (0, 3, 7)))
CHEAP = {StepShape(0): 1.0, StepShape(3): 1.06, StepShape(7): 1.14}
FAIR = {StepShape(0): 1.0, StepShape(3): 1.5, StepShape(7): 1.9}
DEAR = {StepShape(0): 1.0, StepShape(3): 2.0, StepShape(7): 4.0}


def new_policy(
    seconds: dict[StepShape, float], num_rows: int = 8, drafter: Any = None, **options: float
) -> CapturedPolicy:
    rows = buffers(max(num_rows, 8))
    rows.known[:], rows.end[:] = 100, 200
    policy = CapturedPolicy(drafter or Drafter(*SHAPES, **options), rows)
    count = 1
    while count <= num_rows:
        for shape, took in seconds.items():
            policy.costs.capture(StepKey(count, shape), took)
        count *= 2
    policy.start(list(range(num_rows)))
    return policy


def step(
    policy: CapturedPolicy,
    is_right: list[bool],
    matched: list[int] | None = None,
    num_nodes: int = 0,
    source: int = 0,
) -> list[str] | None:
    """A step whose rows' waiting guesses are all right, or the first is wrong; 7 new guesses."""
    count = len(is_right)
    result_RC = np.full((count, FIRST + num_nodes + 1 + 7), 5, dtype=np.int64)
    result_RC[:, TOKENS] = [num_nodes + 1 if right else 1 for right in is_right]
    result_RC[:, FIRST : FIRST + num_nodes + 1] = [[5 if right else 9] for right in is_right]
    result_RC[:, MATCHED] = matched or [2] * count
    result_RC[:, CHECKED], result_RC[:, REASON] = num_nodes, 0
    graph = SimpleNamespace(key=StepKey(count, StepShape(num_nodes, source)), draft_seconds=0.0)
    return policy.learn(np.arange(count), result_RC.tolist(), graph)


def choose(policy: CapturedPolicy, num_rows: int) -> StepShape:
    return policy.choose(np.arange(num_rows))


def settled(policy: CapturedPolicy, num_rows: int) -> StepShape:
    """What is chosen once it has been the better choice for a while."""
    return [choose(policy, num_rows) for _ in range(60)][-1]


def test_right_guesses_are_checked_where_that_costs_little():
    for seconds, want in ((CHEAP, StepShape(7)), (DEAR, StepShape(3))):
        policy = new_policy(seconds)
        for _ in range(120):
            step(policy, [True, True], num_nodes=3)
        assert choose(policy, 2) == want


def test_wrong_guesses_are_not_checked():
    policy = new_policy(CHEAP)
    for _ in range(120):
        step(policy, [False, False])
    assert choose(policy, 2) == StepShape(0)


def test_guesses_teach_though_they_were_not_checked():
    """A step without nodes commits one token; the first guess is compared with it."""
    policy = new_policy(CHEAP)
    for _ in range(120):
        step(policy, [False, False])
    for _ in range(40):
        step(policy, [True, True])
    assert choose(policy, 2).num_nodes > 0


def test_rows_that_gain_nothing_count_for_more_than_those_that_gain():
    """They would wait for what the others check."""
    for seconds, num_right, is_checked in ((FAIR, 3, False), (FAIR, 7, True), (CHEAP, 3, True)):
        policy = new_policy(seconds)
        for _ in range(120):
            step(policy, [True] * num_right + [False] * (8 - num_right))
        assert (choose(policy, 8).num_nodes > 0) == is_checked


def test_many_new_requests_check_where_that_costs_next_to_nothing():
    cost = {StepShape(0): 4.2, StepShape(3): 4.28, StepShape(7): 4.45}  # measured, 7B on a GPU
    assert choose(new_policy(cost, margin=0.03), 8).num_nodes > 0


def test_rows_check_at_once_after_long_matches_and_not_after_none():
    """What was right on the whole is the same in every step; what was matched is not."""
    policy = new_policy({StepShape(0): 1.0, StepShape(3): 1.4, StepShape(7): 1.8})
    chosen: dict[bool, set[StepShape]] = {False: set(), True: set()}
    was_long = False
    for turn in range(144):
        is_long = turn % 8 >= 4
        # The guess of a step is worth what the match a step before it says.
        step(policy, [was_long] * 8, [16 * is_long] * 8)
        was_long = is_long
        if turn >= 96:
            chosen[is_long].add(choose(policy, 8))
    assert chosen[False] == {StepShape(0)}
    assert StepShape(0) not in chosen[True]


def test_a_new_request_starts_anew():
    policy = new_policy(CHEAP)
    before = policy.lookup_estimate.gains([1], (7,))
    for _ in range(60):
        step(policy, [True, False])
    assert policy.lookup_estimate.gains([1], (7,)) != before
    policy.lookup_estimate.common_first = policy.lookup_estimate.common_further = 0.0
    policy.start([1])
    assert policy.lookup_estimate.gains([1], (7,)) == before
    assert policy.lines[1] is NO_LINE


NETWORK = (StepShape(0), StepShape(7), StepShape(7, 1), StepShape(15, 2))
MEASURED = dict(zip(NETWORK, (3.97, 4.1, 4.58, 5.08), strict=True))  # 7B on a GPU


def test_a_network_is_chosen_where_it_brings_more_than_it_costs():
    policy = new_policy(MEASURED, drafter=Drafter(*NETWORK, margin=0.03))
    assert choose(policy, 1) == StepShape(15, 2)
    dear = {shape: seconds + 6 * (shape.source > 0) for shape, seconds in MEASURED.items()}
    assert not choose(new_policy(dear, drafter=Drafter(*NETWORK, margin=0.03)), 1).source
    for _ in range(60):
        policy.network_estimate.learn(0, 0, 1, 2)
        policy.lookup_estimate.learn(0, 0, 1)
    assert settled(policy, 1) == StepShape(0)
    for _ in range(3000):
        policy.network_estimate.fade([0])
    assert settled(policy, 1).source > 0


def test_a_change_of_source_must_bring_in_what_it_costs():
    """With little left to write it does not; a step that promises more by chance is not enough."""
    policy = new_policy(MEASURED, drafter=Drafter(*NETWORK))
    for _ in range(60):
        policy.network_estimate.learn(0, 0, 1, 1)
        policy.lookup_estimate.learn(0, 1, 2)
    assert settled(policy, 1).source == DraftSource.LOOKUP
    for _ in range(60):
        policy.network_estimate.learn(0, 5, 5, 1)
    assert choose(policy, 1).source == DraftSource.LOOKUP
    policy.rows.end[:] = 101
    assert settled(policy, 1).source == DraftSource.LOOKUP
    policy.rows.end[:] = 200
    assert settled(policy, 1).source > 0


def test_rows_a_network_has_not_read_wait_for_the_host():
    policy, row_R = new_policy(MEASURED, drafter=Drafter(*NETWORK)), np.arange(1)
    chain = StepShape(7, DraftSource.CHAIN)
    assert not policy.is_ready(chain, row_R)
    read: list[int] = []

    def see(ids: list[int]) -> None:
        read.extend(ids)
        policy.rows.computed[-1, ids] = policy.rows.known[ids]

    policy.catch_up([0], see)
    assert read == [0]
    assert policy.is_ready(chain, row_R)
    policy.shape_to_launch(StepShape(3), row_R)
    assert not policy.is_ready(chain, row_R), "a step without it left a hole"
    policy.rows.computed[-1], policy.rows.end[:] = (
        0,
        101,
    )  # what is left is not worth reading 100 tokens for
    assert choose(policy, 1).source <= 0


def test_a_new_prompt_is_not_read_to_a_network_that_will_not_draft_for_it():
    """Beside so many others that no node is checked, though it alone would be drafted for."""
    policy, read = new_policy(MEASURED, num_rows=256, drafter=Drafter(*NETWORK)), list[int]()
    policy.catch_up([0], read.extend, range(256))
    assert read == []
    policy.catch_up([0], read.extend)
    assert read == [0]


def test_rows_that_name_a_method_are_drafted_for_by_no_other():
    policy = new_policy(MEASURED, drafter=Drafter(*NETWORK))
    assert choose(policy, 2).source > 0
    policy.network_rows.by_network[0] = False
    assert choose(policy, 2).source > 0, "another row may have the use of it"
    policy.network_rows.by_network[1] = False
    for _ in range(40):
        policy.lookup_estimate.learn(0, 5, 5)
        policy.lookup_estimate.learn(1, 5, 5)
    assert settled(policy, 2) == StepShape(7)
    policy.network_rows.by_network[:2] = [True, True]
    assert settled(policy, 2).source > 0


def test_a_tree_that_waits_is_checked_as_a_tree_or_dropped():
    policy, row_R = new_policy(MEASURED, drafter=Drafter(*NETWORK)), np.arange(1)
    policy.shape_to_launch(StepShape(0, DraftSource.TREE), row_R)
    assert policy.shape_to_launch(StepShape(15, DraftSource.TREE), row_R).num_nodes == 15
    chain = StepShape(7, DraftSource.CHAIN)
    assert policy.shape_to_launch(chain, row_R) == StepShape(0, DraftSource.CHAIN)
    assert policy.shape_to_launch(chain, row_R) == chain


def test_who_drafted_what_was_checked_is_told():
    policy = new_policy(MEASURED, drafter=Drafter(*NETWORK))
    assert step(policy, [True, True], source=DraftSource.CHAIN) is None
    assert step(policy, [True, False], num_nodes=7) == ["draft", "draft"]
    assert step(policy, [True, True], num_nodes=7) == ["suffix", "suffix"]


def test_a_host_that_is_late_with_other_requests_does_not_stop_drafts():
    """Steps with scores keep the host busy; those of free rows do not."""
    policy = new_policy(CHEAP, num_rows=16)
    for number in range(60):
        step(policy, [number % 2 == 0] * 16, num_nodes=3)
        for num_nodes, late in ((0, 1.5), (3, 9.0)):
            key = StepKey(16, StepShape(num_nodes), extras=8)
            policy.timed(SimpleNamespace(key=key, draft_seconds=0.0), 1.0, late)
    assert policy.choose(np.arange(16), extras=8).num_nodes == 0
    assert policy.choose(np.arange(16)).num_nodes > 0


def test_assumed_costs_give_the_same_choices_whatever_steps_took():
    chosen = []
    for slow in (1.0, 7.0):
        policy = CapturedPolicy(Drafter(*SHAPES), buffers(8), is_measured=False)
        policy.start([0])
        for _ in range(40):
            step(policy, [True], num_nodes=3)
            graph = SimpleNamespace(key=StepKey(1, StepShape(3)), draft_seconds=0.0)
            policy.timed(graph, slow, slow)
            chosen.append(choose(policy, 1))
    assert chosen[:40] == chosen[40:]


# --- replayed -------------------------------------------------------------------------------------

LOOKUPS = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=15, margin=0.01)
BOTH = Drafter(*LOOKUPS.shapes, *(StepShape(n, 1) for n in (1, 3, 7)), StepShape(15, 2))


def speedup(
    texts: list[Text],
    num_rows: int,
    drafter: Any = LOOKUPS,
    costs: dict[int, dict[int, float]] = SMALL,
    arrivals: list[float] | None = None,
) -> float:
    """Tokens per second over those of plain decoding."""
    num_levels = getattr(drafter, "num_levels", 0)
    texts, seconds = [t.with_levels(num_levels) for t in texts], seconds_of(costs, 0.11, num_levels)

    def replay(policy: Any, rows: Any) -> float:
        return Replay(texts, policy, rows, seconds, num_rows, arrivals).run()

    rows = buffers(num_rows)
    policy = CapturedPolicy(drafter, rows)
    size = 1
    while size <= num_rows:
        for shape in policy.shapes.to_capture(size):
            policy.costs.capture(StepKey(size, shape), seconds(size, shape))
        size *= 2
    plain = replay(Fixed(StepShape(0, DraftSource.NOBODY)), buffers(num_rows))
    return replay(policy, rows) / plain


def texts(copied: Any, num_rows: int, first: float = 0.75) -> list[Text]:
    """As many as rows, but at least eight."""
    length = 192 if callable(copied) else 96
    return [text(seed, length, copied, first) for seed in range(max(num_rows, 8))]


def in_turn(place: int) -> float:
    return 0.95 if place // 48 % 2 else 0.02


# At least so many times plain decoding. Lookups in the step itself take 1% of a small target's.
@pytest.mark.parametrize(
    ("copied", "num_rows", "least"),
    [
        pytest.param(0.95, 1, 4.0, id="text that repeats itself"),
        pytest.param(0.95, 8, 2.0, id="eight that repeat themselves"),
        pytest.param(0.0, 1, 0.98, id="nothing to guess"),
        pytest.param(0.0, 8, 0.96, id="eight with nothing to guess"),
        pytest.param(0.0, 64, 0.98, id="64 with nothing to guess"),
        pytest.param(in_turn, 1, 1.35, id="phases"),
        pytest.param(in_turn, 8, 1.04, id="eight with phases"),
    ],
)
def test_lookups_pay_or_cost_next_to_nothing(copied, num_rows, least):
    assert speedup(texts(copied, num_rows), num_rows) > least


def test_where_some_rows_gain_the_others_do_not_lose():
    """Eight that came together end with the slowest; while requests come, fast ones count."""
    mixed = [text(seed, 96, 0.9 if seed % 2 else 0.05) for seed in range(24)]
    assert speedup(mixed[:8], 8) > 0.93
    assert speedup(mixed, 8) > 1.15
    assert speedup(mixed, 8, arrivals=[14.0 * place for place in range(24)]) > 0.99


@pytest.mark.parametrize(
    ("copied", "first", "num_rows", "least"),
    [
        pytest.param(0.1, 0.9, 1, 3.2, id="a network that is mostly right"),
        pytest.param(0.1, 0.9, 8, 2.8, id="the same for eight"),
        pytest.param(0.95, 0.1, 1, 3.0, id="only lookups are right"),
        pytest.param(0.0, 0.05, 1, 1.0, id="neither is"),
        pytest.param(0.0, 0.05, 8, 0.96, id="neither is, for eight"),
        pytest.param(in_turn, 0.4, 1, 1.6, id="now lookups, now nobody"),
    ],
)
def test_a_network_beside_lookups_is_asked_where_it_pays(copied, first, num_rows, least):
    some = texts(copied, num_rows, first=first)
    assert speedup(some, num_rows, BOTH, LARGE) > least


def test_chains_are_longer_where_nearly_all_of_them_is_accepted():
    """And no loss where it is not: the same texts, with at most 5 and with at most 10 levels."""
    few, many = (
        Drafter(*shapes_of(DraftSource.CHAIN, most, is_adaptive=True), num_levels=most)
        for most in (5, 10)
    )
    for first, least in ((0.95, 1.2), (0.5, 0.97)):
        some = texts(0.1, 1, first=first)
        assert speedup(some, 1, many, LARGE) > least * speedup(some, 1, few, LARGE)


def test_a_network_drafts_again_for_requests_that_come_and_go():
    some = texts(0.3, 24, first=0.75)
    assert speedup(some, 8, BOTH, LARGE) > 1.8
    assert speedup(some, 8, BOTH, LARGE, arrivals=[60.0 * place for place in range(24)]) > 1.0


# --- requests that come by themselves -------------------------------------------------------------


def open_load(
    policies: dict[str, Any],
    costs: dict[int, dict[int, float]],
    interval: float,
    *,
    first: float,
    copied: float = 0.1,
    prompt: tuple[float, float] = (0.0, 0.0),
    host: Any = None,
    num_rows: int = 128,
    count: int = 120,
) -> dict[str, float]:
    """Milliseconds per token by policy, of requests that come every `interval`; plain: `off`."""
    some = [text(seed, 48, copied, first).with_levels(5) for seed in range(count)]
    seconds, found = seconds_of(costs, 0.11, 5), {}
    for name, drafter in policies.items():
        rows = buffers(num_rows)
        policy = drafter
        if not isinstance(drafter, Fixed):
            policy = CapturedPolicy(drafter, rows)
            for size in (1, 2, 4, 8, 16, 32, 64, 128):
                for shape in policy.shapes.to_capture(size):
                    policy.costs.capture(StepKey(size, shape), seconds(size, shape))
        arrivals = [interval * place for place in range(count)]
        how = {"prompt": prompt} if host is None else {"prompt": prompt, "host": host}
        replay = Replay(some, policy, rows, seconds, num_rows, arrivals, **how)
        replay.run()
        found[name] = float(np.mean(replay.waited[count // 4 :]))
    return found


FIXED = {"off": Fixed(StepShape(0, DraftSource.NOBODY))}
CHAINS = Drafter(*shapes_of(DraftSource.CHAIN, 5, is_adaptive=True), num_levels=5)


@pytest.mark.parametrize("interval", [42.0, 10.4])
def test_under_a_load_it_is_as_fast_as_the_best_fixed_length(interval):
    """A large target: every step has a prompt beside it, and takes as long for it at any length."""
    fixed = {str(n): Fixed(StepShape(n, DraftSource.CHAIN)) for n in (1, 3, 5)}
    found = open_load(
        {**FIXED, **fixed, "auto": CHAINS}, UNDER_LOAD, interval, first=0.6, prompt=(3.5, 3.5)
    )
    assert found["auto"] < min(found.values()) / 0.97


def busy_host(num_rows: int, shape: Any) -> float:
    """Milliseconds: a checked row is more work for the host than one that gets a token."""
    return 0.05 + num_rows * 0.045 * (1.4 if shape.num_nodes else 1.0)  # 135M on an H200


@pytest.mark.parametrize(
    "interval", [1.25, *(pytest.param(each, marks=pytest.mark.slow) for each in (5.0, 2.5))]
)
def test_where_the_host_is_late_it_is_no_slower_than_plain_decoding(interval):
    """A small target: the device waits for the host, and longer after rows that were checked."""
    fixed = {str(n): Fixed(StepShape(n)) for n in (3, 7)}
    how = {"first": 0.3, "copied": 0.3, "prompt": (1.0, 0.1), "host": busy_host, "count": 160}
    found = open_load({**FIXED, **fixed, "auto": LOOKUPS}, SMALL, interval, **how)
    assert found["auto"] < min(found.values()) * 1.04
    assert found["auto"] < found["off"] / 0.98

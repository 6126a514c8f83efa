"""How many guesses a captured step checks follows what was right of late, and what steps cost."""

import numpy as np
import pytest

from hunch.drafting.pace import CHAIN, Pace, StepShape, chains_of, levels_after
from hunch.drafting.record import Array

GAITS = (StepShape(0), StepShape(3), StepShape(7))
CHEAP = {StepShape(0): 1.0, StepShape(3): 1.05, StepShape(7): 1.1}
DEAR = {StepShape(0): 1.0, StepShape(3): 2.0, StepShape(7): 4.0}
ROWS = np.array([0, 1])


def teach(pace: Pace, *, is_right: bool, steps: int = 120) -> None:
    """Two rows whose guesses are all right, or all wrong, after matches of two tokens."""
    guess_RG = np.tile(np.arange(7), (2, 1))
    said_RK = guess_RG[:, :4] if is_right else guess_RG[:, :4] + 100
    num_R = np.full(2, 4 if is_right else 1)
    for _ in range(steps):
        pace.learn(ROWS, num_R, said_RK, guess_RG, np.full(2, 2))


def test_right_guesses_are_worth_a_cheap_step() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=True)
    assert pace.choose(ROWS, CHEAP) == StepShape(7)


def test_wrong_guesses_are_not_checked() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=False)
    assert pace.choose(ROWS, CHEAP) == StepShape(0)


def test_nothing_is_checked_that_costs_more_than_it_brings() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=True)
    assert pace.choose(
        ROWS, {StepShape(0): 1.0, StepShape(3): 9.0, StepShape(7): 99.0}
    ) == StepShape(0)
    assert pace.choose(ROWS, DEAR) == StepShape(3)


def test_a_margin_keeps_small_gains_out() -> None:
    plain, wary = Pace(4, GAITS[:2]), Pace(4, GAITS[:2], margin=0.5)
    cost = {StepShape(0): 1.0, StepShape(3): 1.2}
    gain = plain.choose(ROWS, cost), wary.choose(ROWS, cost)
    assert gain == (StepShape(3), StepShape(0))


def test_guesses_teach_though_they_were_not_checked() -> None:
    """A step without nodes commits one token; the first guess is compared with it."""
    pace = Pace(4, GAITS)
    teach(pace, is_right=False)
    guess_RG = np.tile(np.arange(7), (2, 1))
    for _ in range(40):
        pace.learn(ROWS, np.ones(2, dtype=np.int64), guess_RG[:, :1], guess_RG, np.full(2, 2))
    assert pace.choose(ROWS, CHEAP).num_nodes > 0


def teach_many(pace: Pace, num_right: int, num_rows: int = 8) -> Array:
    """So many of the rows get all of their guesses right, the others none; returns the rows."""
    rows = np.arange(num_rows)
    is_right_R = rows < num_right
    guess_RG = np.tile(np.arange(7), (num_rows, 1))
    said_RK = np.where(is_right_R[:, None], guess_RG[:, :4], 100)
    for _ in range(120):
        pace.learn(rows, np.where(is_right_R, 4, 1), said_RK, guess_RG, np.full(num_rows, 2))
    return rows


def test_one_row_that_gains_nothing_counts_for_many() -> None:
    """It would wait for what the others check, and what came together ends with the slowest."""
    pace, cost = Pace(8, GAITS), {StepShape(0): 1.0, StepShape(3): 1.2, StepShape(7): 1.3}
    rows = teach_many(pace, 7)
    assert pace.choose(rows[:7], cost) == StepShape(7)
    assert pace.choose(rows, cost) == StepShape(0)


def test_while_requests_keep_coming_fast_rows_count_too() -> None:
    """What they gain is the next request's; when nobody has come for long, the slowest decides."""
    pace, cost = Pace(9, GAITS), {StepShape(0): 1.0, StepShape(3): 1.2, StepShape(7): 1.3}
    rows = teach_many(pace, 7)
    assert pace.settled() == rows.tolist()
    pace.start([8], is_beside=True)
    assert pace.choose(rows, cost) == StepShape(7)
    teach_many(pace, 7)
    assert pace.choose(rows, cost) == StepShape(0)


def test_where_checking_costs_little_others_may_gain_before_it() -> None:
    pace = Pace(8, GAITS)
    assert pace.choose(teach_many(pace, 7), CHEAP).num_nodes > 0


def test_a_new_request_alone_is_hoped_more_of_than_one_among_many() -> None:
    """Of many some will gain little: where checking costs, they begin without."""
    pace, rows = Pace(8, GAITS), np.arange(8)
    cost = {StepShape(0): 0.72, StepShape(3): 0.88, StepShape(7): 0.92}
    assert pace.choose(rows[:1], cost).num_nodes > 0
    assert pace.choose(rows[:2], cost).num_nodes > 0
    assert pace.choose(rows, cost) == StepShape(0)


def test_many_new_requests_check_where_that_costs_next_to_nothing() -> None:
    cost = {StepShape(0): 4.2, StepShape(3): 4.28, StepShape(7): 4.45}  # measured, 7B on a GPU
    assert Pace(8, GAITS, margin=0.03).choose(np.arange(8), cost).num_nodes > 0


def test_doubt_passes_as_guesses_turn_out_right_though_unchecked() -> None:
    pace, rows = Pace(8, GAITS), np.arange(8)
    cost = {StepShape(0): 0.72, StepShape(3): 0.88, StepShape(7): 0.92}
    guess_RG = np.tile(np.arange(7), (8, 1))
    steps = 0
    while pace.choose(rows, cost) == StepShape(0):
        pace.learn(rows, np.ones(8, dtype=np.int64), guess_RG[:, :1], guess_RG, np.full(8, 2))
        steps += 1
    assert 0 < steps < 10
    pace.start([3])
    assert pace.lookup.doubt_X[3] == pace.lookup.doubt > pace.lookup.doubt_X[0]


def test_a_network_for_many_new_requests_is_not_doubted() -> None:
    """It would never be tried otherwise: only what it drafts teaches of it."""
    shapes = (StepShape(0), StepShape(7), StepShape(7, 1), StepShape(15, 2))
    cost = {StepShape(0): 4.2, StepShape(7): 4.45, StepShape(7, 1): 5.0, StepShape(15, 2): 5.6}
    pace = Pace(8, shapes, margin=0.03, num_levels=5)
    alone = pace.network.gains(np.arange(1), np.array([7]), 1)
    assert pace.network.gains(np.arange(8), np.array([7]), 1)[0] == pytest.approx(alone[0])
    assert pace.choose(np.arange(8), cost).source > 0


def test_a_new_request_starts_anew() -> None:
    pace = Pace(4, GAITS)
    before = pace.lookup.first_X[1]
    teach(pace, is_right=False)
    pace.start([1])
    assert pace.lookup.first_X[1] == before
    assert (pace.guess_XG[1] == -1).all()


def say(pace: Pace, rows: Array, matched_R: Array, *, is_right_R: Array) -> None:
    """A step without nodes, of which the host hears how long each row's match was."""
    guess_RG = np.tile(np.arange(7), (len(rows), 1))
    said_RK = np.where(is_right_R[:, None], pace.guess_XG[rows, :1], 100)
    pace.learn(rows, np.ones(len(rows), dtype=np.int64), said_RK, guess_RG, matched_R)


def test_rows_check_at_once_after_long_matches_and_not_after_none() -> None:
    """What was right on the whole is the same in every step; what was matched is not."""
    pace, rows = Pace(8, GAITS), np.arange(8)
    cost = {StepShape(0): 1.0, StepShape(3): 1.3, StepShape(7): 1.4}
    chosen: dict[bool, set[StepShape]] = {False: set(), True: set()}
    was_long = False
    for step in range(96):
        is_long = step % 8 >= 4
        # The guess of a step is worth what the match a step before it says.
        say(pace, rows, np.full(8, 16 * is_long), is_right_R=np.full(8, was_long))
        was_long = is_long
        if step >= 48:
            chosen[is_long].add(pace.choose(rows, cost))
    assert chosen[False] == {StepShape(0)}
    assert StepShape(0) not in chosen[True]


def test_matches_that_fail_are_found_out() -> None:
    pace, rows = Pace(8, GAITS), np.arange(8)
    say(pace, rows, np.full(8, 3), is_right_R=np.full(8, True))
    assert pace.choose(rows, CHEAP) != StepShape(0)
    for _ in range(120):
        say(pace, rows, np.full(8, 3), is_right_R=np.full(8, False))
    assert pace.choose(rows, CHEAP) == StepShape(0)


def test_the_row_with_most_left_to_say_decides() -> None:
    """What came together is done when it is; those ahead of it have time."""
    pace, cost = Pace(8, GAITS), {StepShape(0): 1.0, StepShape(3): 1.2, StepShape(7): 1.3}
    rows = teach_many(pace, 1)
    others_ahead = np.where(rows == 0, 60, 30)
    others_behind = np.where(rows == 0, 30, 60)
    assert pace.choose(rows, cost, np.full(8, 60)) == StepShape(0)
    assert pace.choose(rows, cost, others_ahead).num_nodes > 0
    assert pace.choose(rows, cost, others_behind) == StepShape(0)
    pace = Pace(8, GAITS)
    rows = teach_many(pace, 7)
    assert pace.choose(rows, cost, np.where(rows == 7, 60, 30)) == StepShape(0)
    assert pace.choose(rows, cost, np.where(rows == 7, 30, 60)).num_nodes > 0


def test_beside_a_network_a_long_match_is_no_reason_to_leave_it() -> None:
    """Its steps take long matches too; what lookups promise there follows what was right."""
    pace, rows = Pace(2, (StepShape(0), StepShape(7), StepShape(7, 1)), num_levels=5), np.arange(2)
    before = pace.lookup.gains(rows, np.array([7]))
    say(pace, rows, np.full(2, 16), is_right_R=np.full(2, False))
    cost = {StepShape(0): 4.2, StepShape(7): 4.3, StepShape(7, 1): 4.6}
    assert pace.lookup.gains(rows, np.array([7])).max() < before.max()
    assert pace.choose(rows, cost) == StepShape(7, 1)


def test_a_network_alone_drafts_while_it_pays_and_is_tried_again_later() -> None:
    shapes = chains_of(5, is_adaptive=True)
    assert shapes == (
        StepShape(0),
        StepShape(1, CHAIN),
        StepShape(3, CHAIN),
        StepShape(5, CHAIN),
    )
    cost = dict(zip(shapes, (1.0, 1.15, 1.4, 1.7), strict=True))
    pace, nobody = Pace(4, shapes, num_levels=5), np.zeros(2, dtype=np.bool_)
    assert pace.choose(ROWS, cost).source == CHAIN
    for _ in range(60):
        pace.learn_network(CHAIN, ROWS, np.full(2, 5), 5, nobody)
    assert pace.choose(ROWS, cost) == StepShape(5, CHAIN)
    for _ in range(60):
        pace.learn_network(CHAIN, ROWS, np.zeros(2, dtype=np.int64), 1, nobody)
    assert pace.choose(ROWS, cost) == StepShape(0)
    for _ in range(2000):
        pace.fade(ROWS)
    assert pace.choose(ROWS, cost).source == CHAIN


def test_a_network_that_is_not_to_adapt_drafts_all_it_can() -> None:
    assert chains_of(5, is_adaptive=False) == (StepShape(5, CHAIN),)
    assert chains_of(2, is_adaptive=True) == (
        StepShape(0),
        StepShape(1, CHAIN),
        StepShape(2, CHAIN),
    )


def test_a_step_drafts_as_many_levels_as_it_checks() -> None:
    assert [levels_after(num_tokens, 5) for num_tokens in (1, 2, 4, 6, 8)] == [5, 1, 3, 5, 5]

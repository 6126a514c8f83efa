"""How many guesses a captured step checks follows what was right of late, and what steps cost."""

import numpy as np
import pytest

from hunch.spec.pace import Gait, Pace
from hunch.spec.record import Array

GAITS = (Gait(0), Gait(3), Gait(7))
CHEAP = {Gait(0): 1.0, Gait(3): 1.05, Gait(7): 1.1}
DEAR = {Gait(0): 1.0, Gait(3): 2.0, Gait(7): 4.0}
ROWS = np.array([0, 1])


def teach(pace: Pace, *, is_right: bool, steps: int = 60) -> None:
    """Two rows whose guesses are all right, or all wrong."""
    guess_RG = np.tile(np.arange(7), (2, 1))
    said_RK = guess_RG[:, :4] if is_right else guess_RG[:, :4] + 100
    num_R = np.full(2, 4 if is_right else 1)
    for _ in range(steps):
        pace.learn(ROWS, num_R, said_RK, guess_RG)


def test_right_guesses_are_worth_a_cheap_step() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=True)
    assert pace.choose(ROWS, CHEAP) == Gait(7)


def test_wrong_guesses_are_not_checked() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=False)
    assert pace.choose(ROWS, CHEAP) == Gait(0)


def test_nothing_is_checked_that_costs_more_than_it_brings() -> None:
    pace = Pace(4, GAITS)
    teach(pace, is_right=True)
    assert pace.choose(ROWS, {Gait(0): 1.0, Gait(3): 9.0, Gait(7): 99.0}) == Gait(0)
    assert pace.choose(ROWS, DEAR) == Gait(3)


def test_a_margin_keeps_small_gains_out() -> None:
    plain, wary = Pace(4, GAITS[:2]), Pace(4, GAITS[:2], margin=0.5)
    cost = {Gait(0): 1.0, Gait(3): 1.2}
    gain = plain.choose(ROWS, cost), wary.choose(ROWS, cost)
    assert gain == (Gait(3), Gait(0))


def test_guesses_teach_though_they_were_not_checked() -> None:
    """A step without nodes commits one token; the first guess is compared with it."""
    pace = Pace(4, GAITS)
    teach(pace, is_right=False)
    guess_RG = np.tile(np.arange(7), (2, 1))
    for _ in range(40):
        pace.learn(ROWS, np.ones(2, dtype=np.int64), guess_RG[:, :1], guess_RG)
    assert pace.choose(ROWS, CHEAP).num_nodes > 0


def teach_many(pace: Pace, num_right: int, num_rows: int = 8) -> Array:
    """So many of the rows get all of their guesses right, the others none; returns the rows."""
    rows = np.arange(num_rows)
    is_right_R = rows < num_right
    guess_RG = np.tile(np.arange(7), (num_rows, 1))
    said_RK = np.where(is_right_R[:, None], guess_RG[:, :4], 100)
    for _ in range(120):
        pace.learn(rows, np.where(is_right_R, 4, 1), said_RK, guess_RG)
    return rows


def test_one_row_that_gains_nothing_counts_for_many() -> None:
    """It would wait for what the others check, and what came together ends with the slowest."""
    pace, cost = Pace(8, GAITS), {Gait(0): 1.0, Gait(3): 1.2, Gait(7): 1.3}
    rows = teach_many(pace, 7)
    assert pace.choose(rows[:7], cost) == Gait(7)
    assert pace.choose(rows, cost) == Gait(0)


def test_while_requests_keep_coming_fast_rows_count_too() -> None:
    """What they gain is the next request's; when nobody has come for long, the slowest decides."""
    pace, cost = Pace(9, GAITS), {Gait(0): 1.0, Gait(3): 1.2, Gait(7): 1.3}
    rows = teach_many(pace, 7)
    assert pace.settled() == rows.tolist()
    pace.start(8, is_beside=True)
    assert pace.choose(rows, cost) == Gait(7)
    teach_many(pace, 7)
    assert pace.choose(rows, cost) == Gait(0)


def test_where_checking_costs_little_others_may_gain_before_it() -> None:
    pace = Pace(8, GAITS)
    assert pace.choose(teach_many(pace, 7), CHEAP).num_nodes > 0


def test_a_new_request_alone_is_hoped_more_of_than_one_among_many() -> None:
    """Of many some will gain little: where checking costs, they begin without."""
    pace, rows = Pace(8, GAITS), np.arange(8)
    cost = {Gait(0): 0.72, Gait(3): 0.79, Gait(7): 0.83}  # measured, small model on a GPU
    assert pace.choose(rows[:1], cost).num_nodes > 0
    assert pace.choose(rows[:2], cost).num_nodes > 0
    assert pace.choose(rows, cost) == Gait(0)


def test_many_new_requests_check_where_that_costs_next_to_nothing() -> None:
    cost = {Gait(0): 4.2, Gait(3): 4.28, Gait(7): 4.45}  # measured, 7B on a GPU
    assert Pace(8, GAITS, margin=0.03).choose(np.arange(8), cost).num_nodes > 0


def test_doubt_passes_as_guesses_turn_out_right_though_unchecked() -> None:
    pace, rows = Pace(8, GAITS), np.arange(8)
    cost = {Gait(0): 0.72, Gait(3): 0.79, Gait(7): 0.83}
    guess_RG = np.tile(np.arange(7), (8, 1))
    steps = 0
    while pace.choose(rows, cost) == Gait(0):
        pace.learn(rows, np.ones(8, dtype=np.int64), guess_RG[:, :1], guess_RG)
        steps += 1
    assert 0 < steps < 10
    pace.start(3)
    assert pace.lookup.doubt_X[3] == pace.lookup.doubt > pace.lookup.doubt_X[0]


def test_a_network_for_many_new_requests_is_not_doubted() -> None:
    """It would never be tried otherwise: only what it drafts teaches of it."""
    gaits = (Gait(0), Gait(7), Gait(7, 1), Gait(15, 2))
    cost = {Gait(0): 4.2, Gait(7): 4.45, Gait(7, 1): 5.0, Gait(15, 2): 5.6}
    pace = Pace(8, gaits, margin=0.03, num_levels=5)
    alone = pace.network.gains(np.arange(1), np.array([7]), 1)
    assert pace.network.gains(np.arange(8), np.array([7]), 1)[0] == pytest.approx(alone[0])
    assert pace.choose(np.arange(8), cost).way > 0


def test_a_new_request_starts_anew() -> None:
    pace = Pace(4, GAITS)
    before = pace.lookup.first_X[1]
    teach(pace, is_right=False)
    pace.start(1)
    assert pace.lookup.first_X[1] == before
    assert (pace.guess_XG[1] == -1).all()

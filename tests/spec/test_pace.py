"""How many guesses a captured step checks follows what was right of late, and what steps cost."""

import numpy as np

from hunch.spec.pace import Gait, Pace

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
    cost = {Gait(0): 1.0, Gait(3): 1.5}
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


def test_one_row_that_gains_nothing_counts_for_many() -> None:
    """It would wait for what the others check: they must gain more to make up for it."""
    pace, cost = Pace(4, GAITS[:2]), {Gait(0): 1.0, Gait(3): 2.2}
    guess_RG = np.tile(np.arange(3), (2, 1))
    said_RK = np.array([[0, 1, 2, 9], [100, 0, 0, 0]])
    for _ in range(60):
        pace.learn(ROWS, np.array([4, 1]), said_RK, guess_RG)
    assert pace.choose(ROWS[:1], cost) == Gait(3)
    assert pace.choose(ROWS, cost) == Gait(0)


def test_a_new_request_starts_anew() -> None:
    pace = Pace(4, GAITS)
    before = pace.lookup.first_X[1]
    teach(pace, is_right=False)
    pace.start(1)
    assert pace.lookup.first_X[1] == before
    assert (pace.guess_XG[1] == -1).all()

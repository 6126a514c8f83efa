"""What was right of late says what guesses would bring: per row, and for ways not in use too."""

import numpy as np
import pytest

from hunch.spec.pace import Gait, Pace
from hunch.spec.record import Record

ROWS = np.array([0])


def teach(record: Record, num_right: int, *, way: int = 1, steps: int = 80, row: int = 0) -> None:
    """So many of five guesses are right, step after step."""
    is_right = np.arange(5)[None] < num_right
    for _ in range(steps):
        record.learn(np.array([row]), is_right, np.arange(5)[None] <= num_right, way)


def new() -> Record:
    return Record(4, 15, {1: (0.5, 0.6), 2: (0.65, 0.65)}, rate=0.06, num_levels=5)


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
def test_it_comes_to_expect_what_happens(num_right: int) -> None:
    record = new()
    teach(record, num_right, steps=300)
    expected = record.gains(ROWS, 1)[0, 4]
    assert abs(expected - num_right) < 0.6


def test_what_is_learned_in_one_way_holds_for_the_other() -> None:
    record = new()
    before = record.gains(ROWS, 2)[0, 4]
    teach(record, 0)
    assert record.gains(ROWS, 2)[0, 4] < 0.3 * before
    assert record.gains(ROWS, 2)[0, 4] > record.gains(ROWS, 1)[0, 4]


def test_other_requests_are_mostly_left_as_they_were() -> None:
    record = new()
    before = record.gains(np.array([1]), 1)[0, 4]
    teach(record, 0, steps=20)
    assert record.gains(ROWS, 1)[0, 4] < 0.6 * before
    assert 0.7 * before < record.gains(np.array([1]), 1)[0, 4] < before


def test_without_guesses_hope_comes_back() -> None:
    record = new()
    hoped = record.gains(ROWS, 1)[0, 4]
    teach(record, 0)
    fallen = record.gains(ROWS, 1)[0, 4]
    for _ in range(2000):
        record.fade(ROWS)
    assert fallen < 0.2 * hoped < 0.8 * hoped < record.gains(ROWS, 1)[0, 4]


def test_the_network_is_chosen_where_it_brings_more_than_it_costs() -> None:
    gaits = (Gait(0), Gait(7), Gait(7, 1), Gait(15, 2))
    cost = {
        Gait(0): 3.97,
        Gait(7): 4.1,
        Gait(7, 1): 4.58,
        Gait(15, 2): 5.08,
    }  # measured, 7B on a GPU
    pace = Pace(4, gaits, margin=0.03, num_levels=5)
    assert pace.choose(ROWS, cost) == Gait(15, 2)
    dear = {gait: seconds + 4 * (gait.way > 0) for gait, seconds in cost.items()}
    assert not pace.choose(ROWS, dear).way
    for _ in range(60):
        pace.learn_network(2, ROWS, np.array([0]), 15, np.array([False]))
        pace.learn(ROWS, np.array([1]), np.array([[9]]), np.full((1, 15), -1))
    assert pace.choose(ROWS, cost) == Gait(0)

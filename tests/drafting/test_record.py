"""What was right of late says what guesses would bring: per row, and for sources not in use too."""

import numpy as np
import pytest

from hunch.drafting.pace import Pace, StepShape
from hunch.drafting.record import Record

ROWS = np.array([0])


def teach(
    record: Record, num_right: int, *, source: int = 1, steps: int = 80, row: int = 0
) -> None:
    """So many of five guesses are right, step after step."""
    for _ in range(steps):
        record.learn(np.array([row]), np.array([num_right]), np.array([num_right < 5]), source)


def expected(record: Record, row: int = 0, source: int = 1) -> float:
    return float(record.gains(np.array([row]), np.array([5]), source)[0, 0])


def new() -> Record:
    return Record(4, 15, {1: (0.5, 0.6), 2: (0.65, 0.65)}, rate=0.06, num_levels=5)


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
def test_it_comes_to_expect_what_happens(num_right: int) -> None:
    record = new()
    teach(record, num_right, steps=300)
    assert abs(expected(record) - num_right) < 0.6


def test_what_is_learned_in_one_way_holds_for_the_other() -> None:
    record = new()
    before = expected(record, source=2)
    teach(record, 0)
    assert expected(record) < expected(record, source=2) < 0.3 * before


def test_other_requests_are_mostly_left_as_they_were() -> None:
    record = new()
    before = expected(record, row=1)
    teach(record, 0, steps=20)
    assert expected(record) < 0.6 * before
    assert 0.7 * before < expected(record, row=1) < before


def test_without_guesses_hope_comes_back() -> None:
    record = new()
    hoped = expected(record)
    teach(record, 0)
    fallen = expected(record)
    for _ in range(2000):
        record.fade(ROWS)
    assert fallen < 0.2 * hoped < 0.8 * hoped < expected(record)


def test_past_the_last_level_only_what_all_rows_had_is_known() -> None:
    record = new()
    sizes = np.array([5, 7, 15])
    for _ in range(200):
        record.learn(ROWS, np.array([7]), np.array([True]), 1)
    five, seven, all_of_them = record.gains(ROWS, sizes, 1)[0]
    assert 4.2 < five < 5 < seven < 7
    assert all_of_them - seven < 0.7  # the eighth was never right
    other = record.gains(np.array([1]), sizes, 1)[0]
    assert other[0] < other[1] < other[2]


def test_the_network_is_chosen_where_it_brings_more_than_it_costs() -> None:
    shapes = (StepShape(0), StepShape(7), StepShape(7, 1), StepShape(15, 2))
    cost = {
        StepShape(0): 3.97,
        StepShape(7): 4.1,
        StepShape(7, 1): 4.58,
        StepShape(15, 2): 5.08,
    }  # measured, 7B on a GPU
    pace = Pace(4, shapes, margin=0.03, num_levels=5)
    assert pace.choose(ROWS, cost) == StepShape(15, 2)
    dear = {shape: seconds + 4 * (shape.source > 0) for shape, seconds in cost.items()}
    assert not pace.choose(ROWS, dear).source
    for _ in range(60):
        pace.learn_network(2, ROWS, np.array([0]), 15, np.array([False]))
        pace.learn(ROWS, np.array([1]), np.array([[9]]), np.full((1, 15), -1), np.array([0]))
    assert pace.choose(ROWS, cost) == StepShape(0)


def test_one_row_alone_promises_what_it_does_among_others() -> None:
    record = new()
    teach(record, 3, row=2, source=2)
    teach(record, 7, row=1)
    sizes = np.array([1, 3, 5, 7, 15])
    together = record.gains(np.arange(4), sizes, 2)
    for row in range(4):
        assert record.gains(np.array([row]), sizes, 2)[0] == pytest.approx(together[row])


def test_a_new_row_is_doubted_the_more_the_more_rows_a_step_has() -> None:
    record, sizes = Record(8, 7, {0: (0.3, 0.7)}, rate=0.06, doubt=0.6), np.array([7])
    by_rows = [float(record.gains(np.arange(n), sizes)[0, 0]) for n in (1, 2, 4, 8)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert by_rows[-1] < 0.2 * by_rows[0]
    for _ in range(200):
        record.learn(np.arange(8), np.full(8, 2), np.full(8, True))
    alone = record.gains(np.arange(1), sizes)[0]
    assert record.gains(np.arange(8), sizes)[0] == pytest.approx(alone, rel=0.02)


def test_what_a_hint_foretold_says_nothing_of_the_row() -> None:
    """Rows whose guesses are right as often as hinted are not thought better than others."""
    hints = np.array([[1.0, 3.0], [0.5, 0.5]])
    record, sizes = Record(2, 7, {0: (0.1, 0.6)}, rate=0.06), np.array([7])
    both, chances = np.arange(2), 1.0 / (1.0 + 9.0 * np.exp(-hints[0]))
    rng = np.random.default_rng(0)
    for _ in range(400):
        run_R = (rng.random(2) < chances).astype(np.int64)
        record.learn(both, run_R, run_R == 0, hint_2R=hints)
    plain_R = record.gains(both, sizes, is_doubtful=False)[:, 0]
    assert plain_R.max() < 2 * plain_R.min()
    hinted_R = record.gains(both, sizes, 0, hints, is_doubtful=False)[:, 0]
    assert hinted_R[1] > 2 * hinted_R[0]
    for row in range(2):
        alone = record.gains(both[row : row + 1], sizes, 0, hints[:, row : row + 1])[0, 0]
        assert alone == pytest.approx(hinted_R[row])

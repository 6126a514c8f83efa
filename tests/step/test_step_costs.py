"""What a step costs is known by its capture, and by what others took more than at theirs."""

import pytest

from hunch.drafting.pace import StepShape
from hunch.step.costs import StepCosts

CAPTURED = {StepShape(0): 0.55, StepShape(3): 0.58, StepShape(7): 0.63}


def captured() -> StepCosts:
    costs = StepCosts()
    for shape, seconds in CAPTURED.items():
        costs.capture(8, shape, seconds)
    costs.capture(8, StepShape(15), 0.79)
    return costs


def test_sizes_that_do_not_fly_stay_comparable_with_those_that_do() -> None:
    """Longer texts make every step slower, not only the ones that were seen."""
    costs = captured()
    for _ in range(20):
        costs.record(8, StepShape(7), 1.3 * CAPTURED[StepShape(7)])
    for shape, seconds in CAPTURED.items():
        assert costs.seconds(8, shape) == pytest.approx(1.3 * seconds, rel=0.02)


def test_a_size_that_is_dearer_than_its_capture_is_found_out() -> None:
    costs = captured()
    for _ in range(200):
        costs.record(8, StepShape(0), CAPTURED[StepShape(0)])
        costs.record(8, StepShape(7), 1.5 * CAPTURED[StepShape(7)])
    ratio = costs.seconds(8, StepShape(7)) / costs.seconds(8, StepShape(0))
    assert ratio == pytest.approx(1.5 * CAPTURED[StepShape(7)] / CAPTURED[StepShape(0)], rel=0.1)


def test_a_size_is_tried_though_its_capture_was_disturbed() -> None:
    """It was timed above a larger one, as happened on a GPU; what it flies at then counts."""
    costs = StepCosts()
    for shape, seconds in (
        (StepShape(15), 0.774),
        (StepShape(7), 0.632),
        (StepShape(3), 0.66),
        (StepShape(0), 0.551),
    ):
        costs.capture(8, shape, seconds)
    assert 0.551 < costs.seconds(8, StepShape(3)) < 0.6
    assert costs.seconds(8, StepShape(7)) == pytest.approx(0.632, rel=0.02)
    for _ in range(60):
        costs.record(8, StepShape(0), 0.716)
        costs.record(8, StepShape(3), 0.79)
    for _ in range(200):
        costs.record(8, StepShape(0), 0.716)
    ratio = costs.seconds(8, StepShape(3)) / costs.seconds(8, StepShape(0))
    assert ratio == pytest.approx(0.79 / 0.716, rel=0.01)


def test_a_pause_is_no_cost() -> None:
    costs = captured()
    for _ in range(20):
        costs.record(8, StepShape(0), 0.55)
    costs.record(8, StepShape(0), 500.0)
    assert costs.seconds(8, StepShape(0)) < 0.6


def test_what_was_not_captured_is_read_off_a_curve() -> None:
    costs = captured()
    costs.capture(8, StepShape(0), 99.0)  # the first timing stays
    costs.capture(4, StepShape(0), 0.0)  # where there is no clock
    assert costs.seconds(8, StepShape(0)) == 0.55
    assert 0.55 <= costs.seconds(16, StepShape(0)) <= 0.79
    costs.record(4, StepShape(0), 0.5)
    assert costs.seconds(4, StepShape(0)) == 0.5

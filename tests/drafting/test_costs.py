"""Costs of passes and of captured steps follow what is measured, and stay comparable."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hunch.drafting.costs import CostCurve, HostTime, StepCosts
from hunch.drafting.step_shapes import (
    DraftSource,
    StepKey,
    StepShape,
    StepShapes,
    levels_after,
    shapes_of,
)


def curve_of(points: dict[int, float]) -> CostCurve:
    curve = CostCurve()
    for num_tokens, seconds in points.items():
        curve.record(num_tokens, seconds)
    return curve


def relative(curve: CostCurve, num_tokens: int) -> float:
    """In passes over one token."""
    return curve.seconds(num_tokens) / curve.seconds(1)


def test_before_any_measurement_more_tokens_cost_more():
    curve = CostCurve()
    assert relative(curve, 1) == 1
    assert 1 < relative(curve, 8) < 8


def test_between_and_beyond_measured_sizes():
    curve = curve_of({1: 1.0, 8: 2.4, 16: 4.0})
    assert curve.seconds(8) == 2.4
    assert curve.seconds(4) == pytest.approx(1.6)
    assert curve.seconds(24) == pytest.approx(5.6)
    assert relative(curve, 16) == pytest.approx(4.0)


def test_outliers_do_not_count():
    curve = CostCurve()
    for seconds in (1.0, 1.1, 9.0, 1.05, 8.0, 1.0, 1.02):
        curve.record(4, seconds)
    assert 1.0 <= curve.seconds(4) <= 1.1


def test_a_machine_that_slows_down_is_followed():
    curve = curve_of({1: 1.0})
    for _ in range(15):
        curve.record(1, 3.0)
    assert curve.seconds(1) == 3.0


def test_sizes_not_seen_for_a_while_follow_those_in_use():
    curve = CostCurve()
    for _ in range(20):
        for num_tokens, seconds in ((1, 1.0), (2, 1.2), (8, 2.4)):
            curve.record(num_tokens, seconds)
    for _ in range(60):  # the text has grown long: everything takes half as long again
        for num_tokens, seconds in ((1, 1.5), (2, 1.8)):
            curve.record(num_tokens, seconds)
    assert relative(curve, 8) == pytest.approx(2.4, rel=0.1)
    curve.record(8, 3.6)  # and one pass does not bring the old ones back
    assert relative(curve, 8) == pytest.approx(2.4, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 10)), min_size=1, max_size=30))
def test_never_falls(passes):
    curve = CostCurve()
    for num_tokens, seconds in passes:
        curve.record(num_tokens, seconds)
    values = [curve.seconds(n) for n in range(1, 320)]
    assert values[0] > 0
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))


def test_assumed_costs_are_the_same_whatever_was_measured():
    curve = CostCurve(is_measured=False)
    before = [curve.seconds(n) for n in (1, 8, 64)]
    curve.record(8, 99.0)
    assert [curve.seconds(n) for n in (1, 8, 64)] == before == sorted(before)
    steps = StepCosts(is_measured=False)
    shapes = (StepShape(0), StepShape(3), StepShape(3, DraftSource.CHAIN))
    before = [steps.seconds(StepKey(8, shape)) for shape in shapes]
    for shape in shapes:
        steps.capture(StepKey(8, shape), 5.0, 1.0)
        steps.record(StepKey(8, shape), 9.0)
    assert [steps.seconds(StepKey(8, shape)) for shape in shapes] == before == sorted(before)


# --- shapes ---------------------------------------------------------------------------------------


def test_many_rows_may_check_one_node_each():
    shapes = StepShapes([StepShape(n) for n in (0, 1, 3, 7)])
    sizes = {rows: [shape.num_nodes for shape in shapes.at(rows)] for rows in (4, 8, 64)}
    assert sizes == {4: [0, 3, 7], 8: [0, 1, 3, 7], 64: [0, 1, 3, 7]}
    assert [shape.num_nodes for shape in StepShapes([StepShape(0), StepShape(1)]).at(1)] == [0, 1]


def test_more_rows_than_may_check_a_node_check_none():
    shapes = StepShapes([StepShape(n) for n in (0, 1, 3)])
    assert shapes.checks_at(256)
    assert not shapes.checks_at(512)


def test_steps_of_more_rows_than_the_network_drafts_for_have_the_lookup_alone():
    lookup, merged = StepShape(7), StepShape(7, DraftSource.MERGED)
    shapes = StepShapes([StepShape(0), lookup, merged], max_network_rows=4)
    assert [shapes.at(rows) for rows in (4, 8)] == [
        [StepShape(0), lookup, merged],
        [StepShape(0), lookup],
    ]
    assert StepShape(0, DraftSource.MERGED) not in shapes.to_capture(8)


def test_steps_that_begin_drafting_are_captured_too():
    shapes = StepShapes([StepShape(0), StepShape(7), StepShape(7, DraftSource.CHAIN)])
    assert StepShape(0, DraftSource.CHAIN) in shapes.to_capture(1)


def test_a_network_alone_has_a_few_sizes():
    def sizes(num_levels: int, *, is_adaptive: bool) -> list[int]:
        return [
            shape.num_nodes
            for shape in shapes_of(DraftSource.CHAIN, num_levels, is_adaptive=is_adaptive)
        ]

    assert sizes(5, is_adaptive=True) == [0, 1, 3, 5]
    assert sizes(2, is_adaptive=True) == [0, 1, 2]
    assert sizes(5, is_adaptive=False) == [5]


def test_a_step_drafts_as_many_levels_as_it_checks():
    assert [levels_after(num_nodes, 5) for num_nodes in (0, 1, 3, 5, 7)] == [5, 1, 3, 5, 5]


# --- captured steps -------------------------------------------------------------------------------

CAPTURED = {StepShape(0): 0.55, StepShape(3): 0.58, StepShape(7): 0.63}


def captured() -> StepCosts:
    costs = StepCosts()
    for shape, seconds in CAPTURED.items():
        costs.capture(StepKey(8, shape), seconds)
    costs.capture(StepKey(8, StepShape(15)), 0.79)
    return costs


def test_shapes_not_in_use_stay_comparable_with_those_that_are():
    """Longer texts make every step slower, not only the ones that were seen: those of more nodes by
    as large a part, and those of fewer nodes by fewer seconds."""
    costs = captured()
    for _ in range(20):
        costs.record(StepKey(8, StepShape(3)), 1.3 * CAPTURED[StepShape(3)])
    slower = {
        nodes: costs.seconds(StepKey(8, StepShape(nodes))) - CAPTURED[StepShape(nodes)]
        for nodes in (0, 3, 7)
    }
    assert slower[3] == pytest.approx(0.3 * CAPTURED[StepShape(3)], rel=0.02)
    assert slower[7] == pytest.approx(0.3 * CAPTURED[StepShape(7)], rel=0.02)
    assert slower[0] == pytest.approx(0.5 * slower[3], rel=0.1)


def test_a_shape_that_is_dearer_than_its_capture_is_found_out():
    costs = captured()
    for _ in range(200):
        costs.record(StepKey(8, StepShape(0)), CAPTURED[StepShape(0)])
        costs.record(StepKey(8, StepShape(7)), 1.5 * CAPTURED[StepShape(7)])
    ratio = costs.seconds(StepKey(8, StepShape(7))) / costs.seconds(StepKey(8, StepShape(0)))
    assert ratio == pytest.approx(1.5 * CAPTURED[StepShape(7)] / CAPTURED[StepShape(0)], rel=0.1)


def test_own_corrections_fade_alike_whenever_they_are_written_out(monkeypatch):
    found = []
    for least in (0.9, 1e-6):
        monkeypatch.setattr("hunch.drafting.costs.LEAST_LEFT", least)
        costs = captured()
        for turn in range(400):
            shape = StepShape((0, 3, 7)[turn % 3])
            costs.record(StepKey(8, shape), (1.0 + turn % 3 / 10) * CAPTURED[shape])
        found.append([costs.seconds(StepKey(8, shape)) for shape in CAPTURED])
    assert found[0] == pytest.approx(found[1])


def test_a_pause_is_no_cost():
    costs = captured()
    for _ in range(20):
        costs.record(StepKey(8, StepShape(0)), 0.55)
    costs.record(StepKey(8, StepShape(0)), 500.0)
    assert costs.seconds(StepKey(8, StepShape(0))) < 0.6


def test_the_host_counts_where_the_device_waits_for_it():
    """A checked row takes it longer; steps of either kind teach what a row takes."""
    host, plain, checked = HostTime(), StepShape(0), StepShape(3)
    host.record(16, plain, 0.6, 0.6, has_waited=False)
    host.record(8, plain, 5.0, 0.6, has_waited=False)
    assert host.seconds(64, checked) == 0.0
    for _ in range(200):
        host.record(24, plain, 24 * 0.045, 0.72, has_waited=False)
        host.record(24, checked, 24 * 0.06, 0.85, has_waited=False)
    assert host.seconds(24, plain) == pytest.approx(24 * 0.045, rel=0.1)
    assert host.seconds(24, checked) == pytest.approx(24 * 0.06, rel=0.1)
    before = host.seconds(24, checked)
    host.record(24, plain, 500.0, 0.72, has_waited=False)
    assert host.seconds(24, checked) < 1.15 * before, "a pause is no cost"
    for _ in range(200):  # the pass beside it hides nothing of what the host does afterwards
        host.record(24, plain, 0.72 + 24 * 0.02, 0.72, has_waited=True)
    assert host.seconds(24, plain) == pytest.approx(24 * 0.02, rel=0.1)
    assert host.seconds(24, checked) < 0.6 * before
    host.record(24, plain, 0.3, 0.3, has_waited=False)
    assert host.seconds(24, plain) == pytest.approx(0.3)


def test_what_was_not_captured_is_read_off_a_curve():
    costs = captured()
    costs.capture(StepKey(8, StepShape(0)), 99.0)  # the first timing stays
    costs.capture(StepKey(4, StepShape(0)), 0.0)  # where there is no clock
    assert costs.seconds(StepKey(8, StepShape(0))) == 0.55
    assert 0.55 <= costs.seconds(StepKey(16, StepShape(0))) <= 0.79
    costs.record(StepKey(4, StepShape(0)), 0.5)
    assert costs.seconds(StepKey(4, StepShape(0))) == 0.5


def test_drafting_is_part_of_a_step():
    costs = StepCosts()
    costs.capture(StepKey(8, StepShape(0)), 0.55)
    costs.capture(StepKey(8, StepShape(7, DraftSource.CHAIN)), 0.9, 0.25)
    assert costs.seconds(StepKey(8, StepShape(7, DraftSource.CHAIN))) == pytest.approx(0.9)
    target = costs.target(StepKey(8, StepShape(7, DraftSource.CHAIN)))
    assert target == pytest.approx(0.65)
    assert costs.seconds(StepKey(16, StepShape(7, DraftSource.CHAIN))) > 0.25 + target


def test_steps_that_do_more_have_costs_of_their_own() -> None:
    costs, masks = captured(), 2
    plain, seven = (StepKey(8, StepShape(size), masks) for size in (0, 7))
    costs.capture(plain, CAPTURED[StepShape(0)] + 8 * 0.01)
    share = 1.0 + 8 * 0.01 / CAPTURED[StepShape(0)]
    expected = share * CAPTURED[StepShape(7)]  # not captured yet: as much longer
    assert costs.seconds(seven) == pytest.approx(expected)
    costs.capture(seven, expected)
    costs.record(plain, CAPTURED[StepShape(0)] + 8 * 0.01)
    costs.record(seven, 3 * expected)  # the host was in the way: known at once
    assert costs.seconds(seven) == pytest.approx(3 * expected, rel=0.2)
    assert costs.seconds(plain) < 1.3 * (CAPTURED[StepShape(0)] + 8 * 0.01)
    assert costs.seconds(StepKey(8, StepShape(7))) == CAPTURED[StepShape(7)]


def test_what_a_pass_takes_without_its_nodes_does_not_vary_as_large_passes_do() -> None:
    gen, cost = random.Random(0), CostCurve()
    told = []
    for number in range(600):
        num_tokens = gen.choice((1, 1, 9))
        noise = gen.expovariate(1 / (0.05 if num_tokens == 1 else 0.3))
        seconds = (0.010 if num_tokens == 1 else 0.018) * (1 + noise)
        cost.record(num_tokens, seconds)
        if number > 100 and num_tokens > 1:
            told.append(cost.without_nodes(1, num_tokens, seconds))
    assert sum(told) / len(told) == pytest.approx(0.0105, rel=0.1)


def test_one_interrupted_pass_is_not_taken_for_a_slow_machine() -> None:
    cost = CostCurve()
    for _ in range(20):
        cost.record(1, 0.010)
        cost.record(9, 0.018)
    cost.record(9, 5.0)
    assert cost.without_nodes(1, 9, 5.0) < 0.012


def test_assumed_costs_are_shares_of_the_pass() -> None:
    assert CostCurve(0.5, is_measured=False).without_nodes(1, 3, 0.6) == pytest.approx(0.3)

"""The cost curve is robust and monotone, and buys as many nodes as pay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hunch.drafting.cost import CostCurve


def curve_of(points: dict[int, float]) -> CostCurve:
    curve = CostCurve()
    for num_tokens, seconds in points.items():
        curve.record(num_tokens, seconds)
    return curve


def test_before_any_measurement_more_tokens_cost_more():
    curve = CostCurve()
    assert curve.relative(1) == 1
    assert 1 < curve.relative(8) < 8


def test_between_and_beyond_measured_sizes():
    curve = curve_of({1: 1.0, 8: 2.4, 16: 4.0})
    assert curve.seconds(8) == 2.4
    assert curve.seconds(4) == pytest.approx(1.6)
    assert curve.seconds(24) == pytest.approx(5.6)
    assert curve.relative(16) == pytest.approx(4.0)


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
    assert curve.relative(8) == pytest.approx(2.4, rel=0.1)
    curve.record(8, 3.6)  # and one pass does not bring the old ones back
    assert curve.relative(8) == pytest.approx(2.4, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 10)), min_size=1, max_size=30))
def test_never_falls(passes):
    curve = CostCurve()
    for num_tokens, seconds in passes:
        curve.record(num_tokens, seconds)
    values = [curve.seconds(n) for n in range(1, 320)]
    assert values[0] > 0
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))


def test_best_length_is_the_best_of_all_lengths():
    curve = curve_of({1: 0.6, 2: 0.68, 4: 0.85, 8: 1.25, 16: 2.4})
    for chance in (0.05, 0.3, 0.6, 0.9, 0.99):
        rates = []
        for length in range(17):
            tokens = 1 + sum(chance**i for i in range(1, length + 1))
            rates.append(tokens / curve.seconds(1 + length))
        best = curve.best_length([chance] * 16)
        assert rates[best] == pytest.approx(max(rates))
    assert curve.best_length([0.05] * 16) == 0
    assert curve.best_length([0.99] * 16) >= 7


def test_a_busy_batch_buys_fewer_nodes():
    compute_bound = curve_of({1: 1.0, 64: 1.2, 128: 2.4, 256: 4.8})
    assert compute_bound.best_length([0.6] * 8, base_tokens=1) >= 4
    assert compute_bound.best_length([0.6] * 8, base_tokens=128) == 0


def test_a_margin_asks_for_more():
    curve = curve_of({1: 1.0, 2: 1.1})
    assert curve.best_count([0.12]) == 1
    assert curve.best_count([0.12], margin=0.05) == 0


@given(st.lists(st.floats(0.01, 1.0), min_size=60, max_size=120), st.integers(1, 8))
def test_many_nodes_are_weighed_as_few_are(chances, num_rows):
    curve = curve_of({1: 1.0, 4: 1.3, 16: 3.0, 32: 7.0})
    chances = sorted(chances, reverse=True)
    rates = [
        (num_rows + sum(chances[:count])) / curve.seconds(num_rows + count)
        for count in range(len(chances) + 1)
    ]
    best = curve.best_count(chances, num_rows)
    assert rates[best] == pytest.approx(max(rates))

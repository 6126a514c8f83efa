"""What a pass would have taken without its drafted nodes, of which time saved is counted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hunch.drafting.costs import CostCurve
from hunch.step.host_step import HostStep


def host(cost: CostCurve) -> Any:
    return SimpleNamespace(cost=cost, _lateness=1.0)


def test_it_is_the_mean_of_plain_passes_where_larger_ones_are_noisier() -> None:
    gen, step = random.Random(0), host(CostCurve())
    told = []
    for number in range(600):
        num_tokens = gen.choice((1, 1, 9))
        noise = gen.expovariate(1 / (0.05 if num_tokens == 1 else 0.3))
        seconds = (0.010 if num_tokens == 1 else 0.018) * (1 + noise)
        plain = HostStep._learn_cost(step, 1, num_tokens, seconds)
        if number > 100 and num_tokens > 1:
            told.append(plain)
    assert sum(told) / len(told) == pytest.approx(0.0105, rel=0.1)


def test_one_interrupted_pass_is_not_taken_for_a_slow_machine() -> None:
    step = host(CostCurve())
    for _ in range(20):
        HostStep._learn_cost(step, 1, 1, 0.010)
        HostStep._learn_cost(step, 1, 9, 0.018)
    assert HostStep._learn_cost(step, 1, 9, 5.0) < 0.012


def test_assumed_costs_are_shares_of_the_pass() -> None:
    step = host(CostCurve(0.5, is_measured=False))
    assert HostStep._learn_cost(step, 1, 3, 0.6) == pytest.approx(0.3)

"""Auto falls silent where guesses fail, and comes back when they are right again."""

from __future__ import annotations

import random

from spec_rows import Desk

CURVE = {1: 1.0, 2: 1.13, 4: 1.42, 8: 2.1, 16: 4.0}


def noise(rng: random.Random, count: int) -> list[int]:
    """A few words in random order: something always matches, nothing can be guessed."""
    return [rng.randrange(12) for _ in range(count)]


def test_random_text_is_decoded_almost_plainly():
    rng = random.Random(0)
    desk = Desk("auto", CURVE)
    desk.commit(0, noise(rng, 200), is_prompt=True)
    desk.replay(0, noise(rng, 60))
    passes, drafted, _ = desk.replay(0, noise(rng, 300))
    assert drafted / passes < 0.2


def test_it_comes_back_when_the_text_can_be_guessed_again():
    rng = random.Random(1)
    desk = Desk("auto", CURVE)
    passage = [rng.randrange(1000) for _ in range(150)]
    desk.commit(0, passage + noise(rng, 100), is_prompt=True)
    desk.replay(0, noise(rng, 300))
    passes, _, accepted = desk.replay(0, passage)
    assert accepted / len(passage) > 0.6
    assert len(passage) / passes > 2.5


def test_it_pays_on_copied_text_by_the_curve_it_was_given():
    rng = random.Random(2)
    desk = Desk("auto", CURVE)
    passage = [rng.randrange(1000) for _ in range(300)]
    desk.commit(0, passage, is_prompt=True)
    passes, drafted, _ = desk.replay(0, passage)
    mean_cost = desk.cost.relative(1 + round(drafted / passes))
    assert len(passage) / passes / mean_cost > 2.0


def test_where_rows_cost_a_whole_pass_nothing_is_drafted():
    desk = Desk("auto", {1: 1.0, 2: 2.0, 16: 16.0})
    desk.commit(0, [1, 2, 3, 4] * 20, is_prompt=True)
    assert desk.chain() == []


def test_options_reach_the_method_and_unknown_ones_are_told():
    desk = Desk("auto:num_nodes=3")
    desk.commit(0, [1, 2, 3, 4] * 20, is_prompt=True)
    assert len(desk.chain()) == 3

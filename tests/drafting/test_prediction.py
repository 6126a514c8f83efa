"""Prediction keeps beside the expected text, and finds its way back after a change."""

from __future__ import annotations

import random

import pytest

from hunch.config import SpecConfig
from hunch.errors import ConfigError
from hunch.types import Request, SamplingParams
from spec_rows import Desk

PROMPT = [7, 8, 9]


def expecting(
    expected: list[int], spec: str = "prediction", curve: dict[int, float] | None = None
) -> Desk:
    """A desk whose row 0 holds a request with this prediction."""
    desk = Desk(spec, curve)
    request = Request(
        id="a", prompt_ids=PROMPT, params=SamplingParams(), seed=0, prediction_ids=tuple(expected)
    )
    desk.rows.requests = [request, None, None, None]
    desk.commit(0, PROMPT, is_prompt=True)
    return desk


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 900) for _ in range(count)]


def passes(expected: list[int], said: list[int], spec: str = "prediction") -> int:
    return expecting(expected, spec).replay(0, said)[0]


def test_an_answer_as_expected_takes_few_passes():
    text = words(0, 200)
    num_passes, drafted, accepted = expecting(text).replay(0, text)
    assert num_passes <= 9
    assert drafted == accepted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([1], [2]),  # one for one
        ([1, 3], [2, 4, 5]),  # a longer name
        ([1, 3, 5], [2]),  # a shorter one
        ([], [2, 4, 6]),  # words put in
        ([1, 3, 5, 1, 3, 5], []),  # words left out
    ],
)
def test_it_finds_its_way_back_after_each_change(old, new):
    parts = [words(seed, 40) for seed in range(5)]
    expected = [token for part in parts for token in part + old]
    said = [token for part in parts for token in part + new]
    assert passes(expected, said) < len(said) / 5


def test_words_before_the_expected_text_cost_only_themselves():
    text = words(1, 120)
    assert passes(text, [901, 902, 903, *text]) < 20


def test_it_follows_to_a_passage_further_on_and_back():
    one, two, three = words(1, 60), words(2, 60), words(3, 60)
    assert passes(one + two + three, one + three + two) < 30


def test_past_the_end_of_the_expected_text_nothing_is_guessed():
    desk = expecting([11, 12, 13])
    desk.commit(0, [11, 12, 13])
    assert desk.chain() == []


def test_a_prediction_that_is_wrong_throughout_falls_silent():
    expected, said = words(4, 300), [901 + n % 50 for n in range(300)]
    desk = expecting(expected, curve={1: 1.0, 2: 1.13, 4: 1.42, 8: 2.1, 16: 4.0})
    _, drafted, accepted = desk.replay(0, said)
    assert accepted == 0
    assert drafted < 30


def test_no_prediction_no_draft():
    assert expecting([]).chain() == []


def test_a_request_that_comes_back_goes_on_where_it_was():
    text = words(5, 100)
    desk = expecting(text)
    desk.replay(0, text[:50])
    desk.drafter.forget([0])  # preempted
    desk.commit(0, text[50:51])
    assert desk.chain()[:5] == text[51:56]


def test_options_are_checked():
    with pytest.raises(ConfigError, match="num_nodes"):
        Desk("prediction:num_nodes=0")
    with pytest.raises(ConfigError, match="max_match"):
        Desk("prediction:max_match=3")
    assert SpecConfig.parse("prediction:num_nodes=4").options == {"num_nodes": "4"}
    assert len(expecting(words(6, 50), "prediction:num_nodes=4").chain()) == 4

"""N-gram lookup continues the longest, most recent match."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.drafting.ngram import NgramText
from hunch.errors import ConfigError
from spec_rows import Desk

FIXED = "ngram:adaptive=false"


def test_continues_the_longest_match():
    desk = Desk(f"{FIXED}:num_nodes=3")
    desk.commit(0, [5, 1, 2, 70, 71, 72, 9, 2, 80, 81, 82, 1, 2], is_prompt=True)
    assert desk.chain() == [70, 71, 72]  # after (1, 2), though 2 alone stood later before 80


def test_of_equal_matches_the_most_recent_counts():
    desk = Desk(f"{FIXED}:num_nodes=2")
    desk.commit(0, [1, 2, 70, 71, 1, 2, 80, 81, 1, 2], is_prompt=True)
    assert desk.chain() == [80, 81]


def test_min_match_forbids_shorter_ones():
    desk = Desk(f"{FIXED}:min_match=2")
    desk.commit(0, [1, 2, 3, 9, 3], is_prompt=True)
    assert desk.chain() == []
    desk.commit(0, [5, 1, 2])
    assert desk.chain()[:2] == [3, 9]


def test_max_match_bounds_what_is_compared():
    tokens = [1, 2, 3, 50, 7, 2, 3, 60, 1, 2, 3]
    short, long = Desk(f"{FIXED}:max_match=2"), Desk(f"{FIXED}:max_match=3")
    for desk in (short, long):
        desk.commit(0, tokens, is_prompt=True)
    assert short.chain()[0] == 60
    assert long.chain()[0] == 50


def test_a_loop_is_continued_past_the_end_of_the_text():
    desk = Desk(f"{FIXED}:num_nodes=5")
    desk.commit(0, [4, 6, 4, 6, 4], is_prompt=True)
    assert desk.chain() == [6, 4, 6, 4, 6]


def test_output_counts_as_text_and_nothing_is_found_in_new_text():
    desk = Desk(FIXED)
    desk.commit(0, [1, 2, 3], is_prompt=True)
    assert desk.chain() == []
    desk.commit(0, [8, 9, 8])
    assert desk.chain()[0] == 9


def test_rows_are_separate_and_forgotten():
    desk = Desk(FIXED)
    desk.commit(0, [1, 2, 3, 1], is_prompt=True)
    desk.commit(1, [1, 5, 6, 1], is_prompt=True)
    draft = desk.propose(0, 1)
    assert draft.tokens_RN[:, 0].tolist() == [2, 5]
    desk.leave(0)
    desk.commit(0, [9, 1], is_prompt=True)
    assert desk.chain(0) == []
    assert desk.chain(1)[0] == 5


def test_limits_of_the_row_hold():
    desk = Desk(FIXED)
    desk.commit(0, [1, 2, 3, 4, 5, 6, 1], is_prompt=True)
    desk.rows.max_draft_X[0] = 2
    assert desk.chain() == [2, 3]


def test_checking_costs_decide_the_length():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    cheap, dear = Desk("ngram"), Desk("ngram", {1: 1.0, 2: 1.9, 16: 16.0})
    for desk in (cheap, dear):
        desk.commit(0, text, is_prompt=True)
    assert len(cheap.chain()) >= 4
    assert dear.chain() == []


@settings(max_examples=50)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    min_match=st.integers(1, 2),
    max_match=st.integers(2, 5),
    cut=st.integers(1, 40),
)
def test_finds_what_a_scan_finds(tokens, min_match, max_match, cut):
    text = NgramText(min_match, max_match)
    text.extend(tokens[:cut])
    text.extend(tokens[cut:])
    expected = (0, 0)
    for size in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[-size:]
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == suffix]
        if ends:
            expected = (size, ends[-1])
            break
    assert text.find() == expected


@pytest.mark.parametrize("spec", ["ngram:min_match=5", "ngram:num_nodes=0", "ngram:min_match=0"])
def test_wrong_options_are_told(spec):
    with pytest.raises(ConfigError):
        Desk(spec)

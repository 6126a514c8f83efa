"""Stop strings: nothing of one is shown too early, and the cutting of the text does not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hunch.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher, shown, matched = StopMatcher(stops, include), "", None
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


def test_text_before_the_stop_string() -> None:
    assert run(["END"], ["one E", "ND two"]) == ("one ", "END")
    assert run(["END"], ["one E", "ND two"], include=True) == ("one END", "END")


def test_without_stops_everything_passes_at_once() -> None:
    assert StopMatcher([]).feed("abc") == ("abc", None)


def test_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hello\n") == ("Hello", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("eful") == ("\n\nUseful", None)
    assert matcher.flush() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["END"], ["the EN"]) == ("the EN", None)


@pytest.mark.parametrize("pieces", [["xaab"], list("xaab"), ["xa", "ab"]])
def test_overlapping_beginnings(pieces: list[str]) -> None:
    assert run(["ab"], pieces) == ("xa", "ab")
    assert run(["aab", "ab"], pieces) == ("x", "aab")


def test_the_first_complete_one_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["two", "one"], ["one two"]) == ("", "one")


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == ("a", ".")
    assert matcher.feed("c") == ("", ".")


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=6),
    include=st.booleans(),
)
def test_the_cutting_does_not_matter(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    shown, matched = run(stops, pieces, include)
    # The law, character by character.
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            assert matched == stop
            assert shown == text[: end if include else end - len(stop)]
            return
    assert (shown, matched) == (text, None)

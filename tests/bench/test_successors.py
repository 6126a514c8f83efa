"""Answers replayed with trees of successors: steps that can be counted by hand."""

from __future__ import annotations

import numpy as np

from hunch.bench.parts.successors import guesses, replay
from hunch.kernels.successor_entries import ONE_TOKEN, Entries
from hunch.kernels.successors import Successors


def successors_of(*lines: tuple[int, int, int, int]) -> Successors:
    return Successors.create(20, "cpu", Entries(*map(np.array, zip(*lines, strict=True))))


def test_steps_of_an_answer() -> None:
    """After 1 comes 2 or, likelier, 6; after 2 comes 3. 7 is not known."""
    known = successors_of((ONE_TOKEN, 1, 6, 90), (ONE_TOKEN, 1, 2, 60), (ONE_TOKEN, 2, 3, 90))
    prompt, answer = [5], [1, 2, 3, 7]
    assert list(replay(prompt, answer, known, ())) == [(1, 0)] * 3
    assert list(replay(prompt, answer, known, (1, 1))) == [(1, 1), (2, 1)]
    assert list(replay(prompt, answer, known, (2, 1))) == [(3, 3)]
    assert list(guesses(prompt, answer, known)) == [(False, True), (True, True), (False, False)]


def test_lookups_and_trees_share_nodes() -> None:
    known = successors_of((ONE_TOKEN, 1, 2, 90))
    prompt, answer = [1, 2, 3, 4, 9], [1, 2, 3, 4]
    assert list(replay(prompt, answer, known, (1,))) == [(3, 5)]

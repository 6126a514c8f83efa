"""Trees are built best first; chances of guesses follow what happens."""

from __future__ import annotations

import pytest
import torch

from hunch.draft import Draft
from hunch.drafting.lookup import Chances
from hunch.drafting.trees import Node, best_first, to_draft


def expand(state: tuple[int, ...]):
    """Each node has children 1 and 2 with chances 0.7 and 0.2."""
    for token, chance in ((1, 0.7), (2, 0.2)):
        yield token, chance, 0, (*state, token)


def test_best_first_takes_the_likeliest_nodes():
    nodes = best_first((), expand, 6)
    assert [round(node.chance, 3) for node in nodes] == [0.7, 0.49, 0.343, 0.24, 0.2, 0.168]
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, -1, 3]
    assert len(best_first((), expand, 50, min_chance=0.3)) == 3


def test_to_draft_pads_and_cuts():
    first = [Node(5, -1, 0.9), Node(6, 0, 0.8), Node(7, -1, 0.1)]
    draft = to_draft([first, []], [2, 0], "cpu")
    assert draft.tokens_RN.tolist()[0] == [5, 6]
    assert draft.parents_RN.tolist()[0] == [-1, 0]
    assert draft.num_nodes_R.tolist() == [2, 0]
    nothing = to_draft([first, first], [0, 0], "cpu")
    assert torch.equal(nothing.num_nodes_R, Draft.empty(2).num_nodes_R)


def test_chances_follow_what_happens():
    chances = Chances({0: 0.5, 1: 0.5})
    term = 0.0
    for i in range(400):
        term = chances.learn(0, term, i % 10 == 0)
    assert chances.of(0, term) == pytest.approx(0.1, abs=0.09)
    assert chances.of(1) == 0.5  # another kind is untouched by the shared term
    fresh = chances.of(0)
    assert fresh < 0.5
    for _ in range(30):
        term = chances.learn(0, term, True)
    assert chances.of(0, term) > 0.6  # a request that changes is followed quickly

"""Trees of successors beside a lookup's chain, and their C++ form, which does the same."""

from __future__ import annotations

import random
from math import exp, log

import numpy as np
import pytest
import torch

from hunch.kernels import native_library
from hunch.kernels.native_successors import NativeTrees
from hunch.kernels.successor_entries import ONE_TOKEN, Entries
from hunch.kernels.successor_trees import BESIDE, Chain, SuccessorTrees, TreeLimits
from hunch.kernels.successors import Successors

VOCAB = 12
LIMITS = TreeLimits(num_nodes=10, depth=3, min_chance=0.01)


def chain_of(tokens: list[int], chances: list[float]) -> Chain:
    return np.array(tokens, np.int64), np.array(chances)


def random_table(rng: random.Random) -> Successors:
    """Few pairs share slots, and some chances are equal."""
    found = list[tuple[int, int, int, int]]()
    for first in range(ONE_TOKEN, VOCAB):
        for last in range(VOCAB):
            left = 255
            for token in rng.sample(range(VOCAB), rng.choice([0, 1, 2, 8])):
                chance = min(rng.choice([5, 40, 90, 90, 255]), left)
                left -= chance
                if chance:
                    found.append((first, last, token, chance))
    return Successors.create(
        VOCAB, "cpu", Entries(*map(np.array, zip(*found, strict=True))), pair_bits=6
    )


def said_by(rng: random.Random, trees: SuccessorTrees, count: int) -> list[int]:
    """A path of the tree that was guessed last."""
    path: list[int] = []
    parents, at = trees.parents_N[:count].tolist(), -1
    while at in parents and rng.random() < 0.8:
        at = rng.choice([n for n, parent in enumerate(parents) if parent == at])
        path.append(int(trees.tokens_N[at]))
    return path


def found_by(trees: SuccessorTrees | NativeTrees, count: int) -> list[list[float]]:
    return [array[:count].tolist() for array in (trees.tokens_N, trees.parents_N, trees.chance_N)]


def test_successors_count_where_the_chain_is_wrong() -> None:
    entries = Entries(*map(np.array, ([ONE_TOKEN] * 2, [1, 1], [2, 3], [128, 60])))
    trees = SuccessorTrees(Successors.create(VOCAB, "cpu", entries), LIMITS, 1)
    trees.follow(0, np.array([1]))
    assert trees.guess(0, 10) == 2
    of_two, of_three = (
        1 / (1 + exp(-log(chance / (1 - chance)) - BESIDE))
        for chance in trees.chance_N[:2].tolist()
    )
    assert trees.guess(0, 10, chain_of([3, 5], [0.6, 0.3])) == 3
    expected = {(3, -1): 0.6 + 0.4 * of_three, (2, -1): 0.4 * of_two}
    expected[5, 0] = expected[3, -1] * 0.5
    tokens, parents, chances = found_by(trees, 3)
    found = dict(zip(zip(tokens, parents, strict=True), chances, strict=True))
    assert found == pytest.approx(expected)


def test_chances_follow_what_comes() -> None:
    entries = Entries(*map(np.array, ([ONE_TOKEN], [1], [2], [128])))
    trees = SuccessorTrees(Successors.create(VOCAB, "cpu", entries), LIMITS, 1)
    chances = []
    for token in (2, 2, 2, 4, 4, 4, 4):
        trees.follow(0, np.array([1]))
        trees.guess(0, 10)
        chances.append(float(trees.chance_N[0]))
        trees.follow(0, np.array([token]))
    assert chances[0] < chances[3] > chances[-1]
    trees.follow(0, np.array([1]))
    trees.guess(0, 10, chain_of([5], [0.5]))
    before = float(trees.chance_N[1])
    trees.follow(0, np.array([5, 1]))  # the chain was right: that says nothing of the successors
    trees.guess(0, 10, chain_of([5], [0.5]))
    assert trees.chance_N[1] == before


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("seed", range(4))
def test_the_kernels_do_the_same(seed: int) -> None:
    rng = random.Random(seed)
    table = random_table(rng)
    plain, fast = SuccessorTrees(table, LIMITS, 2), NativeTrees(table, LIMITS, 2)
    counts = [0, 0]
    for _ in range(120):
        row = rng.randrange(2)
        said = [*said_by(rng, plain, counts[row]), rng.randrange(VOCAB)]
        chances = np.cumprod([rng.choice([0.3, 0.6, 0.9]) for _ in range(rng.randrange(6))])
        chain = chain_of([rng.randrange(VOCAB) for _ in chances], chances.tolist())
        most = rng.choice([0, 4, 99])
        for trees in (plain, fast):
            trees.follow(row, np.array(said))
        counts = [0, 0]
        counts[row] = count = plain.guess(row, most, chain)
        assert fast.guess(row, most, chain) == count
        assert found_by(fast, count) == found_by(plain, count)
        if not rng.randrange(10):
            for trees in (plain, fast):
                trees.forget(row)
            table.keep_best(torch.tensor([rng.randrange(VOCAB)]), torch.tensor([[3, 4, 5]]))

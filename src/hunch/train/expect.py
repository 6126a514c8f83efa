"""The speed-up to expect of a drafter before it is trained: a simple model.

A guess is right with the same chance a at every place of a draft, so a chain of n guesses gives
1 + a + ... + a^n tokens per pass. That agrees with measurements to 3%: a draft of 4 layers whose
first guess is right 68% of the time has 2.81 tokens per pass with a chain of 5; the sum is 2.82.

    a = best(method, layers) * coverage * seen / (seen + FAMILIARITY)

On a GPU, a draft model's tree of w nodes on each of n levels gives 1 + b + ... + b^n. The chance b
that one of a level's w nodes is right is larger than a: the width finds a part of the tokens that
the best guess misses. How large that part is was measured with the draft that comes with hunch
alone. A level of a tree costs more than one of a chain: on an H200, beside a target of 7B's cost,
0.155 ms instead of 0.108 (the steps of a tree of 15 and a chain of 7 in docs/benchmarks.md, without
the time for checking them).

`best` is the chance that a recipe reaches with its layers. `coverage` is the share of the answers'
tokens that the draft vocabulary has. `seen` is the number of tokens that it learns from; each time
that the same answers come again, they count a little less (arXiv 2305.16264). Constants come from
the recipes' own runs in docs/training.md. The loss from fewer units is assumed, and the gain from
layers side by side was measured on one model. Training replaces the estimate by measurements.

A draft cut from a smaller model follows the same curve over that model's layers, up to a limit. The
limit comes from a measurement: how many of the target's tokens the smaller model guesses untrained.
Trained, it is assumed to miss three tenths fewer. A draft with all of its layers starts as good as
the smaller model, one with half of them starts from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, inf, log2
from typing import NamedTuple

from hunch.train.costs import layer_parameters, num_parameters, unit_parameters
from hunch.train.sizes import METHODS, Ground, Method, Size, sizes_for
from hunch.train.states import TOP

FAMILIARITY = 4.3e6  # tokens seen after which a draft is half as good as it can get
LOST = 0.04  # share of a guess's chance that is lost with each halving of a layer's units
USELESS = 7  # with this many layers side by side, the further ones add nothing
TAUGHT = 0.7  # misses of a smaller model once it is trained, as a share of those before
# Passes over the same answers after which further ones teach little. The paper has 15, for models
# that learn to write; a draft for a target of 2B's cost stopped improving long before 20 passes.
AGAIN = 6.0
SHARES = (0.25, 0.75)  # the least and the largest share of the time that answers get
FASTEST = 120_000  # most tokens of answers per second that the engine's host can handle
# The share of the seconds for answers that remains after start, prompts and questions (assumed).
_WRITING = {"cuda": 0.5, "cpu": 1.0}
# The share of the answers' tokens that the most frequent ones of a vocabulary of 49,152 cover.
_COVERAGE = ((2048, 0.82), (4096, 0.88), (8192, 0.931), (16384, 0.966), (32768, 0.993))
# The share of the largest product's operations per second that training reaches.
_COMPUTES = {"cuda": 0.35, "cpu": 0.6}
_KEPT = 3 * TOP  # numbers of 2 bytes that are kept for a token beside states
_READS = 0.9  # the same share for the target's pass over many texts at once


class Tree(NamedTuple):
    """A draft model's tree under `auto` on a GPU."""

    width: int
    num_levels: int
    num_nodes: int  # nodes that are checked, including a lookup's beside them
    found: float  # share of the best guess's misses that the other nodes of a level find


# What they find follows from the tokens per pass in docs/decisions/029, beside those of the chain.
TREES = (Tree(4, 4, 7, 0.19), Tree(5, 5, 15, 0.29), Tree(8, 7, 31, 0.34), Tree(8, 8, 63, 0.37))
TREE_LEVEL = 1.43  # time of a tree's level, in levels of a chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What to expect of a drafter."""

    size: Size
    chance: float  # that a guess is right
    num_nodes: int  # of its best chain or tree
    num_levels: int  # guesses of that draft that are made one after the other
    tokens_per_pass: float
    node_seconds: float  # for one guess; for all of them, if one pass makes them
    speedup: float  # over plain decoding, one request at a time

    @property
    def draft_seconds(self) -> float:
        """Seconds for all guesses of a draft."""
        if not METHODS[self.size.method].is_sequential:
            return self.node_seconds
        return self.node_seconds * levels_in_passes(self.num_nodes, self.num_levels)


def chain_tokens(chance: float, num_nodes: int) -> float:
    """Tokens per pass of a chain whose guesses are right with this chance."""
    return sum(chance**level for level in range(num_nodes + 1))


def chance_of(tokens_per_pass: float, num_nodes: int) -> float:
    """The chance of each guess with which a chain of `num_nodes` gives these tokens per pass."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if chain_tokens(middle, num_nodes) < tokens_per_pass:
            low = middle
        else:
            high = middle
    return low


def still_missed(now: float, then: float) -> float:
    """The share of today's wrong guesses that will still be wrong at the later chance.

    It is 1 at most: a measured chance may already be above the later one that is expected.
    """
    return min((1 - then) / max(1 - now, 1e-9), 1.0)


def levels_in_passes(num_nodes: int, num_levels: int) -> float:
    """The time of a draft's levels, in passes over one node."""
    return num_levels * (TREE_LEVEL if num_nodes > num_levels else 1.0)


class Draft(NamedTuple):
    """A chain or a tree that could be checked."""

    num_nodes: int
    num_levels: int
    tokens_per_pass: float
    speedup: float  # over plain decoding

    @property
    def step(self) -> float:
        """The time of a step, in steps of plain decoding."""
        return self.tokens_per_pass / self.speedup


def best_draft(
    ground: Ground, chance: float, node: float, method: Method, covered: float = 1.0
) -> Draft:
    """How many guesses to check, and how much faster than plain decoding that is.

    covered: the share of all tokens that the draft vocabulary has; a tree cannot guess others.
    """
    costs = ground.costs
    plain = costs.of_pass(1) + costs.step
    found = [(n, n, chain_tokens(chance, n)) for n in range(1, method.depth + 1)]
    if method.has_trees and ground.device == "cuda":
        for tree in TREES:
            better = chance + tree.found * (covered - chance) if chance > 0 else 0.0
            tokens = chain_tokens(better, tree.num_levels)
            found.append((tree.num_nodes, tree.num_levels, tokens))
    best = Draft(0, 0, 1.0, 1.0)
    for num_nodes, num_levels, tokens in found:
        levels = levels_in_passes(num_nodes, num_levels) if method.is_sequential else 1.0
        seconds = costs.of_pass(1 + num_nodes) + costs.step + node * levels
        one = Draft(num_nodes, num_levels, tokens, tokens * plain / seconds)
        best = max(best, one, key=lambda draft: draft.speedup)
    return best


def beside_lookups(drafter: float, lookups: float) -> float:
    """The speed of `auto` with both, from the speed with each alone.

    Each drafts where it is the better one. Measured on an H200: 1.49x with a draft of 4 layers
    alone and 1.62x with both beside a target of 135M parameters, 2.42x and 2.62x beside one of 7B's
    cost; that is the better of the two and three tenths of what the other gains.
    """
    return max(drafter, lookups) + 0.3 * max(min(drafter, lookups) - 1.0, 0.0)


def usual_coverage(columns: int, vocab_size: int) -> float:
    """The share of answers' tokens that a draft vocabulary covers, before any answer was seen."""
    if columns >= vocab_size:
        return 1.0
    before = (0, 0.0)
    for size, share in (*_COVERAGE, (max(vocab_size, 49152), 1.0)):
        if columns <= size:
            part = (columns - before[0]) / (size - before[0])
            return before[1] + part * (share - before[1])
        before = (size, share)
    return 1.0


def tokens_answered(ground: Ground, seconds: float) -> float:
    """The number of tokens that the target is expected to write in this time."""
    speed = ground.costs.products * _COMPUTES[ground.device]
    rate = speed / (2.0 * num_parameters(ground.spec))
    return seconds * min(rate, FASTEST) * _WRITING[ground.device]


def learning_seconds(ground: Ground, size: Size) -> float:
    """Seconds of training per token, forward and backward."""
    costs, spec = ground.parts(size)
    layer = layer_parameters(spec) - (1 - size.units) * unit_parameters(spec)
    weights = size.layers * size.abreast * layer + size.columns * spec.width
    speed = costs.products * _COMPUTES[ground.device]
    return 6.0 * weights * METHODS[size.method].passes / speed


def tokens_seen(ground: Ground, size: Size, answered: float, seconds: float) -> float:
    """The number of tokens that training learns from in this time; repeated ones count less.

    The target must read the answers too: once if its opinions can be kept, else each time.
    """
    costs, spec = ground.costs, ground.spec
    learning = learning_seconds(ground, size)
    reading = 2.0 * num_parameters(spec) / (costs.products * _READS)
    kept = answered * 2 * (METHODS[size.method].features * spec.width + _KEPT)
    if costs.room is not None and kept > costs.room:
        seen = seconds / (learning + reading)
    else:
        seen = max((seconds - answered * reading) / learning, seconds / (learning + reading))
    times = seen / max(answered, 1.0)
    if times <= 1:
        return seen
    return answered * (1 + AGAIN * (1 - exp((1 - times) / AGAIN)))


def answering_share(ground: Ground, size: Size, seconds: float) -> float:
    """The share of `seconds` to spend on answers, so that training learns from the most tokens."""
    least, most = (round(100 * share) for share in SHARES)

    def seen(percent: int) -> float:
        answering = percent / 100 * seconds
        answered = tokens_answered(ground, answering)
        return tokens_seen(ground, size, answered, seconds - answering)

    return max(range(least, most + 1), key=seen) / 100


def expect(
    ground: Ground,
    size: Size,
    *,
    seconds: float,
    answered: float,
    coverage: Callable[[int], float] | None = None,
) -> Expected:
    """What to expect of a drafter after `seconds` of training on `answered` tokens."""
    method, smaller = METHODS[size.method], ground.smaller
    seen = tokens_seen(ground, size, answered, seconds)
    _, own = ground.parts(size)
    # Tokens that a smaller model lacks are padding.
    share = usual_coverage(size.columns, min(ground.spec.vocab_size, own.vocab_size))
    if coverage is not None:
        share = coverage(size.columns)
    best = method.best(layers_held(size)) * (1 + LOST * log2(size.units))
    missed = 1 - found_beside(size, own.num_layers)
    best, begins = 1 - (1 - best) * missed, 0.0
    if smaller is not None and size.cut_from:
        limit, whole = 1 - TAUGHT * (1 - smaller.agrees), wholeness(size, own.num_layers)
        best = min(best, limit) + whole * max(limit - best, 0.0)
        begins = whole * smaller.agrees
    # A draft that starts nearer to the target has less to learn.
    learned = seen / (seen + FAMILIARITY * missed**2)
    chance = share * (begins + max(best - begins, 0.0) * learned)
    node = node_seconds(ground, size)
    draft = best_draft(ground, chance, node, method, share)
    return Expected(
        size=size,
        chance=chance,
        num_nodes=draft.num_nodes,
        num_levels=draft.num_levels,
        tokens_per_pass=draft.tokens_per_pass,
        node_seconds=node,
        speedup=draft.speedup,
    )


def layers_held(size: Size) -> float:
    """The number of layers in sequence that a draft is as good as. Layers side by side count for
    less, and for nothing with `USELESS` of them."""
    return size.layers * (1 + (size.abreast - 1) * (USELESS - size.abreast) / USELESS)


def found_beside(size: Size, num_layers: int) -> float:
    """The share of a draft's wrong guesses that layers side by side make right.

    That is the share of the target's other layers that are held side by side, times a factor that
    falls to 0 with `USELESS` of them. Measured on one model of 30 layers, each
    draft trained for 24 seconds: a guess of 8 layers with three in each is right with chance 0.735,
    of 4 with one 0.575, of 4 with seven 0.55; the first one after 130 seconds with 0.825.
    """
    others = size.layers * (size.abreast - 1) / max(num_layers - size.layers, 1)
    return max(others * (USELESS - size.abreast) / USELESS, 0.0)


def wholeness(size: Size, num_layers: int) -> float:
    """How near a cut is to the whole model: 0 with half of its layers, 1 with all, one after the
    other; side by side they count as in `found_beside`."""
    held = size.layers * size.abreast / num_layers
    return max(2 * held * (USELESS - size.abreast) / (USELESS - 1) - 1, 0.0)


def node_seconds(ground: Ground, size: Size) -> float:
    """Seconds for a node of this drafter; for all of its nodes, if one pass makes them."""
    (costs, spec), method = ground.parts(size), METHODS[size.method]
    if method.is_sequential:
        num_layers = size.layers + method.extra
        return costs.of_node(num_layers, size.columns, size.units, size.abreast)
    if size.method != "block":
        return costs.node + method.depth * (size.columns + spec.width) * costs.per_column
    # As many rows as the block has places, then a small product and a choice for each of them. Half
    # of a node for each of these was too little: 0.18 ms expected, 0.28 measured on an H200.
    rows = costs.of_pass(method.depth) / max(costs.of_pass(1), 1e-12)
    layers = (size.layers + method.extra) * costs.of_layer(size.units)
    columns = size.columns * costs.per_column
    return costs.node + rows * (layers + columns) + method.depth * (costs.node + columns / 4)


def rank(
    ground: Ground,
    *,
    seconds: float,
    answered: float = inf,
    coverage: Callable[[int], float] | None = None,
    sizes: Iterable[Size] | None = None,
) -> list[Expected]:
    """All sizes, the fastest first; of equally fast ones, the one with the best single guess."""
    found = [
        expect(ground, size, seconds=seconds, answered=answered, coverage=coverage)
        for size in (sizes_for(ground.spec) if sizes is None else sizes)
    ]
    plain = ground.costs.of_pass(1)
    return sorted(
        found, key=lambda one: (-round(one.speedup, 3), one.node_seconds / plain - one.chance)
    )

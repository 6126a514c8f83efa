"""The choice of what to draft: the most expected tokens per second, zero nodes among the answers.

Tokens come from an estimate (`acceptance`), seconds from what steps took (`costs`). Both kinds of
steps choose by the functions at the top. Below them is what steps run by the host add, which check
a number of nodes of each row; captured steps are in `captured_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from hunch.drafting.acceptance import AcceptanceEstimate
from hunch.drafting.costs import CostCurve, Flow
from hunch.drafting.step_shapes import DraftSource

# --- the choice -----------------------------------------------------------------------------------


def gain_of_rows(gains: Sequence[float], weight: float, most: float = inf) -> float:
    """The gain that a step counts for whose rows gain these tokens.

    All rows of a step wait for what each of them checks, and requests that came together are done
    when the last of them is: so the row that gains least decides. While requests keep coming, a row
    that ends early makes room for the next request, and the mean counts for more.

    weight: how much the mean counts beyond the least; most: tokens of that which count.
    """
    least = min(gains)
    return least + weight * min(sum(gains) / len(gains) - least, most)


def best_rate(tokens: Sequence[float], seconds: Sequence[float], margin: float = 0.0) -> int:
    """The place of the best rate; the first is plain decoding, which others must beat by margin."""
    best, most = 0, tokens[0] / seconds[0] * (1.0 + margin)
    for place in range(1, len(tokens)):
        rate = tokens[place] / seconds[place]
        if rate > most:
            best, most = place, rate
    return best


# --- steps run by the host ------------------------------------------------------------------------

# How much the mean gain counts where each row has its own number of nodes. Replayed on answers of
# three models: eight requests that came together are 5% slower with the mean alone and at most 1%
# with 0.35; with 0.2 four of them gain half as much. While requests keep coming, the mean alone
# counts: eight have 1.29 times plain decoding's speed so, and 1.20 with 0.5.
OF_OWN_NODES = 0.35


def best_count(
    chances: Sequence[float], cost: CostCurve, num_rows: int = 1, margin: float = 0.0
) -> int:
    """How many of the nodes to check, best first; each of `num_rows` rows gets a token anyway."""
    tokens = list(accumulate(chances, initial=float(num_rows)))
    return best_rate(tokens, [cost.seconds(num_rows + n) for n in range(len(tokens))], margin)


def share_nodes(
    chances: Sequence[Sequence[float]],
    limits: Sequence[int],
    cost: CostCurve,
    margin: float = 0.0,
    *,
    is_flowing: bool = False,
) -> list[int]:
    """How many of each row's nodes to check, for the most tokens per second of all rows.

    The chances of a row's nodes fall, so the best nodes of all rows are the first ones of each.
    """
    num_rows = len(chances)
    if num_rows == 1:
        return [best_count(chances[0][: limits[0]], cost, 1, margin)]
    ranked = sorted(
        (-chance, row)
        for row, (own, limit) in enumerate(zip(chances, limits, strict=True))
        for chance in own[:limit]
    )
    counts = [0] * num_rows
    best = best_count([-chance for chance, _ in ranked], cost, num_rows, margin)
    # If the mean of the rows gains something, the row that gains least may still decide otherwise.
    if best and cost.is_measured and not is_flowing:
        gains, tokens = [0.0] * num_rows, [1.0]
        for chance, row in ranked:
            gains[row] -= chance
            tokens.append(1.0 + gain_of_rows(gains, OF_OWN_NODES))
        seconds = [cost.seconds(num_rows + n) for n in range(len(tokens))]
        best = best_rate(tokens, seconds, margin)
    for _, row in ranked[:best]:
        counts[row] += 1
    return counts


HOST_PRIOR = (0.6, 0.7)  # chances of a network's first guess and of a further one
FEW_TIMES = 4  # drafts before their times count: the first ones wait for memory
NETWORK_MARGIN = 0.05  # share by which using a network must beat doing without it


class HostPolicy:
    """Which rows a network on the host drafts for, and how many levels."""

    def __init__(
        self,
        cost: CostCurve,
        *,
        num_rows: int,
        max_nodes: int,
        num_levels: int,
        share: float,  # of a pass: the assumed cost of a level until it was timed
        is_adaptive: bool,  # False: all levels, for all rows whose lookup does not promise more
        flow: Flow | None = None,
    ) -> None:
        self.cost, self.share, self.is_adaptive = cost, share, is_adaptive
        self.flow = Flow(num_rows) if flow is None else flow
        is_chain = max_nodes == num_levels
        # Sizes that may be drafted, as nodes and levels: chains of any length, or the whole tree.
        whole = [(max_nodes, num_levels)]
        self.sizes = [(n, n) for n in range(1, num_levels + 1)] if is_chain else whole
        self.estimate = AcceptanceEstimate(
            num_rows, {DraftSource.LOOKUP: HOST_PRIOR}, rate=0.1, num_levels=num_levels
        )
        self.level_cost = CostCurve()  # seconds of one level, by rows
        self._num_timed = 0

    def timed(self, num_rows: int, num_levels: int, seconds: float) -> None:
        """Drafting `num_levels` levels for `num_rows` rows took this long."""
        if self.cost.is_measured:
            self._num_timed += 1
            self.level_cost.record(num_rows, seconds / num_levels)

    def plan(
        self, ids: Sequence[int], limits: Sequence[int], others: Sequence[tuple[int, float]]
    ) -> tuple[list[int], int]:
        """The rows that the network drafts for, as places in `ids`, and how many levels.

        limits: most nodes of each row; 0: the network does not draft for it.
        others: what each row has without the network: nodes, and expected tokens.
        """
        levels = tuple(level for _, level in self.sizes)
        places = [place for place, limit in enumerate(limits) if limit]
        each = self.estimate.gains([ids[place] for place in places], levels)
        gains = dict(zip(places, each, strict=True))
        num_nodes, without = sum(n for n, _ in others), [gain for _, gain in others]
        weight = 1.0 if self.flow.is_on else OF_OWN_NODES
        choices: list[tuple[list[int], int]] = [([], 0)]
        tokens = [1.0 + gain_of_rows(without, weight)]
        seconds = [self.cost.seconds(len(ids) + num_nodes)]
        for at, (size, num_levels) in enumerate(self.sizes):
            asked, nodes, gained = [], num_nodes, without.copy()
            for place, gain_of in gains.items():
                own = min(size, limits[place])
                gain = gain_of[min(at, own - 1)]
                if gain > without[place]:
                    asked.append(place)
                    nodes += own - others[place][0]
                    gained[place] = gain
            if asked:
                choices.append((asked, num_levels))
                tokens.append(1.0 + gain_of_rows(gained, weight))
                drafting = num_levels * self._level_seconds(len(asked))
                seconds.append(self.cost.seconds(len(ids) + nodes) + drafting)
        if not self.is_adaptive:
            return choices[-1]
        return choices[best_rate(tokens, seconds, NETWORK_MARGIN)]

    def _level_seconds(self, num_rows: int) -> float:
        if self._num_timed >= FEW_TIMES:
            return self.level_cost.seconds(num_rows)
        return self.share * self.cost.seconds(num_rows)

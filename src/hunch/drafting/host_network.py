"""Networks that draft in steps run by the host: which rows they draft for, and how many levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import Drafter, DrafterContext, GrowsLevels
from hunch.drafting.costs import CostCurve, Flow
from hunch.drafting.policy import TOGETHER, AcceptanceEstimate, best_rate, gain_of_rows
from hunch.drafting.step_shapes import DraftSource
from hunch.drafting.trees import nodes_of, path_of

READS = 4  # tokens that a network may catch up on for each one that the row can still get
FEW = 16  # tokens that rows may have to catch up on in a pass that is timed
HOST_PRIOR = (0.6, 0.7)  # chances of a network's first guess and of a further one
FEW_TIMES = 4  # drafts before their times count: the first ones wait for memory
NETWORK_MARGIN = 0.05  # share by which using a network must beat doing without it


class Sent(NamedTuple):
    """A network's draft, to be compared with what the target decides."""

    base: int  # position of its first tokens
    tokens: list[int]
    parents: list[int]

    def compare(self, new_tokens: list[int]) -> tuple[int, int]:
        """How many levels were right, and how many could be compared."""
        path = path_of(self.tokens, self.parents, new_tokens)
        at, run = path[-1] if path else -1, len(path)
        return run, run + (run < len(new_tokens) and at in self.parents)


class SentDrafts:
    """A method's drafts that are not compared yet, and the estimate that learns from them."""

    def __init__(self, estimate: AcceptanceEstimate) -> None:
        self.estimate = estimate
        self._sent: dict[int, Sent] = {}
        self._met: set[int] = set()  # rows whose requests the estimate was told of

    def add(self, row: int, sent: Sent) -> None:
        self._sent[row] = sent

    def compare(self, rows: Rows, *, fades: bool = False) -> None:
        """Learn from what the target decided; `fades`: of rows without a draft, forget a little."""
        ids: list[int] = rows.ids_R.tolist()
        for row in ids:
            if row not in self._met:
                self._met.add(row)
                self.estimate.start([row])
            sent = self._sent.pop(row, None)
            if sent is not None:
                new_tokens = rows.tokens_XL[row, sent.base : int(rows.known_X[row])].tolist()
                self.estimate.learn(row, *sent.compare(new_tokens), weight=1.0 / len(ids))
            elif fades:
                self.estimate.fade([row])

    def forget(self, rows: list[int]) -> None:
        self._met.difference_update(rows)
        for row in rows:
            self._sent.pop(row, None)


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
        weight = 1.0 if self.flow.is_on else TOGETHER
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


class NetworkDrafts:
    """A method with a network on the host, which drafts for the rows that the policy chooses."""

    def __init__(
        self,
        name: str,
        method: Drafter,
        context: DrafterContext,
        *,
        share: float,
        is_adaptive: bool,
    ) -> None:
        self.name, self.method = name, method
        needs, shape = method.needs, method.shape if isinstance(method, GrowsLevels) else None
        self.policy = HostPolicy(
            context.cost,
            num_rows=context.max_rows,
            max_nodes=needs.max_nodes,
            num_levels=needs.max_nodes if shape is None else min(shape.depth, needs.max_nodes),
            share=share,
            is_adaptive=is_adaptive and context.cost.is_measured,
            flow=context.flow,
        )
        self._drafts = SentDrafts(self.policy.estimate)

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)
        self._drafts.compare(step.rows, fades=True)

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)
        self._drafts.forget(rows)

    def plan(
        self, rows: Rows, ids: list[int], limits: list[int], others: Sequence[tuple[int, float]]
    ) -> tuple[list[int], int]:
        """The rows that it drafts for, as places in `ids`, and how many levels.

        Rows that lack too many tokens, for what they can still get, are left out.
        """
        if self.policy.is_adaptive:
            known_X, end_X = rows.known_X.tolist(), rows.end_X.tolist()
            have_X, limits = rows.computed_GX[-1].tolist(), limits.copy()
            for place, row in enumerate(ids):
                lacking = known_X[row] - have_X[row]
                if lacking > FEW and lacking > READS * (end_X[row] - known_X[row]):
                    limits[place] = 0
        return self.policy.plan(ids, limits, others)

    def propose(self, rows: Rows, places: list[int], num_levels: int) -> Draft:
        """Drafts for these rows, in order."""
        ids_R, policy = rows.ids_R[places], self.policy
        lacking = int((rows.known_X[ids_R] - rows.computed_GX[-1, ids_R]).max())
        max_nodes = next(size for size, levels in policy.sizes if levels >= num_levels)
        some = replace(rows, ids_R=ids_R, max_draft_X=rows.max_draft_X.clamp(max=max_nodes))
        began = perf_counter()
        draft = self.method.propose(some)
        if lacking <= FEW:
            policy.timed(len(places), num_levels, perf_counter() - began)
        columns = ids_R.tolist(), rows.known_X[ids_R].tolist(), nodes_of(draft)
        for row, known, nodes in zip(*columns, strict=True):
            self._drafts.add(row, Sent(known, *nodes))
        return draft

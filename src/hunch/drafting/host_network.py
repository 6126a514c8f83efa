"""A network that drafts on the host, for the rows that the policy chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.acceptance import AcceptanceEstimate
from hunch.drafting.base import Drafter, DrafterContext, GrowsLevels
from hunch.drafting.policy import HostPolicy

READS = 4  # tokens that a network may catch up on for each one that the row can still get
FEW = 16  # tokens that rows may have to catch up on in a pass that is timed


class Sent(NamedTuple):
    """A network's draft, to be compared with what the target decides."""

    base: int  # position of its first tokens
    tokens: list[int]
    parents: list[int]

    def compare(self, new_tokens: list[int]) -> tuple[int, int]:
        """How many levels were right, and how many could be compared."""
        at, run = -1, 0
        pairs = zip(self.parents, self.tokens, strict=True)
        children = {pair: node for node, pair in enumerate(pairs)}
        while run < len(new_tokens) and (at, new_tokens[run]) in children:
            at, run = children[at, new_tokens[run]], run + 1
        return run, run + (run < len(new_tokens) and at in self.parents)


class SentDrafts:
    """A method's drafts that are not compared yet, and the estimate that learns from them."""

    def __init__(self, estimate: AcceptanceEstimate) -> None:
        self.estimate = estimate
        self._sent: dict[int, Sent] = {}
        self._met: set[int] = set()

    def add(self, row: int, sent: Sent) -> None:
        self._sent[row] = sent

    def compare(self, rows: Rows, *, fades: bool = False) -> None:
        """Learn from what the target decided; `fades`: rows without a draft fade."""
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
        known, counts = rows.known_X[ids_R].tolist(), draft.num_nodes_R.tolist()
        tokens, parents = draft.tokens_RN.tolist(), draft.parents_RN.tolist()
        for place, row in enumerate(ids_R.tolist()):
            nodes = slice(counts[place])
            self._drafts.add(row, Sent(known[place], tokens[place][nodes], parents[place][nodes]))
        return draft

"""Networks that draft in steps run by the host, for the rows that the policy chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.acceptance import AcceptanceEstimate
from hunch.drafting.base import Drafter, DrafterContext, GrowsLevels
from hunch.drafting.policy import HostPolicy
from hunch.drafting.trees import accepted_path, nodes_of

# A network always catches up on SMALL_CATCH_UP missed tokens of a row. It catches up on more only
# if they are at most HOST_CATCH_UP for each token that the row can still get; that is not timed.
SMALL_CATCH_UP, HOST_CATCH_UP = 16, 4


class ProposedDraft(NamedTuple):
    """A network's draft, to be compared with what the target decides."""

    base: int  # position of its first tokens
    tokens: list[int]
    parents: list[int]

    def compare(self, new_tokens: list[int]) -> tuple[int, int]:
        """How many levels were right, and how many could be compared."""
        path = accepted_path(self.tokens, self.parents, new_tokens)
        at, run = path[-1] if path else -1, len(path)
        return run, run + (run < len(new_tokens) and at in self.parents)


class ProposedDrafts:
    """A method's drafts that are not compared yet, and the estimate that learns from them."""

    def __init__(self, estimate: AcceptanceEstimate) -> None:
        self.estimate = estimate
        self._drafts: dict[int, ProposedDraft] = {}  # by row
        self._started: set[int] = set()  # rows whose requests the estimate has started

    def add(self, row: int, draft: ProposedDraft) -> None:
        self._drafts[row] = draft

    def compare(self, rows: Rows, *, fades: bool = False) -> None:
        """Learn from what the target decided; `fades`: forget a little of rows without a draft."""
        ids: list[int] = rows.ids_R.tolist()
        for row in ids:
            if row not in self._started:
                self._started.add(row)
                self.estimate.start([row])
            draft = self._drafts.pop(row, None)
            if draft is not None:
                new_tokens = rows.tokens_XL[row, draft.base : int(rows.known_X[row])].tolist()
                self.estimate.learn(row, *draft.compare(new_tokens), weight=1.0 / len(ids))
            elif fades:
                self.estimate.fade([row])

    def forget(self, rows: list[int]) -> None:
        self._started.difference_update(rows)
        for row in rows:
            self._drafts.pop(row, None)


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
        )
        self._drafts = ProposedDrafts(self.policy.estimate)

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

        Rows of which it has missed too many tokens, for those they can still get, are left out.
        """
        if self.policy.is_adaptive:
            known_X, end_X = rows.known_X.tolist(), rows.end_X.tolist()
            have_X, limits = rows.computed_GX[-1].tolist(), limits.copy()
            for place, row in enumerate(ids):
                lacking = known_X[row] - have_X[row]
                max_lacking = HOST_CATCH_UP * (end_X[row] - known_X[row])
                if lacking > max(SMALL_CATCH_UP, max_lacking):
                    limits[place] = 0
        return self.policy.plan(ids, limits, others)

    def propose(self, rows: Rows, places: list[int], num_levels: int) -> Draft:
        """The drafts of the rows at these places."""
        ids_R, policy = rows.ids_R[places], self.policy
        lacking = int((rows.known_X[ids_R] - rows.computed_GX[-1, ids_R]).max())
        max_nodes = next(size for size, levels in policy.sizes if levels >= num_levels)
        some = replace(rows, ids_R=ids_R, max_draft_X=rows.max_draft_X.clamp(max=max_nodes))
        began = perf_counter()
        draft = self.method.propose(some)
        if lacking <= SMALL_CATCH_UP:
            policy.timed(len(places), num_levels, perf_counter() - began)
        columns = ids_R.tolist(), rows.known_X[ids_R].tolist(), nodes_of(draft)
        for row, known, nodes in zip(*columns, strict=True):
            self._drafts.add(row, ProposedDraft(known, *nodes))
        return draft

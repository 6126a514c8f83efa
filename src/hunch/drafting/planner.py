"""Several methods as one drafter: who drafts for which row, and how their drafts go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import Clears, DeviceDrafter, Drafter, WorksOnDevice
from hunch.drafting.cost import CostCurve
from hunch.drafting.lookup import LookupDrafter
from hunch.drafting.trees import Node, share_out, to_draft

ON_TRACK = 0.7  # chance of a hint's first guess above which nobody else is asked
HINTED = "prediction"  # drafts from what a request expects; stands beside every other method


@dataclass(frozen=True, slots=True)
class Route:
    """Who drafts for a request: a lookup, or the default, or the better of both."""

    lookup: str | None = None
    has_default: bool = True
    wants_model: bool | None = None  # the draft model: always, never, or (None) where it pays


PLAIN = Route()


class Planner:
    """Several methods as one: each row is drafted by one of them, nodes are shared out together."""

    def __init__(
        self,
        default: str,
        method: Drafter,
        lookups: Mapping[str, LookupDrafter],
        cost: CostCurve,
        device: torch.device,
    ) -> None:
        self.default, self.method, self.lookups = default, method, lookups
        self.cost, self.device = cost, device
        self.margin = method.margin if isinstance(method, LookupDrafter) else 0.0
        sizes = {name: lookup.needs.max_nodes for name, lookup in lookups.items()}
        sizes = {default: method.needs.max_nodes, **sizes}
        self.needs = replace(method.needs, max_nodes=max(sizes.values()), methods=sizes)
        self._routes: dict[int, Route] = {}
        self._routed: set[int] = set()  # rows that do not simply take the default
        self._plain: tuple[Tensor, list[str]] | None = None  # rows of late, all of the default

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)
        rows, routes = step.rows, self._routes
        if self._plain is not None and rows.ids_R is self._plain[0]:
            return
        following: dict[str, list[int]] = {}
        ids: list[int] = rows.ids_R.tolist()
        for row in ids:
            route = routes.get(row)
            if route is None:
                route = routes[row] = self._route(rows, row)
                if route is not PLAIN:
                    self._routed.add(row)
            if route.lookup is not None:
                following.setdefault(route.lookup, []).append(row)
        for name, followed in following.items():
            self.lookups[name].follow(rows, followed)
        if self._routed.isdisjoint(ids):
            self._plain = rows.ids_R, [self.default] * len(ids)

    def _route(self, rows: Rows, row: int) -> Route:
        request = rows.requests[row] if rows.requests else None
        if request is None:
            return PLAIN
        mode = request.params.speculation.mode
        if mode in self.lookups:
            return Route(mode, has_default=False)
        if request.prediction_ids and HINTED in self.lookups and mode != self.default:
            return Route(HINTED)
        return PLAIN

    def propose(self, rows: Rows) -> Draft:
        if self._plain is not None and rows.ids_R is self._plain[0]:
            draft = self.method.propose(rows)
            draft.methods = self._plain[1]
            return draft
        ids: list[int] = rows.ids_R.tolist()
        if self._routed.isdisjoint(ids):
            draft = self.method.propose(rows)
            draft.methods = [self.default] * len(ids)
            return draft
        names, trees = zip(*map(self._choose, ids), strict=True)
        draft = self._look_up(rows, ids, names, trees)
        draft.methods = names
        return draft

    def _choose(self, row: int) -> tuple[str, list[Node] | None]:
        """Who drafts for the row, and what; None where that is up to a method with a network."""
        route, method = self._routes[row], self.method
        tree: list[Node] = []
        if route.lookup is not None:
            tree = self.lookups[route.lookup].look(row)
            if not route.has_default or (tree and tree[0].chance >= ON_TRACK):
                return route.lookup, tree
        if not isinstance(method, LookupDrafter):
            return self.default, None
        other = method.look(row)
        if route.lookup is not None and _expected(tree) > _expected(other):
            return route.lookup, tree
        return self.default, other

    def _look_up(
        self,
        rows: Rows,
        ids: list[int],
        names: Sequence[str],
        trees: Sequence[list[Node] | None],
    ) -> Draft:
        max_draft_X = rows.max_draft_X.tolist()
        places = [place for place, tree in enumerate(trees) if tree is not None]
        found = [tree for tree in trees if tree is not None]
        limits = [max_draft_X[ids[place]] for place in places]
        counts = self._counts([names[place] for place in places], found, limits)
        draft = to_draft(found, counts, self.device)
        if len(places) == len(ids):
            return draft
        rest = [place for place, tree in enumerate(trees) if tree is None]
        other = self.method.propose(replace(rows, ids_R=rows.ids_R[rest]))
        return merge(len(ids), ((places, draft), (rest, other)))

    def _counts(self, names: list[str], trees: list[list[Node]], limits: list[int]) -> list[int]:
        """How many nodes of each row's lookup to check."""
        counts = share_out(trees, limits, self.cost, self.margin)
        for index, name in enumerate(names):
            if not self._lookup(name).is_adaptive:
                counts[index] = min(len(trees[index]), limits[index])
        return counts

    def _lookup(self, name: str) -> LookupDrafter:
        lookup = self.lookups.get(name, self.method)
        assert isinstance(lookup, LookupDrafter)
        return lookup

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)
        self._plain = None
        for row in rows:
            self._routes.pop(row, None)
        self._routed.difference_update(rows)
        for lookup in self.lookups.values():
            lookup.forget(rows)

    def on_device(self) -> DeviceDrafter | None:
        return self.method.on_device() if isinstance(self.method, WorksOnDevice) else None

    def clear(self) -> None:
        for method in (self.method, *self.lookups.values()):
            if isinstance(method, Clears):
                method.clear()


def _expected(tree: list[Node]) -> float:
    """Tokens a draft would bring."""
    return sum(node.chance for node in tree)


def merge(num_rows: int, drafts: Sequence[tuple[list[int], Draft]]) -> Draft:
    """Drafts of different rows as one; nodes that were not drawn from a q get none."""
    device = drafts[0][1].tokens_RN.device
    width = max(draft.tokens_RN.shape[1] for _, draft in drafts)
    tokens_RN = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
    merged = Draft(tokens_RN, tokens_RN.clone(), tokens_RN.new_zeros(num_rows))
    for places, draft in drafts:
        size = draft.tokens_RN.shape[1]
        merged.tokens_RN[places, :size] = draft.tokens_RN
        merged.parents_RN[places, :size] = draft.parents_RN
        merged.num_nodes_R[places] = draft.num_nodes_R
        if draft.q_RNV is not None and draft.is_sampled_RN is not None:
            merged.q_RNV = draft.q_RNV.new_zeros(num_rows, width, draft.q_RNV.shape[2])
            merged.q_RNV[places, :size] = draft.q_RNV
            merged.is_sampled_RN = draft.is_sampled_RN.new_zeros(num_rows, width)
            merged.is_sampled_RN[places, :size] = draft.is_sampled_RN
    return merged

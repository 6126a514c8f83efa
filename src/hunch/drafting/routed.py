"""A default method with lookups beside it: which one drafts for which row.

The policy shares nodes among all rows. One method drafts for each row, or two in a merged tree. It
is the request's prediction, while the answer follows that; else the method that the request or the
config names; with `auto`, suffix lookup or a network (a draft model or a head), whichever promises
more.

A lookup's guesses are compared with the target's tokens even if they are not sent to it. So a
lookup that cannot guess a text stops drafting, and starts again when it can, at no cost to the
target. A network that failed is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.auto_device import (
    DeviceAuto,
    DeviceAutoHead,
    DeviceAutoRecycling,
)
from hunch.drafting.base import (
    PREDICTION,
    Clears,
    DeviceDrafter,
    Drafter,
    DrafterContext,
    RowMethod,
    TakesPhrases,
    form_on_device,
)
from hunch.drafting.following import DeviceFollower
from hunch.drafting.host_network import NetworkDrafts
from hunch.drafting.lookup import DeviceLookup, LookupDrafter
from hunch.drafting.policy import share_nodes
from hunch.drafting.recycling import DeviceRecycling, RecyclingDrafter
from hunch.drafting.trees import Node, side_by_side, to_draft
from hunch.kernels.phrases import PhraseTable
from hunch.kernels.step import NEVER

ON_TRACK = 0.7  # chance of a prediction's first guess above which no other method is asked
RECYCLING = "recycling"


@dataclass(frozen=True, slots=True)
class Route:
    """What may draft for a request: a lookup, the default, or the better of both."""

    lookup: str | None = None
    has_default: bool = True
    wants_network: bool | None = None  # always, never, or (None) where it pays
    has_successors: bool = True  # recycling drafts beside the default


PLAIN = Route()


class RoutedDrafter:
    """A default method (a lookup, a network, or the better of both) and lookups beside it."""

    def __init__(
        self,
        default: str,
        lookup: LookupDrafter | None,
        network: NetworkDrafts | None,
        lookups: Mapping[str, LookupDrafter],
        context: DrafterContext,
    ) -> None:
        self.default, self.lookup, self.network, self.lookups = default, lookup, network, lookups
        self.context, self.margin = context, 0.0 if lookup is None else lookup.margin
        method: Drafter | None = lookup
        if method is None and network is not None:
            method = network.method
        assert method is not None, "neither a lookup nor a network"
        sizes = {name: lookup.needs.max_nodes for name, lookup in lookups.items()}
        sizes = {default: method.needs.max_nodes, **sizes}
        self.needs = replace(method.needs, max_nodes=max(sizes.values()), methods=sizes)
        self.network_name = default if network is None else network.name
        # Drafts beside the lookup. On a CPU it does not learn: to find the best of all tokens
        # takes longer than it would save.
        self.recycling: RecyclingDrafter | None = None
        self._routes: dict[int, Route] = {}

    def observe(self, step: TargetStep) -> None:
        for method in (self.lookup, self.network, self._recycling_on_host):
            if method is not None:
                method.observe(step)
        rows, routes = step.rows, self._routes
        following: dict[str, list[int]] = {}
        for row in rows.ids_R.tolist():
            route = routes.get(row)
            if route is None:
                route = routes[row] = self._route(rows, row)
            if route.lookup is not None:
                following.setdefault(route.lookup, []).append(row)
        for name, followed in following.items():
            self.lookups[name].follow(rows, followed)

    @property
    def _recycling_on_host(self) -> RecyclingDrafter | None:
        return None if self.context.is_fused else self.recycling

    def _route(self, rows: Rows, row: int) -> Route:
        request = rows.request(row)
        if request is None:
            return PLAIN
        mode = request.params.speculation.mode
        if mode in self.lookups:
            return Route(mode, has_default=False, wants_network=False)
        wish = None if mode in ("default", "auto") else mode == self.network_name
        if request.prediction_ids and PREDICTION in self.lookups and mode != self.default:
            return Route(PREDICTION, wants_network=wish)
        if mode == self.default and self.recycling is not None:
            return Route(has_successors=False)
        if wish is None or self.network is None or self.lookup is None:
            return PLAIN
        return Route(wants_network=wish)

    def propose(self, rows: Rows) -> Draft:
        ids: list[int] = rows.ids_R.tolist()
        if self.network is None and all(self._routes[row] is PLAIN for row in ids):
            assert self.lookup is not None
            if (recycling := self._recycling_on_host) is None:
                draft = self.lookup.propose(rows)
                draft.methods = [self.default] * len(ids)
                return draft
            if len(ids) == 1:
                limit = int(rows.max_draft_X[ids[0]])
                chain = self.lookup.chain(ids[0], limit)
                draft = recycling.propose_beside(chain, ids[0], limit, self.margin)
                draft.methods = [self.default if len(chain[0]) else RECYCLING]
                return draft
        names, trees = zip(*map(self._choose, ids), strict=True)
        max_draft_X = rows.max_draft_X.tolist()
        limits = [max_draft_X[row] for row in ids]
        counts = self._counts(names, trees, limits)
        places, num_levels = self._plan_network(rows, ids, trees, counts, limits)
        rest = [place for place in range(len(ids)) if place not in places]
        drafts: list[tuple[list[int], Draft]] = []
        if rest:
            found = [trees[p] for p in rest], [counts[p] for p in rest]
            drafts.append((rest, to_draft(*found, self.context.device)))
        if places:
            assert self.network is not None
            drafts.append((places, self.network.propose(rows, places, num_levels)))
        draft = drafts[0][1] if len(drafts) == 1 else side_by_side(len(ids), drafts)
        asked = set(places)
        draft.methods = [self.network_name if p in asked else n for p, n in enumerate(names)]
        return draft

    def _choose(self, row: int) -> tuple[str, list[Node]]:
        """The lookup that drafts for the row, and its draft."""
        route, tree = self._routes[row], []
        if route.lookup is not None:
            tree = self.lookups[route.lookup].look(row)
            if not route.has_default or (tree and tree[0].chance >= ON_TRACK):
                return route.lookup, tree
        other = [] if self.lookup is None else self.lookup.look(row)
        if route.lookup is not None and _expected(tree) > _expected(other):
            return route.lookup, tree
        if (recycling := self._recycling_on_host) is None or not route.has_successors:
            return self.default, other
        name = self.default if other else RECYCLING
        return name, recycling.look_beside(row, other)

    def _counts(
        self, names: Sequence[str], trees: Sequence[list[Node]], limits: list[int]
    ) -> list[int]:
        """How many nodes of each row's lookup to check."""
        chances = [[node.chance for node in tree] for tree in trees]
        counts = share_nodes(chances, limits, self.context.cost, self.margin)
        for place, name in enumerate(names):
            lookup = self.lookups.get(name, self.lookup)
            if lookup is not None and not lookup.is_adaptive:
                counts[place] = min(len(trees[place]), limits[place])
        return counts

    def _plan_network(
        self,
        rows: Rows,
        ids: list[int],
        trees: Sequence[list[Node]],
        counts: list[int],
        limits: list[int],
    ) -> tuple[list[int], int]:
        """The places of the rows that the network drafts for, and how many levels."""
        if self.network is None:
            return [], 0
        wishes = [self._routes[row].wants_network for row in ids]
        limits = [0 if wish is False else n for wish, n in zip(wishes, limits, strict=True)]
        others = [
            (0, 0.0) if wish else (count, _expected(tree[:count]))
            for wish, tree, count in zip(wishes, trees, counts, strict=True)
        ]
        places, num_levels = self.network.plan(rows, ids, limits, others)
        must = [place for place, wish in enumerate(wishes) if wish and limits[place]]
        if must:
            places = sorted({*places, *must})
            num_levels = num_levels or self.network.policy.sizes[-1][1]
        return places, num_levels

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._routes.pop(row, None)
        for method in (self.lookup, self.network, self.recycling, *self.lookups.values()):
            if method is not None:
                method.forget(rows)

    def on_device(self) -> DeviceDrafter | None:
        """The default method on the device; with a lookup and a network, both together."""
        network = None if self.network is None else form_on_device(self.network.method)
        host_lookup = self.lookup
        if host_lookup is not None and host_lookup.is_alone_on_device and self.network is not None:
            host_lookup = None  # both draft on the host
        lookup = form_on_device(host_lookup)
        found: DeviceDrafter | None = network if self.lookup is None else lookup
        if lookup is not None and network is not None:
            assert isinstance(lookup, DeviceLookup)
            room, only_chains = self.needs.max_nodes, self.context.only_chains
            if isinstance(network, DeviceFollower):
                found = DeviceAutoHead(lookup, network, room, only_chains=only_chains)
            else:
                found = DeviceAuto(lookup, network, room, only_chains=only_chains)
        recycling = form_on_device(self.recycling)
        if isinstance(lookup, DeviceLookup) and isinstance(recycling, DeviceRecycling):
            found = DeviceAutoRecycling(lookup, recycling, self.needs.max_nodes)
        if found is not None:
            found.methods = self._row_methods(found, lookup, network)
        return found

    def _row_methods(
        self, whole: DeviceDrafter, lookup: DeviceDrafter | None, network: DeviceDrafter | None
    ) -> dict[str, RowMethod]:
        """How a device drafts for rows whose requests name one of the methods."""
        found: dict[str, RowMethod] = {}
        if PREDICTION in self.lookups:
            found[PREDICTION] = RowMethod(name=PREDICTION, sure_match=NEVER, is_alone=True)
        if not isinstance(lookup, DeviceLookup):
            return found
        for one in (lookup, *map(form_on_device, self.lookups.values())):
            if isinstance(one, DeviceLookup) and one.max_match <= lookup.max_match:
                found[one.name] = RowMethod(
                    name=one.name,
                    sure_match=0,
                    min_match=one.min_match,
                    max_match=one.max_match,
                    has_table=one.has_table,
                    by_network=False,
                    with_prediction=one is lookup,
                )
        if whole is lookup:
            del found[lookup.name]  # it drafts for all rows
        if network is not None:
            name = self.network_name
            found[name] = RowMethod(name=name, sure_match=NEVER, by_network=True)
        return found

    def take_phrases(self, table: PhraseTable) -> None:
        if isinstance(self.lookup, TakesPhrases):
            self.lookup.take_phrases(table)
        if self.recycling is not None:
            self.recycling.take_phrases(table)

    def clear(self) -> None:
        network = None if self.network is None else self.network.method
        for method in (self.lookup, network, self.recycling, *self.lookups.values()):
            if isinstance(method, Clears):
                method.clear()


def _expected(tree: Sequence[Node]) -> float:
    """The expected tokens of a draft."""
    return sum(node.chance for node in tree)

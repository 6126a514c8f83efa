"""Several methods as one drafter, and `auto`: who drafts for which row, how drafts go together.

Each row is drafted by one method, nodes are shared out together. A request that says what it
expects is drafted from that while the answer keeps to it; everything else by the method that was
named or, with `auto`, by suffix lookup, or by a draft model where that promises more. A request may
name one method. How much is drafted is up to the policy: nothing, where that is best.

Guesses by lookup are compared with what the target chooses even while none are sent, so that a
lookup falls silent on text it cannot guess and comes back when it can, and neither costs the target
a row. A network is asked again, rarely, after it failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from hunch.config import SpecConfig
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import (
    Clears,
    DeviceDrafter,
    Drafter,
    DrafterContext,
    TakesPhrases,
    WorksOnDevice,
)
from hunch.drafting.device_auto import DeviceAuto
from hunch.drafting.draft_model import DeviceDraft
from hunch.drafting.lookup import DeviceLookup, LookupDrafter
from hunch.drafting.policy import HostPolicy, share_nodes
from hunch.drafting.trees import Node, side_by_side, to_draft
from hunch.drafting.watch import comes_with_hunch
from hunch.kernels.phrases import PhraseTable
from hunch.models.heads.draft_model import MAX_SHARE, byte_share
from hunch.models.weights import open_weights
from hunch.registry import DRAFTERS, resolve

log = logging.getLogger("hunch")

ON_TRACK = 0.7  # chance of a prediction's first guess above which nobody else is asked
HINTED = "prediction"  # drafts from what a request expects; stands beside every other method
READS = 4  # tokens worth reading to a network for one that a row may still get
FEW = 16  # tokens a row may lack in a pass whose time says what a level costs
# Gains below this drown in the noise of the measured costs; a GPU's steps are timed by its clock.
MARGIN, FUSED_MARGIN = 0.03, 0.01
DRAFT = "draft"  # the option that names a draft model's files, and the method it is loaded as


class Sent(NamedTuple):
    """A network's draft that waits to be compared."""

    base: int  # position of its first tokens
    tokens: list[int]
    parents: list[int]

    def compare(self, new_tokens: list[int]) -> tuple[int, int]:
        """Levels that were right, and levels that could be compared."""
        at, run = -1, 0
        pairs = zip(self.parents, self.tokens, strict=True)
        children = {pair: node for node, pair in enumerate(pairs)}
        while run < len(new_tokens) and (at, new_tokens[run]) in children:
            at, run = children[at, new_tokens[run]], run + 1
        return run, run + (run < len(new_tokens) and at in self.parents)


class NetworkDrafts:
    """A method with a network on the host, asked where the policy says that it pays."""

    def __init__(
        self, method: Drafter, context: DrafterContext, *, share: float, is_adaptive: bool
    ) -> None:
        self.method = method
        needs, shape = method.needs, getattr(method, "shape", None)
        self.policy = HostPolicy(
            context.cost,
            num_rows=context.max_rows,
            max_nodes=needs.max_nodes,
            num_levels=needs.max_nodes if shape is None else min(shape.depth, needs.max_nodes),
            share=share,
            is_adaptive=is_adaptive and context.cost.is_measured,
        )
        self._sent: dict[int, Sent] = {}
        self._met: set[int] = set()

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)
        rows, estimate = step.rows, self.policy.estimate
        ids: list[int] = rows.ids_R.tolist()
        for row in ids:
            if row not in self._met:
                self._met.add(row)
                estimate.start([row])
            sent = self._sent.pop(row, None)
            if sent is None:
                estimate.fade([row])
                continue
            new_tokens = rows.tokens_XL[row, sent.base : int(rows.known_X[row])].tolist()
            estimate.learn(row, *sent.compare(new_tokens), weight=1.0 / len(ids))

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)
        self._met.difference_update(rows)
        for row in rows:
            self._sent.pop(row, None)

    def plan(
        self, rows: Rows, ids: list[int], limits: list[int], others: Sequence[tuple[int, float]]
    ) -> tuple[list[int], int]:
        """The rows to ask it for, as places in `ids`, and for how many levels.

        Not those too long for what they may still get.
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
        """Drafts of these rows alone, in order."""
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
            count = counts[place]
            self._sent[row] = Sent(known[place], tokens[place][:count], parents[place][:count])
        return draft


@dataclass(frozen=True, slots=True)
class Route:
    """Who may draft for a request: a lookup, the default, or the better of both."""

    lookup: str | None = None
    has_default: bool = True
    wants_network: bool | None = None  # always, never, or (None) where it pays


PLAIN = Route()


class MergedDrafter:
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
        self.cost, self.device = context.cost, context.device
        self.margin = 0.0 if lookup is None else lookup.margin
        method: Drafter | None = lookup
        if method is None and network is not None:
            method = network.method
        assert method is not None, "somebody must draft"
        sizes = {name: lookup.needs.max_nodes for name, lookup in lookups.items()}
        sizes = {default: method.needs.max_nodes, **sizes}
        self.needs = replace(method.needs, max_nodes=max(sizes.values()), methods=sizes)
        self.network_name = default if lookup is None else DRAFT
        self._routes: dict[int, Route] = {}
        self._routed: set[int] = set()  # rows that do not simply take the default
        self._plain: tuple[Tensor, list[str]] | None = None  # rows of late, all of the default

    def observe(self, step: TargetStep) -> None:
        for method in (self.lookup, self.network):
            if method is not None:
                method.observe(step)
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
            return Route(mode, has_default=False, wants_network=False)
        wish = None if mode in ("default", "auto") else mode == self.network_name
        if request.prediction_ids and HINTED in self.lookups and mode != self.default:
            return Route(HINTED, wants_network=wish)
        if wish is None or self.network is None or self.lookup is None:
            return PLAIN
        return Route(wants_network=wish)

    def propose(self, rows: Rows) -> Draft:
        if self.network is None and self._plain is not None and rows.ids_R is self._plain[0]:
            assert self.lookup is not None
            draft = self.lookup.propose(rows)
            draft.methods = self._plain[1]
            return draft
        ids: list[int] = rows.ids_R.tolist()
        if self.network is None and self._routed.isdisjoint(ids):
            assert self.lookup is not None
            draft = self.lookup.propose(rows)
            draft.methods = [self.default] * len(ids)
            return draft
        names, trees = zip(*map(self._choose, ids), strict=True)
        max_draft_X = rows.max_draft_X.tolist()
        limits = [max_draft_X[row] for row in ids]
        counts = self._counts(names, trees, limits)
        places, num_levels = self._ask_network(rows, ids, trees, counts, limits)
        rest = [place for place in range(len(ids)) if place not in places]
        drafts: list[tuple[list[int], Draft]] = []
        if rest:
            found = to_draft([trees[p] for p in rest], [counts[p] for p in rest], self.device)
            drafts.append((rest, found))
        if places:
            assert self.network is not None
            drafts.append((places, self.network.propose(rows, places, num_levels)))
        draft = drafts[0][1] if len(drafts) == 1 else side_by_side(len(ids), drafts)
        asked = set(places)
        draft.methods = [self.network_name if p in asked else n for p, n in enumerate(names)]
        return draft

    def _choose(self, row: int) -> tuple[str, list[Node]]:
        """Which lookup would draft for the row, and what."""
        route, tree = self._routes[row], []
        if route.lookup is not None:
            tree = self.lookups[route.lookup].look(row)
            if not route.has_default or (tree and tree[0].chance >= ON_TRACK):
                return route.lookup, tree
        other = [] if self.lookup is None else self.lookup.look(row)
        if route.lookup is not None and _expected(tree) > _expected(other):
            return route.lookup, tree
        return self.default, other

    def _counts(
        self, names: Sequence[str], trees: Sequence[list[Node]], limits: list[int]
    ) -> list[int]:
        """How many nodes of each row's lookup to check."""
        chances = [[node.chance for node in tree] for tree in trees]
        counts = share_nodes(chances, limits, self.cost, self.margin)
        for place, name in enumerate(names):
            lookup = self.lookups.get(name, self.lookup)
            if lookup is not None and not lookup.is_adaptive:
                counts[place] = min(len(trees[place]), limits[place])
        return counts

    def _ask_network(
        self,
        rows: Rows,
        ids: list[int],
        trees: Sequence[list[Node]],
        counts: list[int],
        limits: list[int],
    ) -> tuple[list[int], int]:
        """Places of rows that the network drafts for, and its levels."""
        if self.network is None:
            return [], 0
        wishes = [self._routes[row].wants_network for row in ids]
        may = [0 if wish is False else n for wish, n in zip(wishes, limits, strict=True)]
        others = [
            (0, 0.0) if wish else (count, _expected(tree[:count]))
            for wish, tree, count in zip(wishes, trees, counts, strict=True)
        ]
        places, num_levels = self.network.plan(rows, ids, may, others)
        must = [place for place, wish in enumerate(wishes) if wish and limits[place]]
        if must:
            places = sorted({*places, *must})
            num_levels = num_levels or self.network.policy.sizes[-1][1]
        return places, num_levels

    def forget(self, rows: list[int]) -> None:
        self._plain = None
        for row in rows:
            self._routes.pop(row, None)
        self._routed.difference_update(rows)
        for method in (self.lookup, self.network, *self.lookups.values()):
            if method is not None:
                method.forget(rows)

    def on_device(self) -> DeviceDrafter | None:
        """There the default drafts; of a lookup and a network both."""
        method = None if self.network is None else self.network.method
        network = method.on_device() if isinstance(method, WorksOnDevice) else None
        if self.lookup is None:
            return network
        matches = self.lookup.on_device() if isinstance(self.lookup, WorksOnDevice) else None
        if matches is None or network is None:
            return matches
        assert isinstance(matches, DeviceLookup)
        assert isinstance(network, DeviceDraft)
        return DeviceAuto(matches, network)

    def take_phrases(self, table: PhraseTable) -> None:
        if isinstance(self.lookup, TakesPhrases):
            self.lookup.take_phrases(table)

    def clear(self) -> None:
        network = None if self.network is None else self.network.method
        for method in (self.lookup, network, *self.lookups.values()):
            if isinstance(method, Clears):
                method.clear()


class AutoDrafter(MergedDrafter):
    """Lookups, and a draft model where it pays. Its options are those of `suffix`, and `draft`."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        options = dict(options)
        draft = options.pop(DRAFT, "off")
        size = {key: value for key, value in options.items() if key in ("num_nodes", "adaptive")}
        lookups = {name: _load(name, size, context) for name in (HINTED, "ngram")}
        margin = FUSED_MARGIN if context.is_fused else MARGIN
        suffix = _load("suffix", {"margin": str(margin), **options}, context)
        model = None if draft == "off" else _load_draft(draft, suffix.is_adaptive, context)
        super().__init__("suffix", suffix, model, lookups, context)
        sizes = {"auto": suffix.needs.max_nodes, **self.needs.methods}
        needs = self.needs
        if model is not None:
            needs = model.method.needs
            sizes |= {DRAFT: needs.max_nodes, "auto": max(sizes["auto"], needs.max_nodes)}
        self.needs = replace(needs, max_nodes=max(sizes.values()), methods=sizes)


def load_drafter(spec: SpecConfig, context: DrafterContext) -> Drafter:
    """The method a config names; predictions stand beside it where drafting needs the host."""
    method: Drafter = resolve(DRAFTERS, spec.method)(spec.options, spec.path, context)
    if method.needs.is_graphable or method.needs.methods or spec.method == HINTED:
        return method
    lookups = {HINTED: _load(HINTED, {}, context)}
    if isinstance(method, LookupDrafter):
        return MergedDrafter(spec.method, method, None, lookups, context)
    share = method.needs.weight_bytes / max(getattr(context.target, "weight_bytes", 0), 1)
    # Who names a network on a CPU gets all its levels, unless `adaptive=true` says otherwise.
    is_adaptive = "adaptive" in spec.options and getattr(method, "is_adaptive", False)
    network = NetworkDrafts(method, context, share=min(share, 1.0), is_adaptive=is_adaptive)
    return MergedDrafter(spec.method, None, network, lookups, context)


def _load_draft(path: str, is_adaptive: bool, context: DrafterContext) -> NetworkDrafts | None:
    """The draft model, unless every node of it would cost too much of a pass to pay."""
    share = byte_share(open_weights(path), context.target)
    if share > MAX_SHARE:
        say = log.info if comes_with_hunch(path) else log.warning
        say(
            "auto: a node of the draft model reads %.0f%% of what the target reads, more than "
            "%.0f%%: it could not pay and is not loaded (speculate='draft:PATH' drafts with it "
            "all the same)",
            100 * share,
            100 * MAX_SHARE,
        )
        return None
    model: Drafter = resolve(DRAFTERS, DRAFT)({}, path, context)
    return NetworkDrafts(model, context, share=share, is_adaptive=is_adaptive)


def _load(name: str, options: Mapping[str, str], context: DrafterContext) -> LookupDrafter:
    lookup: LookupDrafter = resolve(DRAFTERS, name)(options, None, context)
    return lookup


def _expected(tree: Sequence[Node]) -> float:
    """Tokens a draft would bring."""
    return sum(node.chance for node in tree)

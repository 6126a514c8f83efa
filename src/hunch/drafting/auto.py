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
from math import inf
from typing import TYPE_CHECKING

from torch import Tensor

from hunch.config import SpecConfig
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.auto_head import CHAIN_NODES, SURE, DeviceAutoHead
from hunch.drafting.base import (
    Clears,
    DeviceDrafter,
    Drafter,
    DrafterContext,
    TakesPhrases,
    WorksOnDevice,
    comes_with_hunch,
)
from hunch.drafting.costs import DraftSource, StepShape, levels_after
from hunch.drafting.draft_model import DeviceDraft
from hunch.drafting.following import DeviceFollower
from hunch.drafting.host_network import NetworkDrafts
from hunch.drafting.lookup import DeviceLookup, LookupDrafter
from hunch.drafting.policy import share_nodes
from hunch.drafting.trees import Node, side_by_side, to_draft
from hunch.kernels.phrases import PhraseTable
from hunch.models.decoder import Hidden
from hunch.models.heads.draft_model import MAX_SHARE, byte_share
from hunch.models.heads.files import detect
from hunch.models.weights import open_weights
from hunch.registry import DRAFTERS, resolve

if TYPE_CHECKING:
    from hunch.kernels.step import RowState, StepRows

log = logging.getLogger("hunch")

ON_TRACK = 0.7  # chance of a prediction's first guess above which nobody else is asked
HINTED = "prediction"  # drafts from what a request expects; stands beside every other method
# Gains below this drown in the noise of the measured costs; a GPU's steps are timed by its clock.
MARGIN, FUSED_MARGIN = 0.03, 0.01
DRAFT = "draft"  # the option that names a draft model's files, and the method it is loaded as
# On a device:
TREE_WIDTH = 3  # of the steps of a draft model that check trees


@dataclass(frozen=True, slots=True)
class Route:
    """Who may draft for a request: a lookup, the default, or the better of both."""

    lookup: str | None = None
    has_default: bool = True
    wants_network: bool | None = None  # always, never, or (None) where it pays


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
        if isinstance(network, DeviceFollower):
            return DeviceAutoHead(matches, network)
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


class AutoDrafter(RoutedDrafter):
    """Lookups, and a draft model where it pays. Its options are those of `suffix`, and `draft`."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        options = dict(options)
        draft = options.pop(DRAFT, "off")
        # A draft that was measured beside this target is not turned away for its size.
        is_any_size = options.pop("any_size", "").lower() in ("true", "1", "yes", "on")
        size = {key: value for key, value in options.items() if key in ("num_nodes", "adaptive")}
        lookups = {name: _load(name, size, context) for name in (HINTED, "ngram")}
        margin = FUSED_MARGIN if context.is_fused else MARGIN
        suffix = _load("suffix", {"margin": str(margin), **options}, context)
        model = None
        if draft != "off":
            max_share = inf if is_any_size else MAX_SHARE
            model = _load_draft(draft, suffix.is_adaptive, context, max_share)
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
        return RoutedDrafter(spec.method, method, None, lookups, context)
    share = method.needs.weight_bytes / max(getattr(context.target, "weight_bytes", 0), 1)
    # Who names a network on a CPU gets all its levels, unless `adaptive=true` says otherwise.
    is_adaptive = "adaptive" in spec.options and getattr(method, "is_adaptive", False)
    network = NetworkDrafts(method, context, share=min(share, 1.0), is_adaptive=is_adaptive)
    return RoutedDrafter(spec.method, None, network, lookups, context)


def _load_draft(
    path: str, is_adaptive: bool, context: DrafterContext, max_share: float
) -> NetworkDrafts | None:
    """The draft model, unless every node of it would cost too much of a pass to pay. Files of a
    head are drafted with as their kind is."""
    kind = detect(path)
    if kind != DRAFT:
        head: Drafter = resolve(DRAFTERS, kind)({}, path, context)
        share = head.needs.weight_bytes / max(getattr(context.target, "weight_bytes", 0), 1)
        return NetworkDrafts(head, context, share=min(share, 1.0), is_adaptive=is_adaptive)
    share = byte_share(open_weights(path), context.target)
    if share > max_share:
        say = log.info if comes_with_hunch(path) else log.warning
        say(
            "auto: a node of the draft model reads %.0f%% of what the target reads, more than "
            "%.0f%%: it could not pay and is not loaded (speculate='draft:PATH' drafts with it "
            "all the same)",
            100 * share,
            100 * max_share,
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


# --- on a device ----------------------------------------------------------------------------------


class DeviceAuto(DeviceDrafter):
    """Lookup and a draft model on a device, in one step: a long match outbids the model.

    The cheaper source of its steps is the lookup alone. In the others the draft model guesses for
    every row, a chain or a small tree, and rows whose end stood in their text before, for `SURE`
    tokens or more, take what followed. Tokens that were accepted from a lookup have no KV of the
    model's, so each step processes anew as many tokens as it could have committed.
    """

    def __init__(self, matches: DeviceLookup, model: DeviceDraft) -> None:
        super().__init__(
            name="auto",
            num_levels=model.num_levels,
            num_nodes=max(matches.num_nodes, model.num_nodes),
            margin=matches.margin,
        )
        self.matches, self.model = matches, model
        self.tree = replace(model, width=TREE_WIDTH)

    @property
    def network(self) -> DeviceDraft:
        return self.model

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(n, DraftSource.CHAIN) for n in CHAIN_NODES if n <= self.num_nodes]
        size = self.tree.num_nodes
        has_trees = size <= self.num_nodes and not self.model.only_chains
        trees = [StepShape(size, DraftSource.TREE)] if has_trees else []
        return (*self.matches.shapes, *chains, *trees)

    def depth(self, source: int) -> int:
        """A lookup's chain may be checked as a tree, as deep as it has nodes."""
        return self.tree.num_nodes if source == DraftSource.TREE else 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        from hunch.kernels.gpu_lookup import lookup

        at = self.matches
        if not source:
            at.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        if source == DraftSource.TREE:
            self.tree.grow(state, step, kind, self.tree.num_levels, num_tokens)
        else:
            num_levels = levels_after(num_tokens, self.num_levels)
            self.model.grow(state, step, kind, num_levels, num_tokens)
        lookup(state, step, self.num_nodes, at.min_match, at.max_match, SURE)

    def works(self, source: int) -> bool:
        return True

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def can_follow(self, rows: Rows) -> bool:
        return self.model.can_follow(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        is_looked_up = not source or matched >= SURE
        return self.matches.name if is_looked_up else self.model.name

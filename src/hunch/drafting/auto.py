"""Auto: draft where it pays on this machine, for this text, now; otherwise decode plainly.

It plans over the methods that need no weights and, where there is one that could pay, a draft
model. A request that says what it expects is drafted from that while the answer keeps to it;
everything else by suffix lookup, whose guesses are compared with what the target chooses even while
none are sent, so that it falls silent on text it cannot guess and comes back when it can, and
neither costs the target a row; or by the draft model, where that promises more. A request may name
one method.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from hunch.config import SpecConfig
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, Drafter, DrafterContext, WorksOnDevice
from hunch.drafting.beside import DraftBeside
from hunch.drafting.device_auto import DeviceAuto
from hunch.drafting.draft_model import DeviceDraft
from hunch.drafting.lookup import DeviceLookup, LookupDrafter
from hunch.drafting.planner import HINTED, Planner, Route, merge
from hunch.drafting.trees import Node, to_draft
from hunch.drafting.watch import comes_with_hunch
from hunch.models.heads.draft_model import MAX_SHARE, byte_share
from hunch.models.weights import open_weights
from hunch.registry import DRAFTERS, resolve

log = logging.getLogger("hunch")

# Gains below this drown in the noise of the measured costs; a GPU's steps are timed by its clock.
MARGIN, FUSED_MARGIN = 0.03, 0.01
DRAFT = "draft"  # the option that names a draft model's files, and the method it is loaded as


class AutoDrafter(Planner):
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
        super().__init__("suffix", suffix, lookups, context.cost, context.device)
        sizes = {"auto": suffix.needs.max_nodes, **self.needs.methods}
        self.model = None if draft == "off" else _load_beside(draft, suffix.is_adaptive, context)
        if self.model is None:
            self.needs = replace(self.needs, methods=sizes)
            return
        needs = self.model.method.needs
        sizes |= {DRAFT: needs.max_nodes, "auto": max(sizes["auto"], needs.max_nodes)}
        self.needs = replace(needs, max_nodes=max(sizes.values()), methods=sizes)

    def observe(self, step: TargetStep) -> None:
        super().observe(step)
        if self.model is not None:
            self.model.observe(step)

    def forget(self, rows: list[int]) -> None:
        super().forget(rows)
        if self.model is not None:
            self.model.forget(rows)

    def _route(self, rows: Rows, row: int) -> Route:
        route = super()._route(rows, row)
        request = rows.requests[row] if rows.requests else None
        mode = "default" if request is None else request.params.speculation.mode
        if self.model is None or mode in ("default", "auto"):
            return route
        return replace(route, wants_model=mode == DRAFT)

    def propose(self, rows: Rows) -> Draft:
        if self.model is None:
            return super().propose(rows)
        ids: list[int] = rows.ids_R.tolist()
        chosen = [self._choose(row) for row in ids]
        names, trees = [name for name, _ in chosen], [tree or [] for _, tree in chosen]
        max_draft_X = rows.max_draft_X.tolist()
        limits = [max_draft_X[row] for row in ids]
        counts = self._counts(names, trees, limits)
        wishes = [self._routes[row].wants_model for row in ids]
        may = [0 if wish is False else n for wish, n in zip(wishes, limits, strict=True)]
        others = [
            (0, 0.0) if wish else (count, sum(node.chance for node in tree[:count]))
            for wish, tree, count in zip(wishes, trees, counts, strict=True)
        ]
        places, num_levels = self.model.plan(rows, ids, may, others)
        must = [place for place, wish in enumerate(wishes) if wish and limits[place]]
        if must:
            places = sorted({*places, *must})
            num_levels = num_levels or self.model.num_levels
        for place in must:
            counts[place] = 0
        if not places:
            draft = to_draft(trees, counts, self.device)
        else:
            draft = self._with_model(rows, places, num_levels, trees, counts)
        draft.methods = [DRAFT if p in places else name for p, name in enumerate(names)]
        return draft

    def _with_model(
        self,
        rows: Rows,
        places: list[int],
        num_levels: int,
        trees: list[list[Node]],
        counts: list[int],
    ) -> Draft:
        assert self.model is not None
        drafted = self.model.propose(rows, places, num_levels)
        rest = [place for place in range(len(trees)) if place not in places]
        if not rest:
            return drafted
        found = to_draft([trees[p] for p in rest], [counts[p] for p in rest], self.device)
        return merge(len(trees), ((rest, found), (places, drafted)))

    def on_device(self) -> DeviceDrafter | None:
        """There the lookup drafts, and the draft model beside it."""
        matches = super().on_device()
        method = None if self.model is None else self.model.method
        network = method.on_device() if isinstance(method, WorksOnDevice) else None
        if matches is None or network is None:
            return matches
        assert isinstance(matches, DeviceLookup)
        assert isinstance(network, DeviceDraft)
        return DeviceAuto(matches, network)


def load_drafter(spec: SpecConfig, context: DrafterContext) -> Drafter:
    """The method a config names; predictions stand beside it where drafting needs the host."""
    method: Drafter = resolve(DRAFTERS, spec.method)(spec.options, spec.path, context)
    if method.needs.is_graphable or method.needs.methods or spec.method == HINTED:
        return method
    lookups = {HINTED: _load(HINTED, {}, context)}
    return Planner(spec.method, method, lookups, context.cost, context.device)


def _load_beside(path: str, is_adaptive: bool, context: DrafterContext) -> DraftBeside | None:
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
    return DraftBeside(
        model, context.cost, share=share, num_rows=context.max_rows, is_adaptive=is_adaptive
    )


def _load(name: str, options: Mapping[str, str], context: DrafterContext) -> LookupDrafter:
    lookup: LookupDrafter = resolve(DRAFTERS, name)(options, None, context)
    return lookup

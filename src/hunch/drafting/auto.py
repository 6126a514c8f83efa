"""`auto`, and the method that a config names, with what belongs beside it."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf

from hunch.config import MERGE, SpecConfig
from hunch.drafting.auto_device import (
    MAX_NODES,
    OF_SUCCESSORS,
)
from hunch.drafting.base import (
    PREDICTION,
    Drafter,
    DrafterContext,
    GrowsLevels,
    Options,
    comes_with_hunch,
)
from hunch.drafting.host_network import NetworkDrafts
from hunch.drafting.lookup import LookupDrafter
from hunch.drafting.preparing import METHODS as BESIDE
from hunch.drafting.preparing import load_beside
from hunch.drafting.recycling import RecyclingDrafter
from hunch.drafting.routed import RoutedDrafter
from hunch.drafting.suffix import SuffixDrafter
from hunch.kernels.successor_entries import Entries, mixed
from hunch.models.heads.draft_model import MAX_SHARE, byte_share
from hunch.models.heads.files import detect
from hunch.models.weights import open_weights
from hunch.registry import DRAFTERS, resolve

log = logging.getLogger("hunch")

# Smaller gains are less than the noise of measured costs; a GPU's steps are timed by its clock.
MARGIN, FUSED_MARGIN = 0.03, 0.01
SIZES = {"num_nodes": "15", "depth": "4"}  # of its trees on a CPU
DRAFT = "draft"  # the option that names a network's files, and the method of a draft model


class AutoDrafter(RoutedDrafter):
    """Lookups, and a network where it pays; without one, captured steps use recycling too.

    Its options are those of `suffix`, and `draft`.
    """

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        options = dict(options)
        draft = options.pop(DRAFT, "off")
        # A draft model that was measured with this target is taken whatever its size.
        is_any_size = options.pop("any_size", "").lower() in ("true", "1", "yes", "on")
        shared = {key: value for key, value in options.items() if key in ("num_nodes", "adaptive")}
        lookups = {name: _load(name, shared, context) for name in (PREDICTION, "ngram")}
        margin = FUSED_MARGIN if context.is_fused else MARGIN
        suffix = _load("suffix", {"margin": str(margin), **options}, context)
        model = None
        if draft != "off":
            max_share = inf if is_any_size else MAX_SHARE
            context.has_policy &= suffix.is_adaptive
            model = _load_network(draft, suffix.is_adaptive, context, max_share)
        super().__init__("suffix", suffix, model, lookups, context)
        sizes = {"auto": suffix.needs.max_nodes, **self.needs.methods}
        needs = self.needs
        room = sizes["auto"] if "num_nodes" in options else OF_SUCCESSORS[-1].num_nodes
        if model is None and _can_recycle(suffix, room, context):
            entries = _successors(options, suffix, context)
            if context.is_fused or entries is not None:
                learns = context.is_fused
                self.recycling = RecyclingDrafter(SIZES, None, context, entries, learns=learns)
                sizes["auto"] = max(sizes["auto"], room)
        if model is not None:
            needs = model.method.needs
            most = max(sizes["auto"], needs.max_nodes)
            if context.is_fused and "num_nodes" not in options:
                most = max(most, MAX_NODES)
            sizes |= {model.name: needs.max_nodes, "auto": most}
        self.needs = replace(needs, max_nodes=max(sizes.values()), methods=sizes)


def _can_recycle(lookup: LookupDrafter, room: int, context: DrafterContext) -> bool:
    """Whether trees of recycling may be checked beside the lookup's guesses."""
    has_trees = not context.only_chains and not lookup.is_alone_on_device
    return has_trees and lookup.is_adaptive and room >= OF_SUCCESSORS[0].num_nodes


def _successors(options: Options, lookup: LookupDrafter, context: DrafterContext) -> Entries | None:
    """What follows tokens in the target's answers, if they were counted, and in common texts.

    On a CPU, beside a phrase table alone, common texts bring less than checking them costs.
    """
    table = lookup.own_table if isinstance(lookup, SuffixDrafter) else None
    if options.get("phrases") == "off":
        return None
    if table is not None and table.successors is not None:
        return mixed(table.successors, context.common_successors())
    if table is not None and not context.is_fused:
        return None
    common = context.common_successors()
    return common if len(common) else None


def load_drafter(spec: SpecConfig, context: DrafterContext) -> Drafter:
    """The method that a config names, with predictions beside it where the host drafts."""
    # With a verifier that uses q, text depends on how much is drafted, so that must not depend on
    # measured times, which differ from run to run.
    context.has_policy = context.cost.is_measured and spec.method != MERGE and not context.wants_q
    method = _build(spec.method, spec.options, spec.path, context)
    if not method.needs.max_nodes or method.needs.methods or spec.method == PREDICTION:
        return method
    lookups = {PREDICTION: _load(PREDICTION, {}, context)}
    if isinstance(method, LookupDrafter):
        return RoutedDrafter(spec.method, method, None, lookups, context)
    return RoutedDrafter(
        spec.method, None, _network_drafts(spec.method, method, context), lookups, context
    )


def _build(name: str, options: Options, path: str | None, context: DrafterContext) -> Drafter:
    """A method; with files, on the device that was named for them."""
    if context.draft_device is not None and path is not None and name != MERGE:
        return load_beside(name, options, path, context)
    method: Drafter = resolve(DRAFTERS, name)(options, path, context)
    return method


def _network_drafts(
    name: str, method: Drafter, context: DrafterContext, *, is_adaptive: bool = True
) -> NetworkDrafts:
    share = method.needs.weight_bytes / max(context.target.weight_bytes, 1)
    share = min(share, MAX_SHARE)  # else it would never be used, and so never be timed
    is_adaptive &= isinstance(method, GrowsLevels) and method.is_adaptive and not context.wants_q
    return NetworkDrafts(name, method, context, share=share, is_adaptive=is_adaptive)


def _load_network(
    path: str, is_adaptive: bool, context: DrafterContext, max_share: float
) -> NetworkDrafts | None:
    """The network of these files; None: a draft model that costs too much to ever pay."""
    name = detect(path)
    if name == DRAFT:
        share = byte_share(open_weights(path), context.target)
        if share > max_share:
            say = log.info if comes_with_hunch(path) else log.warning
            say(
                "auto: a node of the draft model reads %.0f%% of what the target reads, more than "
                "%.0f%%: it could not pay and is not loaded (speculate='draft:PATH' loads it all "
                "the same)",
                100 * share,
                100 * max_share,
            )
            return None
    if context.draft_device is not None and name not in BESIDE:
        log.warning("speculative_device has no effect: %s reads what the target computes", name)
        context.draft_device = None
    method = _build(name, {}, path, context)
    return _network_drafts(name, method, context, is_adaptive=is_adaptive)


def _load(name: str, options: Options, context: DrafterContext) -> LookupDrafter:
    lookup: LookupDrafter = resolve(DRAFTERS, name)(options, None, context)
    return lookup

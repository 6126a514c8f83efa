"""Several drafters, one tree: `suffix+draft:PATH` merges what its parts would draft.

After SpecInfer (arXiv 2305.09781): every part drafts as it would alone, equal nodes after the same
path become one, and the likeliest nodes are checked. A lookup knows how likely its guesses are; for
other parts that is learned, level by level. Where parts agree, the guess is wrong only if both are;
where they differ, only one can be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hunch.config import SpecConfig, read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.acceptance import host_estimate
from hunch.drafting.base import (
    Clears,
    DeviceDrafter,
    Drafter,
    DrafterContext,
    Options,
    form_on_device,
)
from hunch.drafting.draft_model import DeviceDraftModel
from hunch.drafting.host_network import ProposedDraft, ProposedDrafts
from hunch.drafting.lookup import DeviceLookup, LookupDrafter
from hunch.drafting.options import at_least_one
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.drafting.trees import Node, draft_of, likeliest, nodes_of
from hunch.drafting.with_lookups import DeviceWithLookups, TreeSize
from hunch.errors import ConfigError
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden
from hunch.registry import DRAFTERS, resolve

DEFAULT = "suffix+recycling"
NOT_PARTS = ("auto", "merge", "off", "synthetic")
SIBLING = 0.4  # a network's next best child is assumed to have this share of the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """Options of `merge`, which `A+B` stands for."""

    parts: str = DEFAULT  # NAME[:PATH][:KEY=VALUE]... with + between
    num_nodes: int | None = None  # most nodes checked; None: all that the parts draft
    adaptive: bool = False  # fewer where their chance does not pay for checking them

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", method="merge")


class Part:
    """One of several drafters, whose nodes get chances."""

    def __init__(self, name: str, method: Drafter, num_rows: int) -> None:
        self.name, self.method = name, method
        self.depth = method.needs.max_nodes
        self.estimate = host_estimate(num_rows, self.depth)
        self._drafts = ProposedDrafts(self.estimate)

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)
        if not isinstance(self.method, LookupDrafter):  # a lookup learns by itself
            self._drafts.compare(step.rows)

    def trees(self, rows: Rows) -> list[list[Node]]:
        """The part's tree for each row, parents before children."""
        ids, max_draft_X = rows.ids_R.tolist(), rows.max_draft_X.tolist()
        if isinstance(self.method, LookupDrafter):
            return [self.method.look(row) if max_draft_X[row] else [] for row in ids]
        limited = replace(rows, max_draft_X=rows.max_draft_X.clamp(max=self.depth))
        draft = self.method.propose(limited)
        known_X, found = rows.known_X.tolist(), []
        for row, nodes in zip(ids, nodes_of(draft), strict=True):
            proposed = ProposedDraft(known_X[row], *nodes)
            if proposed.tokens:
                self._drafts.add(row, proposed)
            found.append(self._with_chances(row, proposed))
        return found

    def _with_chances(self, row: int, proposed: ProposedDraft) -> list[Node]:
        if not proposed.tokens:
            return []
        (gains,) = self.estimate.gains([row], tuple(range(1, self.depth + 1)))
        reached = [1.0, *(b - a for a, b in zip((0.0, *gains), gains, strict=False))]
        nodes: list[Node] = []
        depths: list[int] = []
        ranks: dict[int, int] = {}  # children so far, by parent
        for token, parent in zip(proposed.tokens, proposed.parents, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            own = reached[depth + 1] / max(reached[depth], 1e-6)
            if rank:
                own = (1.0 - own) * SIBLING**rank
            nodes.append(Node(token, parent, own * (nodes[parent].chance if parent >= 0 else 1.0)))
            depths.append(depth)
        return nodes

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)
        self._drafts.forget(rows)


class _Graft:
    """A node of the merged tree while it is built."""

    __slots__ = ("chance", "children", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.chance = 0.0  # given its parent
        self.children: dict[int, _Graft] = {}


def graft(trees: Sequence[Sequence[Node]]) -> list[Node]:
    """Merge trees over the same text into one, likeliest nodes first."""
    root = _Graft(-1)
    for tree in trees:
        places: list[_Graft] = []
        for node in tree:
            parent = places[node.parent] if node.parent >= 0 else root
            before = tree[node.parent].chance if node.parent >= 0 else 1.0
            own = min(node.chance / before, 1.0) if before > 0 else 0.0
            found = parent.children.setdefault(node.token, _Graft(node.token))
            found.chance = 1.0 - (1.0 - found.chance) * (1.0 - own)
            places.append(found)
    nodes: list[Node] = []
    waiting: list[tuple[_Graft, int, float]] = [(root, -1, 1.0)]
    while waiting:
        place, number, chance = waiting.pop()
        children = place.children.values()
        most = max(sum(child.chance for child in children), 1.0)  # at most one of them is right
        for child in children:
            own = chance * child.chance / most
            waiting.append((child, len(nodes), own))
            nodes.append(Node(child.token, number, own))
    return likeliest(nodes, len(nodes))


class MergeDrafter:
    """Merges the drafts of its parts into one tree."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.config = read_options(MergeConfig, options, "merge")
        self.context = context
        self.parts = [
            _load(spec, context) for spec in SpecConfig(options={"parts": self.config.parts}).parts
        ]
        needs = [part.method.needs for part in self.parts]
        size = self.config.num_nodes or sum(one.max_nodes for one in needs)
        self.needs = _together(needs, [part.name for part in self.parts], size)

    def observe(self, step: TargetStep) -> None:
        for part in self.parts:
            part.observe(step)

    def propose(self, rows: Rows) -> Draft:
        ids, max_draft_X = rows.ids_R.tolist(), rows.max_draft_X.tolist()
        each = [part.trees(rows) for part in self.parts]
        trees = [graft(some) for some in zip(*each, strict=True)]
        limits = [min(max_draft_X[row], self.needs.max_nodes) for row in ids]
        return draft_of(trees, limits, self.context, is_adaptive=self.config.adaptive)

    def forget(self, rows: list[int]) -> None:
        for part in self.parts:
            part.forget(rows)

    def on_device(self) -> DeviceDrafter | None:
        """The device form of a lookup's chain and one drafter more; the host merges other parts."""
        if len(self.parts) != 2 or self.context.only_chains:
            return None
        forms = [_on_device(part) for part in self.parts]
        lookups = [one for one in forms if isinstance(one, DeviceLookup)]
        others = [one for one in forms if one is not None and one.num_levels]
        if not lookups or not others:
            return None
        size, is_adaptive = self.needs.max_nodes, self.config.adaptive
        if others[0].level_size >= size:  # there is no room for a guess beside it
            return None
        return DeviceMerge(lookups[0], others[0], size, is_adaptive=is_adaptive)

    def clear(self) -> None:
        for part in self.parts:
            if isinstance(part.method, Clears):
                part.method.clear()


def _on_device(part: Part) -> DeviceDrafter | None:
    if isinstance(part.method, LookupDrafter) and part.method.is_alone_on_device:
        return None
    return form_on_device(part.method)


def _load(spec: SpecConfig, context: DrafterContext) -> Part:
    if spec.method in NOT_PARTS:
        raise ConfigError(f"{spec.method!r} cannot be a part of several drafters; name others")
    method: Drafter = resolve(DRAFTERS, spec.method)(spec.options, spec.path, context)
    return Part(spec.method, method, context.max_rows)


def _together(needs: Sequence[Needs], names: Sequence[str], size: int) -> Needs:
    """What all parts need together; only one may be a network with KV or states."""
    networks = [one for one in needs if one.kv is not None or one.feature_layers]
    if len(networks) > 1:
        raise ConfigError(
            f"{'+'.join(names)}: only one of several drafters may be a network that keeps KV; "
            "name one such and lookups"
        )
    base = networks[0] if networks else needs[0]
    return replace(
        base,
        max_nodes=size,
        hidden=any(one.hidden for one in needs),
        top=max(one.top for one in needs),
        weight_bytes=sum(one.weight_bytes for one in needs),
    )


# --- on a device ----------------------------------------------------------------------------------


class DeviceMerge(DeviceWithLookups):
    """All that both parts draft is checked.

    If it is adaptive, a step may check less of both, or nothing, whichever promises most. The
    network drafts in every step but those that check nothing.
    """

    def __init__(
        self,
        lookup: DeviceLookup,
        network: DeviceDrafter,
        max_nodes: int,
        *,
        is_adaptive: bool,
    ) -> None:
        whole = within(
            TreeSize(network.level_size, network.num_levels, lookup.num_nodes), max_nodes
        )
        sizes = cuts_of(whole) if is_adaptive else [whole]
        trees = {DraftSource.MERGED: sizes}
        super().__init__("merge", lookup, network, trees, is_adaptive=is_adaptive)
        self.num_nodes = whole.num_nodes  # parts may draft more alone, for which there is no room
        self.networks = {
            size: replace(
                network,
                num_levels=size.num_levels,
                tree_nodes=min(network.tree_nodes, size.num_grown),
            )
            for size in sizes
        }
        self.network = self.networks[whole]

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return (StepShape(0), *self.tree_shapes) if self.is_adaptive else self.tree_shapes

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        if source <= 0:
            if self.network.writes_kv(source):  # a head follows every step
                self.network.draft(state, step, hidden, source)
            self.lookup.look(state, step, self.num_nodes)
            return
        network = self.networks[self.tree_of(source, step.num_nodes)]
        if isinstance(network, DeviceDraftModel):
            network.grow(state, step, network.num_levels, self.num_again(step))
        else:
            network.draft(state, step, hidden, source)
        self.add_guesses(state, step, source)


def within(size: TreeSize, max_nodes: int) -> TreeSize:
    """The tree cut to `max_nodes` nodes: half of them for the network, as far as it drafts."""
    if size.num_nodes <= max_nodes:
        return size
    num_levels = max(1, min(size.num_levels, max_nodes // 2 // size.level_size))
    num_beside = min(size.num_beside, max_nodes - num_levels * size.level_size)
    num_levels = min(size.num_levels, (max_nodes - num_beside) // size.level_size)
    return TreeSize(size.level_size, num_levels, num_beside)


def cuts_of(size: TreeSize) -> list[TreeSize]:
    """The tree, the same with a quarter of the lookup's guesses, and half of the levels of that."""
    few = -(-size.num_beside // 4)
    levels = size.num_levels, -(-size.num_levels // 2)
    sizes = {size, *(TreeSize(size.level_size, num_levels, few) for num_levels in levels)}
    return sorted(sizes, key=lambda one: one.num_nodes)

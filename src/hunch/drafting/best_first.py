"""Best-first trees of networks that guess all levels at once, or nearly so: blocks, Medusa, MLPs.

`BestFirst` grows them on the host, `grow_on_device` within a captured step; `kernels/best_first.py`
says which nodes a tree has.

Shape letters: R rows of this step, M packed nodes, C columns of logits, B children of a node; on a
device T packed nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.token_chooser import Array, Feed, TokenChooser
from hunch.drafting.tree_shape import Level, TreeShape
from hunch.drafting.trees import Node, draft_of, likeliest
from hunch.kernels.best_first import Growth, nodes_grown, trusted
from hunch.kernels.step import RowState, StepRows

if TYPE_CHECKING:
    from hunch.kernels.gpu_grow import RowSampling  # needs Triton, which a CPU may not have

# Log-odds that the best guesses at a depth are right: by row, after these tokens; None: unknown.
Odds = Callable[[Array, int, Array], Tensor | None]
# Logits and such log-odds of a level on a device, after these tokens. The last argument is the
# place of each one's parent among the tokens of the level before.
DeviceLevel = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class BestFirst:
    """The likeliest paths of each row, on the host.

    The tree grows level by level. A child is never likelier than its parent, so a node that is not
    among the best so far is dropped with all that would follow it. With a confidence head, the best
    guess of a place has the chance that the head gives it, and its siblings share the rest.
    """

    def __init__(
        self,
        context: DrafterContext,
        chooser: TokenChooser,
        limit_R: Array,
        shape: TreeShape,
        *,
        most: int | None = None,  # nodes of a level that get children; None: all that need it
        odds: Odds | None = None,
        is_adaptive: bool = False,
    ) -> None:
        self.context, self.chooser, self.shape, self.odds = context, chooser, shape, odds
        self.most, self.is_adaptive = most, is_adaptive
        self.limits = np.minimum(limit_R, shape.num_nodes).tolist()
        self.trees: list[list[Node]] = [[] for _ in self.limits]

    def grow(self, logits_MC: Tensor, feed: Feed, token_M: Array) -> Draft:
        """A draft per row from the first level's logits; `token_M`: the rows' last tokens."""
        shape = self.shape
        branch = min(shape.branch, logits_MC.shape[1])
        grown = nodes_grown(shape.num_nodes, shape.depth, branch, self.most)
        place_M = np.arange(len(self.limits))
        parent_M = np.full(len(place_M), -1)  # in the row's tree
        chance_M = np.ones(len(place_M))
        for depth in range(shape.depth):
            token_MB, gain_MB = self.chooser.best(logits_MC, place_M, depth, branch)
            chance_MB = chance_M[:, None] * np.exp(self._trusted(gain_MB, place_M, depth, token_M))
            added = self._add(place_M, parent_M, token_MB, chance_MB)
            fed = [] if depth + 1 == shape.depth else self._fed(added, grown[depth])
            if not fed:
                break
            place_M, at_M, which_M, parent_M = (np.array(cells) for cells in zip(*fed, strict=True))
            token_M, chance_M = token_MB[at_M, which_M], chance_MB[at_M, which_M]
            path_MP = np.zeros((len(fed), depth + 1), dtype=np.int64)  # nodes have no slots
            logits_MC = feed(Level(place_M, token_M, at_M, path_MP))
        return self._select()

    def _trusted(self, gain_MB: Array, place_M: Array, depth: int, token_M: Array) -> Array:
        """Logs of children's chances; of greedy rows by the confidence head, if there is one."""
        odds_M = None if self.odds is None else self.odds(place_M, depth, token_M)
        if odds_M is None:
            return gain_MB
        is_greedy = self.chooser.sampling.is_greedy
        is_greedy_M = np.array([is_greedy(row) for row in self.chooser.ids_R[place_M].tolist()])
        told_MB = trusted(torch.from_numpy(gain_MB), odds_M.double().cpu()).numpy()
        return np.where(is_greedy_M[:, None], told_MB, gain_MB)

    def _add(
        self, place_M: Array, parent_M: Array, token_MB: Array, chance_MB: Array
    ) -> list[list[tuple[int, int, int]]]:
        """Add the children; returns those of each row: node, child, number in the tree."""
        added: list[list[tuple[int, int, int]]] = [[] for _ in self.trees]
        least = self.shape.min_confidence
        for at, (place, parent) in enumerate(zip(place_M.tolist(), parent_M.tolist(), strict=True)):
            tree = self.trees[place]
            for which, chance in enumerate(chance_MB[at].tolist()):
                if chance > least:
                    added[place].append((at, which, len(tree)))
                    tree.append(Node(int(token_MB[at, which]), parent, chance))
        return added

    def _fed(
        self, added: list[list[tuple[int, int, int]]], most: int
    ) -> list[tuple[int, int, int, int]]:
        """Those that get children, the likeliest first, with the row's place before them."""
        fed: list[tuple[int, int, int, int]] = []
        for place, (some, tree) in enumerate(zip(added, self.trees, strict=True)):
            limit, edge = self.limits[place], 0.0
            if len(tree) > limit:  # the chance of the least likely node that would be kept now
                chances = sorted((node.chance for node in tree), reverse=True)
                edge = chances[limit - 1] if limit else 1.0
            some = [one for one in some if tree[one[2]].chance >= edge]
            some.sort(key=lambda one: -tree[one[2]].chance)
            fed += [(place, *one) for one in some[:most]]
        return fed

    def _select(self) -> Draft:
        trees = [
            likeliest(tree, limit) for tree, limit in zip(self.trees, self.limits, strict=True)
        ]
        return draft_of(trees, self.limits, self.context, is_adaptive=self.is_adaptive)


def grow_on_device(
    drafter: DeviceDrafter,
    state: RowState,
    step: StepRows,
    level: DeviceLevel,
    token_R: Tensor,
    sampling: RowSampling,
    *,
    ids_C: Tensor | None,
) -> None:
    """Write each row's tree: as many nodes as the step checked, or all if it checked none."""
    from hunch.kernels.gpu_best_first import extend

    size = min(step.num_nodes or drafter.tree_nodes, drafter.tree_nodes)
    num_levels = min(drafter.num_levels, size)
    growth = Growth.begin(step.ids_R, size, num_levels, drafter.branch, drafter.width)
    token_T, up_T = token_R, None
    for depth in range(num_levels):
        logits_TC, odds_T = level(depth, token_T, up_T)
        found = extend(
            state, step, growth, logits_TC, sampling, depth=depth, ids_C=ids_C, odds_T=odds_T,
            least=drafter.least,
        )  # fmt: skip
        if found is not None:
            token_T, up_T = found

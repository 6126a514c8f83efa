"""Medusa: heads that each guess one further token from the same hidden state.

Shape letters: R rows of this step, D width, C columns, N nodes.
Paper: arXiv 2401.10774. Heads do not see each other's tokens, so trees of their best guesses gain
more here than elsewhere: tree=static has the paper's fixed shape, tree=dynamic takes the likeliest
nodes of each step, best first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft
from hunch.drafting.base import DrafterContext, Options
from hunch.drafting.last_state import Guesses, LastStateDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.drafting.token_chooser import Array, Feed, TokenChooser
from hunch.drafting.tree_shape import Level
from hunch.drafting.trees import by_rank
from hunch.errors import ConfigError
from hunch.kernels.best_first import RankedLevel
from hunch.models.heads.medusa import MedusaNet, load_medusa

# How often the token of each rank is the target's, averaged over the published heads: by this the
# shape of a fixed tree is chosen.
RANK_SHARES = (0.55, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01)
DEPTH_DECAY = 0.75  # ratio of these from one head to the next


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions(GrowOptions):
    """medusa:PATH[:KEY=VALUE]..."""

    choices: str = ""  # of a static tree: ranks joined by dots, nodes by slashes ("0/1/0.0")


class MedusaDrafter(LastStateDrafter):
    """As many tokens ahead as there are heads."""

    name = "medusa"
    net: MedusaNet

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.net, ids_C = load_medusa(need_path("medusa", path), context.target)
        given, num_heads = read_options(MedusaOptions, options, "medusa"), len(self.net.heads)
        if given.choices and (given.tree != "static" or given.num_nodes or given.depth):
            raise ConfigError("medusa: choices are a whole tree; give them with tree=static alone")
        self.static: StaticTree | None = None
        if given.tree == "static":
            given.check(("static",))
            self.static = tree = _static_tree(given, num_heads)
            super().__init__(given, context, ids_C, None, (tree.depth, len(tree.parent_N)))
            return
        trees = ("chain", "dynamic", "fixed", "static")
        shape = given.shape(context, default=num_heads, max_depth=num_heads, trees=trees)
        if shape.is_dynamic and given.width is None:  # a node more with children costs no pass
            shape = replace(shape, width=shape.num_nodes)
        super().__init__(given, context, ids_C, shape)

    def start(self, state_RD: Tensor, token_R: Tensor) -> tuple[Tensor, Feed]:
        def feed(level: Level) -> Tensor:
            logits_RC = self.net.logits(level.path_MP.shape[1], state_RD)
            return logits_RC[torch.from_numpy(level.place_M).to(logits_RC.device)]

        return self.net.logits(0, state_RD), feed

    def guesses(self, state_RD: Tensor, token_R: Tensor) -> Guesses:
        for head in range(self.depth):
            yield self.net.logits(head, state_RD)

    def ranked(self) -> tuple[RankedLevel, ...]:
        return () if self.static is None else self.static.levels(self.context.device)

    def draft(
        self, state_RD: Tensor, token_R: Tensor, chooser: TokenChooser, limit_R: Array
    ) -> Draft:
        tree = self.static
        if tree is None:
            return super().draft(state_RD, token_R, chooser, limit_R)
        place_R = np.arange(len(limit_R))
        best = [
            chooser.best(self.net.logits(depth, state_RD), place_R, depth, tree.width[depth])[0]
            for depth in range(tree.depth)
        ]
        nodes = zip(tree.depth_N.tolist(), tree.rank_N.tolist(), strict=True)
        tokens_RN = np.stack([best[depth][:, rank] for depth, rank in nodes], axis=1)
        return tree.fill(tokens_RN, limit_R)


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree of one shape: node n is the rank_N[n]-th best token at depth_N[n], its parent is
    parent_N[n]."""

    rank_N: Array
    depth_N: Array
    parent_N: Array
    width: tuple[int, ...]  # ranks in use, per depth

    @property
    def depth(self) -> int:
        return len(self.width)

    def levels(self, device: torch.device) -> tuple[RankedLevel, ...]:
        """The same level by level: nodes stand in order of depth."""
        found = []
        for depth, num_ranks in enumerate(self.width):
            here = np.flatnonzero(self.depth_N == depth)
            columns = (self.rank_N[here], self.parent_N[here])
            rank_N, parent_N = (torch.from_numpy(column).to(device) for column in columns)
            found.append(RankedLevel(depth, int(here[0]), rank_N, parent_N, num_ranks))
        return tuple(found)

    def fill(self, tokens_RN: Array, limit_R: Array) -> Draft:
        """The tree with these tokens; a row with a lower limit gets its first nodes."""
        num_rows, num_nodes = tokens_RN.shape
        return Draft(
            torch.from_numpy(np.ascontiguousarray(tokens_RN)),
            torch.from_numpy(np.broadcast_to(self.parent_N, (num_rows, num_nodes)).copy()),
            torch.from_numpy(np.minimum(limit_R, num_nodes)),
        )


def _static_tree(given: MedusaOptions, num_heads: int) -> StaticTree:
    if given.choices:
        return parse_choices(given.choices, max_depth=num_heads)
    depth = min(given.depth or num_heads, num_heads)
    paths: list[tuple[int, ...]] = []
    for node in by_rank(RANK_SHARES, DEPTH_DECAY, depth, given.num_nodes or 32):
        before = paths[node.parent] if node.parent >= 0 else ()
        paths.append((*before, node.token))
    return from_paths(paths)


def from_paths(paths: Iterable[Sequence[int]]) -> StaticTree:
    """A tree from the ranks on the path to each node; every prefix must be a node too."""
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    index = {path: number for number, path in enumerate(ordered)}
    for path in ordered:
        if len(path) > 1 and path[:-1] not in index:
            missing = ".".join(map(str, path[:-1]))
            raise ConfigError(f"choices: node {'.'.join(map(str, path))} needs node {missing}")
    depth = max(map(len, ordered))
    width = [0] * depth
    for path in ordered:
        width[len(path) - 1] = max(width[len(path) - 1], path[-1] + 1)
    return StaticTree(
        np.array([path[-1] for path in ordered]),
        np.array([len(path) - 1 for path in ordered]),
        np.array([index[path[:-1]] if len(path) > 1 else -1 for path in ordered]),
        tuple(width),
    )


def parse_choices(text: str, max_depth: int) -> StaticTree:
    """'0/1/0.0': the best and second token, then the best one after the best."""
    try:
        paths = [tuple(int(rank) for rank in node.split(".")) for node in text.split("/")]
    except ValueError:
        raise ConfigError(
            f"choices={text!r} must be ranks joined by dots, nodes by slashes, as in 0/1/0.0"
        ) from None
    if any(rank < 0 for path in paths for rank in path):
        raise ConfigError(f"choices={text!r}: ranks count from 0")
    longest = max(map(len, paths))
    if longest > max_depth:
        raise ConfigError(f"choices={text!r} goes {longest} deep; there are {max_depth} heads")
    return from_paths(paths)

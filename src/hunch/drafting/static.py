"""Fixed trees: the same shape every step, filled with candidates by rank.

Shape letters: R rows of this step, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hunch.draft import Draft
from hunch.drafting.judge import Array
from hunch.drafting.trees import best_first
from hunch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Node n is the rank_N[n]-th best token at depth_N[n], after node parent_N[n]."""

    rank_N: Array
    depth_N: Array
    parent_N: Array
    width: tuple[int, ...]  # ranks in use, per depth

    @property
    def depth(self) -> int:
        return len(self.width)


def from_paths(paths: Iterable[Sequence[int]]) -> StaticTree:
    """A tree from the ranks on the way to each node; every prefix must be a node too."""
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


def rank_tree(share_DK: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The `num_nodes` likeliest nodes where rank k at depth d is right with share_DK[d][k]."""

    def expand(path: tuple[int, ...]) -> Iterable[tuple[int, float, int, tuple[int, ...]]]:
        if len(path) == len(share_DK):
            return []
        return [(k, share, 0, (*path, k)) for k, share in enumerate(share_DK[len(path)])]

    paths: list[tuple[int, ...]] = []
    root: tuple[int, ...] = ()
    for node in best_first(root, expand, num_nodes):
        before = paths[node.parent] if node.parent >= 0 else ()
        paths.append((*before, node.token))
    return from_paths(paths)


def fill(tree: StaticTree, tokens_RN: Array, limit_R: Array) -> Draft:
    """The tree with these tokens; a row with room for fewer nodes gets its first ones."""
    num_rows, num_nodes = tokens_RN.shape
    return Draft(
        torch.from_numpy(np.ascontiguousarray(tokens_RN)),
        torch.from_numpy(np.broadcast_to(tree.parent_N, (num_rows, num_nodes)).copy()),
        torch.from_numpy(np.minimum(limit_R, num_nodes)),
    )

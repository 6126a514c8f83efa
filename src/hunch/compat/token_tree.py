"""vLLM's `speculative_token_tree`: a tree of one shape, by the ranks on the path to each node."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from hunch.config import say_once
from hunch.errors import ConfigError

NAME = "speculative_token_tree"
Path = tuple[int, ...]


def tree_options(given: Any, method: str, num_tokens: int | None) -> dict[str, str]:
    """The options of a drafter that mean such a tree; the nearest dynamic one, if none does."""
    paths = _paths(given)
    if num_tokens is not None and num_tokens != len(paths):
        raise ConfigError(
            f"num_speculative_tokens={num_tokens}, but {NAME} has {len(paths)} nodes: give "
            "as many, or the tree alone"
        )
    depth, branch = max(map(len, paths)), max(path[-1] for path in paths) + 1
    if len(paths) == depth:
        return {"num_nodes": str(depth)}
    if method == "medusa":
        choices = "/".join(".".join(map(str, path)) for path in paths)
        return {"tree": "static", "choices": choices}
    sizes = Counter(map(len, paths))
    size = {"num_nodes": str(len(paths)), "depth": str(depth), "branch": str(branch)}
    has_one_parent = not any(any(path[:-1]) for path in paths)  # per level: the first node
    if has_one_parent and all(sizes[level] == branch for level in range(1, depth + 1)):
        return {"tree": "fixed", **size}
    parents = Counter(len(parent) for parent in {path[:-1] for path in paths})
    say_once(
        f"{NAME}: {method} drafts {len(paths)} nodes, {depth} deep, in the likeliest shape of "
        "each step; trees of one shape are chains whose every node has as many siblings"
    )
    return {"tree": "dynamic", **size, "width": str(max(parents.values()))}


def _paths(given: Any) -> list[Path]:
    try:
        read = ast.literal_eval(given) if isinstance(given, str) else given
        paths = sorted({tuple(path) for path in read}, key=lambda path: (len(path), path))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        paths = []
    numbers = [rank for path in paths for rank in path]
    if not paths or not all(paths) or any(type(one) is not int or one < 0 for one in numbers):
        raise ConfigError(
            f"{NAME}={str(given)[:100]!r} must be a list of paths such as [(0,), (0, 0), (0, 1)]"
        )
    for path in paths:
        before = (*path[:-1], path[-1] - 1) if path[-1] else path[:-1]
        if before and before not in paths:
            raise ConfigError(f"{NAME}: node {path} needs node {before}")
    return paths

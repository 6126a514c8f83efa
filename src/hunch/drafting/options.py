"""Options of all drafters with a network: how deep, how wide, when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hunch.drafting.base import DrafterContext
from hunch.drafting.tree_shape import TreeShape
from hunch.errors import ConfigError
from hunch.registry import RECIPES

TREES = ("chain", "dynamic", "fixed")
BRANCH = 4  # children considered per node, by default
_WITHOUT_EFFECT = {  # tree -> options that mean nothing to it
    "chain": ("depth", "width", "branch"),
    "fixed": ("width",),
    "static": ("width", "branch", "min_confidence"),
}
LENGTH, MAX_LENGTH = 5, 10  # of chains by default: fixed ones, and the most of adaptive ones


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowOptions:
    """Options of a draft; `num_nodes` is the chain's length, or the tree's size."""

    num_nodes: int | None = None  # None: what the files say, else `default_length` or 32 in a tree
    tree: str = "chain"  # chain; dynamic: the likeliest; fixed: a chain with siblings
    depth: int | None = None  # of a tree
    width: int | None = None  # nodes of a level that get children
    branch: int | None = None  # children considered per node of a tree; None: 4
    min_confidence: float = 0.0  # stop where the path's probability falls below this
    draft_temperature: float | None = None  # of drawn tokens; None: the request's
    window: int | None = None  # positions that the drafter sees; None: its trained context
    adaptive: bool = True  # fewer levels, or none, if they do not pay

    def shape(
        self,
        context: DrafterContext,
        *,
        default: int | None = None,  # levels that the files name
        max_depth: int | None = None,
        trees: tuple[str, ...] = TREES,
    ) -> TreeShape:
        """The shape of these drafts; `max_depth`: the most levels of the network."""
        self.check(trees)
        if (self.num_nodes or 0) > context.max_len:
            raise ConfigError(
                f"num_nodes={self.num_nodes} is more than the engine has room for: its sequences "
                f"are at most {context.max_len} tokens long; give fewer nodes or a larger "
                "max_model_len"
            )
        if self.tree == "chain":
            num_nodes = self.num_nodes or default or self.default_length(context)
            if max_depth is not None and num_nodes > max_depth:
                raise ConfigError(
                    f"num_nodes={num_nodes}: this drafter predicts at most {max_depth} tokens; "
                    f"give num_nodes={max_depth} or less"
                )
            return TreeShape(
                depth=num_nodes, num_nodes=num_nodes, min_confidence=self.min_confidence
            )
        num_nodes = self.num_nodes or 32
        depth = self.depth or min(default or LENGTH, num_nodes)
        if max_depth is not None and depth > max_depth:
            raise ConfigError(
                f"depth={depth}: this drafter predicts at most {max_depth} tokens ahead; give "
                f"depth={max_depth} or less"
            )
        branch = self.branch or BRANCH
        if self.tree == "fixed":
            branch = min(branch, num_nodes)
            depth = self.depth or -(-num_nodes // branch)
            if max_depth is not None:
                depth = min(depth, max_depth)
            return TreeShape(
                depth=depth,
                num_nodes=min(num_nodes, depth * branch),
                branch=branch,
                is_fixed=True,
                min_confidence=self.min_confidence,
            )
        # Nodes with children need a slot, and there are as many slots as nodes.
        most = max(num_nodes // max(depth - 1, 1), 1)
        return TreeShape(
            depth=depth,
            num_nodes=num_nodes,
            width=min(self.width or 8, most),
            branch=branch,
            min_confidence=self.min_confidence,
        )

    def default_length(self, context: DrafterContext) -> int:
        """Length of a chain; if it is adaptive, the longest that ever pays."""
        return MAX_LENGTH if self.adaptive and context.has_policy else LENGTH

    def check(self, trees: tuple[str, ...]) -> None:
        if self.tree not in trees:
            raise ConfigError(f"tree={self.tree!r} must be one of {', '.join(trees)}")
        at_least_one(self, "num_nodes", "depth", "width", "window", "branch")
        for name in _WITHOUT_EFFECT.get(self.tree, ()):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect with tree={self.tree}; "
                    "tree=dynamic has it"
                )
        if self.draft_temperature is not None and not 0 < self.draft_temperature <= 100:
            raise ConfigError(f"draft_temperature={self.draft_temperature} must be above 0")
        if not 0 <= self.min_confidence < 1:
            raise ConfigError(f"min_confidence={self.min_confidence} must be from 0 to below 1")


def at_least_one(options: object, *names: str, method: str = "") -> None:
    """Raise an error if one of these options is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{method and method + ': '}{name}={value} must be 1 or more")


def need_path(method: str, path: str | None) -> str:
    """The path; if there is none, raise an error that says how to get the files."""
    if path is not None:
        return path
    words = f"speculate={method!r} needs files made for this target: {method}:PATH"
    if method == "mtp":
        words += ", often the target's own directory"
    if method in RECIPES:
        words += (
            f". To train them: hunch train {method} --target MODEL --out DIR, then "
            f"give {method}:DIR"
        )
    raise ConfigError(words)


def can_capture(context: DrafterContext, draft_temperature: float | None) -> bool:
    """Whether captured steps can make such drafts: they use the target's noise."""
    return context.is_fused and not context.wants_q and draft_temperature is None


def device_shape(
    shape: TreeShape,
    *,
    only_chains: bool,
    is_best_first: bool = False,  # trees are, instead of having levels of one size
) -> dict[str, Any]:
    """Arguments of a device drafter; if the target checks chains alone, a tree's first path."""
    if only_chains:
        shape = TreeShape(
            depth=shape.depth, num_nodes=shape.depth, min_confidence=shape.min_confidence
        )
    sizes: dict[str, Any] = {"branch": shape.branch, "least": shape.least}
    if is_best_first and shape.is_dynamic:
        num_levels, level_size = min(shape.depth, shape.num_nodes), shape.num_nodes // shape.depth
        sizes |= {"tree_nodes": shape.num_nodes, "width": shape.width}
        return {"num_levels": num_levels, "level_size": max(level_size, 1), **sizes}
    num_levels, level_size = shape.depth, shape.level_size
    if shape.is_fixed:  # all levels are whole
        num_levels, level_size = max(shape.num_nodes // shape.branch, 1), shape.branch
    elif shape.is_dynamic:
        level_size = max(level_size, shape.width)
        sizes["tree_nodes"] = shape.num_nodes
    sizes["width"] = min(shape.width, level_size)
    return {"num_levels": num_levels, "level_size": level_size, **sizes}

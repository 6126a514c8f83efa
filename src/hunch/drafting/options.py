"""Options that every drafter with a network shares: how far, how wide, when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from hunch.drafting.base import DrafterContext
from hunch.drafting.choosing import TreeShape
from hunch.errors import ConfigError
from hunch.registry import RECIPES

KINDS = ("chain", "dynamic", "fixed")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowOptions:
    """`num_nodes` is the chain's length, or the tree's size."""

    num_nodes: int | None = None  # None: what the files say, else 5 for a chain, 32 for a tree
    tree: str = "chain"  # chain; dynamic: the likeliest; fixed: a chain with siblings
    depth: int | None = None  # of a tree
    width: int | None = None  # nodes of a level that are grown on
    branch: int = 4  # children looked at per node
    min_confidence: float = 0.0  # stop where the path's probability falls below this
    draft_temperature: float | None = None  # of drawn tokens; None: the request's
    window: int | None = None  # positions the drafter looks back; None: its trained context
    adaptive: bool = True  # fewer levels, or none, where they do not pay; on a CPU if it is given

    def shape(
        self,
        context: DrafterContext,
        *,
        default: int = 5,
        max_depth: int | None = None,
        kinds: tuple[str, ...] = KINDS,
    ) -> TreeShape:
        """The draft these options describe; `max_depth` is the most the network can do."""
        self.check(kinds)
        if (self.num_nodes or 0) > context.max_len:
            raise ConfigError(
                f"num_nodes={self.num_nodes} is more than the engine has room for: its sequences "
                f"are at most {context.max_len} tokens long; give fewer nodes or a larger "
                "max_model_len"
            )
        if self.tree == "chain":
            num_nodes = self.num_nodes or default
            if max_depth is not None and num_nodes > max_depth:
                raise ConfigError(
                    f"num_nodes={num_nodes}: this drafter predicts at most {max_depth} tokens; "
                    f"give num_nodes={max_depth} or less"
                )
            return TreeShape(
                depth=num_nodes, num_nodes=num_nodes, min_confidence=self.min_confidence
            )
        num_nodes = self.num_nodes or 32
        depth = self.depth or min(default, num_nodes)
        if max_depth is not None and depth > max_depth:
            raise ConfigError(
                f"depth={depth}: this drafter predicts at most {max_depth} tokens ahead; give "
                f"depth={max_depth} or less"
            )
        if self.tree == "fixed":
            branch = min(self.branch, num_nodes)
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
        # What is grown on must find a slot, and there are as many slots as nodes.
        most = max(num_nodes // max(depth - 1, 1), 1)
        return TreeShape(
            depth=depth,
            num_nodes=num_nodes,
            width=min(self.width or 8, most),
            branch=self.branch,
            min_confidence=self.min_confidence,
        )

    def check(self, kinds: tuple[str, ...]) -> None:
        if self.tree not in kinds:
            raise ConfigError(f"tree={self.tree!r} must be one of {', '.join(kinds)}")
        for name in ("num_nodes", "depth", "width", "window", "branch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if self.draft_temperature is not None and not 0 < self.draft_temperature <= 100:
            raise ConfigError(f"draft_temperature={self.draft_temperature} must be above 0")
        if not 0 <= self.min_confidence < 1:
            raise ConfigError(f"min_confidence={self.min_confidence} must be from 0 to below 1")


def need_path(method: str, path: str | None) -> str:
    """The path; without one, an error that says how to get what the method needs."""
    if path is not None:
        return path
    words = f"speculate={method!r} needs files made for this target: {method}:PATH"
    if method == "mtp":
        words += ", often the target's own directory"
    if method in RECIPES:
        words += (
            f". To train them: hunch train {method} --target MODEL --prompts FILE --out DIR, then "
            f"give {method}:DIR"
        )
    raise ConfigError(words)

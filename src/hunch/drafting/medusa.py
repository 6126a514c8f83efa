"""Medusa: heads that each guess one further token from the same hidden state.

Shape letters: R rows of this step, M packed nodes, D width, C columns, H heads, N nodes.
Paper: arXiv 2401.10774. Heads do not see each other's tokens, so a tree of their best guesses pays
more here than elsewhere: tree=static takes the paper's kind of fixed choices, tree=dynamic the
likeliest ones of each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.grow import grow
from hunch.drafting.hidden import LastHidden, can_fly
from hunch.drafting.judge import Judge, Level
from hunch.drafting.options import GrowOptions, need_path
from hunch.drafting.static import StaticTree, fill, parse_choices, rank_tree
from hunch.drafting.watch import AcceptanceWatch
from hunch.drafting.window import host
from hunch.models.heads.medusa import load_medusa

# How often the token of a rank is the target's, averaged over the published heads: a start value
# for the choice of a fixed tree.
RANK_SHARES = (0.55, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01)
DEPTH_DECAY = 0.75  # a head further ahead is right so much less often


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions(GrowOptions):
    """medusa:PATH[:KEY=VALUE]..."""

    choices: str = ""  # of a static tree: ranks joined by dots, nodes by slashes ("0/1/0.0")


class MedusaDrafter:
    """As many tokens ahead as there are heads."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        self.context = context
        self.net, self.ids_C = load_medusa(need_path("medusa", path), context.target)
        given = read_options(MedusaOptions, options, "medusa")
        self.draft_temperature, self.is_adaptive = given.draft_temperature, given.adaptive
        num_heads = len(self.net.heads)
        self.static: StaticTree | None = None
        if given.tree == "static":
            given.check(("static",))
            self.static = _static_tree(given, num_heads)
            depth, max_nodes = self.static.depth, len(self.static.parent_N)
        else:
            self.shape = given.shape(
                context,
                default=num_heads,
                max_depth=num_heads,
                kinds=("chain", "dynamic", "fixed", "static"),
            )
            depth, max_nodes = self.shape.depth, self.shape.num_nodes
        self.last = LastHidden(context, AcceptanceWatch("medusa", _REMEDY), depth)
        self.needs = Needs(
            max_nodes=max_nodes,
            hidden=True,
            weight_bytes=self.net.weight_bytes + self.net.matrix_bytes,
        )

    def on_device(self) -> DeviceDrafter | None:
        """Chains; trees are grown by the host."""
        is_chain = self.static is None
        if not (is_chain and can_fly(self.context, self.shape, self.draft_temperature)):
            return None
        from hunch.drafting.device_heads import DeviceHeads, Guesses

        def guesses(state_RD: Tensor, token_R: Tensor) -> Guesses:
            for head in range(self.shape.depth):
                yield self.net.logits(head, state_RD)

        ids_C = None if self.ids_C is None else self.ids_C.to(self.context.device)
        return DeviceHeads(
            name="medusa",
            guesses=guesses,
            sampling=self.context.sampling,
            ids_C=ids_C,
            num_levels=self.shape.depth,
            watch=self.last.watch,
            is_adaptive=self.is_adaptive,
        )

    def observe(self, step: TargetStep) -> None:
        self.last.observe(step)

    def propose(self, rows: Rows) -> Draft:
        ids_R = host(rows.ids_R)
        hidden_RD, limit_R = self.last.take(rows, ids_R)
        judge = Judge(self.context, rows, self.ids_C, self.draft_temperature)
        if self.static is not None:
            draft = self._propose_static(self.static, hidden_RD, judge, limit_R)
        else:

            def feed(level: Level) -> Tensor:
                logits_RC = self.net.logits(level.path_MP.shape[1], hidden_RD)
                return logits_RC[torch.from_numpy(level.place_M).to(logits_RC.device)]

            draft, _ = grow(self.net.logits(0, hidden_RD), feed, judge, limit_R, self.shape)
        self.last.remember(rows, draft)
        return draft

    def _propose_static(
        self, tree: StaticTree, hidden_RD: Tensor, judge: Judge, limit_R: np.ndarray
    ) -> Draft:
        place_R = np.arange(len(limit_R))
        best = [
            judge.best(self.net.logits(depth, hidden_RD), place_R, depth, tree.width[depth])[0]
            for depth in range(tree.depth)
        ]
        tokens_RN = np.stack(
            [
                best[depth][:, rank]
                for depth, rank in zip(tree.depth_N.tolist(), tree.rank_N.tolist(), strict=True)
            ],
            axis=1,
        )
        return fill(tree, tokens_RN, limit_R)

    def forget(self, rows: list[int]) -> None:
        self.last.forget(rows)


def _static_tree(given: MedusaOptions, num_heads: int) -> StaticTree:
    if given.choices:
        return parse_choices(given.choices, max_depth=num_heads)
    depth = min(given.depth or num_heads, num_heads)
    shares = [[share * DEPTH_DECAY**d for share in RANK_SHARES] for d in range(depth)]
    return rank_tree(shares, given.num_nodes or 32)


_REMEDY = "check that the heads were made for this target, or train some (hunch train medusa)"

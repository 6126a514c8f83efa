"""MLP speculator: small stages that each guess one further token, fed with the token before.

Shape letters: X rows of the engine, R rows of this step, M packed nodes, D width, C columns.
Paper: arXiv 2404.19124.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from hunch.drafting.watch import AcceptanceWatch
from hunch.drafting.window import host
from hunch.models.heads.mlp import load_mlp


class MlpDrafter:
    """mlp:PATH[:KEY=VALUE]...; as many tokens as the file has stages."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        self.context = context
        self.net, self.ids_C = load_mlp(need_path("mlp", path), context.target)
        num_stages = self.net.num_stages
        given = read_options(GrowOptions, options, "mlp")
        self.draft_temperature, self.is_adaptive = given.draft_temperature, given.adaptive
        self.shape = given.shape(context, default=num_stages, max_depth=num_stages)
        self.last = LastHidden(context, AcceptanceWatch("mlp", _REMEDY), self.shape.depth)
        self.needs = Needs(
            max_nodes=self.shape.num_nodes,
            hidden=True,
            weight_bytes=self.net.weight_bytes + self.net.matrix_bytes,
        )

    def on_device(self) -> DeviceDrafter | None:
        """Chains; trees are grown by the host."""
        if not can_fly(self.context, self.shape, self.draft_temperature):
            return None
        from hunch.drafting.device_heads import DeviceHeads, Guesses

        def guesses(state_RD: Tensor, token_R: Tensor) -> Guesses:
            state_RI = self.net.start(state_RD)
            for stage in range(self.shape.depth):
                state_RI, logits_RC = self.net.step(stage, state_RI, token_R)
                token_R = yield logits_RC

        ids_C = None if self.ids_C is None else self.ids_C.to(self.context.device)
        return DeviceHeads(
            name="mlp",
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
        ids_R, device = host(rows.ids_R), self.context.device
        known_R = host(rows.known_X)[ids_R]
        hidden_RD, limit_R = self.last.take(rows, ids_R)
        token_R = torch.from_numpy(host(rows.tokens_XL)[ids_R, known_R - 1]).to(device)
        state_MI, logits_MC = self.net.step(0, self.net.start(hidden_RD), token_R)

        def feed(level: Level) -> Tensor:
            nonlocal state_MI
            before_MI = state_MI[torch.from_numpy(np.ascontiguousarray(level.parent_M)).to(device)]
            token_M = torch.from_numpy(np.ascontiguousarray(level.token_M)).to(device)
            state_MI, logits_MC = self.net.step(level.path_MP.shape[1], before_MI, token_M)
            return logits_MC

        judge = Judge(self.context, rows, self.ids_C, self.draft_temperature)
        draft, _ = grow(logits_MC, feed, judge, limit_R, self.shape)
        self.last.remember(rows, draft)
        return draft

    def forget(self, rows: list[int]) -> None:
        self.last.forget(rows)


_REMEDY = "check that it was made for this target, or train one (hunch train mlp)"

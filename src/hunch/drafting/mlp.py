"""MLP speculator: small stages that each guess one further token, fed with the token before.

Shape letters: R rows of this step, M and T packed nodes, D width, I inner width, C columns.
Paper: arXiv 2404.19124.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.drafting.base import DrafterContext, Options
from hunch.drafting.last_state import Guesses, LastStateDrafter
from hunch.drafting.options import GrowOptions, need_path
from hunch.drafting.token_chooser import Feed
from hunch.drafting.tree_shape import Level
from hunch.models.heads.mlp import MlpNet, load_mlp


class MlpDrafter(LastStateDrafter):
    """mlp:PATH[:KEY=VALUE]...; as many tokens as the file has stages."""

    name = "mlp"
    net: MlpNet

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.net, ids_C = load_mlp(need_path("mlp", path), context.target)
        given, num_stages = read_options(GrowOptions, options, "mlp"), self.net.num_stages
        shape = given.shape(context, default=num_stages, max_depth=num_stages)
        super().__init__(given, context, ids_C, shape)

    def start(self, state_RD: Tensor, token_R: Tensor) -> tuple[Tensor, Feed]:
        device = state_RD.device
        state_MI, logits_RC = self.net.step(0, self.net.start(state_RD), token_R)

        def feed(level: Level) -> Tensor:
            nonlocal state_MI
            before_MI = state_MI[torch.from_numpy(np.ascontiguousarray(level.parent_M)).to(device)]
            token_M = torch.from_numpy(np.ascontiguousarray(level.token_M)).to(device)
            state_MI, logits_MC = self.net.step(level.path_MP.shape[1], before_MI, token_M)
            return logits_MC

        return logits_RC, feed

    def guesses(self, state_RD: Tensor, token_R: Tensor) -> Guesses:
        state_TI, token_T = self.net.start(state_RD), token_R
        for stage in range(self.depth):
            state_TI, logits_TC = self.net.step(stage, state_TI, token_T)
            token_T, up_T = yield logits_TC
            if up_T is not None:
                state_TI = state_TI.index_select(0, up_T)

"""A mixture of experts in place of the MLP: a few of many for each token, and a shared one.

Shape letters: T packed tokens, D width, E experts, G groups of experts, K experts per token, F
inner width.
Paper: arXiv 2412.19437, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.linear import linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.part import Part

_BEST_OF_GROUP = 2  # experts whose scores say what a group is worth


class Router(Part):
    """Sigmoid scores; a bias enters the choice alone, and only the best groups take part in it."""

    def __init__(
        self,
        weight_ED: Tensor,
        bias_E: Tensor,
        *,
        num_chosen: int,
        num_groups: int,
        num_groups_kept: int,
        is_normed: bool,  # the weights of a token's experts add up to one
        scale: float,
    ) -> None:
        self.weight_ED, self.bias_E = weight_ED, bias_E  # float32, as small gaps decide
        self.num_chosen, self.num_groups = num_chosen, num_groups
        self.num_groups_kept, self.is_normed, self.scale = num_groups_kept, is_normed, scale

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, TK both."""
        score_TE = linear(x_TD.float(), self.weight_ED).sigmoid()
        choice_TGE = (score_TE + self.bias_E).view(len(x_TD), self.num_groups, -1)
        if self.num_groups_kept < self.num_groups:
            num_best = min(_BEST_OF_GROUP, choice_TGE.shape[2])
            worth_TG = choice_TGE.topk(num_best, dim=2).values.sum(2)
            kept_TG = worth_TG.topk(self.num_groups_kept, dim=1).indices
            is_out_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
            choice_TGE = choice_TGE.masked_fill(is_out_TG[:, :, None], -torch.inf)
        chosen_TK = choice_TGE.flatten(1).topk(self.num_chosen, dim=1).indices
        weight_TK = score_TE.gather(1, chosen_TK)
        if self.is_normed:
            weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + 1e-20)
        return chosen_TK, weight_TK * self.scale


class Experts(Part):
    """sum of weight * expert(x) over a token's experts, plus the shared expert of all tokens."""

    def __init__(self, router: Router, experts: list[GatedMLP], shared: GatedMLP | None) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x_TD: Tensor) -> Tensor:
        chosen_TK, weight_TK = self.router(x_TD)
        y_TD = torch.zeros_like(x_TD) if self.shared is None else self.shared(x_TD)
        weight_TK = weight_TK.to(x_TD.dtype)
        for expert in torch.unique(chosen_TK).tolist():
            token, place = (chosen_TK == expert).nonzero(as_tuple=True)
            part_TD = self.experts[expert](x_TD[token]) * weight_TK[token, place, None]
            y_TD = y_TD.index_add(0, token, part_TD)
        return y_TD

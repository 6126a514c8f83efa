"""A mixture of experts: which experts a token asks, and the sum of what they say.

Shape letters: T packed tokens, D width, E experts, K experts per token, F inner width of an expert,
U = 2F rows of gate and up, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.activation import gated_ref, sigmoid

SCORES = ("softmax", "chosen", "sigmoid", "chosen_sigmoid", "near")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How tokens choose. Among equal scores the expert with the lowest number wins. A token's
    experts stand in ascending order, so their answers are always added in one order."""

    num_experts: int
    num_chosen: int
    # "softmax" over all experts, "sigmoid", or one of both of those that logits chose: "chosen",
    # "chosen_sigmoid". "near": softmax over those that are little below the chosen one, without
    # those chosen before it.
    scores: str = "softmax"
    is_normed: bool = False  # the weights of a token's experts are divided by their sum
    num_groups: int = 1
    num_groups_kept: int = 1  # only experts of the best groups can be chosen
    num_best: int = 2  # experts whose scores, added, say what a group is worth
    scale: float = 1.0  # of the weights
    is_of_input: bool = False  # weights are those of what experts read, not of what they answer
    spread: float = 0.0  # near: how far below, as a part of the larger of the two

    def check(self) -> None:
        """Numbers that contradict each other."""
        count, groups, kept = self.num_experts, self.num_groups, self.num_groups_kept
        if count % groups or kept > groups or not 1 <= self.num_chosen <= kept * (count // groups):
            raise ModelFormatError(
                f"{self.num_chosen} of {count} experts from {kept} of {groups} groups cannot be "
                "chosen"
            )


def route(
    logits_TE: Tensor,
    routing: Routing,
    choice_bias_E: Tensor | None = None,
    factor_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts in ascending order, and their weights, TK both; float32 logits.

    `choice_bias_E` is added to the scores for the choice alone; weights are multiplied by
    `factor_E`.
    """
    if routing.scores == "softmax":
        score_TE = logits_TE.softmax(dim=1)
    else:
        score_TE = sigmoid(logits_TE) if routing.scores == "sigmoid" else logits_TE
    choice_TE = score_TE if choice_bias_E is None else score_TE + choice_bias_E
    if routing.num_groups_kept < routing.num_groups:
        choice_TE = _in_best_groups(choice_TE, routing)
    chosen_TK = _best(choice_TE, routing.num_chosen).sort(dim=1).values
    weight_TK = score_TE.gather(1, chosen_TK)
    if routing.scores == "chosen":
        weight_TK = weight_TK.softmax(dim=1)
    elif routing.scores == "chosen_sigmoid":
        weight_TK = sigmoid(weight_TK)
    elif routing.scores == "near":
        weight_TK = _near(logits_TE, chosen_TK, routing.spread)
    if routing.is_normed:
        weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + 1e-20)
    weight_TK = weight_TK if factor_E is None else weight_TK * factor_E[chosen_TK]
    return chosen_TK, weight_TK * routing.scale


def _near(logits_TE: Tensor, chosen_TK: Tensor, spread: float) -> Tensor:
    """Weights of the chosen, each among the experts that were left when it was chosen."""
    top_TK1, left_T1E = logits_TE.gather(1, chosen_TK)[..., None], logits_TE[:, None]
    number_E = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    is_first_TKE = (left_T1E == top_TK1) & (number_E < chosen_TK[..., None])
    is_far_TKE = (top_TK1 - left_T1E) / left_T1E.abs().maximum(top_TK1) > spread
    is_out_TKE = (left_T1E > top_TK1) | is_first_TKE | is_far_TKE
    return 1 / (left_T1E - top_TK1).exp().masked_fill(is_out_TKE, 0.0).sum(2)


def _best(score_TE: Tensor, count: int) -> Tensor:
    """topk does not say which of equal scores it takes; a stable sort does."""
    return score_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    choice_TGE = choice_TE.unflatten(1, (routing.num_groups, -1))
    num_best = min(routing.num_best, choice_TGE.shape[2])
    worth_TG = choice_TGE.topk(num_best, dim=2).values.sum(2)
    kept_TG = _best(worth_TG, routing.num_groups_kept)
    is_out_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
    return choice_TGE.masked_fill(is_out_TG[:, :, None], -torch.inf).flatten(1)


def experts_ref(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EUD: Tensor,
    down_EDF: Tensor,
    activation: str = "silu",
    gate_up_bias_EU: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    is_of_input: bool = False,
) -> Tensor:
    """sum of weight * expert(x), or expert(weight * x), over a token's experts: the
    specification, in float64."""
    y_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for token, (experts, weights) in enumerate(
        zip(chosen_TK.tolist(), weight_TK.tolist(), strict=True)
    ):
        for expert, weight in zip(experts, weights, strict=True):
            up_U = gate_up_EUD[expert].double() @ x_TD[token].double()
            if is_of_input:
                up_U, weight = up_U * weight, 1.0
            if gate_up_bias_EU is not None:
                up_U += gate_up_bias_EU[expert].double()
            out_D = down_EDF[expert].double() @ gated_ref(up_U, activation)
            if down_bias_ED is not None:
                out_D += down_bias_ED[expert].double()
            y_TD[token] += weight * out_D
    return y_TD

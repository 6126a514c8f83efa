"""A student's distance from the target and its gradient, fused with the output matrix.

The logits over the vocabulary are the largest thing in training. They are computed a part at a
time, turned into their gradient, and dropped.
Shape letters: M rows, R those with a weight, D width, C columns, K likeliest columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError
from hunch.registry import unknown
from hunch.train.states import TopOpinions

LOSSES = ("ce", "kl", "tv", "blend", "l1")
_NUM_ROWS = 8192  # rows whose logits exist at a time


def check_loss(loss_name: str) -> str:
    if loss_name not in LOSSES:
        raise ConfigError(f"loss: {unknown(loss_name, LOSSES)}")
    return loss_name


Late = float | Tensor  # how far a loss that changes has changed, from 0 to 1


def shares_of(loss_name: str, late: Late) -> tuple[Late, Late]:
    """The weights of cross-entropy and total variation in a loss; 0.0: that part is left out."""
    if loss_name == "blend":
        return 1.0 - 0.7 * late, 2.0 * late
    if loss_name == "l1":  # DSpark's: a tenth cross-entropy, nine tenths whole difference
        return 0.1, 1.8
    return float(loss_name != "tv"), float(loss_name == "tv")


def top_slope(
    z_MC: Tensor, p: TopOpinions, weight_M: Tensor, loss_name: str, late: Late = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted losses, their gradient by the logits in the logits' precision and place, and the
    best columns, for a distribution of few columns.

    ce: cross-entropy to the whole distribution. kl: the same less the target's entropy, so that 0
    is perfect. tv: half the difference, which is the chance that a draw is rejected; it says
    little to a student that is far off, so blend begins with kl and goes over to tv.
    Outside of the few columns the gradient is the softmax times a factor of the row.
    """
    entropy, variation = shares_of(loss_name, late)
    column_MK, p_MK = p.column_MK.long(), p.p_MK.float()
    own_MK = z_MC.gather(1, column_MK).float()
    log_sum_M, best_M = _log_sums(z_MC)
    q_MK = (own_MK - log_sum_M[:, None]).exp()
    loss_M = torch.zeros_like(log_sum_M)
    factor_M, few_MK = entropy * torch.ones_like(log_sum_M), -entropy * p_MK
    if _is_there(entropy):
        loss_M += entropy * (p_MK * (log_sum_M[:, None] - own_MK)).sum(-1)
        if loss_name != "ce":
            loss_M += entropy * torch.xlogy(p_MK, p_MK).sum(-1)
    if _is_there(variation):
        gap_MK = q_MK - p_MK
        loss_M += variation * 0.5 * (1 + (gap_MK.abs() - q_MK).sum(-1))
        less_MK = q_MK * (gap_MK.sign() - 1)  # outside of the few columns the sign is 1
        factor_M = factor_M - variation * 0.5 * less_MK.sum(-1)
        few_MK = few_MK + variation * 0.5 * less_MK
    slope_MC = _weighted_softmax(z_MC, log_sum_M, factor_M * weight_M)
    slope_MC.scatter_add_(1, column_MK, (weight_M[:, None] * few_MK).to(slope_MC.dtype))
    return loss_M * weight_M, slope_MC, best_M


def _is_there(share: Late) -> bool:
    return isinstance(share, Tensor) or share != 0.0  # to read a tensor would wait


def _log_sums(z_MC: Tensor) -> tuple[Tensor, Tensor]:
    if z_MC.is_cuda:
        from hunch.kernels.gpu_slope import log_sums

        return log_sums(z_MC)
    return z_MC.float().logsumexp(-1), z_MC.argmax(-1)


def _weighted_softmax(z_MC: Tensor, log_sum_M: Tensor, weight_M: Tensor) -> Tensor:
    if z_MC.is_cuda:
        from hunch.kernels.gpu_slope import weighted_softmax

        return weighted_softmax(z_MC, log_sum_M, weight_M)
    return ((z_MC - log_sum_M[:, None]).exp() * weight_M[:, None]).to(z_MC.dtype)


class _Taught(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_MD: Tensor, w_CD: Tensor, opinions: TopOpinions | None, weight_M: Tensor,
        loss_name: str, late: Late,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        has_w = w_CD.requires_grad
        total = torch.zeros((), device=h_MD.device)
        dh_MD = torch.empty_like(h_MD)
        dw_CD = torch.zeros_like(w_CD, dtype=torch.float32) if has_w else None
        best_M = torch.empty(len(h_MD), dtype=torch.int64, device=h_MD.device)
        for first in range(0, len(h_MD), _NUM_ROWS):
            part = slice(first, first + _NUM_ROWS)
            h, weight = h_MD[part], weight_M[part]
            z_MC = functional.linear(h, w_CD)
            if opinions is None:
                best_M[part] = z_MC.argmax(-1)
                continue
            found = top_slope(z_MC, opinions[part], weight, loss_name, late)
            loss_M, slope_MC, best_M[part] = found
            total += loss_M.sum()
            dh_MD[part] = slope_MC @ w_CD
            if dw_CD is not None:
                dw_CD += slope_MC.t() @ h
        ctx.save_for_backward(dh_MD, *([dw_CD.to(w_CD.dtype)] if dw_CD is not None else []))
        ctx.mark_non_differentiable(best_M)
        return total, best_M

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        dh_MD, *rest = ctx.saved_tensors
        return dh_MD * grad, rest[0] * grad if rest else None, None, None, None, None


def teach(
    h_MD: Tensor,
    head_CD: Tensor,
    opinions: TopOpinions | None,
    weight_M: Tensor,
    loss_name: str,
    late: Late = 1.0,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of states before an output matrix, and the column each row likes best;
    without the target's distribution, the latter alone.

    A CPU skips rows without weight; their column is -1. A GPU does not, as graphs have a fixed
    shape.
    """
    words = (weight_M, loss_name, late)
    if h_MD.is_cuda:
        found: tuple[Tensor, Tensor] = _Taught.apply(h_MD, head_CD, opinions, *words)  # type: ignore[no-untyped-call]
        return found
    used_R = weight_M.nonzero().squeeze(1)
    some, words = None if opinions is None else opinions[used_R], (weight_M[used_R], *words[1:])
    loss, best_R = _Taught.apply(h_MD.index_select(0, used_R), head_CD, some, *words)  # type: ignore[no-untyped-call]
    best_M = torch.full((len(h_MD),), -1)
    best_M[used_R] = best_R
    return loss, best_M

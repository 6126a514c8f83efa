"""Attention of drafts that begin after every token of a text and continue for some steps.

A token's place stays that of the last known token before its draft. There it reads the target's
states up to this place, and what the steps of its own draft left there. Softmaxes over both are
joined by their sums, so known places are left to a kernel for packed texts.

Shape letters: T tokens in a row, J steps, N heads, M KV heads, G heads of a group, H head width,
A all heads side by side, L tokens of a text.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hunch.layers.attention import Heads, split_heads
from hunch.layers.rope import Rope
from hunch.train.attend import can_flash, flash, flash_back, seen
from hunch.train.packs import Spans


class Unrolled:
    """Attention in step i of the drafts; step 0 reads known places alone."""

    def __init__(self, spans: Spans, rope: Rope, max_len: int) -> None:
        self.spans, self.rope, self.max_len = spans, rope, max_len
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self.drafted: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each step after the first
        self.to(0)

    def to(self, step: int) -> None:
        """Go to a step."""
        # Past a text's end are drafts that teach nothing.
        pos_T = (self.spans.pos_T + step).clamp(max=self.max_len - 1)
        self.step, self.rotation = step, self.rope(pos_T)

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None
        assert heads.window is None
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, self.rotation)
        entries = self.drafted.setdefault(layer, [])
        if self.step:
            entries.append((k_TMH, v_TMH))
        else:
            self.known[layer] = k_TMH, v_TMH
        drafted = [torch.stack(part, dim=1) for part in zip(*entries, strict=True)]
        drafted = drafted or [k_TMH[:, None][:, :0]] * 2
        found: Tensor = _Joined.apply(q_TNH, *self.known[layer], *drafted, self.spans, heads)  # type: ignore[no-untyped-call]
        return found


class _Joined(torch.autograd.Function):
    """The joined attention over known and drafted places."""

    @staticmethod
    def forward(
        ctx: Any, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor,
        own_k_TJMH: Tensor, own_v_TJMH: Tensor, spans: Spans, heads: Heads,
    ) -> Tensor:  # fmt: skip
        out_TNH, sum_NT, *rest = _known(q_TNH, k_TMH, v_TMH, spans, heads)
        if own_k_TJMH.shape[1]:
            scores_TMGJ = _scores(q_TNH, own_k_TJMH, heads)
            own_TMG = scores_TMGJ.logsumexp(-1)
            known_TMG = sum_NT.t().view_as(own_TMG)
            all_TMG = torch.logaddexp(known_TMG, own_TMG)
            share_TMGJ = (scores_TMGJ - all_TMG[..., None]).exp().to(q_TNH.dtype)
            own_TMGH = torch.einsum("tmgj,tjmh->tmgh", share_TMGJ, own_v_TJMH)
            share_TN1 = (known_TMG - all_TMG).exp().flatten(1)[..., None]
            out_TNH = (out_TNH * share_TN1 + own_TMGH.flatten(1, 2)).to(q_TNH.dtype)
            sum_NT = all_TMG.flatten(1).t().contiguous()
        ctx.save_for_backward(q_TNH, k_TMH, v_TMH, out_TNH, sum_NT, own_k_TJMH, own_v_TJMH, *rest)
        ctx.spans, ctx.heads = spans, heads
        return out_TNH

    @staticmethod
    def backward(ctx: Any, by_out_TNH: Tensor) -> Any:
        q_TNH, k_TMH, v_TMH, out_TNH, sum_NT, own_k_TJMH, own_v_TJMH, *rest = ctx.saved_tensors
        spans, heads = ctx.spans, ctx.heads
        saved = (q_TNH, k_TMH, v_TMH, out_TNH, sum_NT, *rest)
        # With the sum over all places, each place's share is the joined one.
        dq_TNH, dk_TMH, dv_TMH = _known_back(by_out_TNH, saved, spans, heads)
        if not own_k_TJMH.shape[1]:
            return dq_TNH, dk_TMH, dv_TMH, None, None, None, None
        by_out_TMGH = _grouped(by_out_TNH, heads)
        scores_TMGJ = _scores(q_TNH, own_k_TJMH, heads)
        share_TMGJ = (scores_TMGJ - sum_NT.t().view(*scores_TMGJ.shape[:3], 1)).exp()
        mean_TMG1 = (by_out_TNH.float() * out_TNH).sum(-1).view_as(share_TMGJ[..., :1])
        worth_TMGJ = torch.einsum("tmgh,tjmh->tmgj", by_out_TMGH, own_v_TJMH).float()
        slope_TMGJ = (share_TMGJ * (worth_TMGJ - mean_TMG1) * heads.scale).to(q_TNH.dtype)
        dq_TMGH = torch.einsum("tmgj,tjmh->tmgh", slope_TMGJ, own_k_TJMH)
        own_dk = torch.einsum("tmgj,tmgh->tjmh", slope_TMGJ, _grouped(q_TNH, heads))
        own_dv = torch.einsum("tmgj,tmgh->tjmh", share_TMGJ.to(q_TNH.dtype), by_out_TMGH)
        return dq_TNH + dq_TMGH.flatten(1, 2), dk_TMH, dv_TMH, own_dk, own_dv, None, None


def _scores(q_TNH: Tensor, k_TJMH: Tensor, heads: Heads) -> Tensor:
    q_TMGH = _grouped(q_TNH, heads)
    return torch.einsum("tmgh,tjmh->tmgj", q_TMGH, k_TJMH).float() * heads.scale


def _grouped(x_TNH: Tensor, heads: Heads) -> Tensor:
    """The heads grouped by the KV head that they read, TMGH."""
    return x_TNH.view(len(x_TNH), heads.num_kv_heads, -1, heads.head_dim)


def _known(
    q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spans: Spans, heads: Heads
) -> tuple[Tensor, ...]:
    """What queries read of known places, and the logarithms of their sums, NT; then what a kernel
    needs for `_known_back`."""
    if can_flash(q_TNH):
        return flash(q_TNH, k_TMH, v_TMH, spans.where, heads)
    parts = []
    for first, last in pairwise(spans.starts):
        q, k, v = (_by_head(x[first:last], heads) for x in (q_TNH, k_TMH, v_TMH))
        scores = _text_scores(q, k, heads)
        parts.append(((scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1), scores.logsumexp(-1)))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums, dim=1)


def _known_back(
    by_out_TNH: Tensor, saved: tuple[Tensor, ...], spans: Spans, heads: Heads
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v."""
    q_TNH, k_TMH, v_TMH, out_TNH, sum_NT, *rest = saved
    if rest:
        return flash_back(by_out_TNH, saved, spans.where, heads)
    parts = []
    for first, last in pairwise(spans.starts):
        q, k, v, out, by_out = (
            _by_head(x[first:last], heads) for x in (q_TNH, k_TMH, v_TMH, out_TNH, by_out_TNH)
        )
        share = (_text_scores(q, k, heads) - sum_NT[:, first:last, None]).exp()
        mean = (by_out * out).sum(-1, keepdim=True)
        slope = (share * (by_out @ v.mT - mean) * heads.scale).to(q.dtype)
        found = slope @ k, slope.mT @ q, share.to(q.dtype).mT @ by_out
        parts.append([x.transpose(0, 1) for x in found])
    dq_TNH, dk_TNH, dv_TNH = (torch.cat(some) for some in zip(*parts, strict=True))
    return dq_TNH, *(_grouped(x, heads).sum(2) for x in (dk_TNH, dv_TNH))


def _by_head(x_LNH: Tensor, heads: Heads) -> Tensor:
    """NLH, a key's and a value's for each query that reads it."""
    return x_LNH.repeat_interleave(heads.num_heads // x_LNH.shape[1], dim=1).transpose(0, 1)


def _text_scores(q: Tensor, k: Tensor, heads: Heads) -> Tensor:
    scores = (q @ k.mT).float() * heads.scale
    return scores.masked_fill(~seen(q.shape[1], None, q.device), -torch.inf)

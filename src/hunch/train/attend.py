"""Attention in training: each token attends to its own text, up to itself.

Shape letters: T tokens in a row, S text starts and the end of the last text; N heads, M KV heads, H
head width, A all heads side by side; B texts of about one length, L the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.attention import first_seen
from hunch.kernels.recur import recur_texts
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Heads, split_heads
from hunch.layers.latent import turn_tails
from hunch.layers.rope import Rope
from hunch.models.spec import ModelSpec
from hunch.train.packs import Spans


class Packed:
    """Attention over texts that are packed one after the other."""

    def __init__(
        self,
        spans: Spans,
        ropes: Sequence[Rope],
        *,
        has_readers: bool = False,  # some layers read the keys and values of other layers
    ) -> None:
        self.spans, self.has_readers = spans, has_readers
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, by layer
        self.rotations: list[Rotation | None] = [rope(spans.pos_T) for rope in ropes]
        self.rotations = self.rotations or [None]
        self._groups: list[tuple[Tensor, Tensor]] = []
        self._back_T: Tensor | None = None

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        q_TNH, k_TMH, v_TMH = self._parts(qkv_TAH, heads, layer)
        is_plain = not (heads.cap or sinks_N is not None or heads.alibi_NL is not None)
        if is_plain and can_flash(q_TNH, heads.window):
            return flash(q_TNH, k_TMH, v_TMH, self.spans.where, heads)[0]

        def attend(*parts: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in parts)
            if is_plain:
                return _attend(q, k, v, heads).transpose(1, 2)
            return _attend_plainly(q, k, v, heads, sinks_N).transpose(1, 2)

        return self._by_group(attend, q_TNH, k_TMH, v_TMH)

    def recur(self, inputs_TI: Tensor, shape: Recurrence, weights: Any, layer: int) -> Tensor:
        """The outputs of a recurrent layer for each text."""
        return self._by_group(lambda x_BLI: recur_texts(x_BLI, shape, weights), inputs_TI)

    def _parts(self, qkv_TAH: Tensor, heads: Heads, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, turned by their positions."""
        rotation = self.rotations[heads.rope]
        if heads.is_reader:
            if rotation is not None:
                qkv_TAH = rope(qkv_TAH, rotation.cos_T1H, rotation.sin_T1H)
            return qkv_TAH, *self.kept[layer]
        if rotation is not None and rotation.cos_T1H.shape[-1] < heads.head_dim:
            qkv_TAH, rotation = turn_tails(qkv_TAH, heads, rotation), None
        parts = split_heads(qkv_TAH, heads, rotation)
        if self.has_readers:
            self.kept[layer] = parts[1:]
        return parts

    def _by_group(self, run: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """The results of a function of texts side by side, for these texts."""
        if self._back_T is None:
            self._groups = _groups(self.spans)
            self._back_T = torch.cat([i[is_in] for i, is_in in self._groups]).argsort()
        found = []
        for index_BL, is_in_BL in self._groups:
            shape = index_BL.shape
            side_by_side = (
                part.index_select(0, index_BL.flatten()).view(*shape, *part.shape[1:])
                for part in parts
            )
            inside = is_in_BL.flatten().nonzero().squeeze(1)
            found.append(run(*side_by_side).flatten(0, 1).index_select(0, inside))
        return torch.cat(found).index_select(0, self._back_T)


def _groups(spans: Spans) -> list[tuple[Tensor, Tensor]]:
    """Groups of texts to put side by side, in each of which none is less than half as long as
    another. Of each group: where the tokens are, BL, and whether they are tokens or padding. A text
    is padded with its last token, to which nothing attends."""
    bounds = sorted(pairwise(spans.starts), key=lambda ends: ends[0] - ends[1])
    found, device = [], spans.start_S.device
    while bounds and (longest := bounds[0][1] - bounds[0][0]):
        group = [(first, last) for first, last in bounds if 2 * (last - first) > longest]
        bounds = bounds[len(group) :]
        first_B1, last_B1 = torch.tensor(group, device=device)[:, :, None].unbind(1)
        index_BL = first_B1 + torch.arange(longest, device=device)
        found.append((torch.minimum(index_BL, last_B1 - 1), index_BL < last_B1))
    return found


def can_flash(q_TNH: Tensor, window: int | None = None) -> bool:
    """Whether torch's kernel for packed texts supports such queries."""
    has_shape = q_TNH.shape[2] % 8 == 0 and q_TNH.shape[2] <= 256 and q_TNH.dtype.itemsize == 2
    if not (q_TNH.is_cuda and has_shape and (window is None or window > 0)):
        return False
    is_there = torch.backends.cuda.is_flash_attention_available()
    return is_there and torch.cuda.get_device_capability(q_TNH.device) >= (8, 0)


def can_capture(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether steps of a student with these layers can be a CUDA graph. Attention by anything but
    torch's kernel has another shape for each pack, as has everything on a CPU."""
    q = torch.empty(1, 1, spec.head_dim, dtype=dtype, device=device)
    return all(can_flash(q, window) for window in (None, *spec.windows))


# Starts of texts among queries and among keys, and the lengths of the longest ones.
Where = tuple[Tensor, Tensor, int, int]


def flash(
    q_TNH: Tensor,
    k_TMH: Tensor,
    v_TMH: Tensor,
    where: Where,
    heads: Heads,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Torch's kernel for packed texts; it reads the starts of texts from the device. What was read,
    the logarithms of the softmax's sums, NT, and two tensors for `flash_back`."""
    window = heads.window
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q_TNH, k_TMH, v_TMH, *where, 0.0, is_causal, False,  # no dropout, no debug mask
        scale=heads.scale, window_size_left=None if window is None else window - 1,
    )  # fmt: skip
    return found[0], found[1], found[2], found[3]


def flash_back(
    by_out_TNH: Tensor, saved: Sequence[Tensor], where: Where, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of which and of whose results `saved` consists."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        by_out_TNH, *saved[:5], *where, 0.0, True, *saved[5:], scale=heads.scale
    )
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Causal attention by torch's kernels, with a window if the heads have one."""
    length, mask_LL = q.shape[2], None
    if heads.window is not None and abs(heads.window) < length:
        mask_LL = seen(length, heads.window, q.device)
    return functional.scaled_dot_product_attention(
        q, k, v, mask_LL, is_causal=mask_LL is None, scale=heads.scale, enable_gqa=True
    )


def seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of the positions that each token of a text attends to, LL."""
    pos_L = torch.arange(length, device=device)
    first_L: Tensor = first_seen(pos_L, window)
    return (pos_L <= pos_L[:, None]) & (pos_L >= first_L[:, None])


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, heads: Heads, sinks_N: Tensor | None
) -> Tensor:
    """Attention with capped scores, ALiBi or sinks, which torch's kernels do not support."""
    group, length = heads.num_heads // heads.num_kv_heads, q.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * heads.scale
    if heads.cap:
        scores = heads.cap * torch.tanh(scores / heads.cap)
    if heads.alibi_NL is not None:
        by_key_NL = heads.alibi_NL[:, :length]
        scores = scores + (by_key_NL[:, None] - by_key_NL[:, :, None])
    scores = scores.masked_fill(~seen(length, heads.window, q.device), -torch.inf)
    if sinks_N is not None:
        sink = sinks_N.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=3)
    return scores.softmax(-1)[..., :length].to(v.dtype) @ v

"""Attention in training: each token attends to its own text, up to itself.

Shape letters: B texts, L their padded length, T tokens in a row (of padded texts B * L), S text
starts and the end of the last text; N heads, M KV heads, H head width, A all heads side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.attention import first_seen
from hunch.kernels.recurrence import Recurrence, recur_texts
from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Heads, split_heads
from hunch.layers.latent import turn_tails
from hunch.layers.rope import Rope
from hunch.models.spec import ModelSpec
from hunch.train.packs import PackInputs

Split = Callable[[Tensor, Heads, Rotation | None], tuple[Tensor, Tensor, Tensor]]


class Dense:
    """Attention over a batch of texts that are padded to one length.

    Padding is at the end, so no token of a text attends to it.
    """

    def __init__(
        self,
        ids_BL: Tensor,
        ropes: Sequence[Rope],
        split: Split = split_heads,
        *,
        has_readers: bool = False,  # some layers read the keys and values of other layers
    ) -> None:
        self.shape = ids_BL.shape
        self.split, self.has_readers = split, has_readers
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, by layer
        pos_T = torch.arange(self.shape[1], device=ids_BL.device).repeat(self.shape[0])
        self.rotations: list[Rotation | None] = [rope(pos_T) for rope in ropes]
        self.rotations = self.rotations or [None]

    def heads(self, qkv_TAH: Tensor, heads: Heads) -> list[Tensor]:
        """q, k and v with the dimensions that attention needs: text, head, position, width."""
        rotation = self.rotations[heads.rope]
        if rotation is not None and rotation.cos_T1H.shape[-1] < heads.head_dim:
            qkv_TAH, rotation = turn_tails(qkv_TAH, heads, rotation), None
        parts = self.split(qkv_TAH, heads, rotation)
        return [part.view(*self.shape, *part.shape[1:]).transpose(1, 2) for part in parts]

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        if heads.is_reader:
            rotation = self.rotations[heads.rope]
            if rotation is not None:
                qkv_TAH = rope(qkv_TAH, rotation.cos_T1H, rotation.sin_T1H)
            q = qkv_TAH.view(*self.shape, *qkv_TAH.shape[1:]).transpose(1, 2)
            k, v = self.kept[layer]
        else:
            q, k, v = self.heads(qkv_TAH, heads)
        if self.has_readers:
            self.kept[layer] = k, v
        if heads.cap or sinks_N is not None or heads.alibi_NL is not None:
            return _attend_plainly(q, k, v, heads, sinks_N).transpose(1, 2).flatten(0, 1)
        return _attend(q, k, v, heads).transpose(1, 2).flatten(0, 1)

    def recur(self, inputs_TI: Tensor, shape: Recurrence, weights: Any, layer: int) -> Tensor:
        """The outputs of a recurrent layer for each text."""
        return recur_texts(inputs_TI.view(*self.shape, -1), shape, weights).flatten(0, 1)


class Packed:
    """Attention over a pack: texts in a row, without padding."""

    def __init__(self, inputs: PackInputs, ropes: Sequence[Rope]) -> None:
        self.start_S, self.longest = inputs.start_S, inputs.longest
        self.rotations: list[Rotation | None] = [rope(inputs.pos_T) for rope in ropes]
        self.rotations = self.rotations or [None]

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        parts = split_heads(qkv_TAH, heads, self.rotations[heads.rope])
        if qkv_TAH.is_cuda:
            return self._flash(*parts, heads)
        starts = self.start_S.tolist()
        sizes = [last - first for first, last in pairwise(starts)]
        by_text = zip(*(part.split_with_sizes(sizes) for part in parts), strict=True)
        return torch.cat([_attend_text(q, k, v, heads) for q, k, v in by_text])

    def _flash(self, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, heads: Heads) -> Tensor:
        """Torch's kernel for packed texts; it reads the starts of texts from the device."""
        starts, longest, window = self.start_S, self.longest, heads.window
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q_TNH, k_TMH, v_TMH, starts, starts, longest, longest,
            0.0, True, False, scale=heads.scale,  # no dropout, causal, no debug mask
            window_size_left=None if window is None else window - 1,
        )[0]  # fmt: skip
        return found


def _attend_text(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, heads: Heads) -> Tensor:
    """Attention within one text."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TMH, v_TMH))
    return _attend(q, k, v, heads)[0].transpose(0, 1)


def can_pack(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Packed` supports this model: it has plain causal attention and windows alone."""
    is_plain = not (spec.attn_cap or spec.has_sinks or spec.alibi or spec.kv_of)
    is_plain &= spec.latent is None and spec.recurrence is None and spec.other_heads is None
    is_plain &= all(window is None or window > 0 for window in spec.windows)
    if device.type != "cuda" or not is_plain:
        return is_plain
    if spec.head_dim % 8 or spec.head_dim > 256 or dtype.itemsize != 2:
        return False
    is_there = torch.backends.cuda.is_flash_attention_available()
    return is_there and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Causal attention by torch's kernels, with a window if the heads have one."""
    length, mask_LL = q.shape[2], None
    if heads.window is not None and abs(heads.window) < length:
        mask_LL = _seen(length, heads.window, q.device)
    return functional.scaled_dot_product_attention(
        q, k, v, mask_LL, is_causal=mask_LL is None, scale=heads.scale, enable_gqa=True
    )


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of positions that each token of a text attends to, LL."""
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
    scores = scores.masked_fill(~_seen(length, heads.window, q.device), -torch.inf)
    if sinks_N is not None:
        sink = sinks_N.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=3)
    return scores.softmax(-1)[..., :length].to(v.dtype) @ v

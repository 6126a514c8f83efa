"""Paged attention: a packed token reads its sequence's keys by block table and tree path.

Shape letters: T packed tokens, S sequences of the step, B blocks of a table, P tree depth, N heads,
M KV heads, H head width, L layers, C slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Span:
    """One sequence's part of a packed step, as the host knows it."""

    first: int  # packed tokens [first, last)
    last: int
    seq: int  # row of table_SB
    start: int  # position of the first packed token; known tokens then follow one by one
    num_known: int  # packed tokens that are known; the others are drafted nodes
    is_tree: bool = False  # nodes branch: positions are not consecutive


@dataclass(slots=True)
class AttnInputs:
    """Where each packed token writes its KV and finds its keys.

    Token t reads positions 0..pos_T[t]. A position below base_T[t] is read through the block table;
    position p >= base_T[t] is the drafted ancestor (or the token itself) in slot
    tree_TP[t, p - base_T[t]]. Where no tree branches, tree_TP is None and base_T > pos_T.
    """

    pos_T: Tensor
    slot_T: Tensor  # -1: padding, nothing is written
    seq_T: Tensor
    table_SB: Tensor
    base_T: Tensor
    tree_TP: Tensor | None
    block_size: int
    spans: tuple[Span, ...] = ()


@dataclass(slots=True)
class KVCache:
    """One KV group: slot c of layer l holds the key and value of one position."""

    k_LCMH: Tensor
    v_LCMH: Tensor


def key_slots(attn: AttnInputs, token: int) -> Tensor:
    """The slots packed token `token` reads, in order of position."""
    pos, base, seq = int(attn.pos_T[token]), int(attn.base_T[token]), int(attn.seq_T[token])
    positions = torch.arange(min(base, pos + 1), device=attn.pos_T.device)
    slots = (
        attn.table_SB[seq, positions // attn.block_size] * attn.block_size
        + positions % attn.block_size
    )
    if attn.tree_TP is not None and pos >= base:
        slots = torch.cat([slots, attn.tree_TP[token, : pos - base + 1]])
    return slots


def attention_ref(
    q_TNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    attn: AttnInputs,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The specification: one token at a time, in float64."""
    out_TNH = torch.zeros_like(q_TNH)
    group = q_TNH.shape[1] // k_CMH.shape[1]
    for token in range(q_TNH.shape[0]):
        if attn.slot_T[token] < 0:
            continue
        slots = key_slots(attn, token)
        if window is not None:
            slots = slots[-window:]
        k_PNH = k_CMH[slots].double().repeat_interleave(group, dim=1)
        v_PNH = v_CMH[slots].double().repeat_interleave(group, dim=1)
        scores_NP = torch.einsum("nh,pnh->np", q_TNH[token].double(), k_PNH) * scale
        out_TNH[token] = torch.einsum("np,pnh->nh", scores_NP.softmax(-1), v_PNH).to(out_TNH.dtype)
    return out_TNH

"""Paged attention: a packed token reads its sequence's keys by block table and tree path.

Shape letters: T packed tokens, S sequences of the step, B blocks of a table, P tree depth, N heads,
M KV heads, H head width, C slots of the cache, W tokens of one span, K its keys, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.kv_store import Scales, slots_at


@dataclass(slots=True)
class Span:
    """One sequence's part of a packed step, as far as the host knows it."""

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
    tree_TP[t, p - base_T[t]]. If no draft branches, tree_TP is None and base_T > pos_T.
    """

    pos_T: Tensor
    slot_T: Tensor  # -1: padding, nothing is written
    seq_T: Tensor
    table_SB: Tensor
    base_T: Tensor
    tree_TP: Tensor | None
    block_size: int
    spans: tuple[Span, ...] = ()
    row_S: Tensor | None = None  # the engine's row of each sequence; None: the sequence's number
    # What backends derive from the fields above, made once per step and read by every layer.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def over(packed_5T: Tensor, table_SB: Tensor, block_size: int, depth: int = 0) -> AttnInputs:
        """Views of the one buffer that holds a pass's inputs: ids, then the columns above."""
        return AttnInputs(
            pos_T=packed_5T[1],
            slot_T=packed_5T[2],
            seq_T=packed_5T[3],
            table_SB=table_SB,
            base_T=packed_5T[4],
            tree_TP=packed_5T.new_zeros(packed_5T.shape[1], depth) if depth else None,
            block_size=block_size,
        )

    @staticmethod
    def first(
        count: int, block_size: int = 1, device: torch.device | str | None = None
    ) -> AttnInputs:
        """The inputs of a pass over the first tokens of one sequence, in the first blocks."""
        pos_T = torch.arange(count, device=device)
        table_SB = torch.arange(-(-count // block_size), device=device)[None]
        spans = (Span(0, count, 0, 0, count),)
        return AttnInputs(
            pos_T, pos_T.clone(), pos_T * 0, table_SB, pos_T + 1, None, block_size, spans
        )

    @staticmethod
    def nobody(zero_T: Tensor, table_SB: Tensor, block_size: int) -> AttnInputs:
        """The inputs of a pass over padding: nothing is written, nothing is read."""
        spans = (Span(0, len(zero_T), 0, 0, len(zero_T)),)
        columns = zero_T, zero_T - 1, zero_T, table_SB, zero_T + 1
        return AttnInputs(*columns, None, block_size, spans)


def row_spans(num_rows: int, width: int, num_known: int = 1) -> tuple[Span, ...]:
    """The spans of a pass over `width` tokens of each row; the host does not know positions."""
    return tuple(Span(r * width, (r + 1) * width, r, 0, num_known) for r in range(num_rows))


def first_seen(pos: Any, window: int | None) -> Any:
    """The first position that a token at `pos` (or tokens) sees.

    `window`: how many positions it sees, its own included; below 0: those of its chunk, as
    positions come in chunks of -window; None: all.
    """
    if window is not None and window < 0:
        return pos // -window * -window
    return pos * 0 if window is None else (pos - window + 1) * (pos >= window)


def seen_slots(attn: AttnInputs, token: int, window: int | None = None) -> Tensor:
    """The slots packed token `token` reads, in order of position."""
    pos, base, seq = (int(x[token]) for x in (attn.pos_T, attn.base_T, attn.seq_T))
    slots = _table_slots(attn, seq, 0, min(base, pos + 1))
    if attn.tree_TP is not None and pos >= base:
        slots = torch.cat([slots, attn.tree_TP[token, : pos - base + 1]])
    return slots[first_seen(pos, window) :]


def attention_ref(
    q_TNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    attn: AttnInputs,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: Tensor | None = None,
    alibi_NL: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """The specification: one token at a time, in float64.

    With scales, keys and values are codes. With a cap, scores s become cap * tanh(s / cap). A
    head's sink is one more score in its softmax, whose value is zero. `alibi_NL` is added to
    scores by head and position of the key.
    """
    out_TNH = torch.zeros_like(q_TNH)
    group = q_TNH.shape[1] // k_CMH.shape[1]
    for token in range(q_TNH.shape[0]):
        if attn.slot_T[token] < 0:
            continue
        slots = seen_slots(attn, token, window)
        k_PMH, v_PMH = k_CMH[slots].double(), v_CMH[slots].double()
        if scales is not None:
            k_PMH, v_PMH = k_PMH * scales[0][slots], v_PMH * scales[1][slots]
        k_PNH, v_PNH = (x.repeat_interleave(group, dim=1) for x in (k_PMH, v_PMH))
        scores_NP = torch.einsum("nh,pnh->np", q_TNH[token].double(), k_PNH) * scale
        if alibi_NL is not None:
            scores_NP = scores_NP + _added(alibi_NL.double(), int(attn.pos_T[token]), len(slots))
        weights_NP = _weights(scores_NP, cap, sinks_N)
        out_TNH[token] = torch.einsum("np,pnh->nh", weights_NP, v_PNH).to(out_TNH.dtype)
    return out_TNH


def _weights(scores: Tensor, cap: float, sinks_N: Tensor | None) -> Tensor:
    """Softmax over the last dimension; heads are the first."""
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if sinks_N is None:
        return scores.softmax(-1)
    sink = sinks_N.to(scores.dtype).view(-1, *(1,) * (scores.dim() - 1))
    scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    return scores.softmax(-1)[..., :-1]


def _added(alibi_NL: Tensor, pos: int, num_keys: int) -> Tensor:
    """What a token's scores of the `num_keys` positions up to its own are changed by, NK.

    Less its own, which changes nothing but that numbers stay small.
    """
    return alibi_NL[:, pos + 1 - num_keys : pos + 1] - alibi_NL[:, pos, None]


# --- torch ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Piece:
    """One span, ready for torch: its tokens, its keys' slots, and which token sees which key."""

    first: int
    last: int
    slot: int  # first slot, if the keys are contiguous; they are then read in place
    num_keys: int
    slots_K: Tensor | None  # the slots, if they are not
    mask_WK: Tensor | None  # added to the scores; None: every token sees every key

    def pick(self, cache_CMX: Tensor) -> Tensor:
        """What the cache has of the piece's keys."""
        if self.slots_K is None:
            return cache_CMX.narrow(0, self.slot, self.num_keys)
        return cache_CMX.index_select(0, self.slots_K)


def spans_of(attn: AttnInputs) -> tuple[Span, ...]:
    """The step's spans; if the host does not know them, they are read back from the device."""
    if attn.spans or not len(attn.pos_T):
        return attn.spans
    if "spans" not in attn.memo:
        attn.memo["spans"] = _find_spans(attn)
    return attn.memo["spans"]


def _find_spans(attn: AttnInputs) -> tuple[Span, ...]:
    pos, slot, seq = attn.pos_T.tolist(), attn.slot_T.tolist(), attn.seq_T.tolist()
    base = attn.base_T.tolist()
    spans: list[Span] = []
    for token in range(len(pos)):
        if slot[token] < 0:
            continue
        is_node = attn.tree_TP is not None and pos[token] >= base[token]
        last = spans[-1] if spans else None
        if last is not None and last.last == token and last.seq == seq[token]:
            last.last += 1
            last.is_tree |= is_node or pos[token] != last.start + token - last.first
            last.num_known += not is_node
        else:
            spans.append(Span(token, token + 1, seq[token], pos[token], int(not is_node), is_node))
    return tuple(spans)


def live_tokens(attn: AttnInputs) -> Tensor | None:
    """Packed tokens that are not padding; None when all are."""
    if "live" not in attn.memo:
        is_live_T = attn.slot_T >= 0
        attn.memo["live"] = None if bool(is_live_T.all()) else is_live_T.nonzero().flatten()
    return attn.memo["live"]


def pieces_of(
    attn: AttnInputs, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Piece]:
    """Each span's keys and mask, made on the host and moved to the device of the KV."""
    key = ("pieces", window, dtype)
    if key not in attn.memo:
        attn.memo[key] = [_piece(attn, span, window, dtype, device) for span in spans_of(attn)]
    return attn.memo[key]


def _piece(
    attn: AttnInputs, span: Span, window: int | None, dtype: torch.dtype, device: torch.device
) -> Piece:
    if span.is_tree:
        slots_K, is_seen_WK = _tree_keys(attn, span, window)
    else:
        slots_K, is_seen_WK = _chain_keys(attn, span, window)
    mask_WK = None
    if is_seen_WK is not None:
        mask_WK = torch.zeros(is_seen_WK.shape, dtype=dtype, device=is_seen_WK.device)
        mask_WK.masked_fill_(~is_seen_WK, -torch.inf)
        mask_WK = mask_WK.to(device)
    num_keys, slot = len(slots_K), int(slots_K[0])
    is_row = bool((slots_K[1:] - slots_K[:-1] == 1).all())
    picked_K = None if is_row else slots_K.to(device)
    return Piece(span.first, span.last, slot, num_keys, picked_K, mask_WK)


def _table_slots(attn: AttnInputs, seq: int, first: int, last: int) -> Tensor:
    """Slots of positions [first, last) by the block table."""
    positions = torch.arange(first, last, device=attn.table_SB.device)
    return slots_at(attn.table_SB, seq, positions, attn.block_size)


def _chain_keys(attn: AttnInputs, span: Span, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Consecutive positions: each token sees those up to its own."""
    num_tokens = span.last - span.first
    first = first_seen(span.start, window)
    last = span.start + num_tokens
    slots_K = _table_slots(attn, span.seq, first, last)
    if num_tokens == 1:
        return slots_K, None
    keys_K = torch.arange(first, last, device=slots_K.device)
    pos_W1 = torch.arange(span.start, last, device=slots_K.device)[:, None]
    is_seen_WK = keys_K <= pos_W1
    if window is not None:
        is_seen_WK &= keys_K >= first_seen(pos_W1, window)
    return slots_K, is_seen_WK


def _tree_keys(attn: AttnInputs, span: Span, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Known positions by the table, then all slots on any path of the span."""
    assert attn.tree_TP is not None
    part = slice(span.first, span.last)
    pos_W1, base_W1, path_WP = attn.pos_T[part, None], attn.base_T[part, None], attn.tree_TP[part]
    depth_P = torch.arange(path_WP.shape[1], device=path_WP.device)
    is_path_WP = depth_P <= pos_W1 - base_W1
    num_table = int(torch.minimum(base_W1, pos_W1 + 1).max())
    is_table_WK = torch.arange(num_table, device=path_WP.device) < torch.minimum(
        base_W1, pos_W1 + 1
    )
    if window is not None:
        first_W1 = first_seen(pos_W1, window)
        is_table_WK &= torch.arange(num_table, device=path_WP.device) >= first_W1
        is_path_WP &= base_W1 + depth_P >= first_W1
    nodes_U, place_WP = path_WP.masked_fill(~is_path_WP, -1).unique(return_inverse=True)
    is_node_WU = torch.zeros(len(path_WP), len(nodes_U), dtype=torch.bool, device=path_WP.device)
    is_node_WU.scatter_(1, place_WP, True)
    is_real_U = nodes_U >= 0  # -1: on no path
    nodes_U, is_node_WU = nodes_U[is_real_U], is_node_WU[:, is_real_U]
    slots_K = torch.cat((_table_slots(attn, span.seq, 0, num_table), nodes_U))
    return slots_K, torch.cat((is_table_WK, is_node_WU), dim=1)


def attention(
    q_TNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    attn: AttnInputs,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """torch's attention, one call per span; indices and masks are made once per step."""
    pieces = pieces_of(attn, window, q_TNH.dtype, q_TNH.device)
    if len(pieces) == 1 and pieces[0].last - pieces[0].first == len(q_TNH):
        return _attend(q_TNH, k_CMH, v_CMH, pieces[0], scale, cap, sinks_N, scales=scales)
    out_TNH = torch.zeros_like(q_TNH)
    for piece in pieces:
        out_TNH[piece.first : piece.last] = _attend(
            q_TNH[piece.first : piece.last],
            k_CMH,
            v_CMH,
            piece,
            scale,
            cap,
            sinks_N,
            scales=scales,
        )
    return out_TNH


def attention_by_token(
    q_TNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    attn: AttnInputs,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks_N: Tensor | None = None,
    alibi_NL: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """torch's attention, one call per token, whose shape depends on its position alone."""
    key = ("tokens", window)
    if key not in attn.memo:
        live = [token for token, slot in enumerate(attn.slot_T.tolist()) if slot >= 0]
        attn.memo[key] = [
            (token, seen_slots(attn, token, window).to(q_TNH.device)) for token in live
        ]
    out_TNH = torch.zeros_like(q_TNH)
    for token, slots_K in attn.memo[key]:
        piece = Piece(token, token + 1, 0, len(slots_K), slots_K, None)
        # A copy, as the order of its sums may depend on a query's address.
        q_1NH = q_TNH[token].clone()[None]
        added_NK = None
        if alibi_NL is not None:
            added_NK = _added(alibi_NL, int(attn.pos_T[token]), len(slots_K))
        out_TNH[token] = _attend(q_1NH, k_CMH, v_CMH, piece, scale, cap, sinks_N, added_NK, scales)[
            0
        ]
    return out_TNH


def _attend(
    q_WNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    piece: Piece,
    scale: float,
    cap: float,
    sinks_N: Tensor | None,
    added_NK: Tensor | None = None,  # to the scores of a piece that is one token
    scales: Scales | None = None,
) -> Tensor:
    k_KMH, v_KMH = piece.pick(k_CMH), piece.pick(v_CMH)
    if scales is not None:
        k_KMH, v_KMH = (
            (codes.float() * piece.pick(scale_CM1)).to(q_WNH.dtype)
            for codes, scale_CM1 in zip((k_KMH, v_KMH), scales, strict=True)
        )
    if cap or sinks_N is not None or added_NK is not None:
        group = q_WNH.shape[1] // k_CMH.shape[1]
        k_NKH, v_NKH = (
            x.float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k_KMH, v_KMH)
        )
        scores_NWK = q_WNH.float().transpose(0, 1) @ k_NKH.transpose(1, 2) * scale
        if cap:
            scores_NWK = cap * torch.tanh(scores_NWK / cap)
        if piece.mask_WK is not None:
            scores_NWK = scores_NWK + piece.mask_WK
        if added_NK is not None:
            scores_NWK = scores_NWK + added_NK[:, None]
        out_NWH = _weights(scores_NWK, 0.0, sinks_N) @ v_NKH
        return out_NWH.transpose(0, 1).to(q_WNH.dtype)
    out_NWH = functional.scaled_dot_product_attention(
        q_WNH.transpose(0, 1)[None],
        k_KMH.transpose(0, 1)[None],
        v_KMH.transpose(0, 1)[None],
        attn_mask=piece.mask_WK,
        scale=scale,
        enable_gqa=q_WNH.shape[1] != k_CMH.shape[1],
    )[0]
    return out_NWH.transpose(0, 1)

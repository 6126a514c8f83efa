"""The C++ products and attention over tensors as torch holds them, for models torch computes.

Shape letters: T packed tokens, K inputs, N outputs; of attention N heads, M KV heads, H head width,
C slots of the cache, S sequences, P positions of a sequence, U slots that a step reads.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import Scales, slots_at
from hunch.kernels.native import _floats
from hunch.kernels.native_library import is_available, library, team
from hunch.kernels.native_structs import Kept, address_of

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # weights that are read in place
MAX_HEAD_DIM = 1024
_LANES = 16  # codes of 8 bits are read in whole vectors of every CPU
LOG2_E = 1.4426950408889634


def can_multiply(weight_NK: Tensor) -> bool:
    return weight_NK.dtype in STORED and weight_NK.is_contiguous() and is_available()


def multiply_rows(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x times the weight in float32; a row's bits are the same in any company."""
    x_TK, num_rows = _floats(x_TK), x_TK.shape[0]
    num_out, num_in = weight_NK.shape
    out_TN = torch.empty(num_rows, num_out)
    library().hunch_multiply_rows(
        team(torch.get_num_threads()), x_TK.data_ptr(), num_rows, num_in, weight_NK.data_ptr(),
        STORED[weight_NK.dtype], num_out, out_TN.data_ptr(),
    )  # fmt: skip
    return out_TN


def can_attend(head_dim: int, *, has_scales: bool = False) -> bool:
    """Whether heads are whole vectors on this CPU."""
    if not is_available() or head_dim > MAX_HEAD_DIM:
        return False
    return head_dim % (_LANES if has_scales else library().hunch_panel()) == 0


def attend(
    q_TNH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    attn: AttnInputs,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks_N: Tensor | None = None,
    alibi_NL: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Attention with positions in fixed tiles; a row's bits are the same in any company.

    Codes of 8 bits, which have scales, are read where they lie, as floats are.
    """
    num_rows, num_heads, head_dim = q_TNH.shape
    table_SP, tree_TP, block_size = attn.table_SB, attn.tree_TP, attn.block_size
    is_ready = k_CMH.dtype == torch.float32 or scales is not None
    if not is_ready or not k_CMH.is_contiguous():
        assert scales is None
        slots_U, table_SP, tree_TP = _read_by_step(attn)
        block_size = 1
        k_CMH, v_CMH = (_floats(cache.index_select(0, slots_U)) for cache in (k_CMH, v_CMH))
    q_TNH = _floats(q_TNH.float() * (scale * LOG2_E))
    columns = (attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, table_SP)
    if tree_TP is not None and tree_TP.stride(1) != 1:
        tree_TP = tree_TP.contiguous()
    assert all(column.is_contiguous() and column.dtype == torch.int64 for column in columns)
    out_TNH = torch.empty(num_rows, num_heads, head_dim)
    assert alibi_NL is None or (alibi_NL.dtype == torch.float32 and alibi_NL.stride(1) == 1)
    k_scales, v_scales = scales or (None, None)
    k, v = Kept.over(k_CMH, k_scales), Kept.over(v_CMH, v_scales)
    library().hunch_attend(
        team(torch.get_num_threads()), q_TNH.data_ptr(), ctypes.addressof(k), ctypes.addressof(v),
        *(column.data_ptr() for column in columns), address_of(tree_TP), num_rows,
        table_SP.stride(0), 0 if tree_TP is None else tree_TP.stride(0), block_size,
        num_heads, k_CMH.shape[1], head_dim, window or 0, cap * LOG2_E, address_of(sinks_N),
        address_of(alibi_NL), 0 if alibi_NL is None else alibi_NL.stride(0), out_TNH.data_ptr(),
    )  # fmt: skip
    return out_TNH


def _read_by_step(attn: AttnInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every slot the step reads, and where table (one slot per position) and tree find them there.

    Made once per step: caches of 16-bit numbers are turned into floats for these slots alone.
    """
    if "read by step" not in attn.memo:
        highest = int(attn.pos_T.max()) + 1
        pos_P = torch.arange(highest)
        last = attn.table_SB.shape[1] * attn.block_size - 1
        slot_SP = slots_at(attn.table_SB, slice(None), pos_P.clamp(max=last), attn.block_size)
        reach_S = torch.zeros(len(attn.table_SB), dtype=torch.int64)
        reach_S.scatter_reduce_(0, attn.seq_T, attn.pos_T + 1, "amax")
        slot_SP = slot_SP.masked_fill(pos_P >= reach_S[:, None], 0).clamp(min=0)
        parts = [slot_SP.flatten()]
        if attn.tree_TP is not None:
            parts.append(attn.tree_TP.clamp(min=0).flatten())
        slots_U, place = torch.cat(parts).unique(return_inverse=True)
        table_SP = place[: slot_SP.numel()].view_as(slot_SP)
        tree_TP = None
        if attn.tree_TP is not None:
            tree_TP = place[slot_SP.numel() :].view_as(attn.tree_TP)
        attn.memo["read by step"] = slots_U, table_SP.contiguous(), tree_TP
    return attn.memo["read by step"]

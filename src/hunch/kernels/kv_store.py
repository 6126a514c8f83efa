"""Where a position's keys and values are, and writing them into the slots of the paged cache.

Shape letters: T packed tokens, M KV heads, H head width, C slots, S sequences, B blocks of a table.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kv_store_ref(
    k_TMH: Tensor, v_TMH: Tensor, k_CMH: Tensor, v_CMH: Tensor, slot_T: Tensor
) -> None:
    """The specification: a slot of -1 is padding."""
    for token, slot in enumerate(slot_T.tolist()):
        if slot >= 0:
            k_CMH[slot] = k_TMH[token]
            v_CMH[slot] = v_TMH[token]


def kv_store(k_TMH: Tensor, v_TMH: Tensor, k_CMH: Tensor, v_CMH: Tensor, slot_T: Tensor) -> None:
    """`slot_T` holds no padding here: the caller drops it once per step, not once per layer."""
    k_CMH.index_copy_(0, slot_T, k_TMH)
    v_CMH.index_copy_(0, slot_T, v_TMH)


def slots_at(table_SB: Any, seq: Any, positions: Any, block_size: int) -> Any:
    """The KV slots of positions, by the blocks of their sequences; of tensors or of arrays."""
    return table_SB[seq, positions // block_size] * block_size + positions % block_size

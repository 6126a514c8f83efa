"""Write new keys and values into the slots of the paged cache.

Shape letters: T packed tokens, M KV heads, H head width, C slots.
"""

from __future__ import annotations

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

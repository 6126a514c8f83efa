"""The paged cache of keys and values: its tensors, the slot of a position, writing into slots.

Shape letters: L layers, C slots, M KV heads, H head width, T packed tokens, P moved slots, S
sequences, B blocks of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.kernels.recurrence import RecurrentStates


def slots_at(table_SB: Any, seq: Any, positions: Any, block_size: int) -> Any:
    """The KV slots of positions of sequences; for tensors and for arrays."""
    return table_SB[seq, positions // block_size] * block_size + positions % block_size


def write_slots(
    table_B: np.ndarray, first: int, block_size: int, positions: np.ndarray, slot_T: np.ndarray
) -> None:
    """Write the slots of positions `first`, `first` + 1, ... into slot_T, one block at a time.

    `slots_at` for the few tokens of one row, whose blocks are one or two. `positions` are 0, 1, 2,
    ... A position past the table, whose KV is never written, gets a slot of its last block.
    """
    done, last = 0, len(table_B) - 1
    while done < len(slot_T):
        block, offset = divmod(first + done, block_size)
        stop = min(done + block_size - offset, len(slot_T))
        slot = int(table_B[min(block, last)]) * block_size + offset
        np.add(positions[: stop - done], slot, out=slot_T[done:stop])
        done = stop


Scales = tuple[Tensor, Tensor]  # of codes: those of keys and of values, [C, M, 1] each


def kv_store_ref(
    k_TMH: Tensor,
    v_TMH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    slot_T: Tensor,
    scales: Scales | None = None,
) -> None:
    """The specification: a slot of -1 is padding."""
    for token, slot in enumerate(slot_T.tolist()):
        if slot < 0:
            continue
        for which, (x_TMH, cache_CMH) in enumerate(((k_TMH, k_CMH), (v_TMH, v_CMH))):
            if scales is None:
                cache_CMH[slot] = x_TMH[token]
            else:
                cache_CMH[slot], scales[which][slot] = codes_ref(x_TMH[token], cache_CMH.dtype)


def kv_store(
    k_TMH: Tensor,
    v_TMH: Tensor,
    k_CMH: Tensor,
    v_CMH: Tensor,
    slot_T: Tensor,
    scales: Scales | None = None,
) -> None:
    """`slot_T` holds no padding here: the caller drops it once per step, not once per layer."""
    if scales is not None:
        (k_TMH, k_TM1), (v_TMH, v_TM1) = (codes_ref(x, k_CMH.dtype) for x in (k_TMH, v_TMH))
        scales[0].index_copy_(0, slot_T, k_TM1)
        scales[1].index_copy_(0, slot_T, v_TM1)
        # As bytes: torch copies no float8 by index on a CPU.
        k_TMH, v_TMH, k_CMH, v_CMH = (x.view(torch.uint8) for x in (k_TMH, v_TMH, k_CMH, v_CMH))
    k_CMH.index_copy_(0, slot_T, k_TMH)
    v_CMH.index_copy_(0, slot_T, v_TMH)


@dataclass(slots=True)
class KVCache:
    """One KV group: slot c of layer l holds the key and value of one position.

    Where keys serve as values, both are one tensor.
    """

    k_LCMH: Tensor
    v_LCMH: Tensor
    states: RecurrentStates | None = None  # what recurrent layers remember of rows
    scales: KVCache | None = None  # of codes of 8 bits: a float32 per slot and head, [L, C, M, 1]
    others: KVCache | None = None  # the last layers, where their heads are of another shape
    # Called with each move: other ranks hold the other heads of the same slots.
    on_move: list[Callable[[Tensor, Tensor], None]] = field(default_factory=list)

    def move(self, source_P: Tensor, target_P: Tensor) -> None:
        """Copy the KV of slots to other slots: that of accepted nodes to their positions'."""
        # Nothing is written before all is read: without memory, no slot has changed.
        moved = [(cache, cache[:, source_P]) for cache in self._caches()]
        for cache, taken in moved:
            cache[:, target_P] = taken
        for tell in self.on_move:
            tell(source_P, target_P)

    def clear(self, slot_P: Tensor) -> None:
        """Zeros, as at first: masked products must not meet what is not a number."""
        for cache in self._caches():
            cache.view(torch.uint8).index_fill_(1, slot_P, 0)

    def _caches(self) -> Iterator[Tensor]:
        yield self.k_LCMH
        if self.v_LCMH is not self.k_LCMH:
            yield self.v_LCMH
        for more in (self.scales, self.others):
            if more is not None:
                yield from more._caches()

    def compact(self, source: np.ndarray, target: np.ndarray) -> None:
        """`move`, leaving out slots that stay where they are."""
        moved = source != target
        if moved.any():
            device = self.k_LCMH.device
            self.move(*(torch.from_numpy(slots[moved]).to(device) for slots in (source, target)))

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [C, M, H] each."""
        if number < len(self.k_LCMH) or self.others is None:
            return self.k_LCMH[number], self.v_LCMH[number]
        return self.others.layer(number - len(self.k_LCMH))

    def scales_of(self, number: int) -> Scales | None:
        """The scales of a layer's keys and values, [C, M, 1] each; None: they are plain numbers."""
        if number >= len(self.k_LCMH) and self.others is not None:
            return self.others.scales_of(number - len(self.k_LCMH))
        return None if self.scales is None else self.scales.layer(number)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all layers."""
        own = list(zip(self.k_LCMH.unbind(0), self.v_LCMH.unbind(0), strict=True))
        return own if self.others is None else own + self.others.layers()


def zero_kv(
    shapes: Sequence[tuple[int, int, int]],  # layers, KV heads, head width; others after the first
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    is_shared: bool = False,  # keys serve as values
) -> KVCache:
    """An empty cache."""
    (num_layers, num_kv_heads, head_dim), *rest = shapes
    size = (num_layers, num_slots, num_kv_heads, head_dim)
    k_LCMH = torch.zeros(size, dtype=dtype, device=device)
    kv = KVCache(k_LCMH, k_LCMH if is_shared else torch.zeros_like(k_LCMH))
    if has_scales(dtype):
        k_scale_LCM1 = torch.zeros(*size[:3], 1, device=device)
        kv.scales = KVCache(k_scale_LCM1, torch.zeros_like(k_scale_LCM1))
    kv.others = zero_kv(rest, num_slots, dtype, device, is_shared) if rest else None
    return kv


def has_scales(dtype: torch.dtype) -> bool:
    """Whether keys and values of a precision are codes, with a scale per slot and head."""
    return dtype.itemsize == 1


def codes_ref(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of heads, [..., H] to [..., H] and [..., 1]; the largest number of a head
    has the largest code."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.float().abs().amax(-1, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    code = x.float() / scale
    return (code.round() if dtype == torch.int8 else code).to(dtype), scale

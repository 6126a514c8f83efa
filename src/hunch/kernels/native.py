"""Whole networks by the C++ kernels: all layers of a decoder behind one call.

Shape letters: T packed tokens, P ancestors, M rows, D width, V vocabulary, L layers, C slots of the
cache, H head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.native_library import I64, POINTER, library, team
from hunch.kernels.native_matrix import NativeMatrix
from hunch.kernels.native_structs import (
    KVPlaces,
    LayerStruct,
    NativePart,
    NetworkStruct,
    PassStruct,
    Reduce,
    StatesStruct,
    address_of,
    kv_places,
)
from hunch.kernels.recur import sequences_of
from hunch.kernels.recurrence import RecurrentStates

_MAX_KEPT = 64  # rows of a pass whose columns may come again
_POSITIONS = 1024  # that tables are filled for at once


def _floats(x: Tensor) -> Tensor:
    is_ready = x.dtype is torch.float32 and x.is_contiguous()
    return x if is_ready else x.to(torch.float32).contiguous()


def states_of(states: RecurrentStates, attn: AttnInputs) -> tuple[StatesStruct, Tensor]:
    """Rows' states as a pass takes them, and what it points at."""
    assert states.inputs_LXGI.dtype == torch.float32
    spans_S4 = torch.tensor(sequences_of(attn), dtype=torch.int64).view(-1, 4)
    _, num_rows, num_places, _ = states.inputs_LXGI.shape
    found = StatesStruct(
        state=states.state_LXNHD.data_ptr(),
        inputs=states.inputs_LXGI.data_ptr(),
        folded=states.folded_LX.data_ptr(),
        num_rows=num_rows,
        num_places=num_places,
        num_spans=len(spans_S4),
        spans=spans_S4.data_ptr(),
    )
    return found, spans_S4


class NativeNetwork:
    """All layers of a decoder behind one call. It keeps what the kernels point at alive."""

    def __init__(
        self,
        layers: Sequence[NativePart],
        *,
        head: NativeMatrix,
        kv_dtype: torch.dtype,
        num_threads: int | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        reach: Sequence[Callable[[int], None]] = (),
        **values: Any,
    ) -> None:
        """`reduce`: from this process's part of a sum to the sum, where others hold the rest.
        `reach`: fill tables of positions that are not whole yet for this many. `values` are those
        of NetworkStruct."""
        self.layers, self.kv_dtype = tuple(layers), kv_dtype
        self.team = team(num_threads)
        self._reduce = None if reduce is None else Reduce(reduce)
        self._structs = (LayerStruct * len(layers))(*(layer.struct for layer in layers))
        self.width, self.num_out = int(values["width"]), head.num_out
        self._reach, self._num_positions = tuple(reach), 0
        self._kv: KVCache | None = None
        self._kv_places: KVPlaces = ()
        self._passes: dict[int, tuple[tuple[Tensor, ...], PassStruct]] = {}  # the last of each size
        self._part = NativePart(
            NetworkStruct,
            head=head,
            num_layers=len(layers),
            layers=ctypes.addressof(self._structs),
            **values,
        )
        if self._reduce is not None:
            self._part.struct.reduce = self._reduce.function
        self.handle = library().hunch_decoder_new(ctypes.addressof(self._part.struct))

    def reach(self, num_positions: int) -> None:
        """Passes come to this many positions."""
        if num_positions > self._num_positions:
            self._num_positions = -(-num_positions // _POSITIONS) * _POSITIONS
            for reach in self._reach:
                reach(self._num_positions)

    def forward(
        self,
        ids_T: Tensor | None,
        attn: AttnInputs,
        kv: KVCache,
        feature_layers: Sequence[int] = (),
        embedded_TD: Tensor | None = None,
        state_TD: Tensor | None = None,  # where the network joins
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states after the final norm, and the stream after each layer asked for."""
        tokens = ids_T if ids_T is not None else embedded_TD
        assert tokens is not None
        num_rows, width = tokens.shape[0], self.width
        state_TD = None if state_TD is None else _floats(state_TD)
        tree_TP = attn.tree_TP
        if tree_TP is not None and tree_TP.stride(1) != 1:
            tree_TP = tree_TP.contiguous()
        hidden_TD = torch.empty(num_rows, width)
        features = tuple([torch.empty(num_rows, width) for _ in feature_layers])
        if self._reach and num_rows:
            self.reach(int(attn.pos_T.max()) + 1)
        step = self._pass_over(attn, num_rows)
        step.ids, step.embedded, step.state = map(address_of, (ids_T, embedded_TD, state_TD))
        if kv is not self._kv:  # it is the same one every pass
            self._kv, self._kv_places = kv, kv_places(kv, self.kv_dtype)
        step.place(self._kv_places)
        step.hidden, step.num_features = hidden_TD.data_ptr(), len(features)
        step.tree, step.tree_stride = None, 0
        held = None if kv.states is None else states_of(kv.states, attn)
        step.states = None if held is None else ctypes.addressof(held[0])
        if tree_TP is not None:
            step.tree, step.tree_stride = tree_TP.data_ptr(), tree_TP.stride(0)
        if features:
            layers = (I64 * len(features))(*feature_layers)
            addresses = (POINTER * len(features))(*(f.data_ptr() for f in features))
            step.feature_layers = ctypes.addressof(layers)
            step.features = ctypes.addressof(addresses)
        bad_row = library().hunch_decoder_forward(self.handle, self.team, ctypes.addressof(step))
        assert bad_row < 0, f"row {bad_row}: token id or position out of range"
        if self._reduce is not None:
            self._reduce.check()
        return hidden_TD, features

    def _pass_over(self, attn: AttnInputs, num_rows: int) -> PassStruct:
        """A pass that knows its columns: a row that decodes brings the same ones every step."""
        columns = (attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, attn.table_SB)
        before, step = self._passes.get(num_rows, ((), None))
        if step is not None and all(map(is_, before, columns)):
            return step
        assert all(column.is_contiguous() for column in columns)
        pos, slot, seq, base, table = (column.data_ptr() for column in columns)
        step = PassStruct(
            num_rows=num_rows, pos=pos, slot=slot, seq=seq, base=base, table=table,
            table_stride=attn.table_SB.shape[1], block_size=attn.block_size,
        )  # fmt: skip
        if num_rows <= _MAX_KEPT:
            self._passes[num_rows] = columns, step
        return step

    def logits(self, hidden_MD: Tensor, out_MV: Tensor | None = None) -> Tensor:
        """float32 scores of every token, in `out_MV` where there is one."""
        hidden_MD, num_rows = _floats(hidden_MD), hidden_MD.shape[0]
        logits_MV = torch.empty(num_rows, self.num_out) if out_MV is None else out_MV
        library().hunch_decoder_logits(
            self.handle, self.team, hidden_MD.data_ptr(), num_rows, logits_MV.data_ptr()
        )
        return logits_MV

    def __del__(self) -> None:
        if getattr(self, "handle", None) and library is not None:
            library().hunch_decoder_free(self.handle)

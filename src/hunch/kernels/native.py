"""The C++ kernels as Python sees them: a team of threads, packed matrices, a decoder.

Shape letters: T packed tokens, M rows, D width, N outputs, K inputs, V vocabulary, L layers,
C slots of the cache, H head width.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.build import load_library, num_cores
from hunch.kernels.kv_store import KVCache
from hunch.kernels.native_structs import (
    _F32,
    _I32,
    _I64,
    _POINTER,
    KVPlaces,
    LayerStruct,
    NativePart,
    NetworkStruct,
    Reduce,
    _address,
    _Pass,
    _States,
    kv_places,
)
from hunch.kernels.recurrence import RowStates, sequences_of

INT4, INT8, FLOAT, INT5, K4, K5, K6 = range(7)  # formats of a matrix
ROUNDED = (INT4, INT8, FLOAT)  # those that floats can become; the others hold a file's blocks
_MAX_KEPT = 64  # rows of a pass whose columns may come again
_POSITIONS = 1024  # that tables are filled for at once
# GGUF blocks that are kept as they are: their number in the kernels, and the matrix format that
# holds them.
FORMATS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 3, "Q5_0": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
EXACT_FORMAT = {
    "Q4_0": INT4, "Q4_1": INT4, "Q5_0": INT5, "Q8_0": INT8, "Q4_K": K4, "Q5_K": K5, "Q6_K": K6,
}  # fmt: skip
_FLOATS = 0


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library()
    if library is None:
        return None
    # fmt: off
    signatures = {
        "hunch_team_new": (_POINTER, _I32),
        "hunch_matrix_new": (_POINTER, _I32, _I32, _I32),
        "hunch_matrix_bytes": (_I64, _POINTER),
        "hunch_matrix_fill": (None, _POINTER, _POINTER, _I32, _POINTER, _I64, _I64, _I64),
        "hunch_matrix_rows": (None, _POINTER, _POINTER, _I64, _POINTER),
        "hunch_matrix_free": (None, _POINTER),
        "hunch_multiply": (None, _POINTER, _POINTER, _POINTER, _I64, _POINTER, _I32),
        "hunch_panel": (_I32,),
        "hunch_multiply_rows": (
            None, _POINTER, _POINTER, _I64, _I64, _POINTER, _I32, _I64, _POINTER,
        ),
        "hunch_attend": (
            None, *([_POINTER] * 10), *([_I64] * 8), _F32, _POINTER, _POINTER, _I64, _POINTER,
        ),
        "hunch_decoder_new": (_POINTER, _POINTER),
        "hunch_decoder_free": (None, _POINTER),
        "hunch_decoder_forward": (_I32, _POINTER, _POINTER, _POINTER),
        "hunch_decoder_logits": (None, _POINTER, _POINTER, _POINTER, _I64, _POINTER),
        "hunch_choose_row": (
            _I64, _POINTER, _I64, _F32, _I64, ctypes.c_double, _F32, _I64, _I64, _I64, _I64,
        ),
        "hunch_choose": (None, _POINTER, *([_POINTER] * 10), _I64, _I64, _I64, _I32),
        "hunch_scores": (None, *([_POINTER] * 7), *([_I64] * 4)),
        "hunch_best": (None, _POINTER, *([_POINTER] * 11), _I64, _I64, _I64, _I64, _I32),
        "hunch_draft_chain": (_I32, _POINTER, _POINTER, _POINTER),
        "hunch_lookup_new": (_POINTER, _POINTER, _I64),
        "hunch_lookup_free": (None, _POINTER),
        "hunch_lookup_forget": (None, _POINTER, _I64),
        "hunch_lookup_follow": (None, _POINTER, _I64, _POINTER, _I64),
        "hunch_lookup_guess": (_I64, _POINTER, _I64, _I64, _POINTER, _POINTER),
        "hunch_shared_bytes": (_I64, _I32),
        "hunch_shared_end": (None, _POINTER),
        "hunch_shared_gather": (_I32, _POINTER, _I32, _I32, _POINTER, _I64, _POINTER),
        "hunch_shared_sum": (_I32, _POINTER, _I32, _I32, _POINTER, _I64, _POINTER),
        "hunch_shared_broadcast": (_I32, _POINTER, _I32, _I32, _POINTER, _I64),
    }
    # fmt: on
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def is_available() -> bool:
    """Whether the kernels could be built; the first call may build them."""
    return _library() is not None


@cache
def team(num_threads: int | None = None) -> int:
    """The threads that share every call; one team per size, for the life of the process."""
    return _lib().hunch_team_new(num_threads or num_cores())


def new_team(num_threads: int) -> int:
    """Threads of their own, for a network that computes while others do."""
    return int(_lib().hunch_team_new(num_threads))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team.cache_clear)  # threads do not survive a fork


def _lib() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "ask is_available() first"
    return library


def _floats(x: Tensor) -> Tensor:
    is_ready = x.dtype is torch.float32 and x.is_contiguous()
    return x if is_ready else x.to(torch.float32).contiguous()


class NativeMatrix:
    """A weight matrix [N, K] in the layout of the kernels."""

    def __init__(
        self, matrix_format: int, num_out: int, num_in: int, num_threads: int | None = None
    ) -> None:
        self.format, self.num_out, self.num_in = matrix_format, num_out, num_in
        self.team = team(num_threads)
        self.handle = _lib().hunch_matrix_new(matrix_format, num_out, num_in)

    @staticmethod
    def from_floats(
        weight_NK: Tensor, matrix_format: int, num_threads: int | None = None
    ) -> NativeMatrix:
        """Rounded to the format: INT8 and INT4 have a scale per 32 inputs."""
        assert matrix_format in ROUNDED, "the other formats are filled with a file's blocks alone"
        weight_NK = weight_NK.to(torch.float32).contiguous()
        matrix = NativeMatrix(matrix_format, *weight_NK.shape, num_threads)
        matrix._fill(_FLOATS, weight_NK)
        return matrix

    def put_floats(self, first: int, weight_NK: Tensor) -> None:
        """Rows from `first` on, a multiple of 16, rounded to the format."""
        self._fill(_FLOATS, weight_NK.to(torch.float32).contiguous(), first)

    def put_blocks(self, name: str, first: int, data: Tensor) -> None:
        """Rows from `first` on, a multiple of 16, of GGUF blocks."""
        self._fill(FORMATS[name], data.contiguous(), first)

    def _fill(self, form: int, rows: Tensor, first: int = 0) -> None:
        row_bytes = rows[0].numel() * rows.element_size()
        assert first % 16 == 0
        assert first + len(rows) <= self.num_out
        _lib().hunch_matrix_fill(
            self.handle, self.team, form, rows.data_ptr(), row_bytes, first, len(rows)
        )

    @property
    def nbytes(self) -> int:
        return int(_lib().hunch_matrix_bytes(self.handle))

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows as float32: embeddings."""
        assert ids_T.numel() == 0 or 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.num_out
        ids = ids_T.to(torch.int64).contiguous()
        out = torch.empty(*ids_T.shape, self.num_in)
        _lib().hunch_matrix_rows(self.handle, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def __call__(self, x_MK: Tensor, *, is_fine: bool = False) -> Tensor:
        """x times the matrix, float32; a row's result is the same bits in any company.

        A quantised matrix takes x as whole numbers of 8 bits, or 14 where `is_fine`, with a scale
        per row and 32 inputs.
        """
        x_MK = x_MK.to(torch.float32).contiguous()
        out_MN = torch.empty(*x_MK.shape[:-1], self.num_out)
        num_rows = x_MK.numel() // self.num_in
        _lib().hunch_multiply(
            self.handle, self.team, x_MK.data_ptr(), num_rows, out_MN.data_ptr(), is_fine
        )
        return out_MN

    def __del__(self) -> None:
        if getattr(self, "handle", None) and _library is not None:
            _lib().hunch_matrix_free(self.handle)


def states_of(states: RowStates, attn: AttnInputs) -> tuple[_States, Tensor]:
    """Rows' states as a pass takes them, and what it points at."""
    assert states.inputs_LXGI.dtype == torch.float32
    spans_S4 = torch.tensor(sequences_of(attn), dtype=torch.int64).view(-1, 4)
    _, num_rows, num_places, _ = states.inputs_LXGI.shape
    found = _States(
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
        self._passes: dict[int, tuple[tuple[Tensor, ...], _Pass]] = {}  # the last of each size
        self._part = NativePart(
            NetworkStruct,
            head=head,
            num_layers=len(layers),
            layers=ctypes.addressof(self._structs),
            **values,
        )
        if self._reduce is not None:
            self._part.struct.reduce = self._reduce.function
        self.handle = _lib().hunch_decoder_new(ctypes.addressof(self._part.struct))

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
        step.ids, step.embedded, step.state = map(_address, (ids_T, embedded_TD, state_TD))
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
            layers = (_I64 * len(features))(*feature_layers)
            addresses = (_POINTER * len(features))(*(f.data_ptr() for f in features))
            step.feature_layers = ctypes.addressof(layers)
            step.features = ctypes.addressof(addresses)
        bad_row = _lib().hunch_decoder_forward(self.handle, self.team, ctypes.addressof(step))
        assert bad_row < 0, f"row {bad_row}: token id or position out of range"
        if self._reduce is not None:
            self._reduce.check()
        return hidden_TD, features

    def _pass_over(self, attn: AttnInputs, num_rows: int) -> _Pass:
        """A pass that knows its columns: a row that decodes brings the same ones every step."""
        columns = (attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, attn.table_SB)
        before, step = self._passes.get(num_rows, ((), None))
        if step is not None and all(map(is_, before, columns)):
            return step
        assert all(column.is_contiguous() for column in columns)
        pos, slot, seq, base, table = (column.data_ptr() for column in columns)
        step = _Pass(
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
        _lib().hunch_decoder_logits(
            self.handle, self.team, hidden_MD.data_ptr(), num_rows, logits_MV.data_ptr()
        )
        return logits_MV

    def __del__(self) -> None:
        if getattr(self, "handle", None) and _library is not None:
            _lib().hunch_decoder_free(self.handle)

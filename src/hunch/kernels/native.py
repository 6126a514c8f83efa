"""The C++ kernels as Python sees them: a team of threads, packed matrices, a decoder, a choice.

Shape letters: T packed tokens, M rows, D width, N outputs, K inputs, V vocabulary, L layers,
C slots of the cache, H head width.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.build import load_library, num_cores

if TYPE_CHECKING:
    from hunch.kernels.native_draft import NativeJoin

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

INT4, INT8, FLOAT = 0, 1, 2  # kinds of a matrix
FORMATS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 3}  # GGUF blocks that are kept as they are
EXACT_KIND = {"Q4_0": INT4, "Q4_1": INT4, "Q8_0": INT8}
_FLOATS = 0

_MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm")
_JOINS = ("joins", "is_state_first", "is_first_masked", "is_residual_normed")
_BIASES = tuple(f"{name}_bias" for name in _MATRICES)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in (*_MATRICES, *_NORMS, *_BIASES)),
        *((name, _I64) for name in ("window", "k_row", "v_row", "up_row")),
    )


class _Spec(ctypes.Structure):
    _fields_ = (
        *(
            (name, _I32)
            for name in (
                "width", "ffn_width", "num_heads", "num_kv_heads", "head_dim", "num_layers",
                "is_half", "max_len",
            )
        ),
        ("norm_eps", _F32),
        ("scale", _F32),
        *(
            (name, _POINTER)
            for name in (
                "embedding", "head", "final_norm", "rope", "layers",
                "project", "project_bias", "token_norm", "state_norm", "logits_norm",
            )
        ),
        *((name, _I32) for name in _JOINS),
    )  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = (
        ("num_rows", _I64),
        *(
            (name, _POINTER)
            for name in ("ids", "embedded", "pos", "slot", "seq", "base", "table", "tree")
        ),
        *((name, _I64) for name in ("table_stride", "tree_stride", "block_size")),
        *((name, _POINTER) for name in ("k", "v")),
        ("layer_stride", _I64),
        ("num_features", _I64),
        *((name, _POINTER) for name in ("feature_layers", "features", "hidden", "state")),
    )


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
        "hunch_matrix_fill": (None, _POINTER, _POINTER, _I32, _POINTER, _I64),
        "hunch_matrix_rows": (None, _POINTER, _POINTER, _I64, _POINTER),
        "hunch_matrix_free": (None, _POINTER),
        "hunch_multiply": (None, _POINTER, _POINTER, _POINTER, _I64, _POINTER),
        "hunch_decoder_new": (_POINTER, _POINTER),
        "hunch_decoder_free": (None, _POINTER),
        "hunch_decoder_forward": (_I32, _POINTER, _POINTER, _POINTER),
        "hunch_decoder_logits": (None, _POINTER, _POINTER, _POINTER, _I64, _POINTER),
        "hunch_choose_row": (
            _I64, _POINTER, _I64, _F32, _I64, ctypes.c_double, _F32, _I64, _I64, _I64, _I64,
        ),
        "hunch_choose": (None, _POINTER, *([_POINTER] * 10), _I64, _I64, _I64, _I32),
        "hunch_best": (None, _POINTER, *([_POINTER] * 11), _I64, _I64, _I64, _I64, _I32),
        "hunch_draft_chain": (_I32, _POINTER, _POINTER, _POINTER),
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team.cache_clear)  # threads do not survive a fork


def _lib() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "ask is_available() first"
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeMatrix:
    """A weight matrix [N, K] in the layout of the kernels."""

    def __init__(
        self, kind: int, num_out: int, num_in: int, num_threads: int | None = None
    ) -> None:
        self.kind, self.num_out, self.num_in = kind, num_out, num_in
        self.team = team(num_threads)
        self.handle = _lib().hunch_matrix_new(kind, num_out, num_in)

    @staticmethod
    def from_floats(weight_NK: Tensor, kind: int, num_threads: int | None = None) -> NativeMatrix:
        """Rounded to the kind: INT8 and INT4 have a scale per 32 inputs."""
        weight_NK = weight_NK.to(torch.float32).contiguous()
        matrix = NativeMatrix(kind, *weight_NK.shape, num_threads)
        matrix._fill(_FLOATS, weight_NK)
        return matrix

    @staticmethod
    def from_blocks(
        name: str, shape: tuple[int, int], data: Tensor, num_threads: int | None = None
    ) -> NativeMatrix:
        """GGUF blocks of a format in FORMATS, not one bit changed."""
        matrix = NativeMatrix(EXACT_KIND[name], *shape, num_threads)
        matrix._fill(FORMATS[name], data.contiguous())
        return matrix

    def _fill(self, form: int, rows: Tensor) -> None:
        row_bytes = rows[0].numel() * rows.element_size()
        _lib().hunch_matrix_fill(self.handle, self.team, form, rows.data_ptr(), row_bytes)

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

    def __call__(self, x_MK: Tensor) -> Tensor:
        """x times the matrix, float32; a row's result is the same bits in any company."""
        x_MK = x_MK.to(torch.float32).contiguous()
        out_MN = torch.empty(*x_MK.shape[:-1], self.num_out)
        num_rows = x_MK.numel() // self.num_in
        _lib().hunch_multiply(self.handle, self.team, x_MK.data_ptr(), num_rows, out_MN.data_ptr())
        return out_MN

    def __del__(self) -> None:
        if getattr(self, "handle", None) and _library is not None:
            _lib().hunch_matrix_free(self.handle)


@dataclass(kw_only=True, slots=True)
class NativeLayer:
    """One decoder layer; norms and biases are float32."""

    MATRICES: ClassVar[tuple[str, ...]] = _MATRICES

    q: NativeMatrix
    k: NativeMatrix
    v: NativeMatrix
    out: NativeMatrix
    gate: NativeMatrix
    up: NativeMatrix
    down: NativeMatrix
    attn_norm: Tensor | None
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    biases: dict[str, Tensor | None]  # by the name of the matrix
    window: int | None = None

    def matrices(self) -> list[NativeMatrix]:
        return [getattr(self, name) for name in _MATRICES]

    def _struct(self) -> _Layer:
        struct = _Layer(window=self.window or 0)
        for name in _MATRICES:
            setattr(struct, name, getattr(self, name).handle)
            setattr(struct, f"{name}_bias", _address(self.biases.get(name)))
        for name in _NORMS:
            setattr(struct, name, _address(getattr(self, name)))
        return struct


@dataclass(kw_only=True, slots=True)
class NativeShape:
    """The numbers a pass needs; names as in the model's spec."""

    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    norm_eps: float
    scale: float


class NativeNetwork:
    """All layers of a decoder behind one call. It keeps what the kernels point at alive."""

    def __init__(
        self,
        shape: NativeShape,
        layers: Sequence[NativeLayer],
        *,
        embedding: NativeMatrix,
        head: NativeMatrix,
        final_norm: Tensor | None,
        rope_LH: Tensor,
        kv_dtype: torch.dtype,
        num_threads: int | None = None,
        join: NativeJoin | None = None,
    ) -> None:
        self.shape, self.layers, self.kv_dtype = shape, tuple(layers), kv_dtype
        self.team = team(num_threads)
        self._structs = (_Layer * len(layers))(*(layer._struct() for layer in layers))
        self._keep = (embedding, head, final_norm, rope_LH, join)
        self.num_out = head.num_out
        self._kv: KVCache | None = None
        self._kv_places = (0, 0, 0)
        spec = _Spec(
            **{name: getattr(shape, name) for name in shape.__slots__},
            num_layers=len(layers),
            is_half=kv_dtype == torch.float16,
            embedding=embedding.handle,
            head=head.handle,
            final_norm=_address(final_norm),
            rope=rope_LH.data_ptr(),
            layers=ctypes.addressof(self._structs),
            **(join.fields() if join else {}),
        )
        self.handle = _lib().hunch_decoder_new(ctypes.addressof(spec))

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
        if state_TD is not None:
            state_TD = state_TD.to(torch.float32).contiguous()
        tokens = ids_T if ids_T is not None else embedded_TD
        assert tokens is not None
        num_rows, width = len(tokens), self.shape.width
        columns = (attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, attn.table_SB)
        assert all(column.is_contiguous() for column in columns)
        tree_TP = attn.tree_TP
        if tree_TP is not None and tree_TP.stride(1) != 1:
            tree_TP = tree_TP.contiguous()
        hidden_TD = torch.empty(num_rows, width)
        features = tuple(torch.empty(num_rows, width) for _ in feature_layers)
        layers = (_I64 * len(features))(*feature_layers)
        addresses = (_POINTER * len(features))(*(f.data_ptr() for f in features))
        step = _Pass(
            num_rows, _address(ids_T), _address(embedded_TD), *(c.data_ptr() for c in columns),
            _address(tree_TP),
            attn.table_SB.shape[1], 0 if tree_TP is None else tree_TP.stride(0), attn.block_size,
            *self._places_of(kv),
            len(features), ctypes.addressof(layers), ctypes.addressof(addresses),
            hidden_TD.data_ptr(), _address(state_TD),
        )  # fmt: skip
        bad_row = _lib().hunch_decoder_forward(self.handle, self.team, ctypes.addressof(step))
        assert bad_row < 0, f"row {bad_row}: token id or position out of range"
        return hidden_TD, features

    def _places_of(self, kv: KVCache) -> tuple[int, int, int]:
        """Where keys and values start, and how far apart layers are; the same cache every pass."""
        if kv is not self._kv:
            k_LCMH, v_LCMH = kv.k_LCMH, kv.v_LCMH
            assert k_LCMH.dtype == v_LCMH.dtype == self.kv_dtype
            assert k_LCMH[0].is_contiguous()
            assert v_LCMH.stride() == k_LCMH.stride()
            self._kv = kv
            self._kv_places = k_LCMH.data_ptr(), v_LCMH.data_ptr(), k_LCMH.stride(0)
        return self._kv_places

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token."""
        hidden_MD = hidden_MD.to(torch.float32).contiguous()
        logits_MV = torch.empty(len(hidden_MD), self.num_out)
        _lib().hunch_decoder_logits(
            self.handle, self.team, hidden_MD.data_ptr(), len(hidden_MD), logits_MV.data_ptr()
        )
        return logits_MV

    def __del__(self) -> None:
        if getattr(self, "handle", None) and _library is not None:
            _lib().hunch_decoder_free(self.handle)


def choose(
    logits_MV: Tensor,
    temperature_M: Tensor,
    top_k_M: Tensor,
    top_p_M: Tensor,
    log_min_p_M: Tensor,
    seed_M: Tensor,
    index_M: Tensor,
    pos_M: Tensor,
    stream: int = 0,
    num_threads: int | None = None,
    ids_C: Tensor | None = None,
) -> Tensor:
    """A token per row: temperature, min-p, top-k, top-p, then the best with keyed noise.

    The rule is that of sampling/state.py, its filters and kernels/noise.py; temperature 0 takes
    the argmax. ids_C names the token of each column where they are a part of the
    vocabulary. float32 logits, temperature and log_min_p; float64 top_p; the rest int64.
    """
    assert logits_MV.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    columns = (temperature_M, top_k_M, top_p_M, log_min_p_M, seed_M, index_M, pos_M)
    columns = tuple(column.contiguous() for column in columns)
    num_rows, size = logits_MV.shape
    out_M = torch.empty(num_rows, dtype=torch.int64)
    _lib().hunch_choose(
        team(num_threads), logits_MV.data_ptr(), *(column.data_ptr() for column in columns),
        _address(ids_C), out_M.data_ptr(), num_rows, size, logits_MV.stride(0), stream,
    )  # fmt: skip
    return out_M


def choose_row(
    logits_V: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
    seed: int,
    index: int,
    pos: int,
    stream: int = 0,
) -> int:
    """`choose` for one row, without waking the team."""
    assert logits_V.dtype == np.float32
    assert logits_V.strides == (4,)
    return _lib().hunch_choose_row(
        logits_V.ctypes.data, len(logits_V), temperature, top_k, top_p, log_min_p, seed, index,
        pos, stream,
    )  # fmt: skip

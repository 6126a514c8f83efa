"""What Python and the C++ kernels hand each other: the fields of csrc's structs, in their order."""

from __future__ import annotations

import ctypes

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

_MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm")
_JOINS = ("joins", "is_state_first", "is_first_masked", "is_residual_normed")
_BIASES = tuple(f"{name}_bias" for name in _MATRICES)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in (*_MATRICES, *_NORMS, *_BIASES)),
        *((name, _I64) for name in ("window", "k_row", "v_row", "up_row")),
        ("experts", _POINTER),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "router", "up", "down", "router_bias", "choice_bias", "up_bias", "down_bias",
                "shared_up", "shared_down", "shared_gate",
            )
        ),
        *(
            (name, _I32)
            for name in (
                "num_experts", "num_chosen", "width", "shared_width", "scores", "is_normed",
                "num_groups", "num_groups_kept", "num_best",
            )
        ),
        ("scale", _F32),
    )  # fmt: skip


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
        *((name, _I32) for name in (*_JOINS, "is_fine")),
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

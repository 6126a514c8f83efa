"""What Python and the C++ kernels hand each other: the fields of their structs, in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.kv_store import KVCache
from hunch.kernels.native_library import F32, I32, I64, POINTER
from hunch.kernels.native_matrix import NativeMatrix


def fields(c_type: type, *names: str) -> tuple[tuple[str, type], ...]:
    """Fields of one type."""
    return tuple((name, c_type) for name in names)


MATRICES = ("q", "k", "v", "out", "gate", "up", "down")  # of a layer, each with a bias
NORMS = ("attn_norm", "mlp_norm", "attn_out_norm", "mlp_out_norm")
RULES = ("delta", "ssm", "conv")  # of recurrent layers, as in recurrent.h
_ORDER = ("is_layer_norm", "is_post_norm", "is_parallel", "is_qk_norm_whole")
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", "clipped", "relu2")  # as in activation.h
# How a cache holds numbers, as in kept.h.
KV_FORMS = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
_JOINS = ("joins", "is_state_first", "is_first_masked", "is_residual_normed")


class LayerStruct(ctypes.Structure):
    """One decoder layer. Matrices are None where another part stands in their place: experts for
    gate, up and down, `recurrent` or `latent` for q, k and v. Norms and biases are float32."""

    _fields_ = (
        *fields(POINTER, *MATRICES),
        # mlp_norm None: the stream as it is, or what attention read if parallel. Norms of what is
        # added to the stream stand last.
        *((name + ending, POINTER) for name in NORMS for ending in ("", "_bias")),
        *fields(POINTER, "q_norm", "k_norm", "sinks", "rope"),
        *((f"{name}_bias", POINTER) for name in MATRICES),
        ("window", I64),  # 0: all positions are seen
        # Where k and v begin in q's matrix, and up in gate's, if they are one.
        *fields(I64, "k_row", "v_row", "up_row"),
        *fields(POINTER, "experts", "recurrent", "attn_gate", "attn_gate_bias"),
        ("place", I64),  # among the layers of its kind
        *fields(POINTER, "latent", "v_norm", "inputs"),
        ("stream_scale", F32),  # of the stream at its end
        ("is_reader", I32),  # it has q alone, and reads keys and values in its place
        ("is_other", I32),  # its heads are of the network's other shape
        ("ffn_width", I32),  # 0: the network's
        # Norms where experts stand beside an MLP: of what they read, of their answer, of the MLP's.
        *fields(POINTER, "experts_norm", "experts_out_norm", "beside_norm"),
        ("temper", POINTER),  # of queries, by position
    )


class InputsStruct(ctypes.Structure):
    """A layer's use of what a table says of its tokens."""

    _fields_ = fields(POINTER, "gate", "project", "norm")


class RecurrentStruct(ctypes.Structure):
    """A recurrent layer: what the recurrence and its gate come from. Beta and decay are float
    matrices, as small differences add up in a state; conv is [tap, channel]."""

    _fields_ = (
        *fields(POINTER, "channels", "beta", "decay", "gate", "out", "conv"),
        *fields(POINTER, "conv_bias", "rate", "bias", "skip", "norm"),
        *fields(I32, "num_k_heads", "num_v_heads", "k_dim", "v_dim", "num_taps"),
        *fields(I32, "is_tiled", "is_norm_first", "rule", "place"),
        ("eps", F32),
    )


class StatesStruct(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "state", "inputs", "folded"),
        *fields(I64, "num_rows", "num_places", "num_spans"),
        ("spans", POINTER),
    )


class LatentStruct(ctypes.Structure):
    """Latent attention. q_down None: q reads the stream; q_bias belongs to q_down. k_up has a
    matrix [latent, flat] per head; flat is the width of a head's part without a position."""

    _fields_ = (
        *fields(
            POINTER, "q_down", "q", "kv", "k_up", "v_up", "q_norm", "kv_norm", "q_bias",
            "kv_bias",
        ),
        *fields(I32, "flat", "turned", "latent", "value"),
        ("norm_eps", F32),
    )  # fmt: skip


class ExpertsStruct(ctypes.Structure):
    """A layer's experts. Router and shared gate are float matrices. The matrices of all experts are
    one: `up` holds each expert's gate and up, `down` each expert's outputs; so does shared_up."""

    _fields_ = (
        *fields(
            POINTER, "router", "up", "down", "router_bias", "choice_bias", "up_bias",
            "down_bias", "shared_up", "shared_down", "shared_gate",
        ),
        *fields(
            I32, "num_experts", "num_chosen", "width", "shared_width", "scores", "is_normed",
            "num_groups", "num_groups_kept", "num_best", "activation",
        ),
        ("scale", F32),
        ("factor", POINTER),  # of the weights of each expert
        ("is_of_input", I32),
        ("spread", F32),
    )  # fmt: skip


REDUCE = ctypes.CFUNCTYPE(None, POINTER, I64)  # numbers and their count, summed in place


class NetworkStruct(ctypes.Structure):
    """The numbers, matrices and vectors of a network; names as in a model's spec. `other` heads are
    of layers whose heads have another shape. One that joins takes a token and a state: normed, side
    by side, projected. The table tells each layer something of each token."""

    _fields_ = (
        *fields(
            I32, "width", "ffn_width", "num_heads", "num_kv_heads", "head_dim", "num_layers",
            "max_len",
        ),
        ("norm_eps", F32),
        ("scale", F32),
        *fields(
            POINTER, "embedding", "head", "final_norm", "final_norm_bias", "rope", "positions",
            "layers", "project", "project_bias", "token_norm", "state_norm", "logits_norm",
        ),
        *fields(I32, *_JOINS, "is_fine"),
        *fields(I32, *_ORDER, "activation"),
        *fields(F32, "embed_scale", "residual_scale", "logits_scale", "attn_cap", "logits_cap"),
        ("reduce", REDUCE),
        *fields(I32, "other_kv_heads", "other_head_dim", "table_width"),
        ("table_scale", F32),
        *fields(POINTER, "input_table", "input_project", "input_norm"),
        ("head_bias", POINTER),
    )  # fmt: skip


class Kept(ctypes.Structure):
    """Keys or values as a cache keeps them, with scales where they are codes."""

    _fields_ = (("numbers", POINTER), ("scales", POINTER), ("form", I64))

    @staticmethod
    def over(numbers: Tensor, scales: Tensor | None) -> Kept:
        return Kept(numbers.data_ptr(), address_of(scales), KV_FORMS[numbers.dtype])


class PassStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", I64),
        *fields(POINTER, "ids", "embedded", "pos", "slot", "seq", "base", "table", "tree"),
        *fields(I64, "table_stride", "tree_stride", "block_size"),
        *fields(Kept, "k", "v"),
        ("layer_stride", I64),
        ("num_features", I64),
        *fields(POINTER, "feature_layers", "features", "hidden", "state"),
        ("states", POINTER),
        *fields(Kept, "k_other", "v_other"),
        ("other_stride", I64),
    )

    def place(self, places: KVPlaces) -> None:
        self.k, self.v, self.layer_stride = places[0]
        if len(places) > 1:
            self.k_other, self.v_other, self.other_stride = places[1]


KVPlaces = tuple[tuple[Kept, Kept, int], ...]


def kv_places(kv: KVCache, dtype: torch.dtype) -> KVPlaces:
    """Where keys and values start, and how far apart layers are, for each shape of heads."""
    k_LCMH, v_LCMH = kv.k_LCMH, kv.v_LCMH
    assert k_LCMH.dtype == v_LCMH.dtype == dtype
    assert k_LCMH[0].is_contiguous()
    assert v_LCMH.stride() == k_LCMH.stride()
    scales = (None, None)
    if kv.scales is not None:
        scales = kv.scales.k_LCMH, kv.scales.v_LCMH
        assert all(scale_LCM1.is_contiguous() for scale_LCM1 in scales)
        assert k_LCMH.is_contiguous()
    own = Kept.over(k_LCMH, scales[0]), Kept.over(v_LCMH, scales[1]), k_LCMH.stride(0)
    return (own, *(kv_places(kv.others, dtype) if kv.others is not None else ()))


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def activation_number(name: str) -> int:
    """How the kernels are told an activation of Hugging Face's name."""
    return _ACTIVATIONS.index(KERNEL_NAMES[name])


class NativePart:
    """One of the kernels' structs, filled; what it points at lives as long as this object.

    `values` are matrices, tensors, other parts and numbers, by the names of the struct's fields.
    """

    def __init__(self, form: type[ctypes.Structure], **values: Any) -> None:
        unknown = values.keys() - {name for name, *_ in form._fields_}
        assert not unknown, f"{form.__name__} has no {', '.join(sorted(unknown))}"
        self.values = values
        self.struct = form(**{name: _handed(value) for name, value in values.items()})

    def matrices(self) -> list[NativeMatrix]:
        found: list[NativeMatrix] = []
        for value in self.values.values():
            if isinstance(value, NativePart):
                found += value.matrices()
            elif hasattr(value, "handle"):
                found.append(value)
        return found


def _handed(value: Any) -> Any:
    """How a struct holds it: by its address or handle, or a number as it is."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, NativePart):
        return ctypes.addressof(value.struct)
    return getattr(value, "handle", value)


class Reduce:
    """A sum over processes that the kernels can call; what goes wrong in it is raised later."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self._reduce = reduce
        self._error: Exception | None = None
        self.function = REDUCE(self._call)

    def _call(self, address: int, count: int) -> None:
        if self._error is not None:
            return
        part = torch.frombuffer((F32 * count).from_address(address), dtype=torch.float32)
        try:
            part.copy_(self._reduce(part))
        except Exception as error:  # nothing may pass through the kernels' frames
            self._error = error

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

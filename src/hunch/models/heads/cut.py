"""A draft cut from its target: own layers, the target's embedding and output matrix.

Its config.json names the model it was cut from (`cut_from`). Where that is the target, the tables
are shared; for another target of the same vocabulary they are read from that model's files.
Shape letters: V vocabulary, D width, C columns of the draft's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.hub import resolve as find_files
from hunch.kernels.native import INT8, NativeMatrix
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.parts import check_map
from hunch.models.load import check_tensors, choose_dtype
from hunch.models.native import ID_MAP, NativeDecoder, is_supported
from hunch.models.source import FileSource, Shape
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights, open_weights
from hunch.registry import MODELS, resolve

CUT_FROM = "cut_from"


def is_cut(weights: Weights) -> bool:
    return CUT_FROM in weights.config


def load_cut(
    weights: Weights, target: Any, dtype: str, device: torch.device
) -> tuple[Any, Tensor | None]:
    """The model, and the target's id of each column of its logits (None: all of them)."""
    spec = ModelSpec.from_config(weights.config)
    ids_C = _read_map(weights, spec.vocab_size)
    target = getattr(target, "decoder", target)
    is_native = getattr(target, "kernels", "") == "native"
    if is_native and isinstance(target, NativeDecoder) and is_supported(spec):
        tables = _native_tables(weights, spec, target, ids_C)
        kind = dtype
        if dtype == "auto":
            kind = "float32" if target.kv_dtype == torch.float32 else "int8"
        threads = torch.get_num_threads()
        return NativeDecoder(spec, weights, kind, threads, tables=tables), ids_C
    source = _CutSource(weights, choose_dtype(dtype, spec, device), device, spec, target)
    family: type[Decoder] = resolve(MODELS, spec.architecture)
    check_tensors(spec, source, (family.names.embed, family.names.head, ID_MAP))
    model = family(spec, source)
    if ids_C is not None:
        model.head = Linear(model.head.weight_NK[ids_C.to(device)].contiguous())
    return model, None if ids_C is None else ids_C.to(device)


class _CutSource(FileSource):
    """The draft's own tensors from its file, the tables from the target where it has them."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        spec: ModelSpec,
        target: Any,
    ) -> None:
        super().__init__(weights, dtype, device)
        self.family: type[Decoder] = resolve(MODELS, spec.architecture)
        self.target = target if _is_same(spec, target) and isinstance(target, Decoder) else None

    def read(self, name: str, shape: Shape) -> Tensor:
        names = self.family.names
        if name not in (names.embed, names.head):
            return super().read(name, shape)
        if self.target is not None:
            is_embed = name == names.embed
            return self.target.embedding_VD if is_embed else self.target.head.weight_NK
        origin = FileSource(_origin(self.weights), self.dtype, self.device)
        return origin.read(name, shape)


def _native_tables(
    weights: Weights, spec: ModelSpec, target: NativeDecoder, ids_C: Tensor | None
) -> tuple[NativeMatrix, NativeMatrix]:
    """Embedding and output matrix; a reduced vocabulary has the rows of its tokens alone."""
    threads = torch.get_num_threads()
    if _is_same(spec, target):
        embedding, head = target.embedding, target.head
    else:
        names = resolve(MODELS, spec.architecture).names
        source = FileSource(_origin(weights), torch.float32)
        shape = (spec.vocab_size, spec.width)
        embedding = NativeMatrix.from_floats(source.read(names.embed, shape), INT8, threads)
        head = embedding
        if not spec.is_tied:
            head = NativeMatrix.from_floats(source.read(names.head, shape), INT8, threads)
    if ids_C is not None:
        head = NativeMatrix.from_floats(head.rows(ids_C), head.kind, threads)
    return embedding, head


def _is_same(spec: ModelSpec, target: Any) -> bool:
    """Whether the target can be the model the draft was cut from."""
    other = target.spec
    return bool(other.width == spec.width and other.vocab_size == spec.vocab_size)


def _origin(weights: Weights) -> Weights:
    return open_weights(find_files(str(weights.config[CUT_FROM])))


def _read_map(weights: Weights, vocab_size: int) -> Tensor | None:
    if ID_MAP not in weights.names():
        return None
    offset_C = weights.tensor(ID_MAP, torch.int64)
    if weights.config.get("draft_vocab_size", len(offset_C)) != len(offset_C):
        raise ModelFormatError(
            f"{weights.path}: draft_vocab_size={weights.config['draft_vocab_size']}, but {ID_MAP} "
            f"has {len(offset_C)} entries; the file and its config belong to different drafts"
        )
    return check_map(torch.arange(len(offset_C)) + offset_C, vocab_size, str(weights.path))

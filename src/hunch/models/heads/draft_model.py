"""Draft models: loading one beside its target.

A whole model is loaded in the precision of its target's backend. A draft cut from a model has
layers of its own and that model's embedding and output matrix: its config.json names the model
(`cut_from`). If that is the target, the tables are shared. For another target of the same
vocabulary they are read from the named model's files; always so if the draft was made for another
target (`drafts_for` names it).

Shape letters: V vocabulary, D width, C columns of the draft's logits that are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, ModelNotFoundError
from hunch.hub import resolve as find_files
from hunch.kernels.native_library import is_available
from hunch.kernels.native_matrix import FLOAT, INT8, ROUNDED, NativeMatrix
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.files import check_drafts, check_map
from hunch.models.heads.vocabulary import Columns, compare, read_vocab
from hunch.models.load import check_tensors, choose_dtype, choose_hold
from hunch.models.native import ID_MAP, NativeDecoder
from hunch.models.source import HOLDS, FileSource, Shape
from hunch.models.spec import ModelSpec
from hunch.models.target import Backend, Target, find_backend
from hunch.models.weights import Weights, open_weights
from hunch.registry import MODELS, resolve

CUT_FROM = "cut_from"
DRAFTS_FOR = "drafts_for"  # the target, if the draft was cut from another model
MAX_SHARE = 0.2  # of the bytes a target reads per token, above which a draft model rarely pays


class TargetBeside:
    """A target on another device, for a draft model: what they share, without tensors."""

    tables = None

    def __init__(self, target: Target, device: torch.device) -> None:
        self.device = device
        self.spec: ModelSpec = target.spec
        self.weight_bytes = target.weight_bytes
        is_cpu = device.type == "cpu"
        # On a CPU a draft model reads its weights for every token: in 8 bits it is faster.
        self.is_quantised = is_cpu or target.is_quantised
        self.dtype = torch.float32 if is_cpu else torch.bfloat16
        kernels = "triton" if not is_cpu else "native" if is_available() else "torch"
        self.backend: Backend = find_backend(kernels)


def load_draft_model(
    weights: Weights,
    target: Target,
    vocab: Mapping[str, int] | None,
    *,
    dtype: str = "auto",
    is_crossed: bool = False,
) -> tuple[Target, Columns]:
    """The model on the kernels that its target has, and how its logits become the target's."""
    path, target_size = str(weights.path), target.spec.vocab_size
    check_drafts(weights)
    if CUT_FROM in weights.config:
        spec = ModelSpec.from_config(weights.config)
        own = read_vocab(_origin(weights)) if DRAFTS_FOR in weights.config else None
        columns = compare(own, spec.vocab_size, vocab, target_size, path)
        ids_C = _read_map(weights, min(spec.vocab_size, target_size))
        if ids_C is not None:
            columns = replace(columns, num_columns=len(ids_C), ids_C=ids_C)
        model = target.backend.load_cut(weights, spec, target, dtype, ids_C)
        return model, columns.to(target.device)
    model = target.backend.load_draft(weights, target, dtype)
    size, own = model.spec.vocab_size, read_vocab(weights)
    columns = compare(own, size, vocab, target_size, path, is_crossed)
    return model, columns.to(target.device)


def byte_share(weights: Weights, target: Target) -> float:
    """The bytes that a node of a draft model reads, as a share of those of a target's pass.

    Told from the files alone: nothing is loaded. A pass reads next to nothing of the
    embeddings.
    """
    config, spec = weights.config, target.spec
    sizes = {name: prod(weights.shape(name)) for name in weights.names()}
    num_read = sum(size for name, size in sizes.items() if "embed_tokens" not in name)
    if not any("lm_head" in name for name in sizes):  # the embedding is the output matrix too
        num_columns = config.get("draft_vocab_size") or config.get("vocab_size", 0)
        num_read += num_columns * config.get("hidden_size", 0)
    # Beside a quantised target a draft model is held in 8 bits.
    size = 1 if target.is_quantised else target.dtype.itemsize
    embedding = 0 if spec.is_tied else spec.vocab_size * spec.width * size
    return float(num_read * size / max(target.weight_bytes - embedding, 1))


def cut_native(
    weights: Weights, spec: ModelSpec, target: NativeDecoder, dtype: str, ids_C: Tensor | None
) -> NativeDecoder:
    if dtype == "auto":
        dtype = "int8" if target.is_quantised else "float32"
    tables = _native_tables(weights, spec, target, ids_C, FLOAT if dtype == "float32" else INT8)
    return NativeDecoder(spec, weights, dtype, torch.get_num_threads(), tables=tables)


def cut_decoder(
    weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
) -> Decoder:
    device = target.device
    # A draft that shares the target's tables computes in their precision, not in its file's.
    given = target.dtype if dtype == "auto" or dtype in HOLDS else choose_dtype(dtype, spec, device)
    source = _CutSource(weights, given, device, spec, target)
    source.hold = choose_hold(dtype, spec, device)
    family: type[Decoder] = resolve(MODELS, spec.architecture)
    check_tensors(spec, source, (family.names.embed, family.names.head, ID_MAP))
    model = family(spec, source)
    if ids_C is not None:
        model.head = Linear(model.head.rows(ids_C))
    return model


class _CutSource(FileSource):
    """The draft's own tensors from its file, the tables from the target where it has them."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        spec: ModelSpec,
        target: Target,
    ) -> None:
        super().__init__(weights, dtype, device)
        self.family: type[Decoder] = resolve(MODELS, spec.architecture)
        is_shared = _is_same(weights, spec, target) and dtype == target.dtype
        self.tables = target.tables if is_shared else None

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        names = self.family.names
        if name not in (names.embed, names.head):
            return super().read(name, shape, dtype)
        if self.tables is not None and name == names.embed:
            return self.tables[0]
        return self._origin().read(name, shape, dtype)

    def head(self, name: str, vocab_size: int, width: int, *, has_bias: bool = False) -> Linear:
        if self.tables is not None:
            return Linear(self.tables[1])
        return self._origin().head(name, vocab_size, width, has_bias=has_bias)

    def tied_head(self, name: str, table_VD: Tensor) -> Linear:
        return Linear(table_VD if self.tables is None else self.tables[1])

    def _origin(self) -> FileSource:
        return FileSource(_origin(self.weights), self.dtype, self.device, hold=self.hold)


def _native_tables(
    weights: Weights, spec: ModelSpec, target: NativeDecoder, ids_C: Tensor | None, own_format: int
) -> tuple[NativeMatrix, NativeMatrix]:
    """Embedding and output matrix, in this format unless they are the target's; with a reduced
    vocabulary, only the rows of its tokens."""
    threads = torch.get_num_threads()
    if _is_same(weights, spec, target):
        embedding, head = target.embedding, target.head
    else:
        names = resolve(MODELS, spec.architecture).names
        source = FileSource(_origin(weights), torch.float32)
        shape = (spec.vocab_size, spec.width)
        embedding = NativeMatrix.from_floats(source.read(names.embed, shape), own_format, threads)
        head = embedding
        if not spec.is_tied:
            head = NativeMatrix.from_floats(source.read(names.head, shape), own_format, threads)
    if ids_C is not None:
        head_format = head.format if head.format in ROUNDED else INT8
        head = NativeMatrix.from_floats(head.rows(ids_C), head_format, threads)
    return embedding, head


def _is_same(weights: Weights, spec: ModelSpec, target: Target) -> bool:
    """Whether the target can be the model the draft was cut from."""
    other = target.spec
    if isinstance(target, TargetBeside):
        return False  # its tables are on another device
    if DRAFTS_FOR in weights.config:
        return False
    return other.width == spec.width and other.vocab_size == spec.vocab_size


def _origin(weights: Weights) -> Weights:
    """The model whose tables a draft reads."""
    name = str(weights.config[CUT_FROM])
    try:
        return open_weights(find_files(name))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{weights.path} was cut from {name}, whose embedding and output matrix it reads; put "
            f"it there, or name its place as {CUT_FROM} in config.json. {error}"
        ) from None


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

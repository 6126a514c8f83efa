"""A drafter's directory: which method it belongs to, its config.json, its tensors.

Everything is checked when it is taken. Shape letters: M packed rows, D width, V vocabulary, C
columns of a reduced vocabulary, N outputs, K inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hunch.errors import (
    ModelError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabMismatchError,
)
from hunch.kernels.native_matrix import FLOAT, INT8, NativeMatrix
from hunch.layers.linear import Linear
from hunch.layers.part import Part
from hunch.models.keys import read_common
from hunch.models.load import DRAFTING_LAYERS
from hunch.models.source import AnyLinear, Shape, Source
from hunch.models.spec import ModelSpec
from hunch.models.target import Target
from hunch.models.weights import Weights, open_weights
from hunch.models.weights.json_file import read_json, refuse_unfinished

_ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel": "mlp",
    "MedusaModel": "medusa",
    "EagleModel": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "MiMoMTPModel": "mtp",
    "DeepSeekMTPModel": "mtp",
    "DeepseekV3ForCausalLMNextN": "mtp",
    "Qwen3NextMTP": "mtp",
}
log = logging.getLogger("hunch")

UNREAD = "of its tensors are not read"
BLOCKS = ("dflash2", "dspark", "dflash")  # parts of the names of block drafters
_MODEL_TYPES = {
    "mlp_speculator": "mlp",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mimo_mtp": "mtp",
    "deepseek_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}


def detect(path: str | Path) -> str:
    """The registry name of the method that drafts with the files at `path`."""
    if Path(path).suffix == ".gguf":
        return "draft"
    config = read_config(path)
    if "cut_from" in config:
        return "draft"
    model_type = config.get("speculators_model_type")
    if model_type is not None:
        if model_type not in ("eagle3", *BLOCKS):
            raise UnsupportedModelError(
                f"{path}: speculators_model_type={model_type!r} is not supported; hunch reads "
                "eagle3, dflash, dspark and dflash2"
            )
        return str(model_type)
    for name in config.get("architectures") or ():
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        for method in BLOCKS:
            if method in str(name).lower():
                return method
    if config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    if "medusa_num_heads" in config:
        return "medusa"
    if any(key in config for key in DRAFTING_LAYERS) and "architectures" not in config:
        return "mtp"
    if "draft_vocab_size" in config or "eagle_config" in config:
        return "eagle3"
    if _is_eagle(Path(path), config):
        return "eagle"
    return "draft"


def _is_eagle(path: Path, config: dict[str, Any]) -> bool:
    """EAGLE-1 heads call themselves LlamaForCausalLM; only their tensors tell them apart."""
    if config.get("num_hidden_layers") != 1:
        return False
    names = {name.removeprefix("model.") for name in open_weights(path).names()}
    return "fc.weight" in names and "norm.weight" not in names


def speculative_tokens(path: str | Path) -> int | None:
    """The number of tokens per step in the files; None: it is not there."""
    config = read_config(path)
    for key in ("n_predict", "num_heads"):
        if isinstance(config.get(key), int):
            return int(config[key])
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or ()
    for method in methods:
        if isinstance(method, dict) and isinstance(method.get("speculative_tokens"), int):
            return int(method["speculative_tokens"])
    return None


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a drafter's directory."""
    folder = Path(path)
    file = folder / "config.json"
    if not folder.exists():
        raise ModelNotFoundError(f"{folder}: no such directory; give the folder of a drafter")
    refuse_unfinished(folder)
    if not file.is_file():
        raise ModelFormatError(
            f"{folder}: no config.json; a drafter is a directory with config.json and its weights"
        )
    return read_json(file)


def number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number of a config, above zero unless it is the default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelFormatError(f"{where}: config.json has no {key!r}")
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != default):
        raise ModelFormatError(f"{where}: {key}={value!r} must be a whole number above 0")
    return value


class NativeLinear(Linear):
    """A linear layer on the CPU's own kernels, rounded to 8 bits, as a drafter need not be
    exact."""

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, is_rounded: bool = True
    ) -> None:
        super().__init__(weight_NK[:0], bias_N)  # the matrix itself is kept in the kernels' layout
        matrix_format = INT8 if is_rounded else FLOAT
        self.matrix = NativeMatrix.from_floats(weight_NK, matrix_format, torch.get_num_threads())

    @staticmethod
    def fits(weight_NK: Tensor) -> bool:
        return weight_NK.shape[1] % 32 == 0  # a scale belongs to 32 inputs

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN = self.matrix(x_TK)
        return y_TN if self.bias_N is None else y_TN.add_(self.bias_N)


class Table(Part):
    """An embedding of a drafter's own."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, token_M: Tensor) -> Tensor:
        return self.weight_VD.index_select(0, token_M)


class HeadSource(Source):
    """The tensors of a drafter, under names without `prefixes`, for the target they draft for."""

    def __init__(
        self,
        path: str | Path,
        target: Target,
        prefixes: tuple[str, ...] = (),
        weights: Weights | None = None,  # of the path, if they are open
    ) -> None:
        super().__init__(target.dtype, target.device)
        self.where = str(path)
        self._target = target
        self.matrix_bytes = 0  # held outside of tensors
        self._weights = weights or open_weights(path)
        self._stored: dict[str, str] = {}  # name without prefixes -> name in the file
        self._used: set[str] = set()
        for stored in self._weights.names():
            name = stored
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            self._stored[name] = stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> list[str]:
        return sorted(self._stored)

    @property
    def unread(self) -> list[str]:
        """Tensors of the file that were not read."""
        return sorted(set(self._stored) - self._used)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights.shape(self._find(name)))

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        self._check(name, shape)
        return self._weights.tensor(self._find(name), dtype or self.dtype)

    def ids(self, name: str, size: int) -> Tensor:
        """A tensor of token ids."""
        self._check(name, (size,))
        return self._weights.tensor(self._find(name), torch.int64).to(self.device)

    def output(self, name: str, rows: int, width: int, num_kept: int | None = None) -> Linear:
        """An output matrix, cut to its first rows where the rest is padding."""
        weight_CD = self.take(name, rows, width)
        if num_kept is not None and num_kept < rows:
            weight_CD = weight_CD[:num_kept].contiguous()
        return self.kept(Linear(weight_CD))

    def output_of(self, target: Target, ids_C: Tensor) -> Linear:
        """Rows of the target's own output matrix, for a head without one."""
        return self.kept(Linear(target.output_rows(ids_C).contiguous()))

    def kept(self, layer: AnyLinear) -> AnyLinear:
        held, num_bytes = self._target.backend.convert_layer(layer, self._target)
        self.matrix_bytes += num_bytes
        return cast("AnyLinear", held)  # a head is never split over a group

    def dense(self, name: str, num_out: int, num_in: int) -> Linear:
        """`name`.weight, with `name`.bias where there is one."""
        has_bias = f"{name}.bias" in self
        return self.linear((name,), (num_out,), num_in, has_bias=has_bias, is_split=False)

    def _check(self, name: str, shape: Shape) -> None:
        self._used.add(name)
        if self.shape(name) != tuple(shape):
            raise ModelFormatError(
                f"{self.where}: {name} has shape {list(self.shape(name))}, {list(shape)} was "
                "expected from config.json; the file is damaged or its config belongs to another "
                "drafter"
            )

    def _find(self, name: str) -> str:
        if name not in self._stored:
            some = ", ".join(self.names[:6]) + (", ..." if len(self._stored) > 6 else "")
            raise ModelFormatError(
                f"{self.where}: tensor {name!r} is missing (found: {some or 'nothing'}); the file "
                "is incomplete or not of the form its config.json says"
            )
        return self._stored[name]


def tell_unread(source: HeadSource, *spare: str) -> None:
    """Say once which tensors were not read; `spare` ones are known, and follow from others."""
    unread = [name for name in source.unread if name not in spare]
    if unread:
        some = ", ".join(unread[:4]) + (", ..." if len(unread) > 4 else "")
        log.warning(
            "%s: %d %s (%s); if it was made by another version of the method, it may draft badly",
            source.where,
            len(unread),
            UNREAD,
            some,
        )


def read_geometry(config: Mapping[str, Any], where: str, **more: Any) -> ModelSpec:
    """The shape of a head's layers, from a config with Llama's keys."""
    try:
        spec = ModelSpec(**{**read_common(config, "head"), **more})
        spec.check()
        if spec.rope is not None and spec.rope.dim:
            raise UnsupportedModelError("partial_rotary_factor is not supported in a head; only 1")
    except ModelError as error:
        raise type(error)(f"{where}: {error}") from None
    return spec


def check_drafts(weights: Weights) -> None:
    """Raise if a whole model cannot draft."""
    if ModelSpec.from_config(weights.config).recurrence is not None:
        where = str(weights.path)
        raise UnsupportedModelError(f"{where}: a model with recurrent layers cannot draft yet")


def check_hidden(where: str, found: int, target: Target) -> None:
    """Raise if the head was made for a target of another width."""
    expected = int(target.spec.width)
    if found != expected:
        raise ModelFormatError(
            f"{where}: made for a target of hidden size {found}, this target has {expected}; "
            "it is a head for another model: choose the one trained for this target"
        )


def check_vocab(where: str, found: int, target_size: int) -> None:
    """Raise if the head has another number of tokens than the target, apart from padding."""
    if abs(found - target_size) * 200 > target_size:
        raise VocabMismatchError(
            f"{where}: made for a vocabulary of {found} tokens, this target has {target_size}; "
            "it is a head for another model: choose the one trained for this target"
        )


def column_ids(num_columns: int, vocab_size: int) -> Tensor | None:
    """The target's id of each column of logits; None where they are the whole vocabulary."""
    return None if num_columns == vocab_size else torch.arange(num_columns)


def check_map(ids_C: Tensor, vocab_size: int, where: str) -> Tensor:
    """Check a map from a head's own token numbers to the target's ids."""
    if len(ids_C) and (int(ids_C.min()) < 0 or int(ids_C.max()) >= vocab_size):
        raise ModelFormatError(
            f"{where}: its map of tokens points to ids {int(ids_C.min())}..{int(ids_C.max())}, the "
            f"target has 0..{vocab_size - 1}; the head belongs to another target"
        )
    if len(torch.unique(ids_C)) != len(ids_C):
        raise ModelFormatError(f"{where}: its map of tokens names one id twice; it is damaged")
    return ids_C


def check_layers(layers: tuple[int, ...], target: Target, where: str) -> tuple[int, ...]:
    """Check the layers whose states are fused: after this many of the target's layers."""
    num_layers = target.spec.num_layers
    if not layers or min(layers) < 0 or max(layers) > num_layers:
        raise ModelFormatError(
            f"{where}: fuses the target's states after layers {list(layers)}, this target has "
            f"{num_layers}; it is a head for another model"
        )
    return layers


def read_table(source: HeadSource, spec: ModelSpec) -> Table | None:
    """The embedding in the files; None: the target's is used."""
    name = "embed_tokens.weight"
    return Table(source.take(name, spec.vocab_size, spec.width)) if name in source else None


def read_output(
    source: HeadSource, options: Mapping[str, Any], spec: ModelSpec, target: Target
) -> tuple[Linear | None, Tensor | None]:
    """The output matrix (None: the target's) and the target's id of each of its rows."""
    vocab_size, name = target.spec.vocab_size, "lm_head.weight"
    size = source.shape("d2t")[0] if "d2t" in source else spec.vocab_size
    rows = number(options, "draft_vocab_size", source.where, default=size)
    if "d2t" in source:
        ids_C = torch.arange(rows) + source.ids("d2t", rows).cpu()
        check_map(ids_C, vocab_size, source.where)
        has_own = name in source or spec.width != target.spec.width
        lm_head = source.output(name, rows, spec.width) if has_own else None
        return lm_head or source.output_of(target, ids_C), ids_C.to(source.device)
    if rows != spec.vocab_size:
        raise ModelFormatError(
            f"{source.where}: draft_vocab_size={rows} without d2t, the map of its tokens"
        )
    if name not in source and spec.width == target.spec.width:
        return None, None
    lm_head = source.output(name, rows, spec.width, vocab_size)
    return lm_head, column_ids(min(rows, vocab_size), vocab_size)

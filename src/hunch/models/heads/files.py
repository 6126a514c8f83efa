"""A drafter's directory: its config.json and its tensors, each checked when it is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelError, ModelFormatError, ModelNotFoundError, VocabMismatchError
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.models.heads.parts import NativeLinear
from hunch.models.source import Shape, Source
from hunch.models.spec import ModelSpec, read_common
from hunch.models.weights import open_weights
from hunch.models.weights.json_file import read_json


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a drafter's directory."""
    folder = Path(path)
    file = folder / "config.json"
    if not folder.exists():
        raise ModelNotFoundError(f"{folder}: no such directory; give the folder of a drafter")
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


class HeadSource(Source):
    """The tensors of a drafter, under names without `prefixes`, for the target they draft for."""

    def __init__(self, path: str | Path, target: Any, prefixes: tuple[str, ...] = ()) -> None:
        super().__init__(target.dtype, target.device)
        self.where = str(path)
        self._is_native = getattr(target, "kernels", "") == "native"
        # Beside a quantised target on a CPU, the products of a drafter are quantised too.
        self._is_rounded = self._is_native and target.kv_dtype != torch.float32
        self.matrix_bytes = 0  # held outside of tensors
        self._weights = open_weights(path)
        self._stored: dict[str, str] = {}  # name without prefixes -> name in the file
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

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights.shape(self._find(name)))

    def read(self, name: str, shape: Shape) -> Tensor:
        self._check(name, shape)
        return self._weights.tensor(self._find(name), self.dtype)

    def ids(self, name: str, size: int) -> Tensor:
        """A tensor of token ids."""
        self._check(name, (size,))
        return self._weights.tensor(self._find(name), torch.int64).to(self.device)

    def linear(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        num_in: int,
        *,
        has_bias: bool = False,
        is_split: bool = True,
    ) -> Linear:
        return self._hold(
            super().linear(names, sizes, num_in, has_bias=has_bias, is_split=is_split)
        )

    def row_linear(  # type: ignore[override]  # a drafter is never split over a group
        self, name: str, num_out: int, num_in: int, *, has_bias: bool
    ) -> Linear:
        return self._hold(super().row_linear(name, num_out, num_in, has_bias=has_bias))

    def output(self, name: str, rows: int, width: int, num_kept: int | None = None) -> Linear:
        """An output matrix, cut to its first rows where the rest is padding."""
        weight_CD = self.take(name, rows, width)
        if num_kept is not None and num_kept < rows:
            weight_CD = weight_CD[:num_kept].contiguous()
        return self._hold(Linear(weight_CD))

    def output_of(self, target: Any, ids_C: Tensor) -> Linear:
        """Rows of the target's own output matrix, for a head that brings none."""
        head = getattr(target, "decoder", target).head
        if isinstance(head, Linear):
            return Linear(head.weight_NK[ids_C.to(self.device)].contiguous())
        return self._hold(Linear(head.rows(ids_C)))

    def _hold(self, layer: Linear) -> Linear:
        if not self._is_native or not NativeLinear.fits(layer.weight_NK):
            return layer
        held = NativeLinear(layer.weight_NK, layer.bias_N, is_rounded=self._is_rounded)
        self.matrix_bytes += held.matrix.nbytes
        return held

    def held(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """A layer of a matrix that was read already, as this target's drafters keep theirs."""
        return self._hold(Linear(weight_NK.contiguous(), bias_N))

    def floats(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32 whatever the target's precision."""
        self._check(name, shape)
        return self._weights.tensor(self._find(name), torch.float32).to(self.device)

    def dense(self, name: str, num_out: int, num_in: int) -> Linear:
        """`name`.weight, with `name`.bias where there is one."""
        has_bias = f"{name}.bias" in self
        return self.linear((name,), (num_out,), num_in, has_bias=has_bias, is_split=False)

    def rms(self, name: str, width: int, eps: float) -> RMSNorm:
        return RMSNorm(self.take(f"{name}.weight", width), eps)

    def _check(self, name: str, shape: Shape) -> None:
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


def read_geometry(config: Mapping[str, Any], where: str, **more: Any) -> ModelSpec:
    """The shape of a head's layers, from a config with Llama's keys."""
    try:
        spec = ModelSpec(**{**read_common(config, "head"), **more})
        spec.check()
    except ModelError as error:
        raise type(error)(f"{where}: {error}") from None
    return spec


def check_hidden(where: str, found: int, target: Any) -> None:
    """The head was made for a target of this width."""
    expected = int(target.spec.width)
    if found != expected:
        raise ModelFormatError(
            f"{where}: made for a target of hidden size {found}, this target has {expected}; "
            "it is a head for another model: choose the one trained for this target"
        )


def check_vocab(where: str, found: int, target_size: int) -> None:
    """The head names tokens by the target's ids: as many as the target, but for padding."""
    if abs(found - target_size) * 200 > target_size:
        raise VocabMismatchError(
            f"{where}: made for a vocabulary of {found} tokens, this target has {target_size}; "
            "it is a head for another model: choose the one trained for this target"
        )

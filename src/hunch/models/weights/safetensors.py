"""Weights in safetensors files, one or several, memory-mapped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.models.weights.base import Packed
from hunch.models.weights.configs import unified_config
from hunch.models.weights.json_file import check_index, read_json, shards_of

INDEX = "model.safetensors.index.json"
SCALE = "_scale"  # NAME_scale has the unit of each row of NAME, which is stored as int8

_PART = re.compile(r"model-\d+-of-(?P<count>\d+)\.safetensors")
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # numbers only with scales


class SafetensorsWeights:
    """The `Weights` of a directory in Hugging Face form."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = unified_config(read_json(folder / "config.json"))
        self.metadata: Mapping[str, Any] = {}
        self.nbytes = 0
        self._homes: dict[str, Any] = {}  # tensor -> its open file
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(folder):
            self._open(file)
        check_index(folder / INDEX, self._homes)

    def _open(self, file: Path) -> None:
        try:
            # Stays open: the tensors are read from it later.
            source: Any = safe_open(file, framework="pt")
            names = list(source.keys())
            shapes = {name: tuple(source.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise ModelFormatError(
                f"{file} is damaged or cut short ({error}). Delete it and download it again"
            ) from None
        self.nbytes += file.stat().st_size
        self._shapes |= shapes
        self._homes |= dict.fromkeys(names, source)

    def names(self) -> list[str]:
        scales = {name + SCALE for name in self._homes}
        return [name for name in self._homes if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        self._home(name)
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        loaded: Tensor = self._home(name).get_tensor(name)
        if name + SCALE in self._homes:
            scale_N: Tensor = self._home(name + SCALE).get_tensor(name + SCALE)
            loaded = loaded.float() * scale_N.float()[:, None]
        elif loaded.dtype in _CODES:
            raise ModelFormatError(
                f"{self.path}: {name} is stored in {loaded.dtype}, and config.json has no "
                "quantization_config that says what its codes stand for"
            )
        return loaded.to(dtype)

    def part(
        self, name: str, dim: int, part: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        first, last = part
        loaded: Tensor = self._home(name).get_slice(name)[
            (*[slice(None)] * dim, slice(first, last))
        ]
        if name + SCALE in self._homes:
            scale_N: Tensor = self._home(name + SCALE).get_tensor(name + SCALE)
            scale_N = scale_N[first:last] if dim == 0 else scale_N
            loaded = loaded.float() * scale_N.float()[:, None]
        return loaded.to(dtype)

    def packed(self, name: str) -> Packed | None:
        self._home(name)
        return None

    def raw_names(self) -> list[str]:
        return list(self._homes)

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        loaded: Tensor = self._home(name).get_tensor(name)
        return loaded

    raw_shape = shape

    def _home(self, name: str) -> Any:
        if name not in self._homes:
            raise ModelFormatError(f"{self.path} has no tensor {name}")
        return self._homes[name]


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return shards_of(folder / INDEX)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    parts = [match for file in found if (match := _PART.fullmatch(file.name))]
    if len({match["count"] for match in parts}) == 1 and len(parts) == int(parts[0]["count"]):
        return [folder / match.string for match in parts]  # all of them, without an index
    raise ModelFormatError(
        f"{folder} has {len(found)} safetensors files, none named model.safetensors, and no {INDEX}"
    )

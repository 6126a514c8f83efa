"""Weights in torch's own files (.bin, .pt): tensors only, never code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.models.weights.base import Packed
from hunch.models.weights.configs import unified_config
from hunch.models.weights.json_file import check_index, read_json, shards_of

INDEX = "pytorch_model.bin.index.json"


def load_torch_file(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .bin or .pt file; one that would run code is refused."""
    try:
        content = _load(path)
    except pickle.UnpicklingError:
        raise ModelFormatError(
            f"{path} is damaged, or a pickle that asks to run code, which hunch never does; "
            "convert it to safetensors where you trust it"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, BadZipFile) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelFormatError(
            f"{path} is damaged or cut short ({what}). Download it again"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise ModelFormatError(f"{path} holds no named tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelFormatError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
    return dict(content)


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    if is_zip and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
        raise ValueError("its parts are compressed, as torch never writes them")
    # Files older than torch 1.6 are no zip archives and cannot be mapped.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


class TorchWeights:
    """The `Weights` of a directory with pytorch_model.bin, its shards, or one .bin or .pt file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = unified_config(read_json(folder / "config.json"))
        self.metadata: Mapping[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in _files(folder):
            self._tensors |= load_torch_file(file)
        check_index(folder / INDEX, self._tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._tensor(name).to(dtype)

    def packed(self, name: str) -> Packed | None:
        self._tensor(name)
        return None

    raw_names = names

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        return self._tensor(name)

    raw_shape = shape

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelFormatError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return shards_of(folder / INDEX)
    found = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    named = [file for file in found if file.name == "pytorch_model.bin"]
    if len(named or found) == 1:
        return named or found
    raise ModelFormatError(
        f"{folder} should hold model.safetensors or pytorch_model.bin, or the index of their "
        f"shards; it holds {', '.join(file.name for file in found) or 'no weights at all'}"
    )

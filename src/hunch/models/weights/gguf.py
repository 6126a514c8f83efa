"""Weights in a GGUF file, memory-mapped, under Hugging Face names and in its row order."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import GgufHeader, TensorPlace, read_header
from hunch.kernels.activation import XIELU_BETA
from hunch.models.weights.base import Packed
from hunch.models.weights.dequant import PLAIN, dequantise
from hunch.models.weights.gguf_config import architecture, config_of
from hunch.models.weights.gguf_known import INTERLEAVED
from hunch.models.weights.gguf_names import hf_name


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of Hugging Face's files, where llama.cpp's has another number of dimensions."""
    if name.endswith("shared_expert_gate.weight"):  # stored as a row of numbers
        return (1, *shape[-1:])
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return (shape[0], 1, *shape[-1:])
    if name.endswith(".A_log") and shape[-1] > 1:  # Mamba 1 has one for each number of a state
        return shape
    if name.endswith((".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")):
        return (prod(shape),)
    return shape


class GgufWeights:
    """The `Weights` of a GGUF file, or of one in parts."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata: Mapping[str, Any] = header.metadata
        self.nbytes = sum(place.nbytes for place in header.tensors.values())
        prefix = architecture(header)
        self._places = {
            hf_name(header, prefix, name): place for name, place in header.tensors.items()
        }
        for name, place in self._places.items():
            self._places[name] = replace(place, shape=_shape(name, place.shape))
        # Copy-on-write: torch wants writable memory, and the file must never change.
        self._maps = [_map(part) for part in header.parts]
        self._bytes = [np.frombuffer(mapped, np.uint8) for mapped in self._maps]
        self._told: dict[str, float] = {}  # tensors of one number, from the metadata
        self._num_heads: dict[str, int] = {}  # of the tensors stored in another order of rows
        factors = [name for name in self._places if name.startswith("rope_freqs")]
        self.config = config_of(
            header, {name.removesuffix(".weight"): self.tensor(name).tolist() for name in factors}
        )
        if prefix == "apertus":
            self._told = _activation_numbers(header, self.config["num_hidden_layers"])
        if prefix in INTERLEAVED:
            self._num_heads = {
                "q_proj": self.config["num_attention_heads"],
                "k_proj": self.config["num_key_value_heads"],
            }

    def names(self) -> list[str]:
        return [*self._places, *self._told]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._told:
            return (1,)
        return self._place(name).shape

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        if name in self._told:
            return torch.tensor([self._told[name]], dtype=dtype)
        place = self._place(name)
        rows = self._rows(name, place)
        numbers = dequantise(place.format, rows, place.shape[-1], dtype).view(place.shape)
        if place.format not in PLAIN:
            self._release(place)
        return torch.log(-numbers) if name.endswith(".A_log") else numbers

    def packed(self, name: str) -> Packed | None:
        if name in self._told:
            return None
        place = self._place(name)
        if place.format in PLAIN or len(place.shape) < 2:
            return None
        shape = (prod(place.shape[:-1]), place.shape[-1])
        rows = self._rows(name, place)
        return Packed(place.format, shape, rows, partial(self._release, place))

    def _release(self, place: TensorPlace) -> None:
        """Release a tensor's pages; to read them again means to wait for the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            page = mmap.PAGESIZE
            first, last = (
                -(-place.start // page) * page,
                (place.start + place.nbytes) // page * page,
            )
            if last > first:
                self._maps[place.part].madvise(mmap.MADV_DONTNEED, first, last - first)

    def _place(self, name: str) -> TensorPlace:
        if name not in self._places:
            raise ModelFormatError(f"{self.path} has no tensor for {name}")
        return self._places[name]

    def _rows(self, name: str, place: TensorPlace) -> Tensor:
        """The tensor's bytes, [rows, bytes of a row], in Hugging Face's order of rows."""
        raw = self._bytes[place.part][place.start : place.start + place.nbytes]
        rows = torch.from_numpy(raw).view(-1, place.row_bytes)
        parts = name.split(".")
        num_heads = self._num_heads.get(parts[-2])
        if num_heads is None:
            return rows
        if parts[-1] == "bias":  # one row of numbers, not one number per row
            rows = rows.view(place.shape[0], -1)
        order = _rotary_order(self.path, name, len(rows), num_heads)
        rows = rows[order]
        return rows.view(1, -1) if parts[-1] == "bias" else rows


def _activation_numbers(header: GgufHeader, num_layers: int) -> dict[str, float]:
    """The learned activation numbers of Apertus's layers, which are in the metadata."""
    found: dict[str, list[Any]] = {}
    for key in ("alpha_p", "alpha_n", "beta"):
        value = header.metadata.get(f"xielu.{key}")
        found[key] = value if isinstance(value, list) else [value] * num_layers
        is_number = all(isinstance(one, int | float) for one in found[key])
        if len(found[key]) != num_layers or not is_number:
            raise ModelFormatError(f"{header.path}: its metadata lacks xielu.{key} of every layer")
    if any(abs(one - XIELU_BETA) > 1e-6 for one in found.pop("beta")):
        raise UnsupportedModelError(f"{header.path}: xielu.beta is not {XIELU_BETA}")
    return {
        f"model.layers.{layer}.mlp.act_fn.{key}": float(value)
        for key, values in found.items()
        for layer, value in enumerate(values)
    }


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _rotary_order(path: Path, name: str, num_rows: int, num_heads: int) -> Tensor:
    """The order of the rows of q and k: the file has rotary pairs (i, i + half) side by side."""
    if num_rows % (2 * num_heads):
        raise ModelFormatError(f"{path}: {name} has {num_rows} rows for {num_heads} heads")
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)

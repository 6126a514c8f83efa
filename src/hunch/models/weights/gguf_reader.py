"""Typed access to a GGUF's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from hunch.errors import ModelFormatError
from hunch.hub.gguf_file import GgufHeader

# Architectures whose sizes may be lists, with an entry for each layer. The first one counts; of
# hybrids the largest, as layers that do not attend have 0 KV heads.
BY_LAYER = ("gemma4",)
HYBRIDS = ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe")


class Reader:
    """Typed access to the metadata under one architecture's prefix."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.header.path}: its metadata lacks {self.prefix}.{key}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 2**40:
            raise ModelFormatError(
                f"{self.header.path}: {self.prefix}.{key} is {str(value)[:40]}, not a number"
                " hunch can use"
            )
        return value

    def sizes(self, key: str, num_layers: int) -> list[int]:
        """A size for each layer: listed in the file, or the same for all."""
        value = self.get(key)
        if not isinstance(value, list):
            return [self.size(key)] * num_layers
        is_size = all(isinstance(some, int) and 0 < some < 2**40 for some in value)
        if not is_size or len(value) != num_layers:
            raise ModelFormatError(
                f"{self.header.path}: {self.prefix}.{key} does not list {num_layers} sizes"
            )
        return [int(some) for some in value]

    def size(self, key: str, default: int | None = None) -> int:
        listed = self.get(key)
        numbers = listed if isinstance(listed, list) else []
        if self.prefix in BY_LAYER and isinstance(listed, list):
            return self.sizes(key, len(listed))[0]
        is_by_layer = self.prefix in HYBRIDS and len(numbers) > 0
        is_by_layer = is_by_layer and all(isinstance(some, int) for some in numbers)
        value = max(numbers) if is_by_layer else self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelFormatError(f"{self.header.path}: {self.prefix}.{key}={value} is no size")
        return value

    def count(self, key: str) -> int:
        """A count; 0 if the file does not have it."""
        return int(self.number(key, 0))

    def all(self, **keys: str) -> dict[str, Any]:
        """Sizes under their names in a config.json, by GGUF's keys for them."""
        return {name: self.size(key) for name, key in keys.items()}

    def has(self, part: str) -> bool:
        """Whether a tensor of the file has this name, or this in its name."""
        return any(part in name for name in self.header.tensors)

    def real(self, key: str, default: float | None = None) -> float:
        # The file holds float32; its shortest decimal is what config.json says (1e-05).
        return float(str(np.float32(self.number(key, default))))

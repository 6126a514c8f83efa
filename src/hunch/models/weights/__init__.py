"""Weight files of every kind behind one interface: `open_weights(path)`."""

from __future__ import annotations

import os
from pathlib import Path

from hunch.errors import ModelFormatError
from hunch.models.weights.base import Packed, Weights, iterate
from hunch.models.weights.bitnet import BitnetWeights
from hunch.models.weights.configs import for_length, with_overrides
from hunch.models.weights.gguf import GgufWeights
from hunch.models.weights.json_file import refuse_unfinished
from hunch.models.weights.published import PublishedWeights, settings_of
from hunch.models.weights.safetensors import SafetensorsWeights
from hunch.models.weights.torch_file import TorchWeights, load_torch_file

__all__ = [
    "Packed",
    "Weights",
    "for_length",
    "iterate",
    "load_torch_file",
    "open_weights",
    "with_overrides",
]


def open_weights(files: str | os.PathLike[str]) -> Weights:
    """The weights of a .gguf file or of a directory in Hugging Face form; nothing is read yet."""
    path = Path(files)
    if path.is_file():
        return GgufWeights(path)
    if not path.is_dir():
        raise ModelFormatError(f"{path}: no such file or directory")
    refuse_unfinished(path)
    is_torch = not any(path.glob("*.safetensors")) and any(
        [*path.glob("*.bin"), *path.glob("*.pt")]
    )
    weights = TorchWeights(path) if is_torch else SafetensorsWeights(path)
    settings = settings_of(weights)
    if settings is not None and settings.get("quant_method") == BitnetWeights.method:
        return BitnetWeights(weights, settings)
    return weights if settings is None else PublishedWeights(weights, settings)

"""A drafter's files with one thing changed, as `hunch doctor` tries them."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hunch.models.heads.files import UNREAD

# Keys under which configs name the target's layers whose states are fused, and of nested configs.
LAYER_KEYS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids")
_NESTED = ("eagle_config", "dflash_config", "dspark_config")


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; other forms are not changed."""
    path = folder / "model.safetensors"
    return load_file(path) if path.is_file() else {}


@contextmanager
def changed(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,  # keys that replace those of the file
    tensors: Mapping[str, Tensor] | None = None,  # replace all tensors
) -> Iterator[Path]:
    """A changed copy of the drafter, which exists within the `with` block."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "drafter"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("work"))
        if config is not None:
            (copy / "config.json").write_text(json.dumps(_updated(read_config(folder), config)))
        if tensors is not None:
            stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(stored, copy / "model.safetensors")
        yield copy


def _updated(config: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these keys replaced: at the top, or in the method's own config."""
    config = dict(config)
    for key, value in new.items():
        for nested in _NESTED:
            if key in (config.get(nested) or {}):
                config[nested] = {**config[nested], key: value}
                break
        else:
            config[key] = value
    return config


def fused_layers(folder: Path) -> tuple[str, list[int]] | None:
    """The config's key for the layers whose states are fused, and its value."""
    config = read_config(folder)
    for key in LAYER_KEYS:
        for part in (config, *(config.get(nested) or {} for nested in _NESTED)):
            if isinstance(part.get(key), list):
                return key, list(part[key])
    return None


def moved_map(folder: Path, shift: int, *, is_absolute: bool = False) -> dict[str, Tensor] | None:
    """Tensors with d2t moved; None if the result is no map of tokens."""
    tensors = read_tensors(folder)
    offset_C = tensors["d2t"].long()
    place_C = torch.arange(len(offset_C))
    ids_C = offset_C if is_absolute else place_C + offset_C + shift
    is_map = int(ids_C.min()) >= 0 and len(torch.unique(ids_C)) == len(ids_C)
    config = read_config(folder)
    config = config.get("transformer_layer_config") or config
    if not is_map or int(ids_C.max()) >= int(config["vocab_size"]):
        return None
    return {**tensors, "d2t": (ids_C - place_C).to(tensors["d2t"].dtype)}


def turned_heads(folder: Path) -> dict[str, Tensor] | None:
    """Tensors whose heads are laid out the other way; None: it has no such heads.

    Either the halves of a head are rotated together (Hugging Face's layout) or neighbours are (the
    first Llama's, GGUF's). Another order of a head's rows makes one of the other.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    config = config.get("transformer_layer_config") or config.get("model") or config
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or not tensors:
        return None
    size = config.get("head_dim") or int(config["hidden_size"]) // heads
    order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
    found = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if part in ("q_proj", "k_proj") and len(tensor) % size == 0:
            found[name] = tensor.reshape(-1, size, *tensor.shape[1:])[:, order].flatten(0, 1)
        elif part in ("q_norm", "k_norm") and len(tensor) == size:
            found[name] = tensor[order]
    return {**tensors, **found} if found else None


@contextmanager
def unread_tensors() -> Iterator[list[str]]:
    """What is logged about tensors of a drafter that nothing reads."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if UNREAD in record.getMessage():
                words.append(record.getMessage())

    listener, log = Listener(), logging.getLogger("hunch")
    log.addHandler(listener)
    try:
        yield words
    finally:
        log.removeHandler(listener)

"""A target with the function of a smaller model, and smaller models as other files have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

PADDING = 8  # tokens of the target that the smaller model does not have


def width_of(name: str) -> int:
    """Which side of a matrix is as long as a state."""
    return 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1


def write_wide(small: Path, path: Path, *, width: int = 64, padding: int = PADDING) -> Path:
    """The same function with wider states, which are zero where the small model has none."""
    path.mkdir(parents=True)
    config = json.loads((small / "config.json").read_text())
    before = config["hidden_size"]
    add = width - before
    found = {}
    for name, tensor in load_file(small / "model.safetensors").items():
        if tensor.dim() == 1:  # a norm divides by the mean over more numbers
            tensor = tensor * (before / width) ** 0.5
        more = (0, add) if tensor.dim() == 1 or width_of(name) else (0, 0, 0, add)
        found[name] = functional.pad(tensor, more).contiguous()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = functional.pad(found[name], (0, 0, 0, padding)).contiguous()
    vocab_size = config["vocab_size"] + padding
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    config |= {"hidden_size": width, "vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(small / "tokenizer_config.json", path / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|more{number}|>" for number in range(padding)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_shuffled(small: Path, path: Path) -> Path:
    """The same function with the numbers of its states in another order."""
    shutil.copytree(small, path)
    width = json.loads((small / "config.json").read_text())["hidden_size"]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(4))

    def shuffled(name: str, tensor: Tensor) -> Tensor:
        return tensor.index_select(tensor.dim() - 1 and width_of(name), order).contiguous()

    tensors = load_file(small / "model.safetensors")
    found = {name: shuffled(name, tensor) for name, tensor in tensors.items()}
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return path

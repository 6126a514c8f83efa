"""A dear target whose later layers do nothing, and a cheap draft that says nearly the same."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tiny_models import write_llama

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def write_deep(path: Path, *, layers: int = 8, width: int = 32) -> Path:
    """Only its first layer matters."""
    write_llama(path, layers=layers, width=width)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        is_output = "o_proj" in name or "down_proj" in name
        if is_output and ".layers.0." not in name:
            tensors[name].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_shallow(target: Path, path: Path, *, noise: float = 0.0) -> Path:
    """A draft of the target's first layer, exact or slightly off."""
    path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (path / name).write_bytes((target / name).read_bytes())
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(target / "model.safetensors").items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path

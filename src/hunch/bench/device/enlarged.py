"""A model made larger without changing its function: the same text at a larger model's cost.

The width is padded with zeros and the norms re-scaled; a head becomes one of twice its width, on
every second rotary pair, whose frequencies are the same; padded units of the MLP and padded heads
are random, with output columns of zero; added layers have zero output projections. What cannot
reach the output is random, so that no kernel profits from zeros. Nothing is written to disk.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from hunch.hub import resolve
from hunch.models.load import MadeWeights
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights, open_weights

_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers",
)  # fmt: skip
_SIZES = {  # in the order of the keys
    "7b": (4096, 14336, 32, 8, 128, 32),
    "1b": (2048, 5632, 16, 4, 128, 30),  # for tests on a CPU
    "2b": (1536, 8960, 16, 2, 128, 28),  # with room for the heads of Qwen2.5-0.5B, seven to a group
    "70b": (8192, 28672, 64, 8, 128, 80),  # in 4 bits it fits one large GPU
}
SIZES = {name: dict(zip(_KEYS, numbers, strict=True)) for name, numbers in _SIZES.items()}
BLOCK = 256  # weights of GGUF's largest blocks


def enlarged(model: str, size: str, device: str) -> EnlargedWeights:
    """A model's weights at another size's cost; `auto` is a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return EnlargedWeights(open_weights(resolve(model)), SIZES[size], device)


def in_blocks(small: Weights, device: str, min_width: int = 1024) -> EnlargedWeights:
    """A model's weights in the next size whose matrices have whole blocks of every format, and
    which a GPU keeps in few bits."""
    old = small.config
    head_dim = old.get("head_dim") or old["hidden_size"] // old["num_attention_heads"]
    num_kv = old["num_key_value_heads"]
    new_kv = -(-num_kv * head_dim // BLOCK) * BLOCK // head_dim
    size = {
        "hidden_size": max(min_width, -(-old["hidden_size"] // BLOCK) * BLOCK),
        "intermediate_size": -(-old["intermediate_size"] // BLOCK) * BLOCK,
        "num_attention_heads": new_kv * (old["num_attention_heads"] // num_kv),
        "num_key_value_heads": new_kv,
        "head_dim": head_dim,
        "num_hidden_layers": old["num_hidden_layers"],
    }
    return EnlargedWeights(small, size, device)


def _check_room(old: dict[str, Any], size: dict[str, int]) -> None:
    """Raise if the model does not fit into the size, as its function would change."""
    kv = "num_key_value_heads"
    group = old["num_attention_heads"] // old[kv]
    sizes = [(key, old[key], most) for key, most in size.items() if key != "head_dim"]
    sizes.append(("heads that share keys", group, size["num_attention_heads"] // size[kv]))
    for name, needed, room in sizes:
        if room < needed:
            raise ValueError(f"{name}: the model has {needed}, the size {room}")


class EnlargedWeights(MadeWeights):
    """The `Weights` of a Llama or Qwen2 in another size."""

    def __init__(self, small: Weights, size: dict[str, int], device: str) -> None:
        self.small, self.size, self.device = small, size, device
        old = small.config
        self.old_head = old.get("head_dim") or old["hidden_size"] // old["num_attention_heads"]
        if size["head_dim"] not in (self.old_head, 2 * self.old_head):
            raise ValueError(f"head_dim must be {self.old_head} or twice that")
        _check_room(old, size)
        # The mean square over a padded width is smaller by this factor.
        self.shrink = old["hidden_size"] / size["hidden_size"]
        eps = old["rms_norm_eps"] * self.shrink
        config = {**old, **size, "tie_word_embeddings": False, "rms_norm_eps": eps}
        super().__init__(config, ModelSpec.from_config(config), small.path, small.metadata)
        self._random = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape, module = self.shape(name), name.split(".")[-2]
        layer = re.search(r"layers\.(\d+)\.", name)
        is_new = layer is not None and int(layer[1]) >= self.small.config["num_hidden_layers"]
        if name.endswith(".bias"):
            new = torch.zeros(*shape, 1, device=self.device, dtype=dtype)
            if not is_new:
                old_N = self.small.tensor(name, torch.float32).to(self.device)
                self._place_heads(module, old_N[:, None], new)
            return new[:, 0]
        if len(shape) == 1:  # of a norm
            if is_new:
                return torch.ones(shape, device=self.device, dtype=dtype)
            return self._padded(name, shape, torch.float32).mul(math.sqrt(self.shrink)).to(dtype)
        if module in ("embed_tokens", "lm_head"):
            there = name if name in self.small.names() else "model.embed_tokens.weight"
            return self._padded(there, shape, dtype)
        if module in ("o_proj", "down_proj"):
            new = torch.zeros(shape, device=self.device, dtype=dtype)
        else:
            new = torch.randn(shape, generator=self._random, device=self.device, dtype=dtype) * 0.02
        if not is_new:
            old = self.small.tensor(name, torch.float32).to(self.device)
            self._place(module, old, new)
        return new

    def _padded(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        new = torch.zeros(shape, device=self.device, dtype=dtype)
        old = self.small.tensor(name, torch.float32).to(self.device, dtype)
        new[..., : old.shape[-1]] = old
        return new

    def _place(self, module: str, old: Tensor, new: Tensor) -> None:
        """Place the old matrix so that the old function is kept."""
        rows, columns = old.shape
        if module in ("gate_proj", "up_proj"):
            new[:rows] = 0
            new[:rows, :columns] = old.to(new.dtype)
        elif module == "down_proj":
            new[:rows, :columns] = old.to(new.dtype)
        else:
            self._place_heads(module, old, new)

    def _place_heads(self, module: str, old: Tensor, new: Tensor) -> None:
        h, head = self.old_head, self.size["head_dim"]
        config = self.small.config
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        new_group = self.size["num_attention_heads"] // self.size["num_key_value_heads"]
        half = torch.arange(h // 2, device=self.device)
        first, second = (half, half + h // 2) if head == h else (2 * half, h + 2 * half)
        pairs = torch.cat([first, second])
        is_query = module in ("q_proj", "o_proj")
        count = config["num_attention_heads" if is_query else "num_key_value_heads"]
        for number in range(count):
            place = number // group * new_group + number % group if is_query else number
            at = place * head
            part = slice(number * h, (number + 1) * h)
            if module == "o_proj":
                new[: len(old), at : at + h] = old[:, part].to(new.dtype)
                continue
            new[at : at + head] = 0
            scale = math.sqrt(head / h) if module == "q_proj" else 1.0  # scores are divided by more
            rows = at + (pairs if module != "v_proj" else torch.arange(h, device=self.device))
            new[rows, : old.shape[1]] = (old[part] * scale).to(new.dtype)

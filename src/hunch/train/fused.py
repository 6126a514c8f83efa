"""Heads that start from one state: the target's last, and those of other layers where asked.

Shape letters: T tokens in a row, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.layers.linear import Linear
from hunch.models.heads.parts import Fuse
from hunch.train.states import Thoughts
from hunch.train.student import Student

_FC = "fc.weight"
NONE = "none"  # features=none: the last state alone, as the published heads


class FusedStudent(Student):
    """Base of the heads on one state."""

    has_token = False  # the embedding of the token after the state's is added too

    def take_features(self, text: str, *, has_token: bool = False) -> dict[str, Tensor]:
        """Read the option `features`; the tensors it adds, which at first add nothing."""
        spec = self.target.spec
        if text == NONE:
            if has_token:
                raise ConfigError("token=true needs features=, say features=2,15,29")
            return {}
        self.feature_layers, self.has_token = read_features(text, spec.num_layers), has_token
        return {_FC: torch.zeros(spec.width, self.num_parts * spec.width)}

    @property
    def num_parts(self) -> int:
        return len(self.feature_layers) + self.has_token

    def states(self, thoughts: Thoughts) -> Tensor:
        """What the heads start from, at every token."""
        if not self.feature_layers:
            return thoughts.hidden_TD
        width = self.target.spec.width
        fc = Linear(self.source().take(_FC, width, self.num_parts * width))
        fuse = Fuse(self.feature_layers, fc, self.target.embed if self.has_token else None)
        return fuse(thoughts.hidden_TD, thoughts.features, thoughts.ids_after(1))

    def feature_config(self) -> dict[str, Any]:
        """For config.json."""
        if not self.feature_layers:
            return {}
        more = {"feature_token": True} if self.has_token else {}
        return {"feature_layers": list(self.feature_layers), **more}


def read_features(text: str, num_layers: int) -> tuple[int, ...]:
    """Layers whose states are asked for, by default low, middle and high."""
    if not text:
        return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"features={text!r} must be numbers with commas") from None
    if not layers or not 0 <= min(layers) <= max(layers) <= num_layers:
        raise ConfigError(f"features={text!r} must be from 0 to the target's {num_layers} layers")
    return layers

"""Heads that start from one state: the target's last, and those of other layers where asked.

Shape letters: T tokens in a row, D width.
"""

from __future__ import annotations

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

    def take_features(self, text: str) -> dict[str, Tensor]:
        """Read the option `features`; the tensors it adds, which at first add nothing."""
        spec = self.target.spec
        if text == NONE:
            return {}
        self.feature_layers = read_features(text, spec.num_layers)
        return {_FC: torch.zeros(spec.width, len(self.feature_layers) * spec.width)}

    def states(self, thoughts: Thoughts) -> Tensor:
        """What the heads start from, at every token."""
        if not self.feature_layers:
            return thoughts.hidden_TD
        width = self.target.spec.width
        fc = self.source().take(_FC, width, len(self.feature_layers) * width)
        return Fuse(self.feature_layers, Linear(fc))(thoughts.hidden_TD, thoughts.features)

    def feature_config(self) -> dict[str, list[int]]:
        """For config.json."""
        return {"feature_layers": list(self.feature_layers)} if self.feature_layers else {}


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

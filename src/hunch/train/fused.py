"""Heads that start from one state: the target's last, and those of other layers where asked.

Shape letters: T tokens in a row, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.layers.linear import Linear
from hunch.models.heads.parts import Fuse, Trunk
from hunch.models.spec import ModelSpec
from hunch.train.states import Thoughts
from hunch.train.student import Student

_FC = "fc.weight"
NONE = "none"  # features=none: the last state alone, as the published heads


class FusedStudent(Student):
    """Base of the heads on one state."""

    has_token = False  # the embedding of the token after the state's is added too
    trunk_size = 0  # width of the layer that all heads read; 0: none

    def take_features(
        self, text: str, *, has_token: bool = False, trunk_size: int = 0
    ) -> dict[str, Tensor]:
        """Read the option `features`; the tensors it adds, which at first add nothing, or, of a
        trunk, say something that nobody reads yet."""
        if text == NONE:
            return {}
        num_layers = self.target.spec.num_layers
        self.feature_layers, self.has_token = read_features(text, num_layers), has_token
        self.trunk_size = trunk_size
        fc = torch.zeros(self._fc_shape())
        if trunk_size:
            generator = torch.Generator().manual_seed(3)
            fc = torch.randn(self._fc_shape(), generator=generator) * fc.shape[1] ** -0.5
        return {_FC: fc}

    def _fc_shape(self) -> tuple[int, int]:
        width, num_parts = self.target.spec.width, len(self.feature_layers) + self.has_token
        if self.trunk_size:
            return self.trunk_size, (1 + num_parts) * width
        return width, num_parts * width

    def states(self, thoughts: Thoughts) -> Tensor:
        """What the heads start from, at every token."""
        if not self.feature_layers:
            return thoughts.hidden_TD
        fc = Linear(self.source().take(_FC, *self._fc_shape()))
        embed = self.target.embed if self.has_token else None
        fuse = (Trunk if self.trunk_size else Fuse)(self.feature_layers, fc, embed)
        return fuse(thoughts.hidden_TD, thoughts.features, thoughts.ids_after(1))

    def feature_config(self) -> dict[str, Any]:
        """For config.json."""
        if not self.feature_layers:
            return {}
        config: dict[str, Any] = {"feature_layers": list(self.feature_layers)}
        if self.has_token:
            config["feature_token"] = True
        if self.trunk_size:
            config["trunk_size"] = self.trunk_size
        return config


def check_features(options: Any, spec: ModelSpec) -> None:
    """Raise for layers the target does not have, and for parts that need some."""
    if options.features != NONE:
        read_features(options.features, spec.num_layers)
    elif getattr(options, "token", False) or getattr(options, "trunk", 0):
        raise ConfigError("token= and trunk= need features=, say features=2,15,29")


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

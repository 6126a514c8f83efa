"""Medusa: residual heads on the target's last state, each for one further token.

Shape letters: T tokens in a row, D width, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError
from hunch.models.decoder import Decoder
from hunch.models.weights import Weights
from hunch.train.states import Thoughts
from hunch.train.student import Lesson, Recipe, Student, Walk, narrow
from hunch.train.vocab import Columns

_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions:
    """train medusa KEY=VALUE..."""

    heads: int = 4
    layers: int = 1  # residual layers of each head
    loss: str = "ce"
    share: float = 1.0  # of each batch's texts it learns from


class MedusaStudent(Student):
    """The heads share one output matrix, which begins as the target's."""

    plain = (_HEAD,)

    def __init__(
        self, options: MedusaOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        if options.heads < 1 or options.layers < 1:
            raise ConfigError("medusa: heads and layers must be 1 or more")
        self.options = options
        width = target.spec.width
        blocks = {
            f"blocks.{head}.layers.{layer}.weight": torch.zeros(width, width)
            for head in range(options.heads)
            for layer in range(options.layers)
        }
        self.start({**blocks, _HEAD: target.head.weight_NK[columns.ids_C]})

    def lesson(self, thoughts: Thoughts, *, is_test: bool = False) -> Lesson:
        t = narrow(thoughts, 1.0 if is_test else self.options.share, len(self.columns))
        source, width = self.source(), self.target.spec.width
        head_CD = source.take(_HEAD, len(self.columns), width)
        walk = Walk(t, self.options.loss, is_test=is_test)
        for head in range(self.options.heads):
            x_TD = t.hidden_TD
            for layer in range(self.options.layers):
                weight_DD = source.take(f"blocks.{head}.layers.{layer}.weight", width, width)
                x_TD = x_TD + functional.silu(functional.linear(x_TD, weight_DD))
            walk.teach(x_TD, 1 + head, head_CD)
        return walk.lesson()

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.target.spec
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.width,
            "vocab_size": spec.vocab_size,
            "truncated_vocab_size": len(self.columns),
            "num_heads": self.options.heads,
            "num_hidden_layers": self.options.layers,
        }
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return config, {**tensors, "token_map": self.columns.ids_C.cpu()}


RECIPE = Recipe(options=MedusaOptions, student=MedusaStudent, draft_vocab=16384)

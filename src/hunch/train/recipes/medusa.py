"""Medusa: residual heads on the target's last state, each for one further token.

Shape letters: T tokens of a pack, M positions that teach, D width, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.medusa import MedusaHead
from hunch.models.source import Source
from hunch.models.weights import Weights
from hunch.train.student import Fan, PackLoss, Recipe, StepInputs, Student
from hunch.train.vocab import Columns

_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions:
    """train medusa KEY=VALUE..."""

    heads: int = 4
    layers: int = 1  # residual layers of each head
    share_tables: bool = False  # the target's output matrix in place of one that learns
    loss: str = "ce"


class MedusaStudent(Student):
    """The heads share one output matrix: the target's, or one that begins as the target's."""

    needs_hidden = True

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
        self.head_CD = target.head.weight_NK[columns.ids_C]
        if not options.share_tables:
            blocks[_HEAD] = self.head_CD
        self.start(blocks)

    def loss_on(self, given: StepInputs) -> PackLoss:
        source, width = self.source(), self.target.spec.width
        head_CD = self.head_CD
        if not self.options.share_tables:
            head_CD = source.take(_HEAD, len(self.columns), width)
        fan = Fan(given, self.options.loss)
        known_MD = given.states.hidden_TD.index_select(0, fan.start_M)
        for head in range(self.options.heads):
            fan.teach(self._head(source, f"blocks.{head}.").hidden(known_MD), head_CD)
        return fan.result()

    def _head(self, source: Source, prefix: str) -> MedusaHead:
        width = self.target.spec.width
        layers = [
            Linear(source.take(f"{prefix}layers.{layer}.weight", width, width))
            for layer in range(self.options.layers)
        ]
        return MedusaHead(layers, None)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.target.spec
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.width,
            "vocab_size": spec.vocab_size,
            "truncated_vocab_size": len(self.columns),
            "num_heads": self.options.heads,
            "num_hidden_layers": self.options.layers,
        }
        if self.options.share_tables:
            config["original_lm_head"] = True
        return config, {**self.values(), "token_map": self.columns.ids_C.cpu()}


RECIPE = Recipe(options=MedusaOptions, student=MedusaStudent, draft_vocab=16384)

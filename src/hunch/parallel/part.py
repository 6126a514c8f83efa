"""One rank's part of a model, and what every rank does alike with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.config import ModelConfig
from hunch.draft import KVShape
from hunch.kernels.attention import KVCache
from hunch.models.target import Target, load_target
from hunch.models.weights import open_weights
from hunch.parallel.group import Group, span
from hunch.parallel.link import Link
from hunch.step.kv_cache import allocate


@dataclass(slots=True)
class Part:
    """What one rank holds of a model that `group` computes together."""

    model: Target
    group: Group

    @staticmethod
    def load(link: Link, path: Path, config: ModelConfig, num_ranks: int) -> Part:
        """This rank's part; no more than that is read of the model's files."""
        group = link.group(num_ranks)
        return Part(load_target(config, open_weights(path), link.device, group), group)

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.model.kv_shape()

    def new_kv(self, num_slots: int, device: torch.device) -> KVCache:
        num_layers, num_kv_heads, head_dim = self.model.kv_shape()
        shape = KVShape(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.model.kv_dtype,
        )
        return allocate(shape, num_slots, 1, device)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Scores after the states that rank 0 has; they are whole on rank 0."""
        return self.model.logits(self.group.broadcast(hidden_MD))

    def output_rows(self, ids_C: Tensor) -> Tensor:
        """Rows of the output matrix, each from the rank that has it."""
        spec, group = self.model.spec, self.group
        first, last = span(spec.vocab_size, group)
        is_here_C = (ids_C >= first) & (ids_C < last)
        rows_CD = self.model.output_rows(torch.where(is_here_C, ids_C - first, 0))
        return group.all_reduce(torch.where(is_here_C.to(rows_CD.device)[:, None], rows_CD, 0))


def dump_model(config: ModelConfig) -> dict[str, Any]:
    return asdict(config)

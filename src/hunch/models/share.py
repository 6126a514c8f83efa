"""One rank's share of a model's tensors, as the weights of a narrower model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hunch.models.build import Names, head_rows, local_heads
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Packed, Weights, WeightsOver, part_of
from hunch.parallel.group import Group, Share, head_spans, span

HEAD_SHARE = "head.share"  # this rank's rows of the output matrix, which may be the embedding's


def local_spec(spec: ModelSpec, group: Group) -> ModelSpec:
    """The spec of one rank's share: fewer heads, a narrower MLP."""
    if group.size == 1:
        return spec
    heads, inner = local_heads(spec, group), span(spec.ffn_width, group)
    return replace(
        spec,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        ffn_width=inner[1] - inner[0],
    )


class SharedWeights(WeightsOver):
    """`Weights` over others: of matrices that are split, this rank's rows or columns."""

    def __init__(self, weights: Weights, spec: ModelSpec, names: Names, group: Group) -> None:
        super().__init__(weights)
        self._head = names.embed if spec.is_tied else names.head
        self._shares: dict[str, tuple[int, Share]] = {}  # name -> dimension and share of it
        (q, kv), inner = head_rows(spec, group), span(spec.ffn_width, group)
        rows = {names.q: q, names.k: kv, names.v: kv, names.gate: inner, names.up: inner}
        columns = {names.out: q, names.down: inner}
        heads = head_spans(spec.num_heads, spec.num_kv_heads, group)[0]
        for layer in range(spec.num_layers):
            prefix = names.layer.format(layer)
            self._shares[prefix + names.sinks] = 0, heads
            for name, share in rows.items():
                self._shares |= {
                    f"{prefix}{name}.{ending}": (0, share) for ending in ("weight", "bias")
                }
            for name, share in columns.items():
                self._shares[f"{prefix}{name}.weight"] = 1, share
        self._shares[HEAD_SHARE] = 0, span(spec.vocab_size, group)

    def names(self) -> list[str]:
        return [*self.weights.names(), HEAD_SHARE]

    def _stored(self, name: str) -> str:
        return self._head if name == HEAD_SHARE else name

    def shape(self, name: str) -> tuple[int, ...]:
        shape = list(self.weights.shape(self._stored(name)))
        if name in self._shares:
            dim, (first, last) = self._shares[name]
            shape[dim] = last - first
        return tuple(shape)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        stored = self._stored(name)
        if name not in self._shares:
            return self.weights.tensor(stored, dtype)
        return part_of(self.weights, stored, *self._shares[name], dtype)

    def packed(self, name: str) -> Packed | None:
        packed = self.weights.packed(self._stored(name))
        if packed is None or name not in self._shares:
            return packed
        dim, share = self._shares[name]
        return packed.take(slice(*share)) if dim == 0 else packed.take_columns(*share)

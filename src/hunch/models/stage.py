"""One stage of a pipeline: some of a model's layers, as a model of fewer layers.

The first stage has the embedding; the last has the final norm, the output matrix, and the embedding
too, which drafters read. Each sends the residual stream to the next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hunch.errors import ConfigError, UnsupportedModelError
from hunch.models.build import Names
from hunch.models.source import bias_of
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Packed, Weights, WeightsOver, part_of


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a part among `count` of them."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, spec: ModelSpec) -> range:
        """The layers of this stage: shares that take equally long, the output matrix included."""
        if self.count > spec.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size={self.count} is more than the model's layers "
                f"({spec.num_layers})"
            )
        whole = spec.num_layers + _head_layers(spec)

        def end(index: int) -> int:
            room = spec.num_layers - (self.count - index)  # every stage has a layer
            return max(index, min(round(whole * index / self.count), room))

        return range(end(self.index), end(self.index + 1))


WHOLE = Stage(0, 1)


def _head_layers(spec: ModelSpec) -> float:
    """The number of layers with as many weights as the output matrix."""
    width, head = spec.width, spec.head_dim
    attention = 2 * width * head * (spec.num_heads + spec.num_kv_heads)
    inner = spec.ffn_width
    if spec.experts is not None:
        experts = spec.experts
        inner = experts.width * experts.routing.num_chosen + experts.shared_width
    return spec.vocab_size * width / (attention + (2 + spec.is_gated) * width * inner)


def stage_spec(spec: ModelSpec, stage: Stage) -> ModelSpec:
    """The spec of one stage."""
    if stage.count == 1:
        return spec
    if spec.kv_of or spec.other_heads is not None or spec.inputs is not None:
        raise UnsupportedModelError(
            f"{spec.architecture}: layers that read other layers' keys and values cannot be in "
            "stages: leave pipeline_parallel_size at 1"
        )
    if spec.carried is not None:
        raise UnsupportedModelError(
            f"{spec.architecture}: how fast a layer forgets goes by its number in the whole model: "
            "leave pipeline_parallel_size at 1"
        )
    layers = stage.layers(spec)
    part = slice(layers.start, layers.stop)
    experts = spec.experts
    return replace(
        spec,
        num_layers=len(layers),
        windows=spec.windows[part],
        ffn_widths=spec.ffn_widths[part],
        is_value_key=spec.is_value_key[part],
        is_recurrent=spec.is_recurrent[part],
        is_mlp=spec.is_mlp[part],
        rope_of=spec.rope_of[part],
        unnormed=spec.unnormed[part],
        experts=None if experts is None else replace(experts, layers=experts.layers[part]),
        takes_stream=not stage.is_first,
        has_embedding=stage.is_first or stage.is_last,
        has_head=stage.is_last,
        has_final_norm=spec.has_final_norm and stage.is_last,
    )


class StageWeights(WeightsOver):
    """`Weights` over others: the tensors of one stage, with its layers counted from 0."""

    def __init__(self, weights: Weights, spec: ModelSpec, names: Names, stage: Stage) -> None:
        """`spec` is the whole model's."""
        super().__init__(weights)
        layers, part = stage.layers(spec), stage_spec(spec, stage)
        in_layer = re.compile(re.escape(names.layer).replace(r"\{\}", r"(\d+)"))
        absent = [] if part.has_embedding else [names.embed]
        absent += [names.positions, f"{names.embed_norm}."] if part.takes_stream else []
        absent += [] if part.has_head else [names.head, bias_of(names.head), f"{names.final_norm}."]
        self._stored: dict[str, str] = {}
        for name in weights.names():
            found = in_layer.match(name)
            if found is None:
                if not name.startswith(tuple(absent)):
                    self._stored[name] = name
            elif int(found[1]) in layers:
                local = names.layer.format(int(found[1]) - layers.start)
                self._stored[local + name[found.end() :]] = name

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(self._stored[name])

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weights.tensor(self._stored[name], dtype)

    def part(
        self, name: str, dim: int, part: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[first, last) of a dimension."""
        return part_of(self.weights, self._stored[name], dim, part, dtype)

    def packed(self, name: str) -> Packed | None:
        return self.weights.packed(self._stored[name])

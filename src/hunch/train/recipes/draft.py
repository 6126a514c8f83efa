"""Draft: a few of the target's own layers over its own embedding, distilled on its own answers.

Shape letters: T tokens in a row, D width, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.models.arrange import Arranged
from hunch.models.build import build_block, build_norm
from hunch.models.decoder import Decoder
from hunch.models.heads.draft_model import CUT_FROM
from hunch.models.load import tensor_shapes
from hunch.models.native import ID_MAP
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.cut import (
    ABREAST,
    INNER,
    UNITS,
    check_abreast,
    check_units,
    heads_config,
    in_groups,
    read,
    side_by_side,
    strongest_units,
    taken_together,
    with_units,
)
from hunch.train.states import Dense, TargetOutputs
from hunch.train.student import BatchLoss, Recipe, Student, Walk, check_target
from hunch.train.vocab import Columns


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """train draft KEY=VALUE..."""

    layers: str = ""  # how many of the target's, or which: "0,1,15,29"; empty: 4, at most half
    units: float = 1.0  # share of the units that each layer's MLP keeps
    abreast: int = 1  # layers of the target that each of its own holds side by side
    loss: str = "ce"
    from_scratch: bool = False  # random layers instead of the target's; reads text=FILE first
    share_tables: bool = True  # layers alone, the tables are the target's; false: a whole model


class DraftStudent(Student):
    """Sees what the target sees, and is asked what the target would say."""

    def __init__(
        self, options: DraftOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        self.kind, self.share_tables, self.units = options.loss, options.share_tables, options.units
        self.layers = read_layers(options.layers, target.spec.num_layers, options.abreast)
        self.abreast = options.abreast
        self.groups = in_groups(self.layers, self.abreast)
        windows = tuple(target.spec.windows[group[0]] for group in self.groups)
        spec = with_units(target.spec, options.units) if options.units < 1 else target.spec
        spec = side_by_side(spec, self.abreast)
        self.spec = replace(spec, num_layers=len(self.groups), windows=windows)
        self.head_CD = target.head.weight_NK[columns.ids_C] * target.spec.logits_scale
        self.config = dict(weights.config)
        self.layer_names = [target.names.layer.format(layer) for layer in range(len(self.groups))]
        self.start(self._cut(weights, options.from_scratch))

    def _cut(self, weights: Weights, from_scratch: bool) -> dict[str, Tensor]:
        names, found = self.target.names, {}
        weights = Arranged(weights, self.target.spec, names)  # takes fused tensors apart
        generator, units = torch.Generator().manual_seed(0), dict[int, Tensor]()
        inner = self.spec.ffn_width // self.abreast
        if inner != self.target.spec.ffn_width:
            for layer in self.layers:
                prefix = names.layer.format(layer)
                units[layer] = strongest_units(weights, prefix, names, inner)
        for name, shape in tensor_shapes(self.spec).items():
            if name in (names.embed, names.head):
                continue  # shared with the target, never trained
            for ours, group in enumerate(self.groups):
                prefix = names.layer.format(ours)
                if name.startswith(prefix):
                    part = name.removeprefix(prefix)
                    found[name] = taken_together(weights, part, group, names, units, inner)
            if name not in found:
                found[name] = read(weights, name)
            assert tuple(found[name].shape) == tuple(shape), name
            if from_scratch and len(shape) == 2:
                found[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        return found

    def loss_on(self, outputs: TargetOutputs, *, is_test: bool = False) -> BatchLoss:
        names, target = self.target.names, self.target
        attend = Dense(outputs.ids_BL, target.ropes, outputs.split)
        ids_BL = outputs.ids_BL
        pos_T = torch.arange(ids_BL.shape[1], device=ids_BL.device).repeat(len(ids_BL))
        x_TD = target.start(ids_BL.flatten(), pos_T)
        for layer, source in enumerate(self.sources):
            block = build_block(self.spec, source, "", layer, names=target.names)
            x_TD = block(x_TD, attend)
        if self.spec.has_final_norm:
            x_TD = build_norm(self.spec, self.source(), names.final_norm)(x_TD)
        walk = Walk(outputs, self.kind, is_test=is_test)
        walk.teach(x_TD, 0, self.head_CD)
        # Fed with the target's tokens, it says the same at any depth of a draft.
        return BatchLoss(walk.loss, walk.agreed)

    def settled(self) -> dict[str, Any]:
        return {"layers": ",".join(map(str, self.layers))}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Layers alone, beside the target's tables; or a whole model in Hugging Face form, which
        has no room for a reduced vocabulary."""
        spec, names, target = self.spec, self.target.names, self.target
        key = "n_layer" if "n_layer" in self.config else "num_hidden_layers"
        config: dict[str, Any] = {**self.config, key: spec.num_layers}
        config.pop("layer_types", None)
        if spec.ffn_width != target.spec.ffn_width:
            config |= {INNER: spec.ffn_width, UNITS: self.units}
        if self.abreast > 1:
            config |= {ABREAST: self.abreast, **heads_config(spec)}
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        if self.share_tables or len(self.columns) < spec.vocab_size:
            config |= {CUT_FROM: "", "cut_layers": self.layers}
            if len(self.columns) < spec.vocab_size:
                ids_C = self.columns.ids_C.sort().values.cpu()
                tensors[ID_MAP] = (ids_C - torch.arange(len(ids_C))).int()
                config["draft_vocab_size"] = len(ids_C)
            return config, tensors
        tensors[names.embed] = target.embedding_VD
        if not spec.is_tied:
            tensors[names.head] = target.head.weight_NK
        return config, tensors


def read_layers(text: str, num_layers: int, abreast: int = 1) -> list[int]:
    """A count, or a list of the target's layers in ascending order ("0," is a list of one); of
    layers with several side by side, how many of these, or all that go into them."""
    text = text or str(max(min(4, num_layers // 2), 1))
    try:
        given = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise ConfigError(f"layers={text!r} must be a number, or numbers with commas") from None
    is_count = "," not in text
    layers = choose_layers(given[0] * abreast, num_layers) if is_count else given
    is_good = layers == sorted(set(layers)) and 0 <= layers[0] <= layers[-1] < num_layers
    is_good &= len(layers) % abreast == 0
    if not is_good or (is_count and not 1 <= given[0] * abreast < num_layers):
        raise ConfigError(
            f"layers={text!r}: the target has {num_layers} layers; give a count below that, or "
            f"some of 0 .. {num_layers - 1} in ascending order, say layers={num_layers // 2}"
        )
    return layers


def layers_text(layers: list[int]) -> str:
    """As `read_layers` takes these very layers."""
    return "".join(f"{layer}," for layer in layers)


def choose_layers(count: int, num_layers: int) -> list[int]:
    """The first, then evenly from the second to the last; of two, the first two."""
    if count < 2:
        return [0]
    span = num_layers - 2
    return [0, *(1 + round(i * span / max(count - 2, 1)) for i in range(count - 1))]


def _check(options: DraftOptions, spec: ModelSpec) -> None:
    check_target(spec, "draft")
    check_units(options.units, spec)
    check_abreast(options.abreast, spec)
    read_layers(options.layers, spec.num_layers, options.abreast)


RECIPE = Recipe(options=DraftOptions, student=DraftStudent, check=_check, has_few_columns=True)

"""Draft: a few of the target's own layers over its own embedding, distilled on its own answers.

With from=MODEL layers, embedding and output matrix are those of a smaller model of its family.

Shape letters: T tokens of a pack, M positions that teach, D width, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.hub import resolve as find_files
from hunch.models.arrange import Arranged
from hunch.models.build import build_block, build_norm
from hunch.models.decoder import Decoder
from hunch.models.heads.draft_model import CUT_FROM, DRAFTS_FOR
from hunch.models.load import spec_of, tensor_shapes
from hunch.models.native import ID_MAP
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights, open_weights
from hunch.train.attend import Packed
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
from hunch.train.origin import Origin, open_origin
from hunch.train.packs import Spans
from hunch.train.student import PackLoss, Recipe, StepInputs, Student, Walk, check_target
from hunch.train.vocab import Columns

WHOLE_RATE = 0.3  # share of the rate for a whole smaller model, so that what it knows stays


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """train draft KEY=VALUE..."""

    from_: str = ""  # a smaller model of the target's family to cut from; empty: the target
    layers: str = ""  # how many of its layers, or which: "0,1,15,29"; empty: 4, at most half
    units: float = 1.0  # share of the units that each layer's MLP keeps
    abreast: int = 1  # how many of these layers each of the draft's holds side by side
    loss: str = "ce"
    from_scratch: bool = False  # random layers instead of these; reads text=FILE first
    share_tables: bool = True  # layers alone, the tables stay where they are; false: a whole model


class DraftStudent(Student):
    """Sees what the target sees, and learns to say what the target would."""

    spec: ModelSpec

    def __init__(
        self, options: DraftOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        self.loss_name, self.units = options.loss, options.units
        self.share_tables = options.share_tables
        # What it is cut from: the target, or another model.
        self.origin: Origin | None = None
        self.model = target
        if options.from_:
            self.origin = open_origin(options.from_, weights)
            self.fed = self.origin.columns.to(target.device)  # what it reads for each token
            weights = self.origin.weights
            self.model = self.origin.load(target.dtype, target.device)
        own = self.model.spec
        self.width = own.width
        self.layers = read_layers(
            options.layers, own.num_layers, options.abreast, is_target=self.origin is None
        )
        self.abreast = options.abreast
        self.groups = in_groups(self.layers, self.abreast)
        windows = tuple(own.windows[group[0]] for group in self.groups)
        spec = with_units(own, options.units) if options.units < 1 else own
        spec = side_by_side(spec, self.abreast)
        self.spec = replace(spec, num_layers=len(self.groups), windows=windows)
        self.head_CD = self.model.head.weight_NK[columns.ids_C] * own.logits_scale
        self.config = dict(weights.config)
        names = self.model.names
        self.layer_names = [names.layer.format(layer) for layer in range(len(self.groups))]
        self.start(self._cut(weights, options.from_scratch))
        if self.origin is not None:
            self.model.layers.clear()  # copies of them are taught
            is_whole = len(self.groups) == own.num_layers and options.units == 1
            self.rate = WHOLE_RATE if is_whole and not options.from_scratch else 1.0

    def _cut(self, weights: Weights, from_scratch: bool) -> dict[str, Tensor]:
        names, found = self.model.names, {}
        weights = Arranged(weights, self.model.spec, names)  # takes fused tensors apart
        generator, units = torch.Generator().manual_seed(0), dict[int, Tensor]()
        inner = self.spec.ffn_width // self.abreast
        if inner != self.model.spec.ffn_width:
            for layer in self.layers:
                prefix = names.layer.format(layer)
                units[layer] = strongest_units(weights, prefix, names, inner)
        for name, shape in tensor_shapes(self.spec).items():
            if name in (names.embed, names.head):
                continue  # shared with the model, never trained
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

    def loss_on(self, given: StepInputs) -> PackLoss:
        # Given the target's tokens, it guesses the same at any depth of a draft.
        walk = Walk(given, self.loss_name)
        x_TD = self.stream(given.pack.ids_T, given.pack)
        walk.teach(self.normed(walk.taught(x_TD, 0)), 0, self.head_CD)
        return walk.result()

    def stream(self, ids_T: Tensor, spans: Spans) -> Tensor:
        """The output of its layers for these tokens."""
        names, model = self.model.names, self.model
        if self.origin is not None:
            ids_T = self.fed.to_draft(ids_T)
        attend, x_TD = Packed(spans, model.ropes), model.start(ids_T, spans.pos_T)
        for layer, source in enumerate(self.sources):
            block = build_block(self.spec, source, "", layer, names=names)
            x_TD = block(x_TD, attend)
        return x_TD

    def normed(self, x_MD: Tensor) -> Tensor:
        if not self.spec.has_final_norm:
            return x_MD
        return build_norm(self.spec, self.source(), self.model.names.final_norm)(x_MD)

    def settled(self) -> dict[str, Any]:
        return {"layers": ",".join(map(str, self.layers))}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Layers alone, beside the tables of what they were cut from; or a whole model in Hugging
        Face form, which has no room for a reduced vocabulary."""
        spec, names, model = self.spec, self.model.names, self.model
        key = "n_layer" if "n_layer" in self.config else "num_hidden_layers"
        config: dict[str, Any] = {**self.config, key: spec.num_layers}
        config.pop("layer_types", None)
        if self.units < 1 or self.abreast > 1:
            config |= {INNER: spec.ffn_width, UNITS: self.units}
        if self.abreast > 1:
            config |= {ABREAST: self.abreast, **heads_config(spec)}
        tensors = self.values()
        num_known = min(spec.vocab_size, self.target.spec.vocab_size)
        if self.share_tables or len(self.columns) < num_known:
            config |= {CUT_FROM: "", "cut_layers": self.layers}
            if self.origin is not None:
                config |= {CUT_FROM: self.origin.name, DRAFTS_FOR: ""}
                config["tie_word_embeddings"] = spec.is_tied  # as its files have it
            if len(self.columns) < spec.vocab_size:
                tensors[ID_MAP] = self.columns.offsets().int()
                config["draft_vocab_size"] = len(self.columns)
            return config, tensors
        tensors[names.embed] = model.embedding_VD
        if not spec.is_tied:
            tensors[names.head] = model.head.weight_NK
        return config, tensors


def read_layers(
    text: str, num_layers: int, abreast: int = 1, *, is_target: bool = True
) -> list[int]:
    """A count, or a list of a model's layers in ascending order ("0," is a list of one); of layers
    with several side by side, how many of these, or all that go into them. A draft can have all
    layers of a model that is not its target."""
    text = text or str(max(min(4, num_layers // 2), 1))
    try:
        given = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise ConfigError(f"layers={text!r} must be a number, or numbers with commas") from None
    is_count = "," not in text
    layers = choose_layers(given[0] * abreast, num_layers) if is_count else given
    is_good = layers == sorted(set(layers)) and 0 <= layers[0] <= layers[-1] < num_layers
    is_good &= len(layers) % abreast == 0
    most = num_layers - 1 if is_target else num_layers
    if not is_good or (is_count and not 1 <= given[0] * abreast <= most):
        model, count = "the target", "a count below that"
        if not is_target:
            model, count = "the model to cut from", "a count up to that"
        side = f" of {abreast} side by side" if abreast > 1 else ""
        raise ConfigError(
            f"layers={text!r}{side}: {model} has {num_layers} layers; give {count}, or some of "
            f"0 .. {num_layers - 1} in ascending order, say "
            f"layers={max(num_layers // 2 // abreast, 1)}"
        )
    return layers


def choose_layers(count: int, num_layers: int) -> list[int]:
    """The first, then evenly from the second to the last; of two, the first two."""
    if count < 2:
        return [0]
    span = num_layers - 2
    return [0, *(1 + round(i * span / max(count - 2, 1)) for i in range(count - 1))]


def _check(options: DraftOptions, spec: ModelSpec) -> None:
    if options.from_:
        spec = spec_of(open_weights(find_files(options.from_)))
    check_target(spec, "draft", options.from_)
    check_units(options.units, spec)
    check_abreast(options.abreast, spec)
    is_target = not options.from_
    read_layers(options.layers, spec.num_layers, options.abreast, is_target=is_target)


# For a target of 2B's cost, after 14 seconds: 1.68 tokens per pass on unseen prompts with the rate
# of other recipes and 2.10 with twice that; on fewer texts 1.95 and 2.00 with four and eight times
# that. Its padded matrices had too small steps then, so the rate is between (docs/training.md).
RECIPE = Recipe(
    options=DraftOptions, student=DraftStudent, check=_check, has_few_columns=True, lr=5.4e-3
)

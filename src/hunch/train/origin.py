"""The model a draft is cut from, if that is not its target but a smaller one of its family.

It has the target's ids. If one of the vocabularies is padded, training treats ids as serving does
(`models.heads.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hunch.errors import ConfigError
from hunch.hub import KNOWN
from hunch.hub import resolve as find_files
from hunch.models.decoder import Decoder
from hunch.models.heads.draft_model import CUT_FROM
from hunch.models.heads.vocabulary import Columns, compare, read_vocab
from hunch.models.load import load_decoder, spec_of
from hunch.models.source import EXPAND
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights, open_weights
from hunch.train.attend import Packed
from hunch.train.packs import Spans
from hunch.train.student import check_target


@dataclass(frozen=True, slots=True)
class Origin:
    """A model whose layers become a draft for another model."""

    name: str  # by which it is found from any directory
    weights: Weights
    spec: ModelSpec
    columns: Columns  # how its ids are the target's
    num_known: int  # how many of the target's tokens it has, from the first on

    def load(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """The whole model, as training reads it."""
        name = str(dtype).removeprefix("torch.")
        return load_decoder(self.weights, dtype=name, device=device, hold=EXPAND)


def open_origin(name: str, target: Weights) -> Origin:
    """The model of that name; raises where no draft for the target can be cut from it."""
    files = find_files(name)
    weights = open_weights(files)
    if CUT_FROM in weights.config:
        raise ConfigError(
            f"from={name} is a draft without tables of its own; name a whole model, or go on with "
            f"that draft: --resume {name}"
        )
    spec, target_size = spec_of(weights), ModelSpec.from_config(target.config).vocab_size
    check_target(spec, "draft", name)
    columns = compare(
        read_vocab(weights),
        spec.vocab_size,
        read_vocab(target),
        target_size,
        f"from={name}",
        remedy="Name a smaller model of the target's family, with its vocabulary",
    )
    is_path = name.lower() not in KNOWN and Path(name).expanduser().exists()
    lasting = str(Path(name).expanduser().resolve()) if is_path else name
    return Origin(lasting, weights, spec, columns, min(spec.vocab_size, target_size))


def check_context(origin: Origin, context: int, target: ModelSpec) -> None:
    """Raise where texts would be longer than the model can read."""
    if origin.spec.max_len < min(context, target.max_len):
        raise ConfigError(
            f"from={origin.name} reads texts of up to {origin.spec.max_len} tokens, and training "
            f"has some of {context}: give context={origin.spec.max_len}"
        )


@torch.inference_mode()
def agreement(
    origin: Origin, model: Decoder, answers: Sequence[tuple[list[int], list[int]]]
) -> float:
    """The share of the answers' tokens that the model would choose itself, after their prompts."""
    columns, num_right, num_asked = origin.columns.to(model.device), 0, 0
    for prompt, answer in answers:
        ids_L = torch.tensor([*prompt, *answer], device=model.device)
        fed_L, spans = columns.to_draft(ids_L), Spans.of([len(ids_L)], model.device)
        hidden = model.read(fed_L, spans.pos_T, Packed(spans, model.ropes))
        logits_MV = model.logits(hidden.last_TD[len(prompt) - 1 : -1])
        guess_M = logits_MV[:, : origin.num_known].argmax(-1)
        num_right += int((guess_M == ids_L[len(prompt) :]).sum())
        num_asked += len(answer)
    return num_right / max(num_asked, 1)

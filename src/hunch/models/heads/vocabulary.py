"""A draft model's vocabulary beside its target's: how ids and logits of one become the other's.

Shape letters: T packed tokens, M packed rows, V vocabulary of the target, W of the draft, D width,
C columns of the draft's logits that are used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hunch.byte_level import BYTE_OF
from hunch.errors import VocabMismatchError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.models.target import Hidden, Target
from hunch.models.weights import Weights
from hunch.models.weights.json_file import read_json

log = logging.getLogger("hunch")

_MAX_NAMED = 3  # differing tokens an error names
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of a SentencePiece vocabulary
_REMEDY = (
    "Choose a draft model of the target's family, give text:PATH, which tokenizes its text again, "
    "or cross_vocab=true to draft over the tokens both have"
)


@dataclass(frozen=True, slots=True)
class Columns:
    """How a draft model's token ids and logits become the target's."""

    num_columns: int  # logits past these are padding
    ids_C: Tensor | None = None  # the target's id of each column; None: the whole vocabulary
    pick_C: Tensor | None = None  # the columns to keep, where they are not the first ones
    draft_id_V: Tensor | None = None  # the draft model's id for each of the target's
    begin_id: int | None = None  # what the draft model's texts begin with, for the first token

    @property
    def is_mapped(self) -> bool:
        """Whether a token has another number there, or none."""
        return self.pick_C is not None or self.draft_id_V is not None

    def to_draft(self, ids_T: Tensor, pos_T: Tensor | None = None) -> Tensor:
        if self.draft_id_V is None:
            return ids_T
        ids_T = self.draft_id_V[ids_T.to(self.draft_id_V.device)]
        if self.begin_id is None or pos_T is None:
            return ids_T
        return ids_T.masked_fill(pos_T == 0, self.begin_id)

    def fit(self, logits_MW: Tensor) -> Tensor:
        if self.pick_C is not None:
            return logits_MW.index_select(1, self.pick_C)
        if logits_MW.shape[1] > self.num_columns:
            return logits_MW[:, : self.num_columns]
        return logits_MW

    def to(self, device: torch.device) -> Columns:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        maps = move(self.ids_C), move(self.pick_C), move(self.draft_id_V)
        return Columns(self.num_columns, *maps, self.begin_id)


class Renumbered:
    """A draft model of another vocabulary, which is given the target's ids and has its columns.

    All else is the model's own.
    """

    def __init__(self, model: Target, columns: Columns) -> None:
        self.model, self.columns = model, columns

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        return self.model.forward(
            self.columns.to_draft(ids_T, attn.pos_T), attn, kv, feature_layers
        )

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return self.columns.fit(self.model.logits(hidden_MD)).contiguous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def renumbered(model: Target, columns: Columns) -> Target:
    """The model as one of the target's vocabulary; itself, if it is that."""
    is_padded = columns.ids_C is None and columns.num_columns < model.spec.vocab_size
    return cast("Target", Renumbered(model, columns)) if columns.is_mapped or is_padded else model


def read_vocab(weights: Weights) -> dict[str, int] | None:
    """The tokens beside a model's weights; None where the files hold no tokenizer."""
    tokens = weights.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return {str(token): number for number, token in enumerate(tokens)}
    folder = Path(weights.path)
    if (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
        stored = (content.get("model") or {}).get("vocab") or {}
        if isinstance(stored, Mapping):
            vocab = {str(token): int(number) for token, number in stored.items()}
        else:  # a unigram model lists (token, score)
            vocab = {str(entry[0]): number for number, entry in enumerate(stored)}
        for added in content.get("added_tokens") or ():
            vocab[str(added["content"])] = int(added["id"])
        return vocab
    if (folder / "vocab.json").is_file():
        return {str(t): int(n) for t, n in read_json(folder / "vocab.json").items()}
    return None


def compare(
    draft: Mapping[str, int] | None,
    draft_size: int,
    target: Mapping[str, int] | None,
    target_size: int,
    where: str,
    is_crossed: bool = False,
    remedy: str = _REMEDY,
) -> Columns:
    """Raise unless they are equal, apart from padding, or one is a part of the other, ids
    included."""
    if draft is None or target is None:
        if draft_size != target_size:
            raise VocabMismatchError(
                f"{where}: its vocabulary has {draft_size} tokens, the target's {target_size}, and "
                "without a tokenizer beside its weights they cannot be compared; put its "
                "tokenizer.json there, or choose a draft model of the target's family"
            )
        return _same_ids(draft_size, target_size)
    by_id = {number: token for token, number in draft.items()}
    different = [
        (number, token, by_id[number])
        for token, number in target.items()
        if number in by_id and by_id[number] != token
    ]
    if not different:
        return _same_ids(draft_size, target_size)
    if is_crossed:
        return _cross(draft, draft_size, target, target_size, where)
    different.sort()
    named = ", ".join(
        f"{number}: target {ours!r}, draft {theirs!r}"
        for number, ours, theirs in different[:_MAX_NAMED]
    )
    raise VocabMismatchError(
        f"{where}: its vocabulary ({len(draft)} tokens) differs from the target's ({len(target)} "
        f"tokens) at {len(different)} ids ({named}). {remedy}"
    )


def _same_ids(draft_size: int, target_size: int) -> Columns:
    if draft_size >= target_size:
        return Columns(target_size)
    # For tokens of the target that the draft does not have, it is given its own last id.
    draft_id_V = torch.arange(target_size).clamp(max=draft_size - 1)
    return Columns(draft_size, torch.arange(draft_size), None, draft_id_V)


def _cross(
    draft: Mapping[str, int],
    draft_size: int,
    target: Mapping[str, int],
    target_size: int,
    where: str,
) -> Columns:
    theirs = {data: number for data, number in _as_bytes(draft) if number < draft_size}
    pairs = sorted(
        (number, theirs[data])
        for data, number in _as_bytes(target)
        if number < target_size and data in theirs
    )
    if len(pairs) < 2:
        raise VocabMismatchError(f"{where}: it has no tokens in common with the target")
    log.warning(
        "%s: drafting over the %d tokens both vocabularies have, of the target's %d. Every other "
        "token ends a draft, and the draft model reads a placeholder for it: expect fewer accepted "
        "tokens than with a draft model of the target's family",
        where,
        len(pairs),
        len(target),
    )
    unknown = next((theirs[t] for t in (b"<unk>", b"<|endoftext|>") if t in theirs), 0)
    draft_id_V = torch.full((target_size,), unknown)
    ids_C, pick_C = torch.tensor(pairs).unbind(1)
    draft_id_V[ids_C] = pick_C
    return Columns(len(pairs), ids_C.contiguous(), pick_C.contiguous(), draft_id_V)


def _as_bytes(vocab: Mapping[str, int]) -> Iterator[tuple[bytes, int]]:
    """Tokens as what they add to a text, however the vocabulary spells spaces and bytes."""
    is_byte_level = not any("\u2581" in token for token in vocab)
    for token, number in vocab.items():
        if is_byte_level and all(char in BYTE_OF for char in token):
            yield bytes(BYTE_OF[char] for char in token), number
        elif _BYTE_TOKEN.fullmatch(token):
            yield bytes.fromhex(token[3:5]), number
        else:
            yield token.replace("\u2581", " ").encode(), number

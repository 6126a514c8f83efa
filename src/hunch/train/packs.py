"""Packs: several texts in a row, without padding between them.

Packs have about the same size. Filled up to one shape, all of them can take the same CUDA graph of
a training step. A position *teaches* if a token of the answer follows it that the draft vocabulary
has a column for.

Shape letters: B texts of a pack, S text starts and the end of the last text, T tokens, M positions
that teach, N positions of all texts, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hunch.train.batches import Array, Texts

_OPEN = 16  # packs that are filled at the same time
_MANY = 2.0  # room for texts, as a multiple of the average number in so many tokens
_SPARE = 1.06  # room for positions that teach, as a multiple of their average number
_MULTIPLE = 128  # the room for positions that teach is rounded up to a multiple of this


@dataclass(frozen=True, slots=True)
class PackShape:
    """The size of a pack, or the room in it."""

    num_tokens: int
    num_texts: int
    num_rows: int  # positions that teach
    longest: int  # tokens of the longest text

    @property
    def sizes(self) -> list[int]:
        """The length of each part of `Pack.flat`."""
        return [*(2 * [self.num_tokens]), self.num_texts + 1, *(3 * [self.num_rows]), 1]


@dataclass(slots=True)
class Pack:
    """Some texts in a row, in the host's memory."""

    index_B: Array  # of its texts in their collection
    at_T: Array  # index of each token among those of all texts
    ids_T: Array
    pos_T: Array
    start_S: Array
    row_M: Array  # which of the T positions teach
    label_M: Array  # the column of the token that follows each of them

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def at_M(self) -> Array:
        found: Array = self.at_T[self.row_M]
        return found

    @property
    def shape(self) -> PackShape:
        longest = int(np.diff(self.start_S).max())
        return PackShape(self.num_tokens, len(self.index_B), len(self.row_M), longest)

    def flat(self, shape: PackShape) -> Array:
        """All inputs of a step as one array, filled up to a shape.

        The filling teaches nothing: it is texts of zeros, and copies of the first position that
        teaches, which have no weight.
        """
        size, count = shape.num_tokens, len(self.row_M)
        more = np.arange(self.num_tokens, size, shape.longest)  # where texts of zeros start
        starts = np.full(shape.num_texts + 1, size)
        starts[: len(self.index_B)] = self.start_S[:-1]
        starts[len(self.index_B) : len(self.index_B) + len(more)] = more
        parts = [np.resize(x, shape.num_rows) for x in (self.row_M, self.label_M, self.at_M)]
        for part in parts:
            part[count:] = part[0] if count else 0
        zeros = np.zeros(size - self.num_tokens, dtype=np.int64)
        found: Array = np.concatenate(
            [self.ids_T, zeros, self.pos_T, zeros, starts, *parts, [count]]
        ).astype(np.int32)
        return found


class PackInputs:
    """The inputs of a step over a pack: views of one tensor (`Pack.flat`)."""

    def __init__(self, flat: Tensor, shape: PackShape) -> None:
        ids, pos, self.start_S, row, label, at, self.count_1 = flat.split_with_sizes(shape.sizes)
        self.ids_T, self.pos_T, self.row_M = ids.long(), pos.long(), row.long()
        self.label_M, self.at_M = label.long(), at.long()
        self.longest = shape.longest

    def weight_M(self) -> Tensor:
        """The weight of each position in the loss: equal for those that teach, 0 for filling."""
        place_M = torch.arange(len(self.row_M), device=self.row_M.device)
        return (place_M < self.count_1) / self.count_1


@dataclass(slots=True)
class _Filling:
    """A pack that is not full yet."""

    texts: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0


class Laid:
    """All texts in a row, each cut to the context length."""

    def __init__(self, texts: Texts, column_V: Tensor, context: int) -> None:
        self.lengths = np.minimum(texts.lengths, context)
        self.start = np.concatenate([[0], np.cumsum(self.lengths)])
        skipped = np.repeat(texts.offset[:-1] - self.start[:-1], self.lengths)
        self.pos_N = np.arange(self.start[-1]) - np.repeat(self.start[:-1], self.lengths)
        self.ids_N = np.asarray(texts.tokens)[np.arange(self.start[-1]) + skipped]
        first = np.repeat(np.maximum(texts.prompt_len - 1, 0), self.lengths)
        last = np.repeat(self.lengths - 1, self.lengths)
        column_N = column_V.cpu().numpy()[np.roll(self.ids_N, -1)]
        is_taught_N = (self.pos_N >= first) & (self.pos_N < last)
        self.label_N = np.where(is_taught_N, column_N, -1).astype(np.int32)
        before = np.concatenate([[0], np.cumsum(self.label_N >= 0)])
        self.num_taught = before[self.start[1:]] - before[self.start[:-1]]

    def shape(self, num_tokens: int) -> PackShape:
        """The shape for packs of `num_tokens` tokens, or of the longest text if it has more."""
        longest = int(self.lengths.max())
        num_tokens = max(num_tokens, longest)
        lengths = self.lengths[self.num_taught > 0]
        share = self.num_taught.sum() / max(lengths.sum(), 1)
        num_rows = max(int(_SPARE * share * num_tokens), int(self.num_taught.max()))
        num_rows = min(-(-num_rows // _MULTIPLE) * _MULTIPLE, num_tokens)
        num_texts = int(_MANY * num_tokens * len(lengths) / max(lengths.sum(), 1)) + 1
        num_texts += -(-num_tokens // longest)  # texts of zeros that fill a pack
        return PackShape(num_tokens, num_texts, num_rows, longest)

    def pack(self, index_B: Array) -> Pack:
        """A pack of these texts."""
        start, lengths = self.start[index_B], self.lengths[index_B]
        start_S = np.concatenate([[0], np.cumsum(lengths)])
        at_T = np.arange(start_S[-1]) + np.repeat(start - start_S[:-1], lengths)
        label_T = self.label_N[at_T]
        row_M = np.flatnonzero(label_T >= 0)
        ids_T, pos_T = self.ids_N[at_T], self.pos_N[at_T]
        return Pack(np.asarray(index_B), at_T, ids_T, pos_T, start_S, row_M, label_T[row_M])

    def packs(self, shape: PackShape, seed: int, epoch: int) -> Iterator[Pack]:
        """Packs of all texts that teach, none larger than `shape`, in an order set by seed and
        epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(np.flatnonzero(self.num_taught))
        most = shape.num_texts - -(-shape.num_tokens // shape.longest)
        filling: list[_Filling] = []
        sizes = np.stack((order, self.lengths[order], self.num_taught[order]), axis=1)
        for text, length, taught in sizes.tolist():
            for one in filling:
                is_room = one.num_tokens + length <= shape.num_tokens and len(one.texts) < most
                if is_room and one.num_rows + taught <= shape.num_rows:
                    break
            else:
                if len(filling) == _OPEN:
                    fullest = max(filling, key=lambda one: one.num_tokens)
                    filling.remove(fullest)
                    yield self.pack(np.array(fullest.texts))
                one = _Filling()
                filling.append(one)
            one.texts.append(text)
            one.num_tokens += length
            one.num_rows += taught
        for one in filling:
            yield self.pack(np.array(one.texts))

"""Packs: several texts in a row, without padding between them.

Packs have about the same size. Padded to one shape, all of them can use the same CUDA graph of a
training step. A position *teaches* if a token of the answer follows it that the draft vocabulary
has a column for; an *anchor* is where a block of guesses begins.

Shape letters: B texts of a pack, S text starts and the end of the last text, T tokens, M positions
that teach, A anchors, N positions of all texts, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import le

import numpy as np
import torch
from torch import Tensor

from hunch.train.texts import Array, Texts, put

FLOOR = 0.2  # share of the places after a wrong guess that teach all the same
_DEPTHS = 8  # of a draft, each with its own choice of these places; deeper ones repeat them
_OPEN = 16  # packs that are filled at the same time
_MANY = 2.0  # room for texts, as a multiple of the average number in so many tokens
_SPARE = 1.06  # room for positions that teach, as a multiple of their average number
_MULTIPLE = 128  # both kinds of room are rounded up to a multiple of this


@dataclass(frozen=True, slots=True)
class PackShape:
    """The size of a pack, or of its padded form."""

    num_tokens: int
    num_texts: int
    num_rows: int  # positions that teach
    longest: int  # tokens of the longest text
    num_blocks: int = 0  # anchors of all texts
    anchors: int = 0  # most anchors of a text

    @property
    def sizes(self) -> list[int]:
        """The length of each part of `Pack.flat`."""
        tokens, rows = 3 * [self.num_tokens], 4 * [self.num_rows]
        return [*tokens, self.num_texts + 1, *rows, self.num_blocks, 2]


@dataclass(slots=True)
class Pack:
    """Some texts in a row, in the host's memory."""

    index_B: Array  # of its texts in their collection
    prompt_B: Array  # number of tokens of their prompts
    at_T: Array  # index of each token among those of all texts
    ids_T: Array
    pos_T: Array
    start_S: Array
    row_M: Array  # which of the T positions teach
    label_M: Array  # the column of the token after each of these; -1: it has none
    is_own_M: Array  # whether the target wrote that token
    spared_M: Array  # bit i: it teaches the i-th guess of a draft even if those before are wrong
    anchor_A: Array  # of the T positions

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def shape(self) -> PackShape:
        longest = int(np.diff(self.start_S).max())
        sizes = self.num_tokens, len(self.index_B), len(self.row_M), longest, len(self.anchor_A)
        return PackShape(*sizes, anchors=len(self.anchor_A))

    def flat(self, shape: PackShape) -> Array:
        """All inputs of a step as one array, padded to a shape.

        The padding teaches nothing: it is texts of zeros, and copies of the first position that
        teaches, which have no weight.
        """
        size, count = shape.num_tokens, len(self.row_M)
        more = np.arange(self.num_tokens, size, shape.longest)  # where texts of zeros start
        starts = np.full(shape.num_texts + 1, size)
        starts[: len(self.index_B)] = self.start_S[:-1]
        starts[len(self.index_B) : len(self.index_B) + len(more)] = more
        rows = [self.row_M, self.label_M, self.is_own_M, self.spared_M]
        parts = [np.resize(x, shape.num_rows).astype(np.int32) for x in rows]
        for part in parts:
            part[count:] = part[0] if count else 0
        anchors = np.zeros(shape.num_blocks, dtype=np.int32)
        anchors[: len(self.anchor_A)] = self.anchor_A
        zeros = np.zeros(size - self.num_tokens, dtype=np.int32)
        tokens = [x for part in (self.ids_T, self.pos_T, self.at_T) for x in (part, zeros)]
        counts = [count, len(self.anchor_A)]
        found: Array = np.concatenate([*tokens, starts, *parts, anchors, counts]).astype(np.int32)
        return found

    def inputs(self, device: torch.device) -> PackInputs:
        """The inputs of a step over the pack, without padding."""
        return PackInputs(put(torch.from_numpy(self.flat(self.shape)), device), self.shape)


class Spans:
    """Where texts in a row begin and end."""

    def __init__(self, start_S: Tensor, pos_T: Tensor, longest: int) -> None:
        self.start_S, self.pos_T, self.longest = start_S, pos_T, longest

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Spans:
        start_S = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        pos_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return Spans(start_S, pos_T, max(lengths))

    @property
    def where(self) -> tuple[Tensor, Tensor, int, int]:
        """Starts and the longest length, for queries and for keys."""
        return self.start_S, self.start_S, self.longest, self.longest

    @cached_property
    def starts(self) -> list[int]:
        """The starts on the host, which waits for the device."""
        found: list[int] = self.start_S.tolist()
        return found


class PackInputs(Spans):
    """The inputs of a step over a pack: views of one tensor (`Pack.flat`)."""

    def __init__(self, flat: Tensor, shape: PackShape) -> None:
        parts = flat.split_with_sizes(shape.sizes)
        self.ids_T, pos_T, self.at_T = (part.long() for part in parts[:3])
        super().__init__(parts[3], pos_T, shape.longest)
        self.row_M, self.label_M, is_own_M, self.spared_M = (part.long() for part in parts[4:8])
        self.anchor_A, count_2 = parts[8].long(), parts[9]
        # Padding has no weight.
        self.is_row_M = torch.arange(shape.num_rows, device=flat.device) < count_2[0]
        self.is_block_A = torch.arange(shape.num_blocks, device=flat.device) < count_2[1]
        self.is_own_M = is_own_M > 0
        self.anchors = shape.anchors

    @property
    def at_M(self) -> Tensor:
        return self.at_T.index_select(0, self.row_M)

    def spared(self, depth: int) -> Tensor:
        """Rows that teach this guess of a draft even if those before are wrong."""
        return ((self.spared_M >> depth % _DEPTHS) & 1) > 0

    def place_T(self) -> Tensor:
        """The index among the M positions of each token, or of a copy of it; -1: none."""
        place_T = torch.full_like(self.ids_T, -1)
        return place_T.scatter(0, self.row_M, torch.arange(len(self.row_M), device=place_T.device))


@dataclass(slots=True)
class _Filling:
    """A pack that is not full yet: its texts, and how many tokens, rows, anchors and texts."""

    texts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Laid:
    """All texts in a row, each cut to the context length."""

    def __init__(
        self,
        texts: Texts,
        column_V: Tensor,
        context: int,
        *,
        whole: float = 0.0,  # the share of texts whose prompts teach too
        seed: int = 0,  # by which these texts are chosen
        is_complete: bool = False,  # tokens without a column have rows too, to measure with
    ) -> None:
        self.lengths = np.minimum(texts.lengths, context)
        self.prompt_len = texts.prompt_len
        self.start = np.concatenate([[0], np.cumsum(self.lengths)])
        skipped = np.repeat(texts.offset[:-1] - self.start[:-1], self.lengths)
        self.pos_N = np.arange(self.start[-1]) - np.repeat(self.start[:-1], self.lengths)
        self.ids_N = np.asarray(texts.tokens)[np.arange(self.start[-1]) + skipped]
        first = np.maximum(texts.prompt_len - 1, 0)
        last = np.repeat(self.lengths - 1, self.lengths)
        self.label_N = column_V.cpu().numpy()[np.roll(self.ids_N, -1)].astype(np.int32)
        self.is_own_N = (self.pos_N >= np.repeat(first, self.lengths)) & (self.pos_N < last)
        first = np.where(np.random.default_rng(seed).random(len(texts)) < whole, 0, first)
        self.is_row_N = (self.pos_N >= np.repeat(first, self.lengths)) & (self.pos_N < last)
        if not is_complete:
            self.is_row_N &= self.label_N >= 0
        self.is_anchor_N = self.is_own_N & (self.pos_N > 0)  # nothing is known before the first
        self.num_taught, self.num_anchors = map(self._by_text, (self.is_row_N, self.is_anchor_N))

    def _by_text(self, is_there_N: Array) -> Array:
        before = np.concatenate([[0], np.cumsum(is_there_N)])
        found: Array = before[self.start[1:]] - before[self.start[:-1]]
        return found

    def shape(self, num_tokens: int, anchors: int = 0) -> PackShape:
        """The shape for packs of `num_tokens` tokens, or of the longest text if it has more, with
        so many anchors of each text."""
        longest = int(self.lengths.max())
        num_tokens = max(num_tokens, longest)
        is_used = self.num_taught > 0
        share = num_tokens / max(self.lengths[is_used].sum(), 1)
        num_rows = _room(self.num_taught, share, num_tokens)
        num_blocks = _room(self.num_anchors.clip(max=anchors) * is_used, share, num_tokens)
        num_texts = int(_MANY * share * is_used.sum()) + 1
        num_texts += -(-num_tokens // longest)  # texts of zeros that fill a pack
        return PackShape(num_tokens, num_texts, num_rows, longest, num_blocks, anchors)

    def pack(
        self, index_B: Array, chance: np.random.Generator | None = None, anchors: int = 0
    ) -> Pack:
        """A pack of these texts, with up to so many random anchors of each; without `chance`, with
        all."""
        start, lengths = self.start[index_B], self.lengths[index_B]
        start_S = np.concatenate([[0], np.cumsum(lengths)])
        at_T = np.arange(start_S[-1]) + np.repeat(start - start_S[:-1], lengths)
        row_M = np.flatnonzero(self.is_row_N[at_T])
        spared_M, anchor_A = np.zeros(len(row_M), dtype=np.uint8), row_M[:0]
        if chance is not None:
            noise = chance.random((len(row_M), _DEPTHS), dtype=np.float32)
            spared_M = np.packbits(noise < FLOOR, axis=1, bitorder="little")[:, 0]
        if anchors:
            anchor_A = np.flatnonzero(self.is_anchor_N[at_T])
        if anchors and chance is not None:
            text_A = np.searchsorted(start_S, anchor_A, side="right") - 1
            order = np.lexsort((chance.random(len(anchor_A)), text_A))
            before = np.searchsorted(text_A, text_A)  # anchors of earlier texts
            anchor_A = np.sort(anchor_A[order[np.arange(len(order)) - before < anchors]])
        at_M = at_T[row_M]
        return Pack(
            np.asarray(index_B), self.prompt_len[index_B], at_T, self.ids_N[at_T],
            self.pos_N[at_T], start_S, row_M, self.label_N[at_M], self.is_own_N[at_M], spared_M,
            anchor_A,
        )  # fmt: skip

    def packs(self, shape: PackShape, seed: int, epoch: int) -> Iterator[Pack]:
        """Packs of all texts that teach, none larger than `shape`, in an order set by seed and
        epoch."""
        chance = np.random.default_rng((seed, epoch))
        order = chance.permutation(np.flatnonzero(self.num_taught))
        most = shape.num_texts - -(-shape.num_tokens // shape.longest)
        room = shape.num_tokens, shape.num_rows, shape.num_blocks, most
        blocks = self.num_anchors[order].clip(max=shape.anchors)
        parts = self.lengths[order], self.num_taught[order], blocks, np.ones_like(order)
        filling: list[_Filling] = []
        for text, *sizes in np.stack((order, *parts), axis=1).tolist():
            for one in filling:
                filled = [size + more for size, more in zip(one.sizes, sizes, strict=True)]
                if all(map(le, filled, room)):
                    break
            else:
                if len(filling) == _OPEN:
                    fullest = max(filling, key=lambda one: one.sizes[0])
                    filling.remove(fullest)
                    yield self.pack(np.array(fullest.texts), chance, shape.anchors)
                one, filled = _Filling(), sizes
                filling.append(one)
            one.texts.append(text)
            one.sizes = filled
        for one in filling:
            yield self.pack(np.array(one.texts), chance, shape.anchors)


def _room(count_N: Array, share: float, most: int) -> int:
    """Room for an average share of all texts, and for any one text."""
    size = max(int(_SPARE * share * count_N.sum()), int(count_N.max()))
    return min(-(-size // _MULTIPLE) * _MULTIPLE, most)

"""Successors of contexts as files have them, counted or mixed.

Shape letters: E successors, N occurrences, G contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hunch.errors import ConfigError

Array = np.ndarray
WIDTH = 8  # successors of a context
CERTAIN = 255  # chances are whole numbers of this
ONE_TOKEN = -1  # in place of a pair's first token: the context is the last token alone
DOUBT = 3.0  # occurrences that count for successors which were not seen
COLUMNS = ("first", "last", "next", "chance")


@dataclass(frozen=True, slots=True)
class Entries:
    """Successors of tokens and of pairs of tokens.

    Those of one context stand together, likeliest first, and frequent contexts before rare ones.
    Chances are 1 to `CERTAIN`; those of a context add up to `CERTAIN` or less.
    """

    first_E: Array  # the token before the last one, or ONE_TOKEN
    last_E: Array
    next_E: Array
    chance_E: Array

    def __len__(self) -> int:
        return len(self.next_E)

    @property
    def context_E(self) -> Array:
        return contexts_of(self.first_E, self.last_E)

    def files(self, prefix: str) -> dict[str, Array]:
        """Tensors to store."""
        columns = self.first_E, self.last_E, self.next_E
        names = [prefix + name for name in COLUMNS]
        stored = {name: c.astype(np.int32) for name, c in zip(names, columns, strict=False)}
        return stored | {names[-1]: self.chance_E.astype(np.uint8)}

    @staticmethod
    def of_files(
        stored: Mapping[str, Array], prefix: str, vocab_size: int, where: str
    ) -> Entries | None:
        """What `files` stored; None: nothing."""
        columns = [stored.get(f"{prefix}{name}") for name in COLUMNS]
        if all(column is None for column in columns):
            return None
        sizes = {None if column is None else column.shape for column in columns}
        if len(sizes) != 1 or any(column is None or column.ndim != 1 for column in columns):
            raise ConfigError(f"{where}: its successors have columns of several sizes")
        first_E, last_E, next_E, chance_E = (np.asarray(c).astype(np.int64) for c in columns)
        if len(next_E):
            least = min(first_E.min() - ONE_TOKEN, last_E.min(), next_E.min(), chance_E.min() - 1)
            most = max(first_E.max(), last_E.max(), next_E.max())
            if least < 0 or most >= vocab_size or chance_E.max() > CERTAIN:
                raise ConfigError(f"{where}: it has successors that the target does not have")
        return _small(first_E, last_E, next_E, chance_E)


def contexts_of(first: Array, last: Array) -> Array:
    """A number for each pair of tokens."""
    return first.astype(np.int64) << 32 | last.astype(np.int64)


def counted(first_N: Array, last_N: Array, next_N: Array, max_pairs: int) -> Entries:
    """Successors of every single token, and of the most frequent pairs that occur more than once.

    first_N: ONE_TOKEN where a text begins with the last token.
    """
    is_pair_N = first_N != ONE_TOKEN
    of_one_N = contexts_of(np.full_like(last_N, ONE_TOKEN), last_N)
    context_N = np.concatenate((of_one_N, contexts_of(first_N, last_N)[is_pair_N]))
    following_N = np.concatenate((next_N, next_N[is_pair_N]))
    order_N = np.lexsort((following_N, context_N))
    context_N, following_N = context_N[order_N], following_N[order_N]
    is_new_N = np.diff(context_N, prepend=context_N[:1] - 1) != 0
    is_other_N = is_new_N | (np.diff(following_N, prepend=-1) != 0)
    at_E = np.flatnonzero(is_other_N)
    count_E = np.diff(at_E, append=len(context_N))
    total_G = np.diff(np.flatnonzero(is_new_N), append=len(context_N))
    total_E = total_G[(np.cumsum(is_new_N) - 1)[at_E]]
    pair_G = context_N[is_new_N] >= 0
    totals = np.sort(total_G[pair_G])
    least = max(int(totals[-max_pairs]) if len(totals) >= max_pairs else 0, 2)
    is_kept_E = (total_E >= least) | (context_N[at_E] < 0)
    at_E, count_E, total_E = at_E[is_kept_E], count_E[is_kept_E], total_E[is_kept_E]
    return sorted_entries(context_N[at_E], following_N[at_E], count_E / (total_E + DOUBT), total_E)


def mixed(own: Entries, common: Entries) -> Entries:
    """Both, where what `own` leaves of a context's chance goes to `common`."""
    context_G, of_own_E = np.unique(own.context_E, return_inverse=True)
    used_G = np.bincount(of_own_E, own.chance_E / CERTAIN, len(context_G))
    place_E = np.minimum(np.searchsorted(context_G, common.context_E), max(len(context_G) - 1, 0))
    left_E = np.ones(len(common))
    if len(context_G):
        is_own_E = context_G[place_E] == common.context_E
        left_E = np.where(is_own_E, 1.0 - used_G[place_E], 1.0)
    context_E = np.concatenate((own.context_E, common.context_E))
    next_E = np.concatenate((own.next_E, common.next_E))
    share_E = np.concatenate((own.chance_E / CERTAIN, left_E * common.chance_E / CERTAIN))
    order_E = np.lexsort((next_E, context_E))
    context_E, next_E, share_E = context_E[order_E], next_E[order_E], share_E[order_E]
    is_new_E = np.diff(context_E, prepend=context_E[:1] - 1) != 0
    at = np.flatnonzero(is_new_E | (np.diff(next_E, prepend=-1) != 0))
    share_E = np.add.reduceat(share_E, at) if len(at) else share_E
    # Contexts come in the order that they had: first those of `own`.
    known, first_seen = np.unique(
        np.concatenate((own.context_E, common.context_E)), return_index=True
    )
    place_E = first_seen[np.searchsorted(known, context_E[at])]
    return sorted_entries(context_E[at], next_E[at], share_E, -place_E)


def sorted_entries(context_E: Array, next_E: Array, share_E: Array, weight_E: Array) -> Entries:
    """The likeliest successors of each context, contexts of much weight first."""
    chance_E = np.minimum(np.floor(share_E * CERTAIN + 0.001), CERTAIN).astype(np.int64)
    order_E = np.lexsort((next_E, -chance_E, context_E, -weight_E))
    order_E = order_E[chance_E[order_E] > 0]
    context_E, next_E, chance_E = context_E[order_E], next_E[order_E], chance_E[order_E]
    is_kept_E = ranks_of(context_E) < WIDTH
    context_E, next_E, chance_E = context_E[is_kept_E], next_E[is_kept_E], chance_E[is_kept_E]
    return _small(context_E >> 32, context_E & 0xFFFFFFFF, next_E, chance_E)


def _small(first_E: Array, last_E: Array, next_E: Array, chance_E: Array) -> Entries:
    columns = first_E, last_E, next_E
    return Entries(*(column.astype(np.int32) for column in columns), chance_E.astype(np.uint8))


def ranks_of(context_E: Array) -> Array:
    """The place of each successor among those of its context, which stand together."""
    place_E = np.arange(len(context_E))
    is_new_E = np.diff(context_E, prepend=context_E[:1] - 1) != 0
    return place_E - np.maximum.accumulate(np.where(is_new_E, place_E, 0))

"""Counting a phrase table: which short contexts an answer can be continued from, and how surely.

An entry is worth having if its guesses are better than those of the request's own text and of
shorter contexts. Its gain is in tokens, less the cost of checking each guess. A fifth of the texts
is kept out of a first table, to measure how far to trust guesses; the table that is written counts
all of them.

As a process of its own, it reads texts from stdin and writes their table to stdout. It takes one
thread, and whoever starts it gives it the lowest priority.

Shape letters: T tokens of all texts, A tokens of answers, F those of the texts kept out, E entries,
V vocabulary, O other tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from safetensors.numpy import save

from hunch.kernels.lookup import (
    MAX_MATCH,
    NUM_GUESS_TYPES,
    NUM_LENGTHS,
    PRIOR_ODDS,
    PRIORS,
    SECOND,
    SuffixText,
    guess_type_of,
)
from hunch.kernels.phrases import NOBODY, NUM_LEVELS, PhraseTable, context_hash, level_odds
from hunch.kernels.successor_entries import ONE_TOKEN, counted
from hunch.kernels.successor_entries import Entries as Successors
from hunch.train.texts import Texts

Array = np.ndarray
KEPT_OUT = 5  # every fifth text
MAX_PAIRS = 150_000  # of tokens whose successors are kept: the most frequent ones
SURE = 0.85  # above this chance of the own text's guess a token is not counted: loops would prevail
NUM_OTHERS = 4  # other guesses of the own text, where its places differ
SECOND_BEST = 0.15  # prior chance of a token that shorter contexts do not guess


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """How entries are chosen."""

    max_order: int = 5  # tokens of the longest context
    cost: float = 0.3  # of checking a guess, in tokens
    min_gain: float = 0.5  # tokens an entry must have brought
    smoothing: float = 3.0  # how many occurrences the shorter context's chance counts as
    doubt: float = 0.8  # taken from every gain, as it is measured on the texts it was counted on


@dataclass(slots=True)
class Answers:
    """Every token of the answers, what led to it, and what the own text would have guessed."""

    at_A: Array  # place among all tokens
    text_A: Array
    next_A: Array
    before_A: list[Array]  # the last token, the one before it, ...; -1 before a text's beginning
    type_A: Array  # of the own text's guess; NOBODY: none
    guess_A: Array
    others_AO: Array  # other tokens that the own text guesses, or -1

    def take(self, index_A: Array) -> Answers:
        before_A = [token_A[index_A] for token_A in self.before_A]
        rest = (self.at_A, self.text_A, self.next_A)
        at_A, text_A, next_A = (column_A[index_A] for column_A in rest)
        own = (self.type_A, self.guess_A, self.others_AO)
        return Answers(at_A, text_A, next_A, before_A, *(column_A[index_A] for column_A in own))


def replay(texts: Texts, max_order: int) -> Answers:
    """Go through the answers as a request with suffix lookup would, token by token."""
    num_tokens = len(texts.tokens)
    text_T = np.repeat(np.arange(len(texts)), texts.lengths)
    pos_T = np.arange(num_tokens) - texts.offset[:-1][text_T]
    at_A = np.flatnonzero((pos_T >= texts.prompt_len[text_T]) & (pos_T > 0))
    type_T, guess_T = np.full(num_tokens, NOBODY, np.int16), np.full(num_tokens, -1, np.int64)
    others_TO = np.full((num_tokens, NUM_OTHERS), -1, np.int32)
    for index, first in enumerate(texts.offset[:-1].tolist()):
        tokens, index_of = texts.text(index).tolist(), SuffixText()
        known, num_prompt = index_of.tokens, max(1, int(texts.prompt_len[index]))
        index_of.extend(tokens[:num_prompt])
        for place in range(num_prompt, len(tokens)):
            length, places = index_of.find(known[-MAX_MATCH:])
            if length:
                after = [known[p] for p in places]
                type_T[first + place] = guess_type_of(after, length)
                guess_T[first + place] = after[0]
                others = list(dict.fromkeys(after))[1 : NUM_OTHERS + 1]
                if others:
                    others_TO[first + place, : len(others)] = others
            index_of.extend(tokens[place : place + 1])
    before_A = [
        np.where(pos_T[at_A] >= back, texts.tokens[np.maximum(at_A - back, 0)], -1)
        for back in range(1, max_order + 1)
    ]
    return Answers(
        at_A, text_T[at_A], texts.tokens[at_A], before_A,
        type_T[at_A].astype(int), guess_T[at_A], others_TO[at_A],
    )  # fmt: skip


@dataclass(slots=True)
class Entries:
    """Contexts by hash, with what follows them and how often, as a share."""

    hash_E: Array
    token_E: Array
    chance_E: Array

    @property
    def level_E(self) -> Array:
        return np.clip((self.chance_E * NUM_LEVELS).astype(np.uint8), 0, NUM_LEVELS - 1)

    def find(self, before_A: Sequence[Array]) -> tuple[Array, Array]:
        """What follows the longest known context, or -1, and its level."""
        token_A, level_A = np.full(len(before_A[0]), -1), np.zeros(len(before_A[0]), int)
        if not len(self.hash_E):
            return token_A, level_A
        for order in range(1, len(before_A) + 1):
            hash_A = context_hash(before_A[:order])
            index_A = np.minimum(np.searchsorted(self.hash_E, hash_A), len(self.hash_E) - 1)
            is_known_A = (self.hash_E[index_A] == hash_A) & (before_A[order - 1] >= 0)
            token_A = np.where(is_known_A, self.token_E[index_A], token_A)
            level_A = np.where(is_known_A, self.level_E[index_A], level_A)
        return token_A, level_A


def count(answers: Answers, options: Counting) -> Entries:
    """The entries worth having, shorter contexts first."""
    own_A = np.array([*(c for chances in PRIORS for c in chances), 0.0])[answers.type_A]
    index_A = np.flatnonzero(own_A < SURE)
    answers, own_A = answers.take(index_A), own_A[index_A]
    is_own_right_A = answers.guess_A == answers.next_A
    size = len(index_A)
    chance_A, token_A = np.zeros(size), np.full(size, -1)  # by the contexts chosen so far
    value_A = np.where(own_A > options.cost, is_own_right_A - options.cost, 0.0)
    chosen: list[tuple[Array, Array, Array]] = []
    for order in range(1, options.max_order + 1):
        here_A = np.flatnonzero(answers.before_A[order - 1] >= 0)
        hash_A = context_hash([column_A[here_A] for column_A in answers.before_A[:order]])
        sort_A = np.lexsort((answers.next_A[here_A], hash_A))
        here_A, hash_A = here_A[sort_A], hash_A[sort_A]
        group_A, first_E, best_E, share_E = _groups(
            hash_A, answers.next_A[here_A], chance_A[here_A], token_A[here_A], options.smoothing
        )
        offer_A, best_A = share_E[group_A], best_E[group_A]
        is_right_A = np.where(
            offer_A > own_A[here_A], best_A == answers.next_A[here_A], is_own_right_A[here_A]
        )
        is_sent_A = np.maximum(offer_A, own_A[here_A]) > options.cost
        new_A = np.where(is_sent_A, is_right_A - options.cost, 0.0)
        gain_E = np.add.reduceat(new_A - value_A[here_A], first_E) if len(first_E) else share_E
        is_kept_E = gain_E - options.doubt * (share_E > options.cost) > options.min_gain
        chosen.append((hash_A[first_E][is_kept_E], best_E[is_kept_E], share_E[is_kept_E]))
        kept_A = is_kept_E[group_A]
        to_A = here_A[kept_A]
        chance_A[to_A], token_A[to_A], value_A[to_A] = (
            offer_A[kept_A], best_A[kept_A], new_A[kept_A],
        )  # fmt: skip
    hash_E, token_E, share_E = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    # Where two contexts have one hash, which is rare, the first found stays.
    hash_E, index_E = np.unique(hash_E, return_index=True)
    return Entries(hash_E, token_E[index_E], share_E[index_E])


def _groups(
    hash_A: Array, next_A: Array, chance_A: Array, token_A: Array, smoothing: float
) -> tuple[Array, Array, Array, Array]:
    """Tokens sorted by context and next token: the context of each; per context its first token,
    what follows it most often, and how often, drawn towards what shorter contexts say."""
    if not len(hash_A):
        nothing = np.zeros(0, int)
        return nothing, nothing, nothing, np.zeros(0)
    is_first_A = np.diff(hash_A.astype(np.int64), prepend=-1) != 0
    first_E, group_A = np.flatnonzero(is_first_A), np.cumsum(is_first_A) - 1
    size_E = np.diff(first_E, append=len(hash_A))
    first_P = np.flatnonzero(is_first_A | (np.diff(next_A, prepend=-1) != 0))  # context and next
    size_P, group_P = np.diff(first_P, append=len(hash_A)), group_A[first_P]
    order_P = np.lexsort((-size_P, group_P))
    pair_E = order_P[np.flatnonzero(np.diff(group_P[order_P], prepend=-1))]
    best_E, most_E = next_A[first_P[pair_E]], size_P[pair_E]
    low_E = chance_A[first_E]
    other_E = np.minimum(SECOND_BEST, 2 * SECOND_BEST * (1 - low_E))
    prior_E = np.where(token_A[first_E] == best_E, low_E, other_E)
    return group_A, first_E, best_E, (most_E + smoothing * prior_E) / (size_E + smoothing)


def make_table(texts: Texts, vocab_size: int, options: Counting) -> PhraseTable:
    """A table that counts all texts, with odds measured on those a first one did not see."""
    answers = replay(texts, options.max_order)
    is_out_A = answers.text_A % KEPT_OUT == min(2, len(texts) - 1)
    seen, unseen = (answers.take(np.flatnonzero(m_A)) for m_A in (~is_out_A, is_out_A))
    odds = _measure(unseen, count(seen, options), vocab_size)
    entries = count(answers, options)
    return PhraseTable(
        successors=count_successors(texts),
        max_order=options.max_order,
        hash_E=entries.hash_E,
        token_E=entries.token_E.astype(np.int32),
        level_E=entries.level_E,
        **odds,
    )


def _measure(unseen: Answers, entries: Entries, vocab_size: int) -> dict[str, Array]:
    """Log-odds of guesses on answers the entries were not counted on."""
    token_F, level_F = entries.find(unseen.before_A)
    is_same_F = token_F == unseen.guess_A
    seen_F = np.where(token_F < 0, 0, 1 + level_F + np.where(is_same_F, 0, NUM_LEVELS))
    own_F = np.flatnonzero(unseen.type_A != NOBODY)
    start = np.array(PRIOR_ODDS)
    own, seen, guess, last = fit(
        [unseen.type_A[own_F], seen_F[own_F], unseen.guess_A[own_F], unseen.before_A[0][own_F]],
        [start, np.zeros(1 + 2 * NUM_LEVELS), np.zeros(vocab_size), np.zeros(vocab_size)],
        [0.5, 0.5, 4.0, 4.0],
        (unseen.guess_A == unseen.next_A)[own_F],
    )
    other_F = np.flatnonzero((token_F >= 0) & ~is_same_F)
    is_second_F = (unseen.others_AO == token_F[:, None]).any(1) & (token_F >= 0)
    versus_F = np.where(
        is_second_F, SECOND * NUM_LENGTHS + unseen.type_A % NUM_LENGTHS, unseen.type_A
    )
    level, versus = fit(
        [level_F[other_F], versus_F[other_F]],
        [level_odds(), np.zeros(NUM_GUESS_TYPES + 1)],
        [0.5, 0.5],
        (token_F == unseen.next_A)[other_F],
    )
    return {
        "own_odds": own,
        "seen_odds": seen,
        "level_odds": level,
        "versus_odds": versus,
        "guess_trust_V": guess,
        "last_trust_V": last,
    }


def fit(
    columns: list[Array], starts: list[Array], doubts: list[float], is_right_F: Array
) -> list[Array]:
    """Logistic regression: a term per value of every column, drawn to where it starts."""
    offsets = np.cumsum([0, *map(len, starts)])
    start = torch.from_numpy(np.concatenate(starts))
    pull = torch.from_numpy(np.repeat(doubts, [len(one) for one in starts]))
    if not len(is_right_F):
        return starts
    index = torch.from_numpy(np.stack([c + o for c, o in zip(columns, offsets, strict=False)], 1))
    right = torch.from_numpy(is_right_F.astype(np.float64))
    terms = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([terms], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        odds = terms[index].sum(1)
        miss = torch.nn.functional.binary_cross_entropy_with_logits(odds, right, reduction="sum")
        total = miss + (pull * (terms - start) ** 2).sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    found = terms.detach().numpy()
    return [found[first:last] for first, last in pairwise(offsets)]


def count_successors(texts: Texts) -> Successors:
    """What follows single tokens and pairs of them in the answers."""
    text_T = np.repeat(np.arange(len(texts)), texts.lengths)
    pos_T = np.arange(len(texts.tokens)) - texts.offset[:-1][text_T]
    at_N = np.flatnonzero((pos_T >= texts.prompt_len[text_T]) & (pos_T > 0))
    first_N = np.where(pos_T[at_N] > 1, texts.tokens[np.maximum(at_N - 2, 0)], ONE_TOKEN)
    return counted(first_N, texts.tokens[at_N - 1], texts.tokens[at_N], MAX_PAIRS)


def count_bytes(data: bytes) -> bytes:
    """The table of texts, both as the files they could be."""
    texts, more = Texts.from_bytes(data)
    return bytes(save(make_table(texts, int(more["vocab_size"]), Counting()).files()))


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.buffer.write(count_bytes(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()

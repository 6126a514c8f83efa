"""Counts which words follow each other in texts, for the table of common words.

    python tools/count_words.py answers.jsonl [more.txt] --out words.safetensors.xz

A text is a line of JSON with `text`, or a whole .txt file.

Shape letters: T words of all texts; W different words; N contexts, each with one of its successors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex

from hunch.drafting.word_table import MAX_WORDS, NO_WORD, WordTable, write_words
from hunch.kernels.successor_entries import CERTAIN, DOUBT, WIDTH

Array = np.ndarray

# As GPT-4's tokenizer cuts text, and what Llama 3, Qwen and others took over, but for line ends:
# the space that the next line begins with belongs to them, as in GPT-2. A tokenizer that cuts finer
# spells a word in several tokens; one that cuts coarser could not be told of words that are parts.
LINE_END = r"[\r\n]+(?:\s+(?!\S))?"
WORD = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+(?:{LINE_END})?|\s*{LINE_END}|\s+(?!\S)|\s+"
)
GAP = -1  # between texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What is too rare to be kept."""

    min_count: int = 3  # of a word
    max_pairs: int = 50_000  # contexts of two words
    min_next: int = 2  # times that a word follows two
    min_chance: int = 5  # of what follows two words, in 255ths


@dataclass(frozen=True, slots=True)
class Follows:
    """Contexts and what follows them: successors of one stand together, frequent ones first."""

    first_N: Array  # NO_WORD in contexts of one word
    last_N: Array
    next_N: Array
    count_N: Array
    total_N: Array  # of the context

    def __getitem__(self, chosen: Array) -> Follows:
        columns = (self.first_N, self.last_N, self.next_N, self.count_N, self.total_N)
        return Follows(*(column[chosen] for column in columns))

    @property
    def is_start_N(self) -> Array:
        """Whether another context begins."""
        steps = (np.diff(column, prepend=column[:1] - 1) for column in (self.first_N, self.last_N))
        return np.logical_or(*(step != 0 for step in steps))

    @property
    def rank_N(self) -> Array:
        place_N = np.arange(len(self.next_N))
        return place_N - np.maximum.accumulate(np.where(self.is_start_N, place_N, 0))

    @property
    def chance_N(self) -> Array:
        return (CERTAIN * self.count_N / (self.total_N + DOUBT)).astype(np.int64)


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as file:
            if path.suffix == ".txt":
                yield file.read()
            else:
                yield from (json.loads(line)["text"] for line in file if line.strip())


def cut(texts: Iterable[str]) -> tuple[list[str], Array, Array]:
    """Words, frequent ones first; how often each was seen; and all texts as numbers of words."""
    number: dict[str, int] = {}
    found: list[int] = []
    for text in texts:
        words = WORD.findall(text.replace("\0", "\ufffd"))
        found += [number.setdefault(word, len(number)) for word in words]
        found.append(GAP)
    found_T = np.array(found, np.int64)
    count_W = np.bincount(found_T[found_T != GAP], minlength=len(number))
    order_W = np.argsort(-count_W, kind="stable")
    new_W = np.empty_like(order_W)
    new_W[order_W] = np.arange(len(order_W))
    spelled = list(number)
    words_T = np.where(found_T == GAP, GAP, new_W[found_T] if len(new_W) else GAP)
    return [spelled[word] for word in order_W], count_W[order_W], words_T


def count_follows(words_T: Array, num_before: int) -> Follows:
    """All that follows one word, or two."""
    last_T, next_T = words_T[num_before - 1 : -1], words_T[num_before:]
    first_T = words_T[:-num_before] if num_before > 1 else np.full_like(last_T, NO_WORD)
    is_real_T = (last_T != GAP) & (next_T != GAP) & ((first_T != GAP) | (num_before == 1))
    columns = np.stack([first_T, last_T, next_T])[:, is_real_T]
    columns = columns[:, np.lexsort(columns[::-1])]
    steps = np.diff(columns, axis=1, prepend=columns[:, :1] - 1)
    starts = np.nonzero(steps.any(axis=0))[0]
    count_N = np.diff(starts, append=columns.shape[1])
    first_N, last_N, next_N = columns[:, starts]
    starts = np.nonzero(np.diff(first_N, prepend=-2) | np.diff(last_N, prepend=-2))[0]
    context_N = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(first_N)))
    total_N = np.bincount(context_N, count_N)[context_N]
    return Follows(first_N, last_N, next_N, count_N, total_N)[np.lexsort((-count_N, context_N))]


def gains(pairs: Follows, ones: Follows, num_words: int) -> Array:
    """How many more successors the best 1 to WIDTH of two words hold than those of the last word
    alone, for the context of each; what was seen once does not count."""
    key_N = ones.last_N * num_words + ones.next_N
    order_N = np.argsort(key_N)
    asked_N = pairs.last_N * num_words + pairs.next_N
    place_N = order_N[np.searchsorted(key_N, asked_N, sorter=order_N)]
    more_N = np.clip(ones.rank_N[place_N], 0, WIDTH) - np.clip(pairs.rank_N, 0, WIDTH)
    context_N = np.cumsum(pairs.is_start_N) - 1
    return np.bincount(context_N, (pairs.count_N - 1) * more_N)[context_N] / WIDTH


def make_table(texts: Iterable[str], limits: Limits) -> WordTable:
    words, count_W, words_T = cut(texts)
    num_words = min(int((count_W >= limits.min_count).sum()), MAX_WORDS)
    ones, pairs = (count_follows(words_T, num_before) for num_before in (1, 2))
    gain_N = gains(pairs, ones, len(words))
    starts = np.nonzero(pairs.is_start_N)[0]
    least = np.sort(gain_N[starts])[-limits.max_pairs :][:1]
    pairs = pairs[(gain_N >= least) & (gain_N > 0) & (pairs.count_N >= limits.min_next)]
    kept = []
    for follows, min_chance in ((ones, 1), (pairs, limits.min_chance)):
        is_kept_N = (follows.rank_N < WIDTH) & (follows.chance_N >= min_chance)
        for word_N in (follows.first_N, follows.last_N, follows.next_N):
            is_kept_N &= word_N < num_words
        kept.append(follows[is_kept_N])
    return as_table(words[:num_words], count_W[:num_words], kept)


def as_table(words: Sequence[str], count_W: Array, kept: Sequence[Follows]) -> WordTable:
    names = ("first_N", "last_N", "next_N", "count_N", "total_N")
    together = Follows(*(np.concatenate([getattr(one, name) for one in kept]) for name in names))
    together = together[np.lexsort((-together.count_N, together.first_N, together.last_N))]
    starts = np.nonzero(together.is_start_N)[0]
    return WordTable(
        words=list(words),
        total_W=count_W.astype(np.float64),
        first_C=together.first_N[starts].astype(np.int32),
        last_C=together.last_N[starts].astype(np.int32),
        total_C=together.total_N[starts].astype(np.float64),
        size_C=np.diff(starts, append=len(together.next_N)),
        next_E=together.next_N.astype(np.int32),
        chance_E=together.chance_N,
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("texts", nargs="+", type=Path)
    asked.add_argument("--out", required=True, type=Path)
    for name, value in Limits.__dataclass_fields__.items():
        asked.add_argument(f"--{name.replace('_', '-')}", type=int, default=value.default)
    given = vars(asked.parse_args())
    paths, out = given.pop("texts"), given.pop("out")
    table = make_table(read_texts(paths), Limits(**given))
    write_words(table, out)
    print(
        f"{out}: {len(table.words)} words, {len(table.size_C)} contexts, "
        f"{len(table.next_E)} successors, {out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()

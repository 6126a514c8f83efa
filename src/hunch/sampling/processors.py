"""Logits processors that look at history, row by row on the host; only some tokens change.

The order is vLLM's: allowed ids, bad words, min_tokens, logit bias, penalties. A drafted node's
history is the prompt, the output and the drafted tokens on the path to it, so that every rule holds
there as in plain decoding.

Shape letters: M rows of logits, V vocabulary, P longest path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hunch.kernels.process import penalise
from hunch.types import Request

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def needs_history(request: Request) -> bool:
    """Whether any processor of this module has work to do for the request."""
    params = request.params
    return bool(
        has_penalties(request)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or request.bad_word_ids
        or (params.min_tokens and request.stop_ids)
    )


def has_penalties(request: Request) -> bool:
    params = request.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def ids_of(ids: object, vocab_size: int) -> Ids:
    """Token ids as an array; an id outside the vocabulary is never produced, so it is dropped."""
    array = np.asarray(list(ids), dtype=np.int64)  # type: ignore[call-overload]
    return array[(array >= 0) & (array < vocab_size)]


@dataclass(slots=True)
class Seen:
    """Distinct tokens of prompt and output, and how often each occurs in the output."""

    index: dict[int, int] = field(default_factory=dict)
    ids: Ids = field(default_factory=lambda: np.zeros(64, np.int64))
    counts: Floats = field(default_factory=lambda: np.zeros(64, np.float32))

    def add(self, token: int, count: int) -> None:
        at = self.index.get(token)
        if at is None:
            at = self.index[token] = len(self.index)
            if at == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.ids[at] = token
        self.counts[at] += count

    def after(self, path: list[int]) -> tuple[Ids, Floats]:
        """Ids and output counts once the tokens of `path` are output too."""
        num = len(self.index)
        ids, counts = self.ids[:num], self.counts[:num]
        if not path:
            return ids, counts
        counts = counts.copy()
        added: dict[int, int] = {}
        for token in path:
            at = self.index.get(token)
            if at is None:
                added[token] = added.get(token, 0) + 1
            else:
                counts[at] += 1
        if added:
            ids = np.concatenate([ids, np.array(list(added))])
            counts = np.concatenate([counts, np.array(list(added.values()), np.float32)])
        return ids, counts


class RowRules:
    """Everything one request asks of its logits beyond temperature and filters."""

    def __init__(self, request: Request, output: list[int], vocab_size: int) -> None:
        params = request.params
        self.num_prompt = len(request.prompt_ids)
        self.min_tokens = params.min_tokens
        self.stop_ids = ids_of(request.stop_ids, vocab_size)
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(ids_of(allowed, vocab_size))
        words = request.bad_word_ids
        self.banned = ids_of((w[0] for w in words if len(w) == 1), vocab_size)
        self.phrases = [(tuple(w[:-1]), w[-1]) for w in words if len(w) > 1 and w[-1] < vocab_size]
        self.num_tail = max((len(prefix) for prefix, _ in self.phrases), default=0)
        bias = {t: b for t, b in (params.logit_bias or {}).items() if b and t < vocab_size}
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        self.penalties = (
            float(params.repetition_penalty),
            float(params.frequency_penalty),
            float(params.presence_penalty),
        )
        self.seen = Seen() if has_penalties(request) else None
        self.tail: list[int] = []
        if self.seen is not None:
            for token in request.prompt_ids:
                self.seen.add(token, 0)
        self.commit(output)

    def commit(self, tokens: list[int]) -> None:
        if self.seen is not None:
            for token in tokens:
                self.seen.add(token, 1)
        if self.num_tail:
            self.tail = (self.tail + tokens)[-self.num_tail :]

    def apply(self, x_V: Floats, pos: int, path: list[int]) -> None:
        """Apply in place, for the token at position `pos` after the drafted tokens `path`."""
        if self.allowed is not None:
            allowed = x_V[self.allowed]
            x_V.fill(-np.inf)
            x_V[self.allowed] = allowed
        if len(self.banned):
            x_V[self.banned] = -np.inf
        if self.phrases:
            history = self.tail + path
            for prefix, last in self.phrases:
                if tuple(history[-len(prefix) :]) == prefix:
                    x_V[last] = -np.inf
        if pos - self.num_prompt < self.min_tokens:
            x_V[self.stop_ids] = -np.inf
        if len(self.bias_ids):
            x_V[self.bias_ids] += self.bias
        if self.seen is not None:
            ids, counts = self.seen.after(path)
            repetition, frequency, presence = self.penalties
            x_V[ids] = penalise(x_V[ids], counts, True, repetition, frequency, presence, np.where)


class HostProcessors:
    """The rules of all rows, on a CPU."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rules: dict[int, RowRules] = {}

    def start(self, row: int, request: Request, output: list[int]) -> None:
        self.rules[row] = RowRules(request, output, self.vocab_size)

    def leave(self, row: int) -> None:
        self.rules.pop(row, None)

    def commit(self, rows: list[int], tokens: list[list[int]]) -> None:
        for row, new in zip(rows, tokens, strict=True):
            if row in self.rules:
                self.rules[row].commit(new)

    def apply(
        self,
        x_MC: Tensor,
        row_M: Tensor,
        pos_M: Tensor,
        path_MP: Tensor,
        ids_C: Tensor | None = None,  # the token of each column, if these are not all tokens
    ) -> None:
        """Apply the rules to float32 logits, in place."""
        x, ids = x_MC.numpy(), None if ids_C is None else ids_C.numpy()
        columns = zip(row_M.tolist(), pos_M.tolist(), path_MP.tolist(), strict=True)
        for m, (row, pos, path) in enumerate(columns):
            rules, path = self.rules.get(row), [token for token in path if token >= 0]
            if rules is None:
                continue
            if ids is None:
                rules.apply(x[m], pos, path)
            else:
                whole_V = np.zeros(self.vocab_size, np.float32)
                whole_V[ids] = x[m]
                rules.apply(whole_V, pos, path)
                x[m] = whole_V[ids]

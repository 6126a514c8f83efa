"""Where a sequence stands in its grammar: what may follow it and every node of its draft.

A matcher is rolled forward along a draft's branches and back again, so between steps it stands
after the committed tokens. llguidance's matchers never leave an error state: one that met its
limits on a drafted branch is made anew from the committed tokens.

Shape letters: M the root and the nodes of a draft, V vocabulary of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.bool_]


class Grammar:
    """A compiled grammar; requests share it."""

    def __init__(
        self, start: LLMatcher, tokenizer: LLTokenizer, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.tokenizer, self.eos_ids, self.vocab_size = tokenizer, frozenset(eos_ids), vocab_size
        self.end = eos_ids[0]
        self._start = start

    def matcher(self) -> Matcher:
        """A new reader at the grammar's beginning."""
        return Matcher(self)

    def fresh(self) -> LLMatcher:
        return self._start.deep_copy()


class Matcher:
    """One sequence's place."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._at = grammar.fresh()
        self._tokens: list[int] = []  # consumed for good
        self._is_over = False  # end-of-text was consumed
        self._error = ""  # the last limit it met

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on by the tokens for good; how many the grammar takes."""
        for count, token in enumerate(tokens):
            if self._is_over or not self._step(token):
                return count
            self._tokens.append(token)
            self._is_over = token in self.grammar.eos_ids
        return len(tokens)

    def _step(self, token: int) -> bool:
        if token in self.grammar.eos_ids:
            return bool(self._at.is_accepting())
        return bool(self._at.try_consume_tokens([token]) == 1)

    def fill(self, tokens: Sequence[int], parents: Sequence[int], mask_MV: Mask) -> None:
        """What may follow the committed tokens (row 0) and each node (the rows after it).

        The mask comes all False. Rows of nodes the grammar forbids stay so, as does a row whose
        mask cannot be told: it fails closed.
        """
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        if not self._is_over:
            self._fill(0, tokens, children, mask_MV)
        if self._at.is_error():
            self._restore()

    def _fill(
        self, place: int, tokens: Sequence[int], children: list[list[int]], mask_MV: Mask
    ) -> None:
        self._mask(mask_MV[place])
        for node in children[place]:
            token = tokens[node]
            if token in self.grammar.eos_ids or not mask_MV[place, token]:
                continue  # nothing follows an end, or what may not stand
            if self._at.try_consume_tokens([token]) == 1:
                self._fill(node + 1, tokens, children, mask_MV)
                self._at.rollback(1)
            if self._at.is_error():
                self._restore(self._path_to(place, children, tokens))

    def _path_to(self, place: int, children: list[list[int]], tokens: Sequence[int]) -> list[int]:
        """Drafted tokens from the root to a node."""
        path: list[int] = []
        while place:
            path.append(tokens[place - 1])
            place = next(p for p, below in enumerate(children) if place - 1 in below)
        return path[::-1]

    def _mask(self, mask_V: Mask) -> None:
        bits = self._at.compute_bitmask()
        if self._at.is_error():
            return
        size = min(self.grammar.vocab_size, len(mask_V))
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little")
        mask_V[:size] = allowed.view(np.bool_)

    def _restore(self, path: Sequence[int] = ()) -> None:
        """The same place again, without the error."""
        self._error = self._at.get_error()
        self._at = self.grammar.fresh()
        ends = self.grammar.eos_ids
        self._at.consume_tokens([t for t in (*self._tokens, *path) if t not in ends])

    # --- looking ahead, for drafts --------------------------------------------------------------

    def branch(self, token: int) -> bool:
        """Go on by a token for a look; False, and nothing happens, if it is forbidden."""
        if self._is_over or token in self.grammar.eos_ids:
            return False
        return bool(self._at.try_consume_tokens([token]) == 1)

    def back(self, count: int) -> None:
        """Take back so many branch steps."""
        if count:
            self._at.rollback(count)
        if self._at.is_error():
            self._restore()

    def may_end(self) -> bool:
        return not self._is_over and bool(self._at.is_accepting())

    def forced(self, max_tokens: int) -> list[int]:
        """A likely spelling of what the grammar leaves no choice about."""
        if self._is_over or max_tokens <= 0 or self._at.is_error():
            return []
        text = self._at.compute_ff_bytes()
        # A token has a byte at least, so this many bytes are enough.
        tokens = self.grammar.tokenizer.tokenize_bytes(text[: 16 * max_tokens]) if text else []
        tokens = tokens[:max_tokens]
        taken = self._at.try_consume_tokens(tokens) if tokens else 0
        tokens = tokens[:taken]
        if len(tokens) < max_tokens and self._at.is_stopped() and not self._at.is_error():
            tokens.append(self.grammar.end)
        self.back(taken)
        return tokens

    def problem(self) -> str:
        """Why nothing can follow."""
        if self._error:
            return f"the grammar became too complex: {self._error.splitlines()[0][:200]}"
        return "no token is allowed both by the grammar and by the request's other rules"

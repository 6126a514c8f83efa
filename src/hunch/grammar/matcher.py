"""A sequence's state in its grammar: what may follow it and every node of its draft.

A matcher is rolled forward along a draft's branches and back again, so that between steps it has
consumed the committed tokens. llguidance's matchers never leave an error state: one that reached
its limits on a drafted branch is replaced by a new one, which consumes the committed tokens.

Shape letters: M the root and the nodes of a draft, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from hunch.grammar.spellings import ForcedText, Spellings

Words = npt.NDArray[np.int32]  # bit v % 32 of word v // 32: token v is allowed

MARK = b"\xff"  # the grammar engine writes it before special tokens
BITS = [*(1 << bit for bit in range(31)), -(1 << 31)]  # of a word


class Codec(Protocol):
    """What a matcher needs of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def token_bytes(self, token: int) -> bytes: ...


def ends_of(codec: Codec) -> list[int]:
    """End-of-text tokens that the vocabulary has: files may name others."""
    return [token for token in codec.eos_ids if token < codec.vocab_size]


@dataclass(frozen=True, slots=True)
class Budget:
    """Reasoning has a limit: after `max_tokens` of it, `end_ids` must follow."""

    max_tokens: int
    begin: bytes  # what an answer with reasoning begins with; empty: it is in it from the start
    end: bytes
    end_ids: tuple[int, ...]


class Reasoning(NamedTuple):
    """A sequence's state in its reasoning; None in its place: it is over, or there is none."""

    is_open: bool
    num_tokens: int = 0
    text: bytes = b""  # what may be part of the next mark
    num_due: int = 0  # of `end_ids`, written because the budget was spent


class Grammar:
    """A compiled grammar; requests share it."""

    def __init__(
        self,
        start: LLMatcher,
        tokenizer: LLTokenizer,
        codec: Codec,
        spellings: Spellings,
        budget: Budget | None = None,
    ) -> None:
        self.tokenizer, self.codec, self.budget = tokenizer, codec, budget
        self.spellings = spellings
        ends = ends_of(codec)
        self.eos_ids, self.vocab_size, self.end = frozenset(ends), codec.vocab_size, ends[0]
        self.num_words = -(-tokenizer.vocab_size // 32)  # of the grammar engine's masks
        # A letter, a digit and a space: if they may follow, most tokens may.
        self.probe = [token for text in "e7 " for token in tokenizer.tokenize_str(text)]
        self._start = start

    def matcher(self) -> Matcher:
        """A new matcher at the grammar's start."""
        return Matcher(self)

    def new_parser(self) -> LLMatcher:
        return self._start.deep_copy()

    def keep_spelling(self, forced: ForcedText, first: int | None) -> None:
        """Remember the token that a forced text's usual spelling begins with.

        None: it is not known, as the whole text may be part of a longer token.
        """
        if first is None:
            first = self._first_token(*forced)
        if first is not None:
            self.spellings.keep(forced, first, self.codec.token_bytes(first))

    def _first_token(self, last: int, text: bytes) -> int | None:
        """That token, found as the grammar engine does; None: a special token is part of it."""
        before = b"" if last < 0 else self.codec.token_bytes(last)
        if MARK in before + text or (last >= 0 and self.tokenizer.is_special_token(last)):
            return None
        tokens: list[int] = self.tokenizer.tokenize_bytes(before + text)
        if last >= 0 and tokens[0] == last:
            return tokens[1]
        if last >= 0:
            tokens = self.tokenizer.tokenize_bytes(text)
        return tokens[0]

    def start_reasoning(self) -> Reasoning | None:
        return None if self.budget is None else Reasoning(is_open=not self.budget.begin)

    def due(self, at: Reasoning | None) -> int | None:
        """The token that must follow once the budget is spent; None: there is none."""
        if at is None or self.budget is None or not at.is_open:
            return None
        return self.budget.end_ids[at.num_due] if at.num_tokens >= self.budget.max_tokens else None

    def reason(self, at: Reasoning | None, token: int) -> Reasoning | None:
        """The state after one more token."""
        if at is None or self.budget is None:
            return None
        num_due = at.num_due + (self.due(at) == token)
        num_tokens, text = at.num_tokens + 1, at.text + self.codec.token_bytes(token)
        if not at.is_open:
            text = text.lstrip()
            if not text.startswith(self.budget.begin):
                is_possible = self.budget.begin.startswith(text)
                return Reasoning(False, num_tokens, text) if is_possible else None
            text = text[len(self.budget.begin) :]
        if self.budget.end in text or num_due == len(self.budget.end_ids):
            return None
        return Reasoning(True, num_tokens, text[1 - len(self.budget.end) :], num_due)


def _is_allowed(mask_W: Words, token: int) -> bool:
    return token >> 5 < len(mask_W) and bool(mask_W[token >> 5] >> (token & 31) & 1)


class Matcher:
    """One sequence's state in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._parser = grammar.new_parser()  # the grammar engine's
        self._tokens: list[int] = []  # consumed for good
        self._num_behind = 0  # last tokens that the parser has not consumed
        self._is_over = False  # end-of-text was consumed
        self._error = ""  # the last limit that was reached
        self._needs_mask = False  # a choice without one was refused
        self._forced: ForcedText | None = None  # after the tokens; None: not asked yet
        # Forced texts that this sequence has written; False: another choice was refused there.
        self._wrote: dict[ForcedText, bool] = {}
        self._branch: list[int] = []  # consumed after them for a while
        self._reasoning = [grammar.start_reasoning()]  # after the tokens, then after each of those

    @property
    def parser(self) -> LLMatcher:
        """The grammar engine's parser, after the committed tokens.

        It consumes the tokens of a forced text together, when it is asked what comes after them.
        """
        if self._num_behind:
            behind, self._num_behind = self._tokens[-self._num_behind :], 0
            taken = self._parser.try_consume_tokens(behind)
            assert taken == len(behind), "a text that was forced"
        return self._parser

    def consume(self, tokens: Sequence[int]) -> int:
        """Consume tokens; returns how many the grammar takes."""
        self._forced = None
        is_simple = self._reasoning[0] is None and not self._is_over
        if is_simple and self.grammar.eos_ids.isdisjoint(tokens):  # the grammar alone decides
            taken: int = self.parser.try_consume_tokens(tokens)
            self._tokens += tokens if taken == len(tokens) else tokens[:taken]
            return taken
        for count, token in enumerate(tokens):
            if self._is_over or not self._step(token):
                return count
            self._tokens.append(token)
            self._is_over = token in self.grammar.eos_ids
            self._reasoning[0] = self.grammar.reason(self._reasoning[0], token)
        return len(tokens)

    def consume_chosen(self, tokens: Sequence[int], num_masked: int) -> int:
        """Consume tokens of which the first `num_masked` had masks; returns how many masks allow.

        If the grammar forces a text, a mask allows its usual spelling alone.
        """
        if num_masked == len(tokens):
            return self.consume(tokens)
        taken = self.consume(tokens[:num_masked]) if num_masked else 0
        if taken < num_masked:
            return taken
        for token in tokens[num_masked:]:
            if not self._consume_unmasked(token):
                self._needs_mask = True
                self.recover()
                break
            taken += 1
        return taken

    def _consume_unmasked(self, token: int) -> bool:
        """Consume a token that was chosen without a mask, if a mask would have allowed it."""
        forced = self._forced or self._forced_text()
        if not forced[1]:
            return self.consume([token]) == 1
        after = self.grammar.spellings.after(forced)
        if after is not None and after[0] == token:
            if after[1]:  # the forced text continues: the parser is not needed
                self._tokens.append(token)
                self._num_behind += 1
                self._forced = after
                self._wrote.setdefault(forced, True)
                return True
            is_usual = True
        else:
            is_usual = self.only_token() in (None, token)
        is_right = is_usual and self.consume([token]) == 1
        self._wrote[forced] = is_right and self._wrote.get(forced, True)
        return is_right

    def _forced_text(self) -> ForcedText:
        if self._forced is None:
            self._forced = self._last, self.parser.compute_ff_bytes()
        return self._forced

    def only_token(self) -> int | None:
        """The only token that a mask would allow, if the grammar forces a text and its spelling.

        It is the first token of the text's usual spelling, which depends on the token before. None:
        a mask may allow others, as the text may be the beginning of a longer token.
        """
        forced = self._forced_text()
        if not forced[1]:
            return None
        only = self.grammar.spellings.only(forced)
        if only is None:
            spelled = self.parser.compute_ff_tokens()
            only = spelled[0] if spelled else None
            self.grammar.keep_spelling(forced, only)
        return only

    @property
    def _last(self) -> int:
        return self._tokens[-1] if self._tokens else -1

    def _step(self, token: int) -> bool:
        if self.grammar.due(self._reasoning[-1]) not in (None, token):
            return False
        if token in self.grammar.eos_ids:
            return bool(self.parser.is_accepting())
        return bool(self.parser.try_consume_tokens([token]) == 1)

    def fill(self, tokens: Sequence[int], parents: Sequence[int], mask_MW: Words) -> None:
        """Fill in what may follow the committed tokens (row 0) and each node (the rows after it).

        The mask must be zero. It stays zero, and so allows nothing, for nodes that the grammar
        forbids, and where the grammar engine fails.
        """
        if not self._is_over:
            self._mask(mask_MW[0])
        children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        path: list[int] = []  # the nodes that the parser has consumed
        todo = children[0][::-1]  # a stack: a draft may be longer than calls may be deep
        while todo:
            node = todo.pop()
            depth = path.index(parents[node]) + 1 if parents[node] >= 0 else 0
            self.back(len(path) - depth)
            del path[depth:]
            # Nothing follows an end, or a forbidden token.
            if _is_allowed(mask_MW[parents[node] + 1], tokens[node]) and self.branch(tokens[node]):
                path.append(node)
                self._mask(mask_MW[node + 1])
                todo += children[node + 1][::-1]
        self.back(len(path))

    def _mask(self, mask_W: Words) -> None:
        """Fill in what may follow the tokens that the parser has consumed."""
        due = self.grammar.due(self._reasoning[-1])
        if due is not None:
            mask_W[due >> 5] = BITS[due & 31]
            return
        bits = self.parser.compute_bitmask()
        if self.parser.is_error():
            return
        words = np.frombuffer(bits, np.int32)[: len(mask_W)]
        mask_W[: len(words)] = words
        whole, rest = divmod(self.grammar.vocab_size, 32)
        if whole < len(mask_W):  # nothing past the vocabulary
            mask_W[whole] &= (1 << rest) - 1
            mask_W[whole + 1 :] = 0

    def _restore(self) -> None:
        """A new parser after the same tokens, those of branches too, without the error."""
        self._error = self._parser.get_error()
        self._parser, self._num_behind = self.grammar.new_parser(), 0
        ends = self.grammar.eos_ids
        so_far = *self._tokens, *self._branch
        self._parser.consume_tokens([token for token in so_far if token not in ends])

    @property
    def is_free(self) -> bool:
        """Whether the grammar alone decides what follows: it is not over and has no budget."""
        return not self._is_over and self.grammar.budget is None

    def can_wait(self) -> bool:
        """Whether a mask would most likely allow what is chosen without one.

        It would if the grammar forces a text that the sequence has written before. It also would
        where most tokens may follow; a mask takes long there.
        """
        if self._needs_mask or self._is_over:
            self._needs_mask = False
            return False
        forced = self._forced or self._forced_text()
        if forced[1]:
            can_wait = self._wrote.get(forced)
            if can_wait is None:
                self._wrote[forced] = True  # from the next time on
            return bool(can_wait)
        probe = self.grammar.probe
        return bool(self.parser.validate_tokens(probe) == len(probe))

    def recover(self) -> bool:
        """Replace the parser if it reached a limit while others used it."""
        if not self.parser.is_error():
            return False
        self._restore()
        return True

    # --- looking ahead, for drafts --------------------------------------------------------------

    def branch(self, token: int) -> bool:
        """Consume a token for a while, see `back`; False: it is forbidden, and nothing changed."""
        if self._is_over or token in self.grammar.eos_ids or not self._step(token):
            self.recover()
            return False
        self._branch.append(token)
        self._reasoning.append(self.grammar.reason(self._reasoning[-1], token))
        return True

    def back(self, count: int) -> None:
        """Take back the last `count` branch steps."""
        if count:
            self.parser.rollback(count)
            del self._branch[-count:], self._reasoning[-count:]
        self.recover()

    def may_end(self) -> bool:
        is_due = self.grammar.due(self._reasoning[-1]) is not None
        return not (self._is_over or is_due) and bool(self.parser.is_accepting())

    def forced(self, max_tokens: int) -> list[int]:
        """A likely spelling of what the grammar leaves no choice about."""
        if self._is_over or max_tokens <= 0 or self.parser.is_error():
            return []
        at = self._reasoning[-1]
        if self.grammar.due(at) is not None:
            assert self.grammar.budget is not None
            assert at is not None
            return list(self.grammar.budget.end_ids[at.num_due :][:max_tokens])
        text = self.parser.compute_ff_bytes()
        # A token has a byte at least, so this many bytes are enough.
        tokens = self.grammar.tokenizer.tokenize_bytes(text[: 16 * max_tokens]) if text else []
        tokens = tokens[:max_tokens]
        taken = self.parser.try_consume_tokens(tokens) if tokens else 0
        tokens = tokens[:taken]
        if len(tokens) < max_tokens and self.parser.is_stopped() and not self.parser.is_error():
            tokens.append(self.grammar.end)
        if taken:
            self.parser.rollback(taken)
        self.recover()
        return tokens

    def problem(self) -> str:
        """Why nothing can follow."""
        if error := self._error or self._parser.get_error():
            return f"the grammar became too complex: {error.splitlines()[0][:200]}"
        return "no token is allowed both by the grammar and by the request's other rules"

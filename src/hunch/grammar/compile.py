"""Compile grammars: bounded in size, time and depth, off the engine's thread, shared by requests.

The grammar engine is llguidance (docs/decisions say why). It gives up the interpreter's lock while
it compiles, so other threads go on; its own limits bound the work of a compilation and of every
mask after it. Grammars nest, and the engine recurses: compilation has a thread with a large stack.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from hunch.errors import GrammarError
from hunch.grammar.matcher import Budget, Grammar, ends_of
from hunch.grammar.source import source_of
from hunch.grammar.spellings import Spellings
from hunch.types import StructuredOutput

MAX_SECONDS = 5.0
MAX_AT_ONCE = 2
MAX_FORCED_BYTES = 100_000  # every mask spells all of a forced text
NUM_KEPT = 64  # compiled grammars
# Characters: the engine is told beforehand which tokens fit strings of these lengths. Where a
# string may still be that long, it looks at longer tokens alone. Without lengths above 10, masks
# inside a string of at most 20 characters took 265 us where these take 30 (vocabulary of 49152).
LENGTHS = (7, 9, 11, 13, 15, 20, 30)
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{IN_STRING}{{1,{length}}}" for length in LENGTHS),
    f"{IN_STRING}+",
]
_REGEX_FAULT = re.compile(  # the regex and what is wrong with it, among drawings of the place
    r"invalid regex (\"[^\n]*\") \(in .*?^\s*error: ([^\n]+)", re.DOTALL | re.MULTILINE
)
_NO_TEXT = b"\xff"  # of no UTF-8 text; the engine writes it before the names of special tokens
_BEFORE = b"\x02"  # no token joins it to what follows
STACK_BYTES = 512 * 1024 * 1024  # of address space; pages are used only as deep as a grammar goes


class Codec(Protocol):
    """What a grammar needs of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    added_ids: frozenset[int]
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def definition(self) -> str:
        """All of it, as a tokenizer.json has it."""


class GrammarCompiler:
    """From what a request asks for to a grammar. Any thread may call it."""

    def __init__(self, codec: Codec, max_seconds: float = MAX_SECONDS) -> None:
        self._codec, self._max_seconds = codec, max_seconds
        self._loaded: tuple[LLTokenizer, Spellings] | None = None
        self._tokenizer_lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Budget | None], Grammar] = OrderedDict()

    def __call__(self, asked: StructuredOutput) -> Grammar:
        """The compiled grammar, or GrammarError within the time limit."""
        if not ends_of(self._codec):
            raise GrammarError("structured_outputs needs an end-of-text token; the model has none")
        source, budget = source_of(asked), self._budget(asked)
        with self._lock:
            if (source, budget) in self._kept:
                self._kept.move_to_end((source, budget))
                return self._kept[source, budget]
        grammar = self._compile(source, budget)
        with self._lock:
            self._kept[source, budget] = grammar
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _budget(self, asked: StructuredOutput) -> Budget | None:
        if asked.reasoning is None:
            return None
        begin, end, max_tokens = asked.reasoning
        ids = self._codec.encode(end, add_special_tokens=False)
        return Budget(max_tokens, begin.encode(), end.encode(), tuple(ids))

    def _compile(self, source: str, budget: Budget | None) -> Grammar:
        tokenizer, spellings = self._load()  # takes long once, which is not the grammar's fault
        if not self._places.acquire(timeout=self._max_seconds):
            raise GrammarError("other grammars are being compiled; try again later")
        found: list[LLMatcher] = []
        clock = _ThreadClock()

        def work() -> None:
            clock.start()
            try:
                matcher = LLMatcher(tokenizer, source, limits=_limits(), log_level=0)
                if not matcher.is_error():
                    matcher.compute_bitmask()  # the first mask does the rest of the work
                found.append(matcher)
            finally:
                self._places.release()

        thread = _start(work)
        while thread.is_alive() and (left := self._max_seconds - clock.seconds()) > 0:
            thread.join(max(left, 0.001))
        if thread.is_alive():
            raise GrammarError(f"the grammar takes more than {self._max_seconds:g} s to compile")
        if not found:
            raise GrammarError("the grammar cannot be compiled")
        if found[0].is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_short(found[0].get_error())}")
        num_forced = len(found[0].compute_ff_bytes())
        if num_forced > MAX_FORCED_BYTES:
            raise GrammarError(
                f"the grammar begins with a fixed text of {num_forced} bytes or more; at most "
                f"{MAX_FORCED_BYTES} are taken"
            )
        return Grammar(found[0], tokenizer, self._codec, spellings, budget)

    def _load(self) -> tuple[LLTokenizer, Spellings]:
        with self._tokenizer_lock:
            if self._loaded is None:
                codec = self._codec
                spellings = Spellings(map(codec.token_bytes, range(codec.vocab_size)))
                self._loaded = _tokenizer_of(codec), spellings
            return self._loaded


def _tokenizer_of(codec: Codec) -> LLTokenizer:
    """One of the engine's own, if it spells every token as the model's does, else the model's.

    Masks need texts encoded. The engine's own tokenizer does that without the interpreter's lock,
    so that the masks of many rows are made at the same time.
    """
    ends = ends_of(codec)
    how: dict[str, Any] = {"n_vocab": codec.vocab_size, "eos_token": ends, "slices": SLICES}
    spelling = _Spelling(codec)
    if any(_is_tag(spelling.tokens[token]) for token in codec.added_ids - codec.special_ids):
        return LLTokenizer(TokenizerWrapper(spelling), **how)  # its own would take seconds in vain
    try:
        own = LLTokenizer(codec.definition(), **how)
    except ValueError:  # a kind that it does not know
        return LLTokenizer(TokenizerWrapper(spelling), **how)
    special = set(spelling.special_token_ids)
    is_same = all(
        own.is_special_token(token) == (token in special)
        and (token in special or own.decode_bytes([token]) == text)
        for token, text in enumerate(spelling.tokens)
        if not text.startswith(_NO_TEXT)
    )
    return own if is_same else LLTokenizer(TokenizerWrapper(spelling), **how)


def _is_tag(text: bytes) -> bool:
    """Whether the engine's own tokenizer takes an added token of this text for no text."""
    return text.startswith(b"<") and text.endswith(b">")


class _Spelling:
    """The tokenizer as llguidance asks for it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.eos_token_id: int = ends_of(codec)[0]
        self.bos_token_id = codec.bos_id
        self.tokens: Sequence[bytes] = [codec.token_bytes(t) for t in range(codec.vocab_size)]
        self.special_token_ids = sorted({*codec.special_ids, *ends_of(codec)})

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell these bytes: others, and the engine's next mask fails."""
        ids = self._encode(text)
        if self._spelled(ids) == text:
            return ids
        # SentencePiece puts a space before a text, but none behind another character.
        before, ids = self._encode(_BEFORE), self._encode(_BEFORE + text)
        if ids[: len(before)] == before and self._spelled(ids[len(before) :]) == text:
            return ids[len(before) :]
        return list(self._longest(text))  # a normalised text, bytes that are no UTF-8

    def _encode(self, text: bytes) -> list[int]:
        return self._codec.encode(text.decode("utf-8", "replace"), add_special_tokens=False)

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])

    def _longest(self, text: bytes) -> Iterator[int]:
        """The longest token that fits, again and again, as far as there is one."""
        token_of = {piece: token for token, piece in enumerate(self.tokens) if piece in text}
        for token in self.special_token_ids:
            token_of.pop(self.tokens[token], None)
        while text:
            fits = [end for end in range(len(text), 0, -1) if text[:end] in token_of]
            if not fits:
                return
            yield token_of[text[: fits[0]]]
            text = text[fits[0] :]


def _limits() -> Any:
    """Tighter than llguidance's own: a step must not keep other rows waiting."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class _ThreadClock:
    """The time a thread has used: that a busy machine has no core for it is no fault of a grammar.

    Where the system does not tell (macOS, Windows), the time that has passed.
    """

    def __init__(self) -> None:
        self._clock: tuple[Callable[[], float], float] = (time.monotonic, time.monotonic())

    def start(self) -> None:
        """In the thread itself."""
        if hasattr(time, "pthread_getcpuclockid"):
            number = time.pthread_getcpuclockid(threading.get_ident())
            self._clock = (partial(time.clock_gettime, number), 0.0)

    def seconds(self) -> float:
        now, began = self._clock
        try:
            return now() - began
        except OSError:  # the thread has ended meanwhile
            return 0.0


def _start(work: Any) -> threading.Thread:
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="hunch-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _short(message: str) -> str:
    if "NoExtension" in message:  # there is not even a first token
        return "no text fits it"
    if regex := _REGEX_FAULT.search(message):
        return f"invalid regex {regex[1]}: {regex[2]}"[:300]
    _, mark, fault = message.partition("failed to compile JSON schema: ")
    message = fault.splitlines()[0] if mark else message  # the rest is a grammar that we wrote
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines)[:300]

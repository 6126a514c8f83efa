"""A model of bytes for server tests: the real engine over a runner that computes tokens by a hash.

The next token depends on seed, answer, position and the token before, as with a real model, so that
streams can be compared with `expected_text`. A prompt with `SAY[text]YAS` in it is answered by that
text, whatever the seed. FAKE_STEP_SECONDS sets how long a step takes,
FAKE_LOAD_SECONDS how long the model takes to load. FAKE_HOLDS is where a test leaves marks for as
long as something must wait (see `LiveServer.holding`).
"""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from hunch.config import Config
from hunch.engine.engine import Engine
from hunch.errors import GrammarError, RequestError
from hunch.pooling import POOL_SCALE
from hunch.types import (
    Capacity,
    DraftTrace,
    Logprob,
    Request,
    RowResult,
    RowStart,
    RowWork,
    SamplingParams,
    StepPlan,
    StepResult,
    StructuredOutput,
)

EOS = 256
MAX_LEN = 512
NUM_NODES = 3
LETTERS = b"eeeetttaaaooiinnsshhrrddlluu      .,"


def next_token(seed: int, sample: int, position: int, last: int) -> int:
    """The target's choice. 0xC3 and 0xA9 make an e with an accent: a character of two tokens."""
    if last == 0xC3:
        return 0xA9
    digest = blake2b(b"%d/%d/%d/%d" % (seed, sample, position, last), digest_size=2).digest()
    if digest[0] < 10:
        return 0xC3
    return LETTERS[digest[1] % len(LETTERS)]


def expected_tokens(prompt_ids: Sequence[int], seed: int, count: int, sample: int = 0) -> list[int]:
    tokens = list(prompt_ids)
    for _ in range(count):
        tokens.append(next_token(seed, sample, len(tokens), tokens[-1]))
    return tokens[len(prompt_ids) :]


def expected_text(prompt: str, seed: int, count: int, sample: int = 0) -> str:
    tokens = expected_tokens(list(prompt.encode()), seed, count, sample)
    return bytes(tokens).decode(errors="replace")


class FakeDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeMatcher:
    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include, self._held = stops, include, ""

    def feed(self, text: str) -> tuple[str, str | None]:
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            place, stop = min(found)
            return self._held[: place + len(stop) * self._include], stop
        keep = max(map(len, self._stops)) - 1
        cut = max(0, len(self._held) - keep)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, None

    def flush(self) -> str:
        safe, self._held = self._held, ""
        return safe


class FakeText:
    """One token per byte."""

    vocab_size = 257
    eos_ids = (EOS,)
    chat_template = tool_template = None
    special_tokens: ClassVar[dict[str, int]] = {}

    generation_config: ClassVar[dict[str, Any]] = {}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        if max_tokens is not None and len(text) > 2 * max_tokens:
            raise RequestError(f"the prompt has more than {max_tokens} tokens, the context's")
        return list(text.encode())

    def token_id(self, name: str) -> int | None:
        """Three bytes that no text has stand for the marks of filling in the middle."""
        names = {"<fim_prefix>": 0xF8, "<fim_suffix>": 0xF9, "<fim_middle>": 0xFA}
        return names.get(name)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> FakeDetokenizer:
        return FakeDetokenizer()

    def stop_matcher(self, stops: Sequence[str], include: bool) -> FakeMatcher:
        return FakeMatcher(stops, include)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **values: Any,
    ) -> list[int]:
        if any(message["content"] == "BAD TEMPLATE" for message in messages):
            raise RequestError("the chat template failed")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        prompt = "".join(lines)
        if continue_final_message:
            prompt = prompt.removesuffix("\n")
        prompt += "assistant: " * add_generation_prompt
        return self.encode(prompt, max_tokens=max_tokens)


class Row:
    """One sequence on the pretended device."""

    def __init__(self, start: RowStart) -> None:
        self.request: Request = start.request
        self.params: SamplingParams = start.request.params
        self.tokens = list(start.tokens)
        self.num_computed = start.num_computed[0]
        self.draft: list[int] = []
        self.method = "prediction" if start.request.prediction_ids else "oracle"
        prompt = bytes(token for token in start.request.prompt_ids if token < 256)
        said = prompt.rpartition(b"SAY[")[2].partition(b"]YAS")
        self.script = said[0] if said[1] else None

    def _next(self, tokens: Sequence[int]) -> int:
        if self.script is None:
            sample = self.request.sample_index
            return next_token(self.request.seed, sample, len(tokens), tokens[-1])
        place = len(tokens) - len(self.request.prompt_ids)
        return self.script[place] if place < len(self.script) else EOS

    def run(self, work: RowWork) -> RowResult:
        num_prompt = len(self.request.prompt_ids)
        num_known = len(self.tokens)
        num_processed = min(work.num_tokens, num_known - self.num_computed)
        result = RowResult(row=work.row, num_processed=num_processed)
        if self.params.prompt_logprobs is not None:
            first = self.num_computed + 1
            after = self.tokens[first : first + num_processed]
            result.prompt_logprobs = [self._scores(token) for token in after]
        if self.params.pooling is not None:  # a state is the token itself, and its square
            read = self.tokens[self.num_computed : self.num_computed + num_processed]
            states = [(token, token * token) for token in read]
            result.pooled = [POOL_SCALE * sum(column) for column in zip(*states, strict=True)]
            if self.params.pooling == "last":
                result.pooled = list(map(float, states[-1]))
        self.num_computed += num_processed
        if self.num_computed == num_known:
            self._commit(work, result, num_prompt + self.request.max_tokens - num_known)
        result.computed = (self.num_computed,)
        return result

    def _commit(self, work: RowWork, result: RowResult, room: int) -> None:
        draft = self.draft[: work.num_nodes]
        tokens = []
        for guess in [*draft, None]:
            token = self._next(self.tokens)
            self.tokens.append(token)
            tokens.append(token)
            if token in self.request.stop_ids or len(tokens) == room or token != guess:
                break
        accepted = sum(a == b for a, b in zip(tokens, draft, strict=False))
        self.num_computed += min(accepted, len(tokens) - 1)
        result.tokens = tokens
        result.num_checked, result.num_accepted = min(len(draft), room), accepted
        result.method = self.method
        if tokens[-1] in self.request.stop_ids:
            result.finish = "stop"
        elif len(tokens) == room:
            result.finish = "length"
        if self.params.logprobs is not None:
            result.logprobs = [self._scores(token) for token in tokens]
        if self.params.speculation.trace:
            nodes = list(range(len(draft)))
            result.trace = DraftTrace(
                tokens=draft,
                parents=[n - 1 for n in nodes],
                accepted=nodes[:accepted],
                method=self.method,
            )
        self._guess(work.max_draft)
        result.num_waiting = len(self.draft)

    def _guess(self, max_draft: int) -> None:
        """What the client expects, token by token; else the right tokens but for every fifth."""
        if self.method == "prediction":
            first = len(self.tokens) - len(self.request.prompt_ids)
            expected = self.request.prediction_ids[first:]
            self.draft = list(expected[: min(max_draft, NUM_NODES)])
            return
        self.draft = []
        tokens = self.tokens.copy()
        for _ in range(min(max_draft, NUM_NODES)):
            position = len(tokens)
            token = self._next(tokens)
            token = token if position % 5 else token ^ 1
            self.draft.append(token)
            tokens.append(token)

    def _scores(self, token: int) -> dict[int, Logprob]:
        scores = {token: Logprob(logprob=-0.5, rank=1)}
        for rank in range(2, (self.params.logprobs or 0) + 1):
            scores[(token + rank) % 256] = Logprob(logprob=-0.5 - rank, rank=rank)
        return scores


class FakeRunner:
    depth = 0

    def __init__(self, config: Config) -> None:
        self.capacity = Capacity(
            num_blocks=4096,
            block_size=16,
            max_rows=config.schedule.num_rows,
            max_len=config.model.max_model_len or MAX_LEN,
            max_nodes=0 if config.spec.method == "off" else NUM_NODES,
            methods={"auto": NUM_NODES, "oracle": NUM_NODES, "prediction": NUM_NODES},
        )
        self._rows: dict[int, Row] = {}
        self._shift = len(config.model.lora or "")  # what an adapter does to every seed
        self._results: deque[StepResult] = deque()
        self._num_steps = 0
        self._seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0.001"))

    def submit(self, plan: StepPlan) -> None:
        wait_while_held("steps", self._num_steps)
        self._num_steps += 1
        time.sleep(self._seconds)
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for start in plan.starts:
            start.request.seed += self._shift
            self._rows[start.row] = Row(start)
        rows = [self._rows[work.row].run(work) for work in plan.work]
        self._results.append(
            StepResult(
                id=plan.id,
                rows=rows,
                target_seconds=self._seconds,
                draft_seconds=self._seconds / 10,
                plain_seconds=self._seconds,
            )
        )

    def collect(self) -> StepResult:
        return self._results.popleft()

    def has_result(self) -> bool:
        return True

    def reset(self) -> None:
        """Nothing is kept of finished requests."""

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def wait_while_held(what: str, num_done: int = 0) -> None:
    """While there is a mark that says no more than `num_done`."""
    mark = Path(f"{os.environ.get('FAKE_HOLDS')}.{what}")
    with suppress(FileNotFoundError):
        while num_done >= int(mark.read_text() or "0"):
            time.sleep(0.005)


def build_engine(config: Config) -> Engine:
    if config.model.model == "missing":
        raise RequestError("there is no such model")
    wait_while_held("load")
    time.sleep(float(os.environ.get("FAKE_LOAD_SECONDS", "0")))
    return Engine(config, FakeRunner(config), FakeText(), compile_grammar=compile_grammar)


def compile_grammar(asked: StructuredOutput) -> None:
    """No grammar at all; a regex may ask for trouble."""
    if asked.regex == "slow":
        wait_while_held("grammars")
    if asked.regex == "unforeseen":
        raise ZeroDivisionError("a bug")
    if asked.regex == "bad":
        raise GrammarError("the grammar cannot be compiled: bad")


def load_text(config: Config) -> FakeText:
    return FakeText()

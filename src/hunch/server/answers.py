"""Outputs in OpenAI's forms: whole answers and stream chunks, chat and completion."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hunch.chat.ids import CallIds
from hunch.chat.turn import Turn, read_message
from hunch.server.calls import delta_of, without_reasoning
from hunch.server.cursor import Delta, ending_of
from hunch.server.problems import ProblemError
from hunch.server.summary import Json, best, ending, prompt_logprobs, report, speculation, usage
from hunch.server.text import Text
from hunch.types import CompletionOutput, Logprob, RequestOutput


class Shape(Protocol):
    """The form of an answer: OpenAI's, or another API's."""

    id: str
    media_type: str  # of a stream
    last: bytes  # what ends one

    @property
    def turn(self) -> Turn | None:
        """How to read the answer, where it may be more than text."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json: ...

    @property
    def is_plain(self) -> bool:
        """Whether chunks with nothing but text differ in their text alone."""

    @property
    def needs_prompt(self) -> bool:
        """Whether an answer is opened only once its prompt was read, with its first token."""

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        """What comes before the text of the answer with this index."""

    def chunks(self, delta: Delta) -> list[Json]:
        """News as they are sent; the first must be such that only its text can differ."""

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        """The last chunks, with what is known at the end."""

    def encode(self, chunk: Json) -> bytes: ...

    def fault(self, problem: ProblemError) -> bytes:
        """What a stream ends with that cannot go on."""


class DataEvents:
    """Server-sent events that are data alone, in JSON."""

    media_type = "text/event-stream"
    last = b"data: [DONE]\n\n"

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        return chunks

    def encode(self, chunk: Json) -> bytes:
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    def fault(self, problem: ProblemError) -> bytes:
        return self.encode(problem.body()) + self.last


@dataclass(kw_only=True)
class OutputEvents(DataEvents):
    """A shape whose events look into the output of their answer, and never are text alone."""

    num_answers: int = 1  # of each prompt
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    turn: Turn | None = None
    is_plain: bool = False
    needs_prompt: bool = True
    _outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        self._outputs[index] = output
        return iter(())


@dataclass(kw_only=True)
class OpenAIStream(DataEvents):
    """Events as OpenAI sends them."""

    id: str
    model: str
    text: Text
    num_top: int  # alternatives shown where logprobs were asked for; -1: all
    has_token_ids: bool = False
    has_prompt_logprobs: bool = False
    names_ids: bool = False  # tokens of log-probabilities by their ids
    turn: Turn | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_plain(self) -> bool:
        return not self.has_token_ids

    @property
    def head(self) -> Json:
        raise NotImplementedError

    def _name(self, token: int, entry: Logprob | None) -> str:
        """What a token is called beside its log-probability."""
        return f"token_id:{token}" if self.names_ids else token_text(self.text, token, entry)

    def head_of(self, object_type: str) -> Json:
        return {"id": self.id, "object": object_type, "created": self.created, "model": self.model}

    def _of_prompt(self, output: RequestOutput) -> Json:
        """What an answer repeats of its prompt, where that was asked for."""
        found: Json = {}
        if self.has_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if self.has_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(output)
        return found

    def chunk(self, delta: Delta) -> Json:
        raise NotImplementedError

    def _chunk_of(self, news: Json, delta: Delta) -> Json:
        """A chunk with these news of one answer."""
        choice = {"index": delta.index, **news, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.has_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk = {**self.head, "choices": [choice]}
        if delta.pieces is not None:
            chunk["hunch"] = {"pieces": [list(piece) for piece in delta.pieces]}
        return chunk

    def chunks(self, delta: Delta) -> list[Json]:
        return [self.chunk(delta)]

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        if has_usage:
            chunks.append({**self.head, "choices": [], "usage": usage(outputs)})
        last = chunks[-1]
        last["metrics"] = {"speculative_decoding": speculation(outputs)}
        last["hunch"] = {**last.get("hunch", {}), **report(outputs)}
        return chunks


@dataclass(kw_only=True)
class ChatShape(OpenAIStream):
    """`chat.completion` and its chunks."""

    has_reasoning: bool = True  # it is shown
    echoed: str = ""  # what the text begins with, before what was generated

    @property
    def needs_prompt(self) -> bool:
        return True  # clients take the first chunk for the first token

    @property
    def head(self) -> Json:
        return self.head_of("chat.completion.chunk")

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [
            {
                "index": choice.index,
                "message": (message := self._message(choice)),
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": ending_of(choice.finish_reason, "tool_calls" in message),
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.token_ids} if self.has_token_ids else {}),
            }
            for choice in outputs[0].outputs
        ]
        return {
            **self.head_of("chat.completion"),
            "choices": choices,
            **self._of_prompt(outputs[0]),
            **ending(outputs),
        }

    def _message(self, choice: CompletionOutput) -> Json:
        if self.turn is None:
            content = self.echoed + choice.text
            return {"role": "assistant", "content": content, "reasoning": None}
        message = read_message(self.turn, choice.text, self.turn.call_ids.new)
        if self.echoed:
            message["content"] = self.echoed + (message["content"] or "")
        shown = message if self.has_reasoning else without_reasoning(message)
        return {"reasoning": None, **shown}  # vLLM's clients read the field of every message

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        delta = {"role": "assistant", "content": self.echoed}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**self.head, "choices": [choice], **(self._of_prompt(output) if not index else {})}

    def chunk(self, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        return self._chunk_of({"delta": self._delta(delta), "logprobs": logprobs}, delta)

    def _delta(self, delta: Delta) -> Json:
        if delta.parts is None:
            return {"content": delta.text} if delta.text else {}
        news = delta_of(delta.parts, self.turn.call_ids if self.turn else CallIds())
        return news if self.has_reasoning else without_reasoning(news)

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None
    ) -> Json | None:
        if logprobs is None:
            return None
        content = []
        for token, entry in zip(ids, logprobs, strict=True):
            others = [self._logprob(other, lp) for other, lp in ranked(entry, self.num_top)]
            content.append({**self._logprob(token, entry[token]), "top_logprobs": others})
        return {"content": content}

    def _logprob(self, token: int, entry: Logprob) -> Json:
        return {
            "token": self._name(token, entry),
            "logprob": max(entry.logprob, -9999.0),
            "bytes": list(self.text.token_bytes(token)),  # of half a character, too
        }


@dataclass(kw_only=True)
class CompletionShape(OpenAIStream):
    """`text_completion` and its chunks, which are of the same form."""

    num_answers: int  # n: the answers of one prompt
    echo: Sequence[str] | None = None  # the prompts' texts, to be repeated
    has_logprobs: bool = True  # they may be there for best_of alone
    _offsets: dict[int, int] = field(default_factory=dict)

    @property
    def needs_prompt(self) -> bool:
        return self.echo is not None

    @property
    def head(self) -> Json:
        return self.head_of("text_completion")

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices, used = [], usage(outputs)  # of all answers there were to choose from
        outputs = [best(output, self.num_answers) for output in outputs]
        for number, output in enumerate(outputs):
            for choice in output.outputs:
                index = number * self.num_answers + choice.index
                prefix = self.echo[number] if self.echo else ""
                choices.append(
                    {
                        "index": index,
                        "text": prefix + choice.text,
                        "logprobs": self._whole_logprobs(index, output, choice),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        **({"token_ids": choice.token_ids} if self.has_token_ids else {}),
                        **self._of_prompt(output),
                    }
                )
        return {**self.head, "choices": choices, **ending(outputs), "usage": used}

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        if self.echo is None and not self.has_token_ids:
            return
        logprobs = None
        if self.echo is not None and output.prompt_logprobs is not None and self.has_logprobs:
            logprobs = self._logprobs(index, output.prompt_token_ids, output.prompt_logprobs)
        choice = {
            "index": index,
            "text": self.echo[index // self.num_answers] if self.echo is not None else "",
            "logprobs": logprobs,
            "finish_reason": None,
            **self._of_prompt(output),
        }
        yield {**self.head, "choices": [choice]}

    def chunk(self, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs)
        return self._chunk_of({"text": delta.text, "logprobs": logprobs}, delta)

    def _whole_logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> Json | None:
        if choice.logprobs is None or not self.has_logprobs:
            return None
        ids: list[int] = list(choice.token_ids)
        entries: list[dict[int, Logprob] | None] = list(choice.logprobs)
        if self.echo is not None and output.prompt_logprobs is not None:
            ids = output.prompt_token_ids + ids
            entries = output.prompt_logprobs + entries
        return self._logprobs(index, ids, entries)

    def _logprobs(
        self, index: int, ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None] | None
    ) -> Json | None:
        """Parallel lists; offsets go on where this answer's last chunk ended."""
        if entries is None:
            return None
        strings: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        offset = self._offsets.get(index, 0)
        for token, entry in zip(ids, entries, strict=True):
            strings.append(self._name(token, entry[token] if entry else None))
            values.append(max(entry[token].logprob, -9999.0) if entry else None)
            # The chosen one comes on top, as from OpenAI, where it is none of the likeliest.
            top = {**dict(ranked(entry, self.num_top)), token: entry[token]} if entry else {}
            tops.append({self._name(t, lp): lp.logprob for t, lp in top.items()} or None)
            offsets.append(offset)
            offset += num_begun(self.text.token_bytes(token))
        self._offsets[index] = offset
        return {
            "tokens": strings,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def token_text(text: Text, token: int, entry: Logprob | None) -> str:
    """A token's own string; special tokens are shown by name."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return text.token_text(token)


def num_begun(data: bytes) -> int:
    """Characters that begin in a token, so that one spread over several tokens counts once."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def ranked(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens, best first; the chosen one is in `entry` even if it is none of them."""
    found = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return found if num_top == -1 else found[:num_top]

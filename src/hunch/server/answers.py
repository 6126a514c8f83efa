"""Outputs in OpenAI's forms: whole answers and stream chunks, chat and completion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hunch.server.origins import Painter, Piece, origins_of
from hunch.server.text import Text
from hunch.types import CompletionOutput, Logprob, RequestOutput

Json = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Delta:
    """What one answer gained since it was last looked at."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    pieces: list[Piece] | None = None  # text and who guessed it, when asked for


@dataclass(slots=True)
class Cursor:
    """How far a reader has got in one answer."""

    index: int
    painter: Painter | None = None
    num_text: int = 0
    num_tokens: int = 0
    is_finished: bool = False

    def plain(self, choice: CompletionOutput) -> str | None:
        """The news, where they are text and nothing else."""
        if choice.finish_reason is not None or choice.logprobs is not None or self.painter:
            return None
        text = choice.text[self.num_text :]
        if not text:
            return None
        self.num_text += len(text)
        self.num_tokens = len(choice.token_ids)
        return text

    def advance(self, choice: CompletionOutput) -> Delta | None:
        """The news, or None."""
        text = choice.text[self.num_text :]
        ids = choice.token_ids[self.num_tokens :]
        if self.is_finished or not (text or choice.finish_reason):
            return None  # tokens without text wait for the character they begin
        logprobs = None if choice.logprobs is None else choice.logprobs[self.num_tokens :]
        pieces = self.painter.paint(choice, text) if self.painter else None
        self.num_text = len(choice.text)
        self.num_tokens = len(choice.token_ids)
        self.is_finished = choice.finish_reason is not None
        return Delta(
            index=self.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            pieces=pieces,
        )


class Shape(Protocol):
    """One of OpenAI's two answer forms."""

    @property
    def head(self) -> Json: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Json: ...

    def opening(self, num_choices: int) -> Iterator[Json]: ...

    def chunk(self, delta: Delta) -> Json: ...


@dataclass(kw_only=True)
class ChatShape:
    """`chat.completion` and its chunks."""

    id: str
    model: str
    text: Text
    num_top: int  # alternatives shown where logprobs were asked for
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def head(self) -> Json:
        return self._head("chat.completion.chunk")

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in outputs[0].outputs
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(outputs),
            "hunch": report(outputs),
        }

    def opening(self, num_choices: int) -> Iterator[Json]:
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self.head, "choices": [choice]}

    def chunk(self, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return _with_pieces({**self.head, "choices": [choice]}, delta)

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None
    ) -> Json | None:
        if logprobs is None:
            return None
        content = []
        for token, entry in zip(ids, logprobs, strict=True):
            others = [self._logprob(other, lp) for other, lp in _ranked(entry, self.num_top)]
            content.append({**self._logprob(token, entry[token]), "top_logprobs": others})
        return {"content": content}

    def _logprob(self, token: int, entry: Logprob) -> Json:
        string = token_text(self.text, token, entry)
        raw = None if "\ufffd" in string else list(string.encode())
        return {"token": string, "logprob": max(entry.logprob, -9999.0), "bytes": raw}


@dataclass(kw_only=True)
class CompletionShape:
    """`text_completion` and its chunks, which are of the same form."""

    id: str
    model: str
    text: Text
    num_top: int  # alternatives shown where logprobs were asked for
    num_answers: int  # n: the answers of one prompt
    echo: Sequence[str] | None = None  # the prompts' texts, to be repeated
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)

    @property
    def head(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = []
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
                    }
                )
        return {**self.head, "choices": choices, "usage": usage(outputs), "hunch": report(outputs)}

    def opening(self, num_choices: int) -> Iterator[Json]:
        if self.echo is None:
            return
        for index in range(num_choices):
            text = self.echo[index // self.num_answers]
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            yield {**self.head, "choices": [choice]}

    def chunk(self, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs)
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        return _with_pieces({**self.head, "choices": [choice]}, delta)

    def _whole_logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> Json | None:
        if choice.logprobs is None:
            return None
        ids: list[int] = list(choice.token_ids)
        entries: list[dict[int, Logprob] | None] = list(choice.logprobs)
        if self.echo is not None and output.prompt_logprobs is not None:
            ids = output.prompt_token_ids + ids
            entries = output.prompt_logprobs + entries
        return self._logprobs(index, ids, entries)

    def _logprobs(
        self,
        index: int,
        ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None] | None,
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
            string = token_text(self.text, token, entry[token] if entry else None)
            strings.append(string)
            values.append(max(entry[token].logprob, -9999.0) if entry else None)
            top = _ranked(entry, self.num_top) if entry else []
            tops.append({token_text(self.text, t, lp): lp.logprob for t, lp in top} or None)
            offsets.append(offset)
            offset += len(string)
        self._offsets[index] = offset
        return {
            "tokens": strings,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def usage(outputs: Sequence[RequestOutput]) -> Json:
    """Token counts; a prompt is counted once however many answers it gets."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "completion_tokens_details": _predicted(outputs),
    }


def _predicted(outputs: Sequence[RequestOutput]) -> Json:
    """How much of what clients expected was written; 0 and 0 where they expected nothing."""
    accepted = rejected = 0
    for output in outputs:
        for choice in output.outputs:
            counts = choice.stats.get("drafters", {}).get("prediction")
            if counts is not None:
                accepted += counts["accepted"]
                rejected += counts["drafted"] - counts["accepted"]
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def report(outputs: Sequence[RequestOutput]) -> Json:
    """The `hunch` object: per answer its stats, its seed and, when asked, its tokens' origins."""
    answers: list[Json] = []
    for output in outputs:
        for choice in output.outputs:
            answer: Json = {"index": len(answers), "seed": choice.seed, "stats": choice.stats}
            if choice.trace is not None:
                answer["origins"] = origins_of(choice)
            answers.append(answer)
    stats = outputs[0].stats if len(outputs) == 1 else {}
    return {"stats": stats or answers[0]["stats"], "answers": answers}


def token_text(text: Text, token: int, entry: Logprob | None) -> str:
    """A token's own string; special tokens are shown by name."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return text.decode([token], skip_special_tokens=False)


def _ranked(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens, best first; the chosen one is in `entry` even if it is none of them."""
    ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return ranked[:num_top]


def _with_pieces(chunk: Json, delta: Delta) -> Json:
    if delta.pieces is not None:
        chunk["hunch"] = {"pieces": [list(piece) for piece in delta.pieces]}
    return chunk

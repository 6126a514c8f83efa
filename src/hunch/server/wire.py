"""Messages between the HTTP side and the engine's process: plain values, length-prefixed.

Both are the same interpreter, one started by the other, so marshal serves: a token's message costs
a tenth of JSON's time, and that time is taken from the engine where cores are few.

To the engine:   start {factory, config, logs}, submit {id, prompt_ids, params, options},
                 abort {id}, reset {is_held_too}, close {}
From the engine: ready {info}, accepted {id}, refused {id, error_type, message},
                 deltas {items, tokens}, reset {is_done}, stats {stats}, alive {}, fatal {message}
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

import hunch.errors as errors
from hunch.config import Config
from hunch.types import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestOutput,
    SamplingParams,
    Speculation,
)

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
_DATACLASSES = ("speculation", "structured_outputs")
_USUAL_PARAMS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
_SECTIONS: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(Config).items() if is_dataclass(hint)
}


def pack(message: Message) -> bytes:
    """One frame."""
    body = marshal.dumps(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Whole messages out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a message

    def feed(self, data: bytes) -> list[Message]:
        if self._rest:
            data = self._rest + data
        messages: list[Message] = []
        start, size = 0, len(data)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            end = start + _LENGTH.size + length
            if size < end:
                break
            messages.append(marshal.loads(data[start + _LENGTH.size : end]))
            start = end
        self._rest = data[start:]
        return messages


# --- values -------------------------------------------------------------------------------------


def dump_params(params: SamplingParams) -> Message:
    """The fields that differ from their defaults."""
    out: Message = {}
    for name, usual in _USUAL_PARAMS.items():
        value = getattr(params, name)
        if value is usual or value == usual:
            continue
        if name == "logit_bias":
            value = list(value.items())  # JSON would turn the ids into strings
        out[name] = asdict(value) if name in _DATACLASSES else value
    return out


def load_params(message: Message) -> SamplingParams:
    """The parameters `dump_params` wrote, checked again."""
    values = dict(message)
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    if "speculation" in values:
        values["speculation"] = Speculation(**values["speculation"])
    return SamplingParams(**values)


def load_config(message: Message) -> Config:
    """A configuration from its plain values (`asdict`)."""
    sections: dict[str, Any] = {name: make(**message[name]) for name, make in _SECTIONS.items()}
    return Config(**sections)


def dump_error(error: errors.HunchError) -> Message:
    """An error one request met, by the name of its class."""
    return {"error_type": type(error).__name__, "message": str(error)}


def load_error(message: Message) -> errors.HunchError:
    """The same error on the other side."""
    error_class = getattr(errors, message["error_type"], errors.EngineError)
    error: errors.HunchError = error_class(message["message"])
    return error


# --- outputs, as differences --------------------------------------------------------------------


@dataclass(slots=True)
class Sent:
    """How much of one request the other side already has."""

    text: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    traces: dict[int, int] = field(default_factory=dict)
    has_prompt_logprobs: bool = False


def dump_delta(output: RequestOutput, sent: Sent) -> Message:
    """What `output` says beyond what was sent; counts it as sent."""
    choices = []
    for choice in output.outputs:
        num_text = sent.text.get(choice.index, 0)
        num_tokens = sent.tokens.get(choice.index, 0)
        delta: Message = {
            "i": choice.index,
            "x": choice.text[num_text:],
            "t": choice.token_ids[num_tokens:],
        }
        if not delta["x"] and not delta["t"] and choice.finish_reason is None:
            continue
        sent.text[choice.index] = len(choice.text)
        sent.tokens[choice.index] = len(choice.token_ids)
        if choice.logprobs is not None:
            delta["l"] = [_dump_logprobs(entry) for entry in choice.logprobs[num_tokens:]]
        if choice.trace is not None:
            num_traces = sent.traces.get(choice.index, 0)
            delta["r"] = [
                [t.tokens, t.parents, t.accepted, t.method] for t in choice.trace[num_traces:]
            ]
            sent.traces[choice.index] = len(choice.trace)
        if choice.finish_reason is not None:
            delta["f"] = [choice.finish_reason, choice.stop_reason, choice.seed, choice.stats]
        choices.append(delta)
    item: Message = {"id": output.request_id, "c": choices}
    if output.finished:
        item["s"] = output.stats
        item["h"] = output.num_cached_tokens
    if output.embedding is not None:
        item["e"] = output.embedding
    if output.prompt_logprobs is not None and not sent.has_prompt_logprobs:
        item["p"] = [None if e is None else _dump_logprobs(e) for e in output.prompt_logprobs]
        sent.has_prompt_logprobs = True
    return item


def apply_delta(output: RequestOutput, item: Message, *, is_whole: bool = False) -> None:
    """Bring `output` up to date. With is_whole, the item tells all, not what is new."""
    for delta in item["c"]:
        choice = output.outputs[delta["i"]]
        if is_whole:
            choice.text, choice.token_ids = "", []
        choice.text += delta["x"]
        choice.token_ids += delta["t"]
        if "l" in delta:
            choice.logprobs = choice.logprobs or []
            choice.logprobs.extend(_load_logprobs(entry) for entry in delta["l"])
        if "r" in delta:
            choice.trace = choice.trace or []
            choice.trace += [
                DraftTrace(tokens=tokens, parents=parents, accepted=accepted, method=method)
                for tokens, parents, accepted, method in delta["r"]
            ]
        if "f" in delta:
            choice.finish_reason, choice.stop_reason, choice.seed, choice.stats = delta["f"]
    if "p" in item:
        output.prompt_logprobs = [None if e is None else _load_logprobs(e) for e in item["p"]]
    output.embedding = item.get("e")
    if "s" in item:
        output.stats, output.num_cached_tokens = item["s"], item["h"]
        output.finished = True


def drop_answer(item: Message) -> None:
    """Leave the prompt's scores: of the one token that had to be generated nothing was wanted."""
    for delta in item["c"]:
        delta["x"], delta["t"] = "", []
        if "l" in delta:
            delta["l"] = []
        if "f" in delta:
            delta["f"] = ["length", None, *delta["f"][2:]]


def empty_output(request_id: str, prompt_ids: list[int], n: int) -> RequestOutput:
    """A request before its first token."""
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt_ids,
        outputs=[CompletionOutput(index=index) for index in range(n)],
    )


def _dump_logprobs(entry: Mapping[int, Logprob]) -> list[list[Any]]:
    """Columns: a list for each of a whole vocabulary's tokens would cost both sides much more."""
    scores = entry.values()
    values, ranks = [score.logprob for score in scores], [score.rank for score in scores]
    return [list(entry), values, ranks, [score.decoded_token for score in scores]]


def _load_logprobs(columns: list[list[Any]]) -> dict[int, Logprob]:
    tokens, *parts = columns
    return dict(zip(tokens, map(Logprob, *parts), strict=True))

"""What users get: a request's answers, as vLLM returns them, and when they came."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib import import_module
from operator import attrgetter
from typing import Any


class RequestOutputKind(IntEnum):
    """What each output of a request that is streamed holds, by vLLM's names."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what came since the output before
    FINAL_ONLY = 2  # there is one output, at the end


@dataclass(slots=True)
class Logprob:
    """Natural log of a token's probability under the target, before sampling filters."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(kw_only=True, slots=True)
class DraftTrace:
    """A draft and what was accepted: node i is tokens[i] after node parents[i] (-1: the root)."""

    tokens: list[int]
    parents: list[int]
    accepted: list[int]  # nodes on the accepted path, in order
    method: str = ""  # the method that drafted it


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One answer. While streaming, everything up to now."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token or string that ended it
    seed: int = 0
    stats: dict[str, Any] = field(default_factory=dict, repr=False)
    trace: list[DraftTrace] | None = None  # per step, when asked for
    message: dict[str, Any] | None = None  # of a chat: text, reasoning and tool calls, as OpenAI's

    lora_request = routed_experts = None  # vLLM's; here never anything else

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """When things happened to a request, by vLLM's names: seconds of one clock, since 1970."""

    arrival_time: float
    first_scheduled_time: float | None  # when it was given a row
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float
    num_generation_tokens: int

    @property
    def time_in_queue(self) -> float | None:
        started = self.first_scheduled_time
        return None if started is None else started - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        first = self.first_token_time
        return None if first is None else first - self.arrival_time

    # Newer names of the same times.
    queued_ts = property(attrgetter("arrival_time"))
    scheduled_ts = property(attrgetter("first_scheduled_time"))
    first_token_ts = property(attrgetter("first_token_time"))
    last_token_ts = property(attrgetter("last_token_time"))


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request and its answers, as vLLM returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: list[float] | None = None  # with `pooling`: the prompt's states as one
    stats: dict[str, Any] = field(default_factory=dict, repr=False)
    metrics: RequestMetrics | None = None  # once it is finished

    # vLLM's; here never anything else.
    lora_request = kv_transfer_params = encoder_prompt = encoder_prompt_token_ids = None

    def since(self, before: RequestOutput | None) -> RequestOutput:
        """What came after `before`, an earlier output of the same request."""
        if before is None:
            return self
        news = [
            replace(
                now,
                text=now.text[len(then.text) :],
                token_ids=now.token_ids[len(then.token_ids) :],
                logprobs=now.logprobs and now.logprobs[len(then.logprobs or ()) :],
            )
            for now, then in zip(self.outputs, before.outputs, strict=True)
        ]
        return replace(self, outputs=news)


def __getattr__(name: str) -> Any:
    """vLLM has all its outputs in one module."""
    if name.startswith("__"):
        raise AttributeError(f"module 'hunch.outputs' has no attribute {name!r}")
    return getattr(import_module("hunch"), name)

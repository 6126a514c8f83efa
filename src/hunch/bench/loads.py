"""When requests come: a number at once (closed), or a number per second (open)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hunch import SamplingParams
from hunch.errors import ConfigError

Encode = Callable[[list[dict[str, str]]], list[int]]  # messages to token ids


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to be sent: to an engine by its token ids, to a server by its body."""

    id: str
    category: str
    token_ids: list[int]  # empty if only a server has the tokenizer
    params: SamplingParams
    body: dict[str, Any]  # "messages" or "prompt", as in OpenAI's API
    conversation: str = ""  # requests of one conversation share their cached prefix
    later: tuple[str, ...] = ()  # what the user says after the answers to this and to each other
    turn: int = 1

    @property
    def answer_id(self) -> str:
        return self.id if self.turn == 1 else f"{self.id}, turn {self.turn}"


def nobody(*_: Any) -> None:
    """A callback that does nothing."""


def next_turn(job: Job, answer: str, encode: Encode | None = None) -> Job | None:
    """The request after this answer: the conversation so far, and the user's next words."""
    if not job.later:
        return None
    messages = [
        *job.body["messages"],
        {"role": "assistant", "content": answer},
        {"role": "user", "content": job.later[0]},
    ]
    return replace(
        job,
        token_ids=encode(messages) if encode is not None else [],
        params=replace(job.params, prediction=None),  # that was for the first answer
        body={"messages": messages},
        later=job.later[1:],
        turn=job.turn + 1,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """A closed load keeps `concurrency` requests under way; an open one sends `rate` per second.

    Arrivals of an open load are those of a gamma process: burstiness 1 is Poisson, less comes in
    bursts, more is more even (as in vLLM's bench). The same seed gives the same moments.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    num_warmup: int = 0  # first requests, which are part of the load but not of the figures
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("a load needs a concurrency or a rate, and not both")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} must be 1 or more")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise ConfigError(f"rate={self.rate} must be above 0 requests per second")
        if not 0 < self.burstiness <= 1e3:
            raise ConfigError(f"burstiness={self.burstiness} must be above 0; 1 is Poisson")

    def arrivals(self, count: int) -> list[float]:
        """The seconds at which requests are due; in a closed load all are due at once."""
        if self.rate is None:
            return [0.0] * count
        chooser = random.Random(self.seed)
        scale = 1 / (self.rate * self.burstiness)
        moments, now = [], 0.0
        for _ in range(count):
            moments.append(now)
            now += chooser.gammavariate(self.burstiness, scale)
        return moments

    def num_requests(self, num_prompts: int, seconds: float, least: int) -> int:
        """The requests of a round: one per prompt or, with a rate, those that come in its
        seconds."""
        if self.rate is None:
            assert self.concurrency is not None
            return max(num_prompts, self.concurrency)
        return max(round(self.rate * seconds), least, 1) + self.num_warmup

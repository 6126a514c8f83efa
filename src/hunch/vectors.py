"""Texts as vectors, by vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hunch.errors import RequestError
from hunch.pooling import misfit, unit
from hunch.types import RequestOutput


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """A text as one vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(kw_only=True, slots=True)
class PoolingOutput:
    """A text as one vector, as `encode` gives it."""

    data: Tensor


Vector = TypeVar("Vector")


@dataclass(kw_only=True, slots=True)
class PoolingRequestOutput(Generic[Vector]):
    """A text and its vector, as vLLM returns them."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Vector
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `embed` returns."""


@dataclass(kw_only=True, slots=True)
class PoolingParams:
    """What vLLM's programs ask of a vector.

    dimensions: how many numbers it has; None: as many as the model's states.
    use_activation, in older words normalize: whether its length is made 1; None: it is.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        check_task("PoolingParams: task", self.task)

    @property
    def is_unit(self) -> bool:
        return self.use_activation is not False and self.normalize is not False


def check_task(name: str, task: str | None) -> None:
    if task not in (None, "embed"):
        raise RequestError(f"{name}={task!r} is not covered: hunch makes one vector of a text")


def vector_of(output: RequestOutput, asked: PoolingParams) -> list[float]:
    """The states of a prompt that a request has pooled."""
    found = output.embedding or []
    if problem := misfit(asked.dimensions, len(found)):
        raise RequestError(problem)
    return unit(found) if asked.is_unit else found


def embedding_of(output: RequestOutput, asked: PoolingParams) -> EmbeddingRequestOutput:
    """The answer to a request that pools its prompt's states."""
    return EmbeddingRequestOutput(
        **_told(output), outputs=EmbeddingOutput(embedding=vector_of(output, asked))
    )


def pooled_of(output: RequestOutput, asked: PoolingParams) -> PoolingRequestOutput[PoolingOutput]:
    """`embedding_of`, for `encode`."""
    return PoolingRequestOutput(
        **_told(output), outputs=PoolingOutput(data=torch.tensor(vector_of(output, asked)))
    )


def _told(output: RequestOutput) -> dict[str, Any]:
    names = "request_id", "prompt_token_ids", "num_cached_tokens"
    return {name: getattr(output, name) for name in names}


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """vLLM's: a line with a vector's first numbers and its size."""
    some = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{some}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")

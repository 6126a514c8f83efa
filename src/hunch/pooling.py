"""A prompt's states as one vector: its last token's, or the mean of all its tokens'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hunch.types import RequestOutput, SamplingParams, Speculation

# States are summed as whole multiples of 1 / POOL_SCALE: such a sum is the same in any order, and
# so does not depend on how a prompt was cut into steps.
POOL_SCALE = 2**28


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """A text as one vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(kw_only=True, slots=True)
class EmbeddingRequestOutput:
    """A text and its vector, as vLLM returns them."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    finished: bool = True


def pooling_params(pooling: str) -> SamplingParams:
    """To read a prompt for its states. One token has to be said, which nobody looks at."""
    wish = Speculation(mode="off")
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, pooling=pooling, speculation=wish)


def unit(vector: Sequence[float]) -> list[float]:
    """The same direction with length 1; a vector of zeros stays."""
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """vLLM's: a line with a vector's first numbers and its size."""
    some = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{some}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


def embedding_of(output: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    """The answer to a request that pools its prompt's states."""
    found = output.embedding or []
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=EmbeddingOutput(embedding=unit(found) if normalize else found),
        num_cached_tokens=output.num_cached_tokens,
    )

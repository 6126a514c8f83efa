"""A prompt's states as one vector: its last token's, or the mean of all its tokens'."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hunch.types import SamplingParams, Speculation

# States are summed as whole multiples of 1 / POOL_SCALE: such a sum is the same in any order, and
# so does not depend on how a prompt was cut into steps.
POOL_SCALE = 2**28


def params_to_pool(pooling: str) -> SamplingParams:
    """To read a prompt for its states. One token has to be said, which nobody looks at."""
    wish = Speculation(mode="off")
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, pooling=pooling, speculation=wish)


def unit(vector: Sequence[float]) -> list[float]:
    """The same direction with length 1; a vector of zeros stays."""
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]


def misfit(dimensions: int | None, width: int) -> str | None:
    """Why vectors cannot have so many numbers; None: they have."""
    if dimensions in (None, width):
        return None
    return (
        f"dimensions={dimensions}: this model's states have {width} numbers, and none of them can "
        "be left out"
    )

"""The three penalties on one formula, shared by the sparse and the dense processors."""

from __future__ import annotations

from typing import Any


def penalise(
    x: Any, count: Any, is_known: Any, repetition: Any, frequency: Any, presence: Any, where: Any
) -> Any:
    """Logits after vLLM's penalties, in its order.

    `count` is how often a token stands in the output; `is_known`, whether in prompt or output;
    `where` is torch.where or numpy.where. All in float32.
    """
    x = where(is_known, where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * count
    return where(count > 0, x - presence, x)

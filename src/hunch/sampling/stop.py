"""Where a row's output ends: at a stop id, or at its longest length.

A stop id counts once min_tokens are out; the token that stops is part of the output. At the last
place a stop id still counts as a stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from hunch.types import Request

REASONS = (None, "stop", "length")  # by the number that a captured step gives (`kernels.step`)


def cut_at_end(tokens: Sequence[int], request: Request, num_output: int) -> tuple[int, str | None]:
    """How many of the tokens that follow `num_output` others to keep, and why the row ends."""
    stop_ids, min_tokens = request.stop_ids, request.params.min_tokens
    for i, token in enumerate(tokens):
        if token in stop_ids and num_output + i >= min_tokens:
            return i + 1, "stop"
        if num_output + i + 1 >= request.max_tokens:
            return i + 1, "length"
    return len(tokens), None

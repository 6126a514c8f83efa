"""Where outputs end."""

from __future__ import annotations

import pytest

from hunch.sampling.stop import cut_at_end
from hunch.types import Request, SamplingParams


def request_of(stop_ids=(0,), max_tokens=10, min_tokens=0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return Request(
        id="r", prompt_ids=[1], params=params, seed=0, max_tokens=max_tokens, stop_ids=stop_ids
    )


@pytest.mark.parametrize(
    ("tokens", "num_output", "request_", "expected"),
    [
        ([4, 5], 0, request_of(), (2, None)),
        ([4, 0, 5], 0, request_of(), (2, "stop")),
        ([4, 5, 6], 8, request_of(), (2, "length")),
        ([4, 0], 8, request_of(), (2, "stop")),  # the last place may still stop
        ([0, 4, 0], 0, request_of(min_tokens=2), (3, "stop")),
        ([4, 0], 0, request_of(stop_ids=()), (2, None)),
    ],
)
def test_where_an_output_ends(tokens, num_output, request_, expected):
    assert cut_at_end(tokens, request_, num_output) == expected

"""Where outputs end, on the host and on a device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hunch.sampling.stop import REASONS, finish, finish_rows
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
def test_finish(tokens, num_output, request_, expected):
    assert finish(tokens, request_, num_output) == expected


@given(
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    num_output=st.integers(0, 8),
    stop_ids=st.lists(st.integers(0, 6), max_size=3, unique=True),
    max_tokens=st.integers(9, 14),
    min_tokens=st.integers(0, 9),
)
def test_device_and_host_agree(tokens, num_output, stop_ids, max_tokens, min_tokens):
    request = request_of(tuple(stop_ids), max_tokens, min_tokens)
    num_kept, reason_R = finish_rows(
        torch.tensor([[*tokens, 0, 0]]),
        torch.tensor([len(tokens)]),
        torch.tensor([num_output]),
        torch.tensor([max_tokens]),
        torch.tensor([[*stop_ids, -1, -1]]),
        torch.tensor([min_tokens]),
    )
    got = int(num_kept[0]), REASONS[int(reason_R[0])]
    assert got == finish(tokens, request, num_output)

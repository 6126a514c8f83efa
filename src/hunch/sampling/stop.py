"""Where a row's output ends: at a stop id, or at its longest length.

A stop id counts once min_tokens are out; the token that stops is part of the output. At the last
place a stop id still counts as a stop. `finish` works on lists, `finish_rows` on a device.

Shape letters: R rows, K tokens of the step, S stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hunch.types import Request

GOES_ON, STOP, LENGTH = 0, 1, 2
REASONS = (None, "stop", "length")


def finish(tokens: Sequence[int], request: Request, num_output: int) -> tuple[int, str | None]:
    """How many of the tokens that follow `num_output` others to keep, and why the row ends."""
    stop_ids, min_tokens = request.stop_ids, request.params.min_tokens
    for i, token in enumerate(tokens):
        if token in stop_ids and num_output + i >= min_tokens:
            return i + 1, "stop"
        if num_output + i + 1 >= request.max_tokens:
            return i + 1, "length"
    return len(tokens), None


def finish_rows(
    tokens_RK: Tensor,
    num_tokens_R: Tensor,
    num_output_R: Tensor,
    max_tokens_R: Tensor,
    stop_RS: Tensor,  # padded with -1
    min_tokens_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same without the host: how many tokens to keep, and GOES_ON, STOP or LENGTH."""
    num_k = tokens_RK.shape[1]
    at_RK = num_output_R[:, None] + torch.arange(num_k, device=tokens_RK.device)
    is_new_RK = torch.arange(num_k, device=tokens_RK.device) < num_tokens_R[:, None]
    is_stop_RK = (tokens_RK[:, :, None] == stop_RS[:, None, :]).any(-1)
    is_stop_RK &= is_new_RK & (at_RK >= min_tokens_R[:, None])
    is_last_RK = is_new_RK & (at_RK + 1 >= max_tokens_R[:, None])
    is_end_RK = is_stop_RK | is_last_RK
    # Everything up to and including the first end stays.
    before_RK = is_end_RK.cumsum(1) - is_end_RK.long()
    kept_RK = is_new_RK & (before_RK == 0)
    is_stopped_R = (kept_RK & is_stop_RK).any(1)
    is_ended_R = (kept_RK & is_end_RK).any(1)
    reason_R = torch.where(is_stopped_R, STOP, torch.where(is_ended_R, LENGTH, GOES_ON))
    return kept_RK.sum(1), reason_R

"""A pass that runs out of memory on one rank still makes all its exchanges, so no rank waits.

The rank that failed withdraws from the remaining exchanges: its parts are no numbers, nor is
anything that any rank computes from them. So rank 0 sees in a result that some rank has failed, and
nothing is sent for that while all goes well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from hunch.parallel.group import Exchange, Group

Result = TypeVar("Result")

Withdrawals = Sequence[Callable[[], object]]  # one for each exchange, in their order


class NoMemory(torch.OutOfMemoryError):
    """A rank ran out of memory in a pass; all ranks have made the pass's exchanges."""


def run_whole(
    group: Group, body: Callable[[], Result], withdrawals: Callable[[], Withdrawals]
) -> Result:
    """Run `body`; if memory is short, withdraw from the exchanges it has not made, and raise."""
    before = group.num_made
    try:
        return body()
    except torch.OutOfMemoryError as error:
        reason = str(error)
        traceback.clear_frames(error.__traceback__)  # else its tensors would stay
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for withdraw in withdrawals()[group.num_made - before :]:
        withdraw()
    raise NoMemory(reason)


def withdrawals_of(group: Group, exchanges: Sequence[Exchange]) -> Withdrawals:
    return [partial(group.withdraw, exchange) for exchange in exchanges]

"""What ranks exchange through shared memory: the reference's bits, and no waiting for the dead."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from hunch.kernels import gpu_exchange
from hunch.kernels.gpu_exchange import Exchange, buffer_words, exchange_ref
from hunch.parallel import shared
from hunch.parallel.group import Exchange as Part
from hunch.parallel.shared import SharedGroup

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are processes without a GPU here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
ALL, FIRST = range(2), range(1)


def two_ranks(work: Callable[[Exchange], list[Tensor]]) -> list[Tensor]:
    """What rank 0 gets, where another process is rank 1 and does the same."""
    buffers_RW = torch.zeros(2, buffer_words(2), dtype=torch.int32).share_memory_()
    addresses = [int(buffer.data_ptr()) for buffer in buffers_RW]
    stop_1 = torch.zeros(1, dtype=torch.int32)
    child = os.fork()
    if not child:
        try:
            work(Exchange(1, addresses, stop_1, torch.device("cpu")))
            os._exit(0)
        finally:
            os._exit(1)
    found = work(Exchange(0, addresses, stop_1, torch.device("cpu")))
    assert os.waitpid(child, 0)[1] == 0
    assert int(stop_1) == 0
    return found


def part_of(rank: int, num_slices: int, num_words: int) -> Tensor:
    seeded = torch.Generator().manual_seed(100 * rank + num_slices)
    return torch.randn(num_slices, num_words, generator=seeded)


SIZES = [(1, 5), (3, 700), (2, 2500), (1, 5), (4, 64), (1, 3000), (2, 1)]


def test_every_rank_gets_the_sums_in_rank_order() -> None:
    """Of several sizes one after the other, as the layers of a step have them."""

    def work(exchange: Exchange) -> list[Tensor]:
        parts = [part_of(exchange.rank, *size) for size in SIZES]
        found = [exchange.gather(part, writers=ALL, readers=ALL) for part in parts]
        expected = [exchange_ref([part_of(rank, *size) for rank in ALL]) for size in SIZES]
        assert all(map(torch.equal, found, expected))  # on both ranks
        return found

    assert len(two_ranks(work)) == len(SIZES)


def test_words_of_some_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """From rank 0 to all, from all to rank 0; in pieces where they are long."""
    monkeypatch.setattr(gpu_exchange, "MAX_WORDS", 1000)

    def work(exchange: Exchange) -> list[Tensor]:
        mine = torch.arange(2200, dtype=torch.int32)[None] * (exchange.rank + 1)
        down = exchange.gather(mine, writers=FIRST, readers=ALL)
        up = exchange.gather(mine, writers=ALL, readers=FIRST)
        assert down.equal(torch.arange(2200, dtype=torch.int32)[None])
        assert len(up) == (0 if exchange.rank else 2)
        return [up]

    (up,) = two_ranks(work)
    assert up.equal(torch.arange(2200, dtype=torch.int32) * torch.tensor([[1], [2]]))


def test_nobody_waits_for_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exchange, "POLLS", tl.constexpr(32))
    buffers_RW = torch.zeros(2, buffer_words(2), dtype=torch.int32)
    addresses = [int(buffer.data_ptr()) for buffer in buffers_RW]
    exchange = Exchange(0, addresses, torch.zeros(1, dtype=torch.int32), torch.device("cpu"))
    exchange.limit = 100
    exchange.gather(torch.ones(1, 4), writers=ALL, readers=ALL)
    assert int(exchange.stop_1) == gpu_exchange.TIMED_OUT
    exchange.limit = 1 << 30  # whoever comes now does not wait that long again
    exchange.gather(torch.ones(1, 4), writers=ALL, readers=ALL)
    assert int(exchange.stop_1) == gpu_exchange.TIMED_OUT


def test_a_rank_without_memory_withdraws_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part is not a number, in every kind of exchange; the next one is as ever."""
    for module in (gpu_exchange, shared):
        monkeypatch.setattr(module, "MAX_WORDS", 1000)

    def work(exchange: Exchange) -> list[Tensor]:
        group, found = SharedGroup(exchange), list[Tensor]()
        for size, dtype in ((2200, torch.float32), (7, torch.float32), (2501, torch.bfloat16)):
            part = torch.ones(size, dtype=dtype)
            for join in (group.all_reduce, partial(group.gather, sizes=(size, size))):
                if exchange.rank:
                    group.withdraw(Part(size, dtype))
                else:
                    found.append(join(part)[-1])
            if exchange.rank:
                group.withdraw(Part(size, dtype, is_broadcast=True))
            else:
                group.broadcast(part)
        assert group.num_made == 9
        total = group.all_reduce(torch.full((3000,), 2.0))
        assert total.equal(torch.full((3000,), 4.0))
        return found

    assert all(number.isnan() for number in two_ranks(work))

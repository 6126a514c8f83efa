"""Ranks of one machine: sums and parts through memory that all of them map, and nobody waits on."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hunch.kernels import native_library
from hunch.parallel.group import NearGroup, added

if not native_library.is_available():
    pytest.skip("the C++ kernels are not built here", allow_module_level=True)

from hunch.kernels.native_shared import SharedMemory

LARGE = 300_000  # float32 numbers: more than one piece


def over_ranks(file: Path, size: int, work: Callable[[NearGroup], list[Tensor]]) -> list[Tensor]:
    """What rank 0 gets; each rank is a thread, with a mapping of its own."""
    groups = [NearGroup(SharedMemory(file, rank, size)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(work, groups))
    return found[0]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_an_addition_in_rank_order(size: int, tmp_path: Path) -> None:
    parts = [torch.randn(size, n) for n in (1, 576, LARGE)]

    def work(group: NearGroup) -> list[Tensor]:
        return [group.all_reduce(part[group.rank]) for part in parts for _ in range(3)]

    sums = over_ranks(tmp_path / "ranks", size, work)
    wanted = [added(part) for part in parts for _ in range(3)]
    assert all(one.equal(other) for one, other in zip(sums, wanted, strict=True))


def test_parts_of_every_kind_are_joined(tmp_path: Path) -> None:
    def work(group: NearGroup) -> list[Tensor]:
        rank = group.rank
        odd = group.all_reduce((torch.arange(33) * (rank + 1)).bfloat16())
        column = torch.full((2, 8), rank)[:, ::2]  # not contiguous
        whole = group.gather(torch.full((2, (5, 3)[rank]), float(rank)), (5, 3))
        slices = group.all_slices(torch.full((3, 2, 4), rank + 0.5))
        said = group.broadcast(torch.arange(LARGE) * (1 - rank))
        told = group.broadcast((torch.arange(8) * (1 - rank))[::2])
        assert said.equal(torch.arange(LARGE))
        assert told.tolist() == [0, 2, 4, 6]
        return [odd, group.all_reduce(column), whole, slices[:, 0, 0]]

    odd, column, whole, slices = over_ranks(tmp_path / "ranks", 2, work)
    assert odd.equal(torch.arange(33).bfloat16() + (torch.arange(33) * 2).bfloat16())
    assert column.tolist() == [[1] * 4] * 2
    assert whole.tolist() == [[0.0] * 5 + [1.0] * 3] * 2
    assert slices.tolist() == [1.5, 4.5]


def test_nobody_waits_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    first, second = (SharedMemory(tmp_path / "ranks", rank, 2) for rank in range(2))
    timer = threading.Timer(0.05, second.end)
    timer.start()
    with pytest.raises(RuntimeError, match="another rank is gone"):
        first.sum(torch.ones(4))
    timer.join()
    with pytest.raises(RuntimeError, match="another rank is gone"):
        first.broadcast(torch.ones(4))

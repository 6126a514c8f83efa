"""Groups over shared memory: the sums of messages, and who may share."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hunch.kernels.gpu_exchange import Exchange
from hunch.parallel import shared
from hunch.parallel.shared import HANDLE_BYTES, NAME_BYTES, SharedBuffers, SharedGroup
from kernels.test_gpu_exchange import pytestmark as forked
from kernels.test_gpu_exchange import two_ranks

pytestmark = forked
SIZES = (5, 3)


def test_a_group_joins_parts_of_every_kind() -> None:
    def work(exchange: Exchange) -> list[Tensor]:
        group, rank = SharedGroup(exchange), exchange.rank
        odd = (torch.arange(33) * (rank + 1)).bfloat16()  # an odd number of half words
        total = group.all_reduce(odd)
        assert total.equal(torch.arange(33).bfloat16() + (torch.arange(33) * 2).bfloat16())
        inputs = torch.arange(9) * (1 - rank)
        assert group.broadcast(inputs).equal(torch.arange(9))
        slices_STD = torch.full((3, 2, 4), rank + 0.5)
        assert group.all_slices(slices_STD)[:, 0, 0].tolist() == [1.5, 4.5]
        part = torch.full((2, SIZES[rank]), float(rank))
        whole = group.gather(part, SIZES)
        assert rank == 0 or whole is part
        return [whole]

    (whole,) = two_ranks(work)
    assert whole.tolist() == [[0.0] * 5 + [1.0] * 3] * 2


class FakeDriver:
    """Addresses 1000 and 2000; `fails` says what does not work."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.freed, self.closed = fails, list[int](), list[int]()

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        return (0, bytes(HANDLE_BYTES)) if self.fails == "allocate" else (1000, b"h" * HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        return 0 if self.fails == "open" else 2000

    def close(self, buffer: int) -> None:
        self.closed.append(buffer)

    def free(self, buffer: int) -> None:
        self.freed.append(buffer)


@pytest.mark.parametrize("fails", ["", "allocate", "open", "machine", "other"])
def test_ranks_share_memory_where_all_of_them_can(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = FakeDriver(fails)
    monkeypatch.setattr(shared.Driver, "find", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def share(data: bytes) -> list[bytes]:
        if len(data) == 1:  # whether the other one could open them
            return [data, b"0" if fails == "other" else b"1"]
        name = b"elsewhere".ljust(NAME_BYTES) if fails == "machine" else data[:NAME_BYTES]
        return [data, name + b"g" * HANDLE_BYTES]

    buffers = SharedBuffers.open(0, 2, torch.device("cpu"), share)
    if not fails:
        assert buffers is not None
        assert buffers.addresses == [1000, 2000]
        buffers.close()
    else:
        assert buffers is None
    assert driver.freed == ([] if fails == "allocate" else [1000])
    assert driver.closed == ([2000] if fails in ("", "other") else [])

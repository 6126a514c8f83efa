"""The device's state holds what the host's rows do, and a step's inputs, however much changed."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_transfer
from hunch.kernels.step import RowState, update_ref
from hunch.step import upload
from hunch.step.rows import RowBuffers
from hunch.step.upload import PINNED, RING, DeviceRows
from hunch.types import Capacity, Request, RowStart, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPACITY = Capacity(num_blocks=3000, block_size=4, max_rows=3, max_len=PINNED + 100, max_nodes=0)
UPDATES = pytest.mark.parametrize(
    "update", [gpu_transfer.update, update_ref], ids=["triton", "plain"]
)


def sit_down(rows: RowBuffers, row: int, tokens: list[int]) -> None:
    blocks = list(range(10 * row, 10 * row + len(tokens) // 4 + 1))
    request = Request(
        id=f"r{row}",
        prompt_ids=tokens,
        params=SamplingParams(),
        seed=0,
        max_tokens=9,
        stop_ids=(row + 2,),
    )
    rows.start(RowStart(row=row, request=request, tokens=tokens, blocks=blocks, num_computed=(0,)))


def assert_same(state: RowState, rows: RowBuffers, row: int) -> None:
    known, blocks = int(rows.known[row]), rows.num_blocks[row]
    assert int(state.known_X[row]) == known
    assert int(state.end_X[row]) == int(rows.end[row])
    assert int(state.stop_XS[row, 0]) == row + 2
    assert state.tokens_XL[row, :known].tolist() == rows.tokens[row, :known].tolist()
    assert state.table_XB[row, :blocks].tolist() == rows.table[row, :blocks].tolist()


@UPDATES
def test_the_state_is_what_the_host_holds(update: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "update", update)
    rows = RowBuffers(CAPACITY)
    device = DeviceRows(rows, 4, DEVICE)
    sit_down(rows, 0, [5, 6, 7])
    sit_down(rows, 2, list(range(PINNED + 50)))  # more than a buffer holds
    assert device.update(np.array([[2, 0], [0, 1], [3, 4]]), 4) == [2, 0]
    assert device.inputs_3R.tolist() == [[2, 0, -1, -1], [0, 1, -1, -1], [3, 4, -1, -1]]
    for row in (0, 2):
        assert_same(device.state, rows, row)
    for block in range(2 * RING):  # only a table grows
        rows.add_blocks(0, (50 + block,))
        assert device.update(np.array([[0], [block], [2]]), 1) == []
        assert device.inputs_3R[:, 0].tolist() == [0, block, 2]
        assert_same(device.state, rows, 0)


@UPDATES
def test_of_a_row_that_was_cut_only_its_length_is_sent(
    update: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def counted(state: RowState, inputs_3R: object, buffer_W: object, num_changes: int) -> None:
        sent.append(num_changes)
        update(state, inputs_3R, buffer_W, num_changes)  # type: ignore[operator]

    monkeypatch.setattr(upload, "update", counted)
    rows = RowBuffers(CAPACITY)
    device = DeviceRows(rows, 4, DEVICE)
    sit_down(rows, 1, [5, 6, 7])
    device.update(np.array([[1], [0], [0]]), 1)
    device.state.known_X[1], device.state.is_done_X[1] = 5, 1  # it went on, to an end
    device.state.num_nodes_X[1] = 2
    device.mark_cut(1)
    assert device.is_known(1)
    assert device.update(np.array([[1], [0], [0]]), 1) == []
    assert_same(device.state, rows, 1)
    assert int(device.state.is_done_X[1]) == int(device.state.num_nodes_X[1]) == 0
    assert sent[-1] == 3
    assert not device.is_known(1)


def test_rows_that_only_decode_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def update(state: RowState, inputs_3R: object, buffer_W: object, num_changes: int) -> None:
        sent.append(num_changes)

    monkeypatch.setattr(upload, "update", update)
    rows = RowBuffers(CAPACITY)
    device = DeviceRows(rows, 4, DEVICE)
    sit_down(rows, 1, [5, 6, 7])
    sent.clear()
    for _ in range(5):
        device.update(np.array([[1], [0], [0]]), 1)
    assert len(sent) == 1
    device.update(np.array([[1], [0], [0]]), 2)  # a larger step pads further
    device.update(np.array([[1], [0], [3]]), 2)
    assert sent[1:] == [0, 0]


@UPDATES
def test_a_row_that_somebody_else_takes(update: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "update", update)
    rows = RowBuffers(CAPACITY)
    device = DeviceRows(rows, 4, DEVICE)
    sit_down(rows, 0, list(range(30)))
    device.update(np.array([[0], [0], [0]]), 1)
    rows.leave(0)
    sit_down(rows, 0, [3, 4])  # fewer blocks than the one before
    device.mark_stale(0)
    assert device.update(np.array([[0], [0], [0]]), 1) == [0]
    assert_same(device.state, rows, 0)
    assert device.update(np.array([[0], [0], [0]]), 1) == []


@UPDATES
def test_a_request_that_ended_where_a_longer_one_sat(
    update: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "update", update)
    rows = RowBuffers(CAPACITY)
    device = DeviceRows(rows, 4, DEVICE)
    for row in (0, 1):
        sit_down(rows, row, list(range(30)))
    device.update(np.array([[0, 1], [0, 0], [0, 0]]), 2)
    sit_down(rows, 0, [3, 4])
    device.mark_stale(0)
    rows.leave(0)  # by the host's step; the engine, which has not read it, names it once more
    rows.add_blocks(1, (77,))
    assert device.update(np.array([[0, 1], [0, 0], [0, 0]]), 2) == [0]
    assert device.state.is_done_X[:2].tolist() == [1, 0]
    assert_same(device.state, rows, 1)

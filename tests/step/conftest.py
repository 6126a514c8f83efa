"""What the runner's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from captured_heads import World


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NO_BLOCK = 10**7  # whoever writes there fails


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables name no block past a row's own, rather than one of whoever sat there before."""
    if find_spec("triton") is None:
        return
    from hunch.step.rows import RowBuffers
    from hunch.step.upload import DeviceRows

    update, start = DeviceRows.update, RowBuffers.start

    def guarded_update(device: DeviceRows, inputs_3R: np.ndarray, *rest: Any) -> list[int]:
        for row in device._stale.intersection(inputs_3R[0].tolist()):
            device.state.table_XB[row] = NO_BLOCK
        return update(device, inputs_3R, *rest)

    def guarded_start(rows: RowBuffers, what: Any) -> None:
        rows.table[what.row] = NO_BLOCK
        start(rows, what)

    monkeypatch.setattr(DeviceRows, "update", guarded_update)
    monkeypatch.setattr(RowBuffers, "start", guarded_start)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target, and heads trained for it."""
    from captured_heads import make_world  # needs Triton

    return make_world(tmp_path_factory.mktemp("captured"))

"""What a network has not seen is read to it in passes of a few sizes, each token once."""

from typing import Any

import pytest

pytest.importorskip("triton")

from hunch.step import passes
from hunch.step.rows import RowBuffers
from hunch.types import Capacity, GroupInfo


@pytest.mark.parametrize(
    ("known", "sizes"),
    [
        ([30], [29]),
        ([300, 300], [512, 86]),
        ([1500, 700], [2048, 150]),
        ([3000, 1600, 9], [2048, 2048, 510]),
        ([2048], [512, 512, 512, 511]),
    ],
)
def test_passes(known: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (GroupInfo(name="target"), GroupInfo(name="draft"))
    capacity = Capacity(
        num_blocks=400, block_size=16, max_rows=3, max_len=4000, max_nodes=4, groups=groups
    )
    rows = RowBuffers(capacity)
    rows.known[: len(known)] = known
    rows.computed[-1, :] = 1
    seen: list[list[tuple[int, int, int]]] = []

    class Passes:
        def __init__(self, *parts: Any) -> None:
            self.forward = lambda parts, later: seen.append(parts)

    monkeypatch.setattr(passes, "PassGraphs", Passes)
    monkeypatch.setattr(passes, "pack_known", lambda rows, parts: parts)
    nothing: Any = None
    ids = list(range(len(known)))
    passes.CatchUp(nothing, nothing, rows, nothing, nothing).run(ids)
    assert [sum(stop - start for _, start, stop in parts) for parts in seen] == sizes
    at = [1] * len(known)
    for row, start, stop in (part for parts in seen for part in parts):
        assert start == at[row]
        at[row] = stop
    assert at == known == rows.computed[-1, ids].tolist()


def test_every_pass_up_to_the_largest_has_a_captured_size_that_wastes_little() -> None:
    for num_tokens in range(1, passes.MAX_PASS + 1):
        size = passes.size_of(num_tokens)
        assert num_tokens <= size <= max(16, 2 * num_tokens)
        assert num_tokens <= 256 or size <= 1.25 * num_tokens

"""Who holds what: parts that join to the whole, heads with the KV heads they read."""

from itertools import pairwise

import pytest
import torch

from builders import tiny_model, tiny_weights
from hunch.errors import ConfigError
from hunch.models.load import load_decoder
from hunch.parallel.group import SINGLE, SingleGroup, head_spans, span, spans


class Place(SingleGroup):
    """One of several ranks, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def places(size: int) -> list[Place]:
    return [Place(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("whole", [7, 48, 95, 128, 1536, 49152, 128256])
def test_parts_join_to_the_whole(whole: int, size: int) -> None:
    parts = [span(whole, place) for place in places(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == whole
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert spans(whole, size) == tuple(last - first for first, last in parts)
    assert all(last > first for first, last in parts)


@pytest.mark.parametrize(("whole", "size", "unit"), [(1536, 2, 256), (8960, 4, 32), (576, 4, 32)])
def test_blocks_of_quantised_weights_are_not_cut(whole: int, size: int, unit: int) -> None:
    assert all(first % unit == 0 for first, _ in (span(whole, place) for place in places(size)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (9, 3, 3), (32, 8, 4), (8, 2, 4), (16, 1, 4)]
)
def test_every_head_is_somewhere_beside_its_kv_head(heads: int, kv_heads: int, size: int) -> None:
    readers, held = heads // kv_heads, []
    for place in places(size):
        (first, last), (kv_first, kv_last) = head_spans(heads, kv_heads, place)
        held += range(first, last)
        assert {head // readers for head in range(first, last)} == set(range(kv_first, kv_last))
        assert (last - first) % (kv_last - kv_first) == 0  # every KV head has as many readers here
    assert held == list(range(heads))


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* KV heads \(2\)"):
        head_spans(8, 2, Place(0, 3))
    with pytest.raises(ConfigError, match=r"attention heads \(4\)"):
        load_decoder(tiny_weights(), group=Place(0, 5))


def test_one_device_needs_no_group() -> None:
    model = tiny_model()
    assert model.group is SINGLE
    part = torch.ones(2)
    assert SINGLE.all_reduce(part) is part
    assert SINGLE.gather(part, [2]) is part

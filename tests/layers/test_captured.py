"""Attention inside a graph gives what the torch form gives, and leaves padding's slots alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.gpu_attention import Tiling
from hunch.layers.attention import Heads, Paged
from hunch.layers.captured import Captured
from hunch.layers.rope import Rope, RopeSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
BLOCK, WIDTH = 4, 3


def inputs() -> AttnInputs:
    """Three rows of three places: all live, one live, none."""
    table_SB = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(3, 8)
    pos, slot, seq = [], [], []
    for row, (start, count) in enumerate(((9, 3), (17, 1), (0, 0))):
        for place in range(WIDTH):
            here, is_live = start + place, place < count
            pos.append(here if is_live else 0)
            slot.append(int(table_SB[row, here // BLOCK]) * BLOCK + here % BLOCK if is_live else -1)
            seq.append(row)
    columns = [torch.tensor(column, device=DEVICE) for column in (pos, slot, seq)]
    return AttnInputs(*columns, table_SB.to(DEVICE), columns[0] + 1, None, BLOCK)


def cache() -> KVCache:
    noise = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 24 * BLOCK, 2, 32, generator=noise).to(DEVICE) for _ in range(2)]
    return KVCache(*made)


@pytest.mark.parametrize("window", [None, 5])
def test_as_torch_has_it(window: int | None) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, window=window)
    rope = Rope(RopeSpec(), 32, 64, DEVICE)
    noise = torch.Generator().manual_seed(2)
    qkv_TAH = torch.randn(3 * WIDTH, 8, 32, generator=noise).to(DEVICE)
    attn, mine, theirs = inputs(), cache(), cache()
    spans = [(r * WIDTH, (r + 1) * WIDTH) for r in range(3)]
    tiles = torch.tensor([(a, b - a) for a, b in spans], dtype=torch.int32)
    captured = Captured(attn, mine, rope.table_LH, Tiling(tiles.to(DEVICE), 4))
    got_TNH = captured(qkv_TAH.clone(), heads, 1)
    want_TNH = Paged(inputs(), theirs, rope(attn.pos_T))(qkv_TAH.clone(), heads, 1)
    assert torch.allclose(got_TNH, want_TNH, atol=1e-4)
    assert not got_TNH[attn.slot_T < 0].any()
    assert torch.allclose(mine.k_LCMH, theirs.k_LCMH, atol=1e-5)
    assert torch.equal(mine.v_LCMH, theirs.v_LCMH)
    assert not torch.equal(mine.k_LCMH, cache().k_LCMH)

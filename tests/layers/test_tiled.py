"""Attention by a GPU's kernels gives what the torch form gives, however a step is packed."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton")

from builders import Seq, pack, tables
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import next_power_of_2
from hunch.kernels.gpu_tiling import MAX_NUMBERS, Tiler, Tiling
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Heads, Paged
from hunch.layers.rope import Rope, RopeSpec
from hunch.layers.tiled import Tiled

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
def test_rows_with_padding(window: int | None) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, window=window)
    rope = Rope(RopeSpec(), 32, 64, DEVICE)
    noise = torch.Generator().manual_seed(2)
    qkv_TAH = torch.randn(3 * WIDTH, 8, 32, generator=noise).to(DEVICE)
    attn, mine, theirs = inputs(), cache(), cache()
    spans = [(r * WIDTH, (r + 1) * WIDTH) for r in range(3)]
    tiles = torch.tensor([(a, b - a) for a, b in spans], dtype=torch.int32)
    tiled = Tiled(attn, mine, rope.table_LH, Tiling(tiles.to(DEVICE), 4))
    got_TNH = tiled(qkv_TAH.clone(), heads, 1)
    want_TNH = Paged(inputs(), theirs, rope(attn.pos_T))(qkv_TAH.clone(), heads, 1)
    assert torch.allclose(got_TNH, want_TNH, atol=1e-4)
    assert not got_TNH[attn.slot_T < 0].any()
    assert torch.allclose(mine.k_LCMH, theirs.k_LCMH, atol=1e-5)
    assert torch.equal(mine.v_LCMH, theirs.v_LCMH)
    assert not torch.equal(mine.k_LCMH, cache().k_LCMH)


STEPS = {
    "a prompt": [Seq(range(67))],
    "a long prompt": [Seq(range(301))],
    "odd prompts": [Seq(range(1)), Seq(range(19)), Seq(range(33))],
    "chunks": [Seq(range(5), start=130), Seq(range(70), start=11), Seq([1], start=259)],
    "a level of chains": [Seq([1], start=40), Seq([1], start=3), Seq([1], start=270)],
    "trees": [
        Seq((), start=21, draft=range(6), parents=(-1, -1, 0, 0, 1, 3)),
        Seq(range(3), start=150, draft=range(4), parents=(-1, 0, -1, 2)),
        Seq(range(2), start=7),
    ],
}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [
        (6, 2),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_the_host(name: str, num_heads: int, num_kv_heads: int) -> None:
    seqs = STEPS[name]
    _, attn = pack(seqs, tables(len(seqs), 80))
    for item in fields(attn):
        value = getattr(attn, item.name)
        setattr(attn, item.name, value.to(DEVICE) if isinstance(value, torch.Tensor) else value)
    heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16, scale=0.25)
    noise = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 2, len(seqs) * 320, num_kv_heads, 16, generator=noise).to(DEVICE)
    qkv_TAH = torch.randn(len(attn.pos_T), num_heads + 2 * num_kv_heads, 16, generator=noise)
    qkv_TAH, rope = qkv_TAH.to(DEVICE), Rope(RopeSpec(), 16, 320, DEVICE)
    tiler = Tiler.create(num_heads, num_kv_heads, 16, 320, torch.device(DEVICE), 2**22)
    mine, theirs = KVCache(*kv.clone()), KVCache(*kv.clone())
    tiled = Tiled(attn, mine, rope.table_LH, tiler.of(attn))
    got_TNH = tiled(qkv_TAH.clone(), heads, 1)
    want_TNH = Paged(attn, theirs, rope(attn.pos_T))(qkv_TAH.clone(), heads, 1)
    assert torch.allclose(got_TNH, want_TNH, atol=1e-4)
    assert torch.allclose(mine.k_LCMH, theirs.k_LCMH, atol=1e-5)
    assert torch.equal(mine.v_LCMH, theirs.v_LCMH)
    assert not tiler.workspace.count.any()  # ready for the next step


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head", "usual"),
    [
        (32, 8, 128, 16),
        (14, 2, 64, 8),
        (16, 8, 256, 32),
        (71, 1, 64, 4),
        (48, 1, 128, 4),
        (128, 1, 128, 2),
        (40, 1, 256, 2),  # latent attention of 256 numbers
        (16, 1, 512, 2),
    ],
)
def test_tiles_of_prompts_fit_shared_memory(
    num_heads: int, num_kv_heads: int, head: int, usual: int
) -> None:
    tiler = Tiler.create(num_heads, num_kv_heads, head, 320, torch.device("cpu"), 2**22)
    assert tiler.block(1000) == usual
    group = next_power_of_2(num_heads // tiler.num_kv_heads)
    assert tiler.block(1000) * group * head <= MAX_NUMBERS

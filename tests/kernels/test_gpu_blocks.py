"""Blocks by a GPU's kernels beside the same network by torch; padding is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import head_files
from head_files import Study
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.models.fused import FusedLayers
from hunch.models.heads.block_files import load_block
from hunch.models.heads.block_net import BlockNet, TiledBlocks
from hunch.models.heads.fused_block import FusedBlocks
from models.heads.test_blocks import FORMS, make
from tiny_models import write_llama

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
BLOCK_SIZE, ROWS, LENGTHS = 4, 2, (9, 14)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    model = write_llama(tmp_path_factory.mktemp("target") / "model", layers=3)
    return head_files.study(model, num_texts=ROWS, length=20)


def new_kv(net: BlockNet) -> KVCache:
    size = (net.num_kv_layers, 64, net.spec.num_kv_heads, net.spec.head_dim)
    return KVCache(torch.zeros(size), torch.zeros(size))


def inputs(pos: list[list[int]], table_SB: torch.Tensor, padding: int) -> AttnInputs:
    """Packed places of rows, each followed by padding."""
    pos_T = torch.tensor([p for row in pos for p in [*row, *[0] * padding]])
    seq_T = torch.tensor([r for r, row in enumerate(pos) for _ in range(len(row) + padding)])
    is_live_T = torch.tensor([i < len(row) for row in pos for i in range(len(row) + padding)])
    slot_T = table_SB[seq_T, pos_T // BLOCK_SIZE] * BLOCK_SIZE + pos_T % BLOCK_SIZE
    slot_T = torch.where(is_live_T, slot_T, -1)
    return AttnInputs(pos_T, slot_T, seq_T, table_SB, pos_T + 1, None, BLOCK_SIZE)


@pytest.mark.parametrize("form", ["dspark", "dflash, sliding"])
def test_a_pass_on_the_device(form: str, study: Study, tmp_path: Path) -> None:
    make(study, tmp_path, **FORMS[form])
    net = load_block(tmp_path, study.target, FORMS[form]["method"])
    size = net.shape.num_places
    table_SB = torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(ROWS, 8)
    kv, plain = new_kv(net), new_kv(net)
    known = [list(range(length)) for length in LENGTHS]
    attn = inputs(known, table_SB, padding=2)
    features, slots = [], []
    for layer in net.feature_layers:
        parts = [study.features[layer][row] for row in range(ROWS)]
        spaced = [torch.cat((x[:n], x[:2] * 9)) for x, n in zip(parts, LENGTHS, strict=True)]
        features.append(torch.cat(spaced))
    net.cover_tiled(features, attn, kv)
    live_T = attn.slot_T >= 0
    net.cover([x[live_T] for x in features], attn.pos_T[live_T], attn.slot_T[live_T], plain)
    torch.testing.assert_close(kv.k_LCMH, plain.k_LCMH, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv.v_LCMH, plain.v_LCMH, rtol=1e-5, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        pos_K = torch.arange(length)
        slots.append(table_SB[row, pos_K // BLOCK_SIZE] * BLOCK_SIZE + pos_K % BLOCK_SIZE)
    token_R, pos_R = torch.tensor([5, 77]), torch.tensor(LENGTHS)
    expected = net.guess(token_R, pos_R, slots, plain)
    places = [list(range(length, length + size)) for length in LENGTHS]
    attn = inputs(places, table_SB, padding=0)
    spans = tuple(Span(r * size, (r + 1) * size, r, 0, size) for r in range(ROWS))
    tiling = net.tiler(attn).tiling(spans, ROWS * size)
    end_T = (pos_R + size - 1).repeat_interleave(size)
    found = net.told(token_R, TiledBlocks(attn, end_T, kv, net, tiling))
    torch.testing.assert_close(found.state_RSD, expected.state_RSD, rtol=1e-3, atol=1e-3)


def test_a_pass_by_fused_kernels(study: Study, tmp_path: Path) -> None:
    """The same keys, values and scores as torch's, place by place, also for several nodes a row."""
    make(study, tmp_path, **FORMS["dspark"])
    net = load_block(tmp_path, study.target, "dspark")
    layers = FusedLayers(net.body.blocks, [net.rope.table_LH], net.spec.norm_eps)
    fused, size = FusedBlocks(net, layers), net.shape.num_places
    table_SB = torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(ROWS, 8)
    kv, plain = new_kv(net), new_kv(net)
    attn = inputs([list(range(length)) for length in LENGTHS], table_SB, padding=0)
    features = [
        torch.cat([study.features[layer][row][:n] for row, n in enumerate(LENGTHS)])
        for layer in net.feature_layers
    ]
    fused.cover(features, attn, kv)
    net.cover_tiled(features, attn, plain)
    torch.testing.assert_close(kv.k_LCMH, plain.k_LCMH, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv.v_LCMH, plain.v_LCMH, rtol=1e-4, atol=1e-4)
    token_R, pos_R = torch.tensor([5, 77]), torch.tensor(LENGTHS)
    places = [list(range(length, length + size)) for length in LENGTHS]
    attn = inputs(places, table_SB, padding=0)
    spans = tuple(Span(r * size, (r + 1) * size, r, 0, size) for r in range(ROWS))
    tiling = net.tiler(attn).tiling(spans, ROWS * size)
    end_T = (pos_R + size - 1).repeat_interleave(size)
    blocks = TiledBlocks(attn, end_T, kv, net, tiling)
    expected, found = net.told(token_R, blocks), fused.told(token_R, blocks)
    for depth, token_M in ((0, token_R), (2, torch.tensor([3, 9, 11, 4]))):
        scores = expected.level(depth, token_M)
        torch.testing.assert_close(found.level(depth, token_M), scores, rtol=2e-3, atol=2e-3)
        odds = expected.odds(depth, token_M)
        assert odds is not None
        torch.testing.assert_close(found.odds(depth, token_M), odds, rtol=2e-3, atol=2e-3)

"""The torch path of paged attention against its specification."""

from dataclasses import replace

import pytest
import torch

from builders import BLOCK_SIZE, Seq, pack, tables
from hunch.kernels.attention import attention, attention_by_token, attention_ref
from hunch.kernels.kv_store import codes_ref
from hunch.kernels.native_tensors import attend, can_attend
from hunch.layers.attention import Alibi

STEPS = {
    "one token": [Seq([1], start=13)],
    "prompt": [Seq(range(11))],
    "chunk": [Seq(range(7), start=9)],
    "chain": [Seq([1], start=6, draft=[2, 3, 4])],
    "tree": [Seq([1], start=6, draft=[2, 3, 4, 5, 6], parents=[-1, -1, 0, 0, 2])],
    "tree after a chunk": [Seq(range(5), start=3, draft=[2, 3, 4], parents=[-1, -1, 1])],
    "several": [
        Seq([1], start=20),
        Seq(range(6)),
        Seq([1], start=2, draft=[2, 3, 4], parents=[-1, 0, 0]),
        Seq([1], start=9, draft=[2, 3]),
    ],
}


def make(seqs, num_heads, num_kv_heads, num_padding=0, head_dim=8, num_blocks=16):
    random = torch.Generator().manual_seed(3)
    ids_T, attn = pack(seqs, tables(len(seqs), num_blocks), num_padding=num_padding)
    num_slots = attn.table_SB.numel() * BLOCK_SIZE
    q_TNH = torch.randn(len(ids_T), num_heads, head_dim, generator=random)
    k_CMH, v_CMH = (torch.randn(num_slots, num_kv_heads, head_dim, generator=random) for _ in "kv")
    return q_TNH, k_CMH, v_CMH, attn


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 100, -4])
def test_torch_path_is_the_reference(step, heads, window):
    q_TNH, k_CMH, v_CMH, attn = make(STEPS[step], *heads)
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, 0.3, window)
    torch.testing.assert_close(
        attention(q_TNH, k_CMH, v_CMH, attn, 0.3, window), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("window", [None, 4, -5])
def test_caps_and_sinks_are_those_of_the_reference(window):
    q_TNH, k_CMH, v_CMH, attn = make(STEPS["several"], 4, 2, num_padding=1)
    more = (0.7, window, 1.5, torch.tensor([-2.0, 0.5, 9.0, -90.0]))
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, *more)
    plain = attention_ref(q_TNH, k_CMH, v_CMH, attn, 0.7, window)
    assert (plain - expected).abs().max() > 0.1
    paths = [attention, attention_by_token, *([attend] if can_attend(8) else [])]
    for path in paths:
        got = path(q_TNH, k_CMH, v_CMH, attn, *more)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("step", ["tree after a chunk", "several", "long"])
@pytest.mark.parametrize("head_dim", [8, 48, 272])
def test_codes_are_read_as_the_reference_reads_them(dtype, step, head_dim):
    """Some heads are a thousand times as large as others: their scales are apart."""
    long = [Seq([1], start=300, draft=[2, 3, 4], parents=[-1, 0, 0]), Seq(range(40), start=100)]
    q_TNH, k_CMH, v_CMH, attn = make(STEPS.get(step, long), 6, 2, 1, head_dim, num_blocks=80)
    random = torch.Generator().manual_seed(1)
    sizes_CM1 = 10 ** (3 * torch.rand(*k_CMH.shape[:2], 1, generator=random) - 2)
    (k_CMH, k_CM1), (v_CMH, v_CM1) = codes_ref(k_CMH, dtype), codes_ref(v_CMH * sizes_CM1, dtype)
    more = (0.3, 150, 9.0, torch.full((6,), 0.5))
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, *more, scales=(k_CM1, v_CM1))
    paths = [attention, attention_by_token]
    paths += [attend] if can_attend(head_dim, has_scales=True) else []
    for path in paths:
        got = path(q_TNH, k_CMH, v_CMH, attn, *more, scales=(k_CM1, v_CM1))
        error = (got - expected).norm() / expected.norm()
        # Where a CPU computes in half floats, it does so for heads up to 256.
        assert error < (2e-3 if path is attend and head_dim <= 256 else 1e-5), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", ["several", "long"])
@pytest.mark.parametrize("window", [None, 4])
def test_scores_fall_with_the_distance(window, step, dtype):
    long = [Seq([1], start=90, draft=[2, 3, 4], parents=[-1, 0, 0]), Seq(range(40), start=80)]
    q_TNH, k_CMH, v_CMH, attn = make(STEPS.get(step, long), 4, 2, num_padding=1, num_blocks=40)
    k_CMH, v_CMH = k_CMH.to(dtype), v_CMH.to(dtype)
    slopes = Alibi(slopes=(0.5, 0.1, 0.3, 0.02)).table(slice(0, 4), 0.7, 160)
    more = (0.7, window, 0.0, None, slopes)
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, *more)
    assert (attention_ref(q_TNH, k_CMH, v_CMH, attn, *more[:2]) - expected).abs().max() > 0.1
    for path in [attention_by_token, *([attend] if can_attend(8) else [])]:
        got = path(q_TNH, k_CMH, v_CMH, attn, *more)
        live = attn.slot_T >= 0
        torch.testing.assert_close(got[live], expected[live], atol=2e-5, rtol=2e-5)


def test_a_token_reads_the_same_bits_alone_where_scores_fall_with_the_distance():
    if not can_attend(8):
        pytest.skip("needs native kernels")
    q_TNH, k_CMH, v_CMH, attn = make([Seq(range(40), start=80)], 4, 2, num_blocks=40)
    slopes = Alibi(slopes=(0.5, 0.1, 0.3, 0.02)).table(slice(0, 4), 0.7, 160)
    together = attend(q_TNH, k_CMH, v_CMH, attn, 0.7, None, alibi_NL=slopes)
    _, one = pack([Seq([1], start=100)], attn.table_SB)
    alone = attend(q_TNH[20:21], k_CMH, v_CMH, one, 0.7, None, alibi_NL=slopes)
    assert torch.equal(alone[0], together[20])


@pytest.mark.parametrize("step", STEPS)
def test_spans_are_found_where_the_host_was_not_told(step):
    q_TNH, k_CMH, v_CMH, attn = make(STEPS[step], 4, 2, num_padding=2)
    told = attention(q_TNH, k_CMH, v_CMH, attn, 0.3)
    untold = attention(q_TNH, k_CMH, v_CMH, replace(attn, spans=(), memo={}), 0.3)
    torch.testing.assert_close(untold, told, atol=1e-6, rtol=1e-6)


def test_padding_reads_nothing():
    q_TNH, k_CMH, v_CMH, attn = make(STEPS["several"], 4, 2, num_padding=3)
    out_TNH = attention(q_TNH, k_CMH, v_CMH, attn, 0.3)
    assert (out_TNH[-3:] == 0).all()
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, 0.3)
    torch.testing.assert_close(out_TNH, expected, atol=1e-5, rtol=1e-5)


def test_ancestors_may_come_from_earlier_steps():
    """A drafter grows its tree level by level: the pack then holds only the newest nodes."""
    seqs = [Seq([1], start=6, draft=[2, 3, 4, 5, 6], parents=[-1, -1, 0, 1, 2])]
    q_TNH, k_CMH, v_CMH, attn = make(seqs, 4, 2)
    level = slice(3, 6)  # nodes 2 to 4
    part = replace(
        attn,
        pos_T=attn.pos_T[level],
        slot_T=attn.slot_T[level],
        seq_T=attn.seq_T[level],
        base_T=attn.base_T[level],
        tree_TP=attn.tree_TP[level],
        spans=(replace(attn.spans[0], first=0, last=3, start=7, num_known=0),),
        memo={},
    )
    expected = attention_ref(q_TNH, k_CMH, v_CMH, attn, 0.3)[level]
    torch.testing.assert_close(
        attention(q_TNH[level], k_CMH, v_CMH, part, 0.3), expected, atol=1e-5, rtol=1e-5
    )


def test_contiguous_blocks_are_read_in_place():
    """Slots that lie in a row give what scattered ones give."""
    seqs = [Seq([1], start=14)]
    q_TNH, k_CMH, v_CMH, attn = make(seqs, 4, 2)
    in_row = replace(attn, table_SB=torch.arange(16)[None], memo={})
    expected = attention_ref(q_TNH, k_CMH, v_CMH, in_row, 0.3)
    torch.testing.assert_close(
        attention(q_TNH, k_CMH, v_CMH, in_row, 0.3), expected, atol=1e-5, rtol=1e-5
    )

"""The Triton kernels against their references: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cases import every_pair
from gpu_inputs import DEVICE, close, packed, rand
from hunch.kernels import (
    gpu_activation,
    gpu_attention,
    gpu_fused,
    gpu_gemm,
    gpu_inputs,
    gpu_join,
    gpu_launch,
    gpu_tiling,
)
from hunch.kernels.activation import ACTIVATIONS, gated_ref
from hunch.kernels.attention import attention_ref
from hunch.kernels.slices import split_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 40, 96), (17, 33, 80), (70, 64, 64)])
def test_gemm_adds_bias_and_residual(m: int, n: int, k: int) -> None:
    x, w, bias, residual = rand(m, k), rand(n, k), rand(n), rand(m, n, seed=1)
    y = torch.full((m, n), float("nan"), device=DEVICE)
    gpu_gemm.gemm(x, w, y, bias, residual)
    close(y, gpu_gemm.gemm_ref(x, w, bias) + residual)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 24, 400), (130, 72, 576), (5, 70, 1000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_slices_of_k_add_up_in_one_program_as_in_many(
    m: int, n: int, k: int, has_bias: bool
) -> None:
    x, w, bias = rand(m, k), rand(n, k), rand(n) if has_bias else None
    split = split_of(n, k)
    assert split > 1
    parts = torch.full((split, m, n), float("nan"), device=DEVICE)
    whole = torch.full((1, m, n), float("nan"), device=DEVICE)
    gpu_gemm.gemm_parts(x, w, parts, bias)
    gpu_gemm.gemm_parts(x, w, whole, bias)
    close(parts.sum(0), gpu_gemm.gemm_ref(x, w, bias))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(total, whole[0])


def test_gated_product() -> None:
    x, w = rand(3, 64), rand(80, 64, scale=0.1)
    y = torch.full((3, 40), float("nan"), device=DEVICE)
    gpu_gemm.gemm_gated(x, w, y)
    close(y, gpu_gemm.gated_ref(x, w))


@pytest.mark.parametrize("m", [64, 100, 130])
def test_bulk_copies_change_no_sum(m: int, monkeypatch) -> None:
    """Tiles that bulk copies bring, and tiles whose numbers are read one by one."""
    n, k = 72, 576
    x, w, bias = (rand(*size).to(torch.float16) for size in ((m, k), (2 * n, k), (2 * n,)))
    split = split_of(n, k)
    assert split > 1
    found = []
    for least in (k, k + 1):
        monkeypatch.setattr(gpu_gemm, "BULK_K", least)
        monkeypatch.setattr(gpu_gemm, "LONG_K", least)
        assert gpu_gemm.has_bulk(m, w) == (least == k)
        y, parts, whole, gated = (
            torch.full((*size, n), float("nan"), device=DEVICE, dtype=dtype)
            for size, dtype in (
                ((m,), torch.float16),
                ((split, m), torch.float32),
                ((1, m), torch.float32),
                ((m,), torch.float16),
            )
        )
        gpu_gemm.gemm(x, w[:n], y, bias[:n])
        gpu_gemm.gemm_parts(x, w[:n], parts, bias[:n])
        gpu_gemm.gemm_parts(x, w[:n], whole, bias[:n])
        gpu_gemm.gemm_gated(x, w, gated, bias)
        found.append((y, parts, whole, gated))
    for bulk, plain in zip(*found, strict=True):
        if torch.device(DEVICE).type == "cuda":
            assert torch.equal(bulk, plain)
        else:  # the interpreter's sums depend on their tiles
            close(bulk.float(), plain.double(), 2e-3)


@pytest.mark.parametrize(("heads", "kv", "head"), [(3, 1, 32), (4, 2, 16), (2, 1, 24), (1, 1, 80)])
def test_projection_rotates_and_writes_slots(heads: int, kv: int, head: int) -> None:
    x, w, bias = rand(4, 64), rand((heads + 2 * kv) * head, 64, scale=0.1), rand(6 * 48)
    bias = bias[: w.shape[0]]
    pos = torch.tensor([7, 0, 3, 9], device=DEVICE)
    slot = torch.tensor([5, 2, -1, 0], device=DEVICE)
    angle = rand(16, head // 2)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    q = torch.full((4, heads * head), float("nan"), device=DEVICE)
    cache = [rand(8, kv, head, seed=s) for s in (1, 2)]
    want = [c.clone() for c in cache]
    gpu_gemm.gemm_rope(x, w, q, *cache, pos, slot, table, bias)
    qkv = gpu_gemm.gemm_ref(x, w, bias)
    want_q = gpu_fused.rope_kv_ref(qkv, *want, pos, slot, table)
    close(q, want_q.flatten(1))
    for got, ref in zip(cache, want, strict=True):
        close(got, ref)


@pytest.mark.parametrize("has_norms", [True, False])
def test_rope_after_a_product(has_norms: bool) -> None:
    heads, kv, head = 3, 1, 24
    qkv = rand(4, (heads + 2 * kv) * head)
    pos = torch.tensor([7, 0, 3, 9], device=DEVICE)
    slot = torch.tensor([5, 2, -1, 0], device=DEVICE)
    angle = rand(16, head // 2)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    norms = (rand(head, seed=3), rand(head, seed=4))
    norms = norms if has_norms else None
    q = torch.full((4, heads, head), float("nan"), device=DEVICE)
    cache = [rand(8, kv, head, seed=s) for s in (1, 2)]
    want = [c.clone() for c in cache]
    gpu_fused.rope_kv(qkv, q, *cache, pos, slot, table, norms)
    close(q, gpu_fused.rope_kv_ref(qkv, *want, pos, slot, table, norms))
    for got, ref in zip(cache, want, strict=True):
        close(got, ref)
    parts = rand(3, 6, qkv.shape[1], seed=5)[:, :4]  # rows past the tokens are padding
    gpu_fused.rope_kv(parts, q, *cache, pos, slot, table, norms)
    close(q, gpu_fused.rope_kv_ref(parts.sum(0), *want, pos, slot, table, norms))
    close(cache[0], want[0])


@pytest.mark.parametrize("is_reader", [True, False])
def test_heads_of_v_are_normed_and_readers_write_nothing(is_reader: bool) -> None:
    heads, kv, head = 3, 1, 24
    qkv = rand(4, (heads if is_reader else heads + 2 * kv) * head)
    pos, slot = (torch.tensor(some, device=DEVICE) for some in ([7, 0, 3, 9], [5, 2, -1, 0]))
    angle = rand(16, head // 2)
    turn = (torch.cat([angle.cos(), angle.sin()], -1), (rand(head, seed=3), rand(head, seed=4)))
    how = {"is_v_normed": not is_reader, "is_reader": is_reader}
    q = torch.full((4, heads, head), float("nan"), device=DEVICE)
    cache = [rand(8, kv, head, seed=s) for s in (1, 2)]
    want = [c.clone() for c in cache]
    gpu_fused.rope_kv(qkv, q, *cache, pos, slot, *turn, **how)
    close(q, gpu_fused.rope_kv_ref(qkv, *want, pos, slot, *turn, **how))
    for got, ref in zip(cache, want, strict=True):
        close(got, ref)


def test_what_a_table_tells_layers() -> None:
    size, ids = 24, torch.tensor([8, 0, 8], device=DEVICE)
    seen, table, weight = rand(4, 2 * size), rand(9, 2 * size, seed=1), rand(size, seed=2)
    how = {"table_scale": 3.0, "project_scale": 0.2, "scale": 0.7}
    want = gpu_inputs.make_inputs_ref(seen[:3], table, ids, weight, 1e-5, **how)
    gpu_inputs.make_inputs(seen, table, ids, weight, 1e-5, **how)
    close(seen[:3], want)
    asked, given = rand(4, size, seed=3), seen[:3, size:]
    want = gpu_inputs.take_inputs_ref(asked[:3], given, "gelu_tanh")
    gpu_inputs.take_inputs(asked, given, "gelu_tanh")
    close(asked[:3], want)


def test_branches_that_are_normed_apart() -> None:
    mlp, answer = rand(2, 3, 40), rand(3, 3, 40, seed=1)
    norms = rand(40, seed=2), rand(40, seed=3)
    got = gpu_inputs.add_branches(mlp, answer, norms, 1e-5)
    close(got[0], gpu_inputs.add_branches_ref(mlp, answer, norms, 1e-5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_norms", [True, False])
def test_keys_and_values_of_any_size_have_codes(has_norms: bool, dtype: torch.dtype) -> None:
    heads, kv, head = 2, 2, 16
    qkv = rand(3, (heads + 2 * kv) * head) * torch.tensor([[1e-6], [1.0], [3e4]], device=DEVICE)
    pos, slot = (torch.tensor(some, device=DEVICE) for some in ([0, 5, 2], [3, -1, 1]))
    norms = (rand(head, seed=3), rand(head, seed=4)) if has_norms else None
    q = torch.empty(3, heads, head, device=DEVICE)
    cache, want = (
        [torch.zeros(4, kv, head, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in "ab"
    )
    scales, of_want = ([torch.zeros(4, kv, 1, device=DEVICE) for _ in "kv"] for _ in "ab")
    gpu_fused.rope_kv(qkv, q, *cache, pos, slot, None, norms, scales=tuple(scales))
    gpu_fused.rope_kv_ref(qkv, *want, pos, slot, None, norms, scales=tuple(of_want))
    for which in range(2):
        close(scales[which], of_want[which])
        got, ref = cache[which].float() * scales[which], want[which].float() * of_want[which]
        # A tie may be rounded to either side.
        assert (got - ref).norm() <= (1e-3 if dtype == torch.int8 else 0.03) * ref.norm()
    for token in (0, 2):
        exact = qkv[token, -kv * head :].view(kv, head)
        held = cache[1][slot[token]].float() * scales[1][slot[token]]
        assert (held - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("is_indexed", [False, True])
def test_add_norm(num_parts: int, is_indexed: bool) -> None:
    x, weight = rand(5, 100), rand(100)
    parts = rand(num_parts, 5, 100, seed=2) if num_parts else None
    index = torch.tensor([4, 0, 4], device=DEVICE) if is_indexed else None
    num_rows = 3 if is_indexed else 5
    y, total = (torch.full((num_rows, 100), float("nan"), device=DEVICE) for _ in range(2))
    gpu_fused.add_norm(x, weight, 1e-5, y, sum_TD=total, parts_SVD=parts, index_T=index)
    want_total, want = gpu_fused.add_norm_ref(x, weight, 1e-5, parts, index)
    close(total, want_total)
    close(y, want)


@pytest.mark.skipif(DEVICE == "cuda", reason="it takes no memory on a CPU alone")
def test_slices_of_very_many_tokens(tmp_path: Path) -> None:
    """Slices that are so far apart that 32 bits do not count the numbers between the first and the
    last; in a file that is nearly all holes."""
    num_parts, stride = 5, 2**30
    num_bytes = 4 * ((num_parts - 1) * stride + 100)
    memory = torch.UntypedStorage.from_file(str(tmp_path / "slices"), shared=True, nbytes=num_bytes)
    size, strides = (num_parts, 1, 100), (stride, 100, 1)
    far = torch.empty(0).set_(memory, 0, size, strides)
    parts = rand(num_parts, 1, 100, seed=2)
    far.copy_(parts)
    x, weight = rand(1, 100), rand(100)
    y, total = (torch.full((1, 100), float("nan")) for _ in range(2))
    gpu_fused.add_norm(x, weight, 1e-5, y, sum_TD=total, parts_SVD=far)
    want_total, want = gpu_fused.add_norm_ref(x, weight, 1e-5, parts)
    close(total, want_total)
    close(y, want)


@pytest.mark.skipif(DEVICE == "cuda", reason="it takes no memory on a CPU alone")
def test_rows_of_very_many_numbers(tmp_path: Path) -> None:
    """The same for the rows of a product."""
    m, stride = 5, 2**30
    num_bytes = 4 * (stride * m + 64)
    memory = torch.UntypedStorage.from_file(str(tmp_path / "rows"), shared=True, nbytes=num_bytes)
    far = torch.empty(0).set_(memory, 0, (m, 64), (stride, 1))
    x, w = rand(m, 64), rand(16, 64)
    far.copy_(x)
    y = torch.full((m, 16), float("nan"))
    gpu_gemm.gemm(far, w, y)
    close(y, gpu_gemm.gemm_ref(x, w))


@pytest.mark.parametrize("is_state_first", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_join(is_state_first: bool, has_norms: bool, is_masked: bool) -> None:
    table, state = rand(9, 100), rand(4, 100)
    ids = torch.tensor([8, 0, 8, 3], device=DEVICE)
    norms = (rand(100, seed=1), rand(100, seed=2)) if has_norms else None
    pos = torch.tensor([5, 0, 1, 0], device=DEVICE) if is_masked else None
    y, normed = (torch.full((4, width), float("nan"), device=DEVICE) for width in (200, 100))
    how = {"is_state_first": is_state_first, "pos_T": pos}
    gpu_join.join(table, ids, state, norms, 1e-5, y, normed_TD=normed, **how)
    want = gpu_join.join_ref(table, ids, state, norms, 1e-5, **how)
    close(y, want)
    close(normed, want[:, :100] if is_state_first else want[:, 100:])


@pytest.mark.parametrize("is_centred", [False, True])
def test_add_norm_with_branches_scales_and_places(is_centred: bool) -> None:
    x, parts, table = rand(9, 100), rand(3, 9, 100, seed=1), rand(7, 100, seed=2)
    norms = [
        gpu_fused.RowNorm(
            rand(100, seed=s), rand(100, seed=s + 1) if is_centred else None, is_centred
        )
        for s in (3, 5)
    ]
    places = gpu_fused.Places(table, torch.tensor([6, 0, 3, 3, 1, 2, 5, 4, 0], device=DEVICE))
    how = {"branch": norms[1], "part_scale": 0.3, "row_scale": 2.5, "places": places}
    how["sum_scale"] = 0.6
    y, total = (torch.full((9, 100), float("nan"), device=DEVICE) for _ in range(2))
    gpu_fused.add_norm(x, norms[0], 1e-5, y, sum_TD=total, parts_SVD=parts, **how)
    want_total, want = gpu_fused.add_norm_ref(x, norms[0], 1e-5, parts, **how)
    close(total, want_total)
    close(y, want)


@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "gelu_tanh", "clipped"])
def test_activations(name: str) -> None:
    x, y = 4 * rand(3, 1100), torch.empty(3, 550, device=DEVICE)
    gpu_activation.activated(x, y, 3, name)
    close(y, gated_ref(x, name))
    if name != "clipped":
        gpu_activation.activated(y, y, 3, name, is_gated=False)
        close(y, ACTIVATIONS[name](gated_ref(x, name)))


@pytest.mark.parametrize(
    ("programs", "block_tokens", "window", "tree"),
    every_pair([1, 3, 8], [1, 4], [None, 70, -100], [None, [-1, 0, 0, 1]]),
)
def test_attention(
    programs: int, block_tokens: int, window: int | None, tree: list[int] | None
) -> None:
    heads, kv, head = 6, 2, 24
    attn = packed([150, 1], [2, 1], tree)
    num_tokens = len(attn.pos_T)
    num_slots = int(attn.table_SB.max() + 1) * 16
    q, k, v = (rand(n, h, head) for n, h in ((num_tokens, heads), (num_slots, kv), (num_slots, kv)))
    out = torch.full_like(q, float("nan"))
    tiles = None
    if block_tokens > 1:
        tiles = gpu_tiling.tiles_of(attn.spans, block_tokens, 10).to(DEVICE)
    space = gpu_tiling.Workspace.create(num_tokens, heads, head, 512, DEVICE)
    tiling = gpu_tiling.Tiling(tiles, block_tokens, programs, space)
    gpu_attention.attention(q, k, v, attn, 0.2, out, window=window, tiling=tiling)
    close(out, attention_ref(q, k, v, attn, 0.2, window))
    assert not space.count.any()


@pytest.mark.parametrize(("heads", "block"), [(6, 4), (2, 16)])  # with two that have keys
@pytest.mark.parametrize("length", [5, 126, 190, 255, 300])  # trees before and across a split
def test_a_program_for_each_token_with_keys_of_its_own_changes_no_bit(
    length: int, heads: int, block: int
) -> None:
    attn = packed([length], [1], [-1, 0, 0, 1, 2, -1])
    num_tokens, num_slots = len(attn.pos_T), int(attn.table_SB.max() + 1) * 16
    q, k, v = (rand(n, h, 32) for n, h in ((num_tokens, heads), (num_slots, 2), (num_slots, 2)))
    space = gpu_tiling.Workspace.create(num_tokens, heads, 32, 512, DEVICE)
    alone = torch.full_like(q, float("nan"))
    gpu_attention.attention(q, k, v, attn, 0.2, alone)
    close(alone, attention_ref(q, k, v, attn, 0.2, None))
    tiles = gpu_tiling.tiles_of(attn.spans, block).to(DEVICE)
    for programs in (1, 4, 8):  # of one token after the other, and of all at once
        out = torch.full_like(q, float("nan"))
        tiling = gpu_tiling.Tiling(tiles, block, programs, space)
        gpu_attention.attention(q, k, v, attn, 0.2, out, tiling=tiling)
        assert out.equal(alone)


def test_tiles_fill_the_rows_of_one_product() -> None:
    """Tokens of a tile, times the heads that share keys: 16 rows, or 64 for many tokens."""
    for heads, few, many in ((1, 16, 64), (2, 8, 32), (4, 4, 16), (6, 2, 8), (32, 1, 4)):
        tiler = gpu_tiling.Tiler.create(heads, 1, 64, 512, torch.device("cpu"), 1 << 20)
        assert (tiler.block(64), tiler.block(65)) == (few, many)


@pytest.mark.parametrize("programs", [1, 2])
def test_attention_with_caps_and_sinks(programs: int) -> None:
    attn = packed([140, 3], [2, 1], [-1, 0] if programs == 1 else None)
    num_tokens, num_slots = len(attn.pos_T), int(attn.table_SB.max() + 1) * 16
    q, k, v = (rand(n, h, 16) for n, h in ((num_tokens, 2), (num_slots, 1), (num_slots, 1)))
    sinks = torch.tensor([0.7, -3.0], device=DEVICE)
    out = torch.full_like(q, float("nan"))
    space = gpu_tiling.Workspace.create(num_tokens, 2, 16, 512, DEVICE)
    tiling = gpu_tiling.Tiling(None, 1, programs, space)
    gpu_attention.attention(q, k, v, attn, 0.9, out, cap=1.5, sinks_N=sinks, tiling=tiling)
    close(out, attention_ref(q, k, v, attn, 0.9, None, 1.5, sinks))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (5, 1, 80)])
@pytest.mark.parametrize("tree", [None, [-1, 0, -1]])
@pytest.mark.parametrize("programs", [1, 32])
def test_attention_over_a_long_context(
    heads: tuple[int, int, int], tree: list[int] | None, programs: int
) -> None:
    num_heads, kv, head = heads
    attn = packed([32_760, 17], [2, 3], tree)
    num_tokens = len(attn.pos_T)
    num_slots = int(attn.table_SB.max() + 1) * 16
    q = rand(num_tokens, num_heads, head)
    k, v = rand(num_slots, kv, head), rand(num_slots, kv, head)
    out = torch.full_like(q, float("nan"))
    tiles = gpu_tiling.tiles_of(attn.spans, 4).to(DEVICE)
    space = gpu_tiling.Workspace.create(num_tokens, num_heads, head, 32_768, DEVICE)
    tiling = gpu_tiling.Tiling(tiles, 4, programs, space)
    gpu_attention.attention(q, k, v, attn, 0.1, out, tiling=tiling)
    close(out, attention_ref(q, k, v, attn, 0.1, None))
    assert not space.count.any()


@pytest.mark.parametrize(
    ("kilobytes", "stages"),
    [(227, {1: 1, 2: 2, 4: 4, 6: 6}), (163, {1: 1, 3: 2, 4: 2, 6: 4}), (99, {1: 1, 3: 2, 6: 2})],
)
def test_a_gpu_with_less_shared_memory_holds_fewer_tiles(
    kilobytes: int, stages: dict[int, int], monkeypatch
) -> None:
    monkeypatch.setattr(gpu_launch, "SHARED_BYTES", kilobytes * 1024)
    assert {wanted: gpu_launch.stages_for(wanted) for wanted in stages} == stages

"""The GPU kernels alone: right, the same bits for every batch, and how near the memory wall.

python benchmarks/kernels_gpu.py [check] [small] [stack]      (all without arguments)
"""

# ruff: noqa: B023
from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span, attention_ref
from hunch.kernels.gpu_attention import Tiling, Workspace, attention, programs_for, tiles_of
from hunch.kernels.gpu_fused import add_norm
from hunch.kernels.gpu_gemm import (
    Tile,
    gated_ref,
    gemm,
    gemm_gated,
    gemm_parts,
    gemm_ref,
    gemm_rope,
    num_parts,
)  # fmt: skip
from hunch.kernels.gpu_lookup import lookup
from hunch.kernels.gpu_sampling import argmax, choose
from hunch.kernels.gpu_step import FIRST, RowState, StepRows
from hunch.kernels.slices import split_of
from hunch.layers.rope import RopeSpec
from hunch.models.cuda import CudaDecoder
from hunch.models.decoder import Decoder
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 256, 512)
GEOMETRIES = {  # width, layers, heads, KV heads, head width, FFN, vocabulary
    "7B": (4096, 32, 32, 8, 128, 14336, 49152),
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
}
WALL = 4.45e12  # bytes per second this H200 was measured to read
BF16 = torch.bfloat16
TILES = (Tile(16, 32, 64, 4, 3), Tile(64, 16, 128, 4, 3), Tile(64, 32, 64, 8, 2),
         Tile(128, 32, 64, 8, 3, 8))  # fmt: skip


class DeviceSource(Source):
    """Random weights, made where they are used."""

    def __init__(self) -> None:
        super().__init__(BF16, "cuda")

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(shape, device="cuda", dtype=BF16)
        noise = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        return noise.to(dtype or BF16)


def build(geometry: str, num_layers: int | None = None, vocab: int | None = None) -> Decoder:
    width, layers, heads, kv, head, ffn, vocab_size = GEOMETRIES[geometry]
    layers = num_layers or layers
    spec = ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=vocab or vocab_size, width=width,
        num_layers=layers, num_heads=heads, num_kv_heads=kv, head_dim=head, ffn_width=ffn,
        max_len=8192, rope=RopeSpec(), windows=(None,) * layers, is_tied=geometry == "135M",
    )  # fmt: skip
    torch.manual_seed(0)
    return resolve(MODELS, spec.architecture)(spec, DeviceSource())


# --- timing ---------------------------------------------------------------------------------------


def graph_ms(run: Callable[[], None], repeat: int = 10) -> float:
    """Median milliseconds of one call, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2]


# --- products -------------------------------------------------------------------------------------


def shapes(geometry: str) -> dict[str, tuple[int, int]]:
    width, _, heads, kv, head, ffn, vocab = GEOMETRIES[geometry]
    return {
        "rope": ((heads + 2 * kv) * head, width), "o": (width, heads * head),
        "gated": (2 * ffn, width), "down": (width, ffn), "head": (vocab, width),
    }  # fmt: skip


def product(geometry: str, kind: str, m: int) -> Callable[..., None]:
    """A call of the product with fresh outputs; weights and tile come later."""
    _, _, heads, kv, head, _, _ = GEOMETRIES[geometry]
    n, k = shapes(geometry)[kind]
    torch.manual_seed(0)
    table = torch.randn(1024, head, device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    if kind in ("o", "down"):

        def run(w: Tensor, tile: Tile | None = None, split: int | None = None,
                parts: Tensor | None = None) -> Tensor:  # fmt: skip
            split = split or split_of(n, k)
            size = split if num_parts(m, w) > 1 else 1
            out = parts if parts is not None else torch.empty(size, m, n, device="cuda")
            gemm_parts(x, w, out, tile=tile, split=split)
            return out
    elif kind == "head":

        def run(w: Tensor, tile: Tile | None = None, split: int | None = None) -> Tensor:
            out = torch.empty(m, n, device="cuda")
            gemm(x, w, out, tile=tile)
            return out
    elif kind == "gated":

        def run(w: Tensor, tile: Tile | None = None, split: int | None = None) -> Tensor:
            out = torch.empty(m, n // 2, device="cuda", dtype=BF16)
            gemm_gated(x, w, out, tile=tile)
            return out
    else:
        cache = torch.zeros(2, 1024, kv, head, device="cuda", dtype=BF16)
        pos = torch.arange(m, device="cuda")

        def run(w: Tensor, tile: Tile | None = None, split: int | None = None) -> Tensor:
            out = torch.empty(m, heads * head, device="cuda", dtype=BF16)
            gemm_rope(x, w, out, cache[0], cache[1], pos, pos, table, tile=tile)
            return out

    run.x = x
    return run


# --- checks ---------------------------------------------------------------------------------------


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_products() -> None:
    print("\nproducts: relative error against float64; rows whose bits change with M or tile")
    for geometry in GEOMETRIES:
        for kind, (n, k) in shapes(geometry).items():
            w = torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5
            run = product(geometry, kind, 512)
            x = run.x
            whole = _merged(run(w))
            bad = 0
            for m in ROWS:
                some = product(geometry, kind, m)
                some.x.copy_(x[:m])
                for tile in (None, *TILES):
                    bad += not torch.equal(_merged(some(w, tile)), whole[:m])
            err = float("nan")
            if kind == "gated":
                err = error(whole, gated_ref(x, w))
            elif kind != "rope":
                err = error(whole, gemm_ref(x, w))
            print(f"{geometry:5} {kind:6} error {err:.1e}  changed {bad}")


def _merged(y: Tensor) -> Tensor:
    if y.dim() == 2:
        return y
    total = y[0].clone()
    for part in y[1:]:
        total += part
    return total


def paged(lengths: list[int], news: list[int], device: str = "cuda") -> AttnInputs:
    """Sequences of `lengths` positions, the last `news` of each packed."""
    block = 16
    counts = [n // block + 2 for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    pos, slot, seq, spans, at = [], [], [], [], 0
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        table[s, : counts[s]] = order[at : at + counts[s]]
        at += counts[s]
        p = torch.arange(length - new, length)
        spans.append(Span(len(seq), len(seq) + new, s, length - new, new))
        pos.append(p)
        slot.append(table[s, p // block] * block + p % block)
        seq += [s] * new
    pos_T = torch.cat(pos).to(device)
    return AttnInputs(pos_T, torch.cat(slot).to(device), torch.tensor(seq, device=device),
                      table.to(device), pos_T + 1, None, block, tuple(spans))  # fmt: skip


def as_tree(attn: AttnInputs, new: int) -> AttnInputs:
    """The same step, the first sequence's last tokens as drafted nodes found by their slots."""
    depth = min(new, 5)
    base_T = attn.base_T.clone()
    base_T[new - depth : new] = attn.pos_T[new - depth]
    tree_TP = torch.zeros(len(base_T), depth, dtype=torch.int64, device=base_T.device)
    tree_TP[new - depth : new] = attn.slot_T[new - depth : new]  # below the diagonal is not read
    return AttnInputs(attn.pos_T, attn.slot_T, attn.seq_T, attn.table_SB, base_T, tree_TP, 16)


HEADS = ((32, 8, 128), (9, 3, 64), (5, 5, 80))


def check_attention(cases: tuple = HEADS, lengths: tuple = (1, 63, 300, 2500, 32768)) -> None:
    print("\nattention: error against float64; rows whose bits change with the tiling")
    for heads, kv, head in cases:
        for length in lengths:
            new = min(length, 200)
            attn = paged([length, 40], [new, 3])
            num_tokens = new + 3
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(num_tokens, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            space = Workspace.create(num_tokens, heads, head, length + 40, "cuda")
            outs = []
            for block, programs, warps in ((1, 1, 2), (1, 16, 8), (1, 4, 4), (4, 1, 2), (4, 3, 8),
                                           (16, 1, 0), (16, 1, 8), (32, 1, 0)):  # fmt: skip
                out = torch.full_like(q, float("nan"))
                tiles = None if block == 1 else tiles_of(attn.spans, block).cuda()
                tiling = Tiling(tiles, block, programs, space, warps)
                attention(q, k, v, attn, head**-0.5, out, tiling=tiling)
                outs.append(out)
            out = torch.full_like(q, float("nan"))
            attention(q, k, v, as_tree(attn, new), head**-0.5, out, tiling=tiling)
            outs.append(out)
            some = torch.tensor([0, new // 2, new - 1, num_tokens - 1])
            small = AttnInputs(attn.pos_T[some], attn.slot_T[some], attn.seq_T[some], attn.table_SB,
                               attn.base_T[some], None, 16)  # fmt: skip
            want = attention_ref(q[some].double(), k, v, small, head**-0.5)
            bad = [int((o != outs[0]).flatten(1).any(1).sum()) for o in outs]
            err = error(outs[0][some], want)
            print(f"{heads}/{kv}x{head} {length:6} error {err:.1e} changed {bad}")


def check_decoder() -> None:
    print("\ndecoder: one prefill against token by token, bits; against torch, error")
    for geometry in GEOMETRIES:
        decoder = build(geometry, 3, 8192)
        fast = CudaDecoder(decoder)
        length = 150
        ids = torch.randint(0, 8192, (length,), device="cuda")
        kv = fast.new_kv(16 * 32)
        whole = fast.forward(ids, paged([length], [length]), kv, (0, 1, 3))
        logits = fast.logits(whole.last_TD)
        kv = fast.new_kv(16 * 32)
        bad, first = 0, 100
        full = paged([length], [length])
        chunk = AttnInputs(full.pos_T[:first], full.slot_T[:first], full.seq_T[:first],
                           full.table_SB, full.base_T[:first], None, 16,
                           (Span(0, first, 0, 0, first),))  # fmt: skip
        got = fast.forward(ids[:first], chunk, kv)
        bad += int((got.last_TD != whole.last_TD[:first]).any(1).sum())
        for t in range(first, length):
            one = AttnInputs(full.pos_T[t : t + 1], full.slot_T[t : t + 1], full.seq_T[t : t + 1],
                             full.table_SB, full.base_T[t : t + 1], None, 16,
                             (Span(0, 1, 0, t, 1),))  # fmt: skip
            got = fast.forward(ids[t : t + 1], one, kv, (1,))
            bad += not torch.equal(fast.logits(got.last_TD), logits[t : t + 1])
            bad += not torch.equal(got.features[0], whole.features[1][t : t + 1])
        slow = decoder.forward(ids, paged([length], [length]), decoder.new_kv(16 * 32), (0, 1, 3))
        errors = [error(a, b) for a, b in zip(whole.features, slow.features, strict=True)]
        err = error(logits, decoder.logits(slow.last_TD))
        print(f"{geometry:5} changed {bad}; error {err:.1e}, after layers 0, 1 and 3 {errors}")


# --- the rest of a layer and of a step ------------------------------------------------------------


def small() -> None:
    print("\nmicroseconds per call, 30 in a row")

    def each(name: str, run: Callable[[], object]) -> None:
        us = graph_ms(lambda: [run() for _ in range(30)]) / 30 * 1000
        print(f"  {name:44} {us:7.1f}")

    for geometry, (width, _, heads, kv, head, ffn, _) in GEOMETRIES.items():
        for m in (1, 64):
            x = torch.randn(m, width, device="cuda", dtype=BF16)
            parts = torch.randn(split_of(width, ffn), m, width, device="cuda")
            each(
                f"{geometry} add_norm {m} rows",
                lambda: add_norm(x, x[0], 1e-5, torch.empty_like(x), sum_TD=x, parts_SVD=parts),
            )
        for m, context in (
            (1, 100),
            (1, 300),
            (1, 1000),
            (1, 8000),
            (8, 300),
            (64, 300),
            (64, 1000),
        ):
            attn = paged([context] * m, [1] * m)
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            space = Workspace.create(32, heads, head, 8192, "cuda")
            for programs in sorted({1, programs_for(m, kv, 8192) if m <= 32 else 1}):
                tiling = Tiling(None, 1, programs, space)
                each(
                    f"{geometry} attention {m} x {context}, {programs} programs",
                    lambda: attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling),
                )
        for m, block in ((6, 4), (64, 4), (64, 16), (512, 16), (512, 32)):
            attn = paged([1000 + m], [m])
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            tiles = tiles_of(attn.spans, block).cuda()
            for programs in (1, 8) if m <= 32 else (1,):
                tiling = Tiling(
                    tiles, block, programs, Workspace.create(32, heads, head, 8192, "cuda")
                )
                each(
                    f"{geometry} attention {m} new of 1000, tiles of {block}, {programs} programs",
                    lambda: attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling),
                )
    for m in (1, 64, 256):
        logits = torch.randn(m, 49152, device="cuda") * 3
        row = torch.arange(m, device="cuda")
        f, d = (
            torch.ones(m, device="cuda"),
            torch.full((m,), 0.9, device="cuda", dtype=torch.float64),
        )
        top_k, no_min = torch.full_like(row, 50), torch.full_like(f, -torch.inf)
        each(f"argmax {m} rows", lambda: argmax(logits))
        each(
            f"sample {m} rows",
            lambda: choose(logits, row, row, f, row, d, f, row, row, is_filtered=False),
        )
        each(
            f"sample {m} rows, top-k 50, top-p 0.9",
            lambda: choose(logits, row, row, f, top_k, d, no_min, row, row),
        )
        each(
            f"sample {m} rows, top-p 0.9",
            lambda: choose(logits, row, row, f, row * 0, d, no_min, row, row),
        )
        for known in (500, 8000):
            state, step = looking(m, known)
            each(f"look up {m} rows of {known}", lambda: lookup(state, step, 15, 1, 16))


def looking(num_rows: int, known: int) -> tuple[RowState, StepRows]:
    """Rows of random tokens that a step would draft for."""
    state = RowState.create(num_rows, 8192, 1, 15, 1, 16, "cuda")
    state.tokens_XL.random_(0, 1000)
    state.known_X.fill_(known)
    state.end_X.fill_(8192)
    row = torch.arange(num_rows, device="cuda")
    result_RC = row.new_zeros(num_rows, FIRST + 1 + 15)
    return state, StepRows(row, row * 0, row * 0 + 15, row * 0, row[:, None], result_RC)


# --- a whole pass ---------------------------------------------------------------------------------


def stack(context: int = 300, rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512)) -> None:
    print(f"\nwhole pass in a CUDA graph, context {context}: ms (share of the wall)")
    for geometry in GEOMETRIES:
        decoder = build(geometry)
        fast = CudaDecoder(decoder)
        size = decoder.weight_bytes - (0 if geometry == "135M" else decoder.embedding_VD.nbytes)
        for m in rows:
            kv = fast.new_kv((context // 16 + 2) * 16 * m)
            ids = torch.randint(0, 1000, (m,), device="cuda")
            attn = paged([context] * m, [1] * m)

            def run() -> None:
                fast.logits(fast.forward(ids, attn, kv).last_TD)

            ms = graph_ms(run)
            text = f"{geometry:5} rows {m:<4} {ms:7.3f} ms  {size / WALL / ms * 1e5:5.1f}%"
            if m > 1:  # the same number of rows as nodes of one sequence
                attn = paged([context + m], [m])
                text += f"   one sequence {graph_ms(run):7.3f} ms"
            print(text)


# --- compile in parallel, then run ----------------------------------------------------------------


def compile_job(job: tuple) -> str:
    kind, *rest = job
    try:
        if kind == "product":
            geometry, name, m, tile, split = rest
            n, k = shapes(geometry)[name]
            product(geometry, name, m)(torch.empty(n, k, device="cuda", dtype=BF16), tile, split)
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                kind()
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{job[:4]} {problem!r}"[:300]
    return ""


def warm(jobs: list[tuple]) -> None:
    """Fill Triton's cache with all cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        problems = [problem for problem in pool.map(compile_job, jobs) if problem]
    print(
        f"{len(jobs)} compile jobs, {len(problems)} problems", *problems[:5], sep="\n", flush=True
    )


def main() -> None:
    parts = sys.argv[1:] or ["check", "small", "stack"]
    start = time.time()
    rows = (1, 17, 65, 256)
    jobs: list[tuple] = [(part,) for part in (check_decoder, small)]
    jobs += [(functools.partial(check_attention, (heads,), (300,)),) for heads in HEADS]
    for geometry in GEOMETRIES:
        tiles = (None, *TILES) if "check" in parts else (None,)
        jobs += [("product", geometry, kind, m, tile, None)
                 for kind in shapes(geometry) for m in rows for tile in tiles]  # fmt: skip
    warm(jobs)
    sections = {"check": (check_products, check_attention, check_decoder), "small": (small,),
                "stack": (stack,)}  # fmt: skip
    for part in parts:
        for section in sections[part]:
            section()
        print(f"[{part}: {time.time() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    main()

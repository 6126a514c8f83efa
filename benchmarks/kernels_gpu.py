"""The GPU kernels alone: right, the same bits for every batch, and how near the memory wall.

python benchmarks/kernels_gpu.py [check] [small] [stack] [tune]      (all without arguments)
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span, attention_ref
from hunch.kernels.gpu_attention import Tiling, Workspace, attention, programs_for, tiles_of
from hunch.kernels.gpu_fused import add_norm
from hunch.kernels.gpu_gemm import (
    Tile, gated_ref, gemm, gemm_gated, gemm_parts, gemm_ref, gemm_rope, num_parts, split_of,
)  # fmt: skip
from hunch.kernels.gpu_sampling import argmax, choose
from hunch.kernels.gpu_spec import lookup
from hunch.models.cuda import CudaDecoder
from hunch.models.decoder import Decoder
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.layers.rope import RopeSpec
from hunch.registry import MODELS, resolve

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 256, 512)
GEOMETRIES = {  # width, layers, heads, KV heads, head width, FFN, vocabulary
    "7B": (4096, 32, 32, 8, 128, 14336, 49152),
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
}
SPLITS = {"7B": (2, 4), "135M": (3, 8)}  # of o and down, tried
WALL = 4.45e12  # bytes per second this H200 was measured to read
BF16 = torch.bfloat16


class DeviceSource(Source):
    """Random weights, made where they are used."""

    def __init__(self) -> None:
        super().__init__(BF16, "cuda")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, device="cuda", dtype=BF16)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


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
            size = split if (tile or num_parts(m, n, k) > 1) and m <= 128 else 1
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


def candidates(geometry: str, kind: str, m: int) -> list[Tile]:
    half = 2 if kind in ("rope", "gated") else 1
    if m <= 16 and geometry == "7B":
        return [Tile(16, bn, bk, w, st, pf) for bn in (32, 64) for w, pf in ((4, 0), (4, 8), (8, 0))
                for bk, st in ((128, 5), (256, 4), (512, 3))]  # fmt: skip
    if m <= 16:
        return [Tile(16, bn, bk, w, st, 8) for bn in (16, 32, 64) for w in (2, 4)
                for bk, st in ((64, 6), (64, 10), (128, 5), (256, 3), (512, 2))]  # fmt: skip
    if m <= 64:
        return [Tile(64, bn // half, bk, 4, st, pf) for bn in (32, 64, 128)
                for pf in ((0, 8) if geometry == "7B" else (8,))
                for bk, st in ((64, 4), (64, 6), (128, 4))]  # fmt: skip
    if m <= 128:
        return [Tile(bm, bn // half, bk, w, st, 8) for bm in (64, 128) for bn in (64, 128)
                for bk, st, w in ((64, 5, 4), (64, 4, 8), (128, 3, 8), (128, 3, 4))]  # fmt: skip
    return [Tile(bm, bn // half, 64, w, st) for bm, bn, w, st in (
        (128, 128, 8, 4), (128, 256, 8, 3), (128, 128, 4, 4), (64, 128, 4, 4), (64, 256, 8, 4),
        (128, 64, 4, 5), (256, 128, 8, 3))]  # fmt: skip


def sweep(geometry: str, kind: str, m: int) -> list[tuple[float, Tile | None, int]]:
    """(microseconds, tile, split), best first; the first entry of all is cuBLAS's time."""
    n, k = shapes(geometry)[kind]
    count = max(2, min(64, int(600e6 / (n * k * 2))))
    weights = [torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5 for _ in range(count)]
    run = product(geometry, kind, m)
    x = run.x
    blas = graph_ms(lambda: [x @ w.T for w in weights]) / count * 1000
    rows = []
    splits = SPLITS[geometry] if kind in ("o", "down") else (1,)
    for tile in candidates(geometry, kind, m):
        for split in splits if m <= 128 else splits[:1]:
            if k // split < 128:
                continue
            try:
                ms = graph_ms(lambda: [run(w, tile, split) for w in weights])  # noqa: B023
            except Exception as error:  # a tile that does not fit is a row of the table, no more
                print(geometry, kind, m, tile, split, repr(error)[:90])
                continue
            rows.append((ms / count * 1000, tile, split))
    rows.sort(key=lambda row: row[0])
    return [(blas, None, 0), *rows]


def tune(out: Path | None) -> None:
    best: dict[str, list] = {}
    for geometry in GEOMETRIES:
        print(f"\n{geometry}: us per product (TB/s), best tiles, cuBLAS")
        for kind, (n, k) in shapes(geometry).items():
            for m in (1, 64, 128, 256, 512):
                (blas, _, _), *rows = sweep(geometry, kind, m)
                best[f"{geometry} {kind} {m}"] = [[r[0], str(r[1]), r[2]] for r in rows]
                for us, tile, split in rows[:2]:
                    t = tile
                    print(f"{kind:6} M={m:<4} {us:7.1f} {n * k * 2 / us / 1e6:5.2f} TB/s "
                          f"{2 * m * n * k / us / 1e6:6.1f} TF  bm{t.block_m} bn{t.block_n} bk{t.block_k}"
                          f" w{t.num_warps} s{t.num_stages} pf{t.prefetch} split{split}"
                          f"   cublas {blas:.1f}")  # fmt: skip
    if out:
        (out / "tune.json").write_text(json.dumps(best))


ATTENTION = (  # rows, context (0: new tokens of one sequence after 1000), tokens a tile, programs
    (1, 300, 1, 32), (1, 1000, 1, 32), (64, 300, 1, 1), (64, 1000, 1, 1), (64, 1000, 1, 2),
    (6, 0, 4, 8), (64, 0, 16, 1), (512, 0, 16, 1), (512, 0, 32, 1),
)  # fmt: skip


def tune_attention(geometry: str, case: tuple[int, int, int, int], is_timed: bool = True) -> None:
    """Warps, stages and registers of attention; any of them gives the same bits."""
    _, _, heads, kv, head, _, _ = GEOMETRIES[geometry]
    m, context, block, programs = case
    attn = paged([context] * m, [1] * m) if context else paged([1000 + m], [m])
    slots = int(attn.table_SB.max() + 1) * 16
    q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
    k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
    tiles = None if block == 1 else tiles_of(attn.spans, block).cuda()
    space = Workspace.create(64, heads, head, 8192, "cuda")
    rows = []
    for warps, stages, registers in itertools.product((2, 4, 8), (2, 3, 4), (None, 128)):
        if block > 4 and warps == 2:
            continue
        tiling = Tiling(tiles, block, programs, space, warps, stages, registers)

        def run() -> None:
            attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling)  # noqa: B023

        try:
            us = graph_ms(lambda: [run() for _ in range(20)]) * 50 if is_timed else run()  # noqa: B023
            rows.append((us, warps, stages, registers))
        except Exception as problem:
            print(warps, stages, registers, repr(problem)[:80])
    if is_timed:
        rows.sort(key=lambda row: row[0])
        text = "  ".join(f"{us:.1f}:w{w}s{st}r{r}" for us, w, st, r in rows[:6])
        print(f"{geometry} attention {m} x {context or 1000} block {block} x{programs}: {text}")


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
                for tile in (None, *candidates(geometry, kind, m)[::4]):
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


def check_attention() -> None:
    print("\nattention: error against float64; rows whose bits change with the tiling")
    for heads, kv, head in ((32, 8, 128), (9, 3, 64), (5, 5, 80)):
        for length in (1, 63, 300, 2500, 32768):
            new = min(length, 200)
            attn = paged([length, 40], [new, 3])
            num_tokens = new + 3
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(num_tokens, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            space = Workspace.create(num_tokens, heads, head, length + 40, "cuda")
            outs = []
            for block, programs in ((1, 1), (1, 16), (4, 1), (4, 3), (16, 1), (32, 1)):
                out = torch.full_like(q, float("nan"))
                tiles = None if block == 1 else tiles_of(attn.spans, block).cuda()
                attention(q, k, v, attn, head**-0.5, out, tiling=Tiling(tiles, block, programs, space))
                outs.append(out)
            some = torch.tensor([0, new // 2, new - 1, num_tokens - 1])
            small = AttnInputs(attn.pos_T[some], attn.slot_T[some], attn.seq_T[some], attn.table_SB,
                               attn.base_T[some], None, 16)  # fmt: skip
            want = attention_ref(q[some].double(), k, v, small, head**-0.5)
            bad = [int((o != outs[0]).flatten(1).any(1).sum()) for o in outs]
            print(f"{heads}/{kv}x{head} {length:6} error {error(outs[0][some], want):.1e} changed {bad}")


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
        print(f"{geometry:5} changed {bad}; error {error(logits, decoder.logits(slow.last_TD)):.1e} {errors}")


# --- the rest of a layer and of a step --------------------------------------------------------------


def small() -> None:
    print("\nmicroseconds per call, 30 in a row")

    def each(name: str, run: Callable[[], object]) -> None:
        us = graph_ms(lambda: [run() for _ in range(30)]) / 30 * 1000
        print(f"  {name:44} {us:7.1f}")

    for geometry, (width, _, heads, kv, head, ffn, _) in GEOMETRIES.items():
        for m in (1, 64):
            x = torch.randn(m, width, device="cuda", dtype=BF16)
            parts = torch.randn(num_parts(m, width, ffn), m, width, device="cuda")
            each(f"{geometry} add_norm {m} rows",
                 lambda: add_norm(x, x[0], 1e-5, torch.empty_like(x), sum_TD=x, parts_SVD=parts))  # noqa: B023
        for m, context in ((1, 100), (1, 300), (1, 1000), (1, 8000), (8, 300), (64, 300), (64, 1000)):
            attn = paged([context] * m, [1] * m)
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            space = Workspace.create(32, heads, head, 8192, "cuda")
            for programs in sorted({1, programs_for(m, kv, 8192) if m <= 32 else 1}):
                tiling = Tiling(None, 1, programs, space)
                each(f"{geometry} attention {m} x {context}, {programs} programs",
                     lambda: attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling))  # noqa: B023
        for m, block in ((6, 4), (64, 4), (64, 16), (512, 16), (512, 32)):
            attn = paged([1000 + m], [m])
            slots = int(attn.table_SB.max() + 1) * 16
            q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
            k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
            tiles = tiles_of(attn.spans, block).cuda()
            for programs in (1, 8) if m <= 32 else (1,):
                tiling = Tiling(tiles, block, programs, Workspace.create(32, heads, head, 8192, "cuda"))
                each(f"{geometry} attention {m} new of 1000, tiles of {block}, {programs} programs",
                     lambda: attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling))  # noqa: B023
    for m in (1, 64, 256):
        logits = torch.randn(m, 49152, device="cuda") * 3
        row = torch.arange(m, device="cuda")
        f, d = torch.ones(m, device="cuda"), torch.full((m,), 0.9, device="cuda", dtype=torch.float64)
        top_k, no_min = torch.full_like(row, 50), torch.full_like(f, -torch.inf)
        each(f"argmax {m} rows", lambda: argmax(logits))  # noqa: B023
        each(f"sample {m} rows", lambda: choose(logits, row, row, f, row, d, f, row, row,
                                                is_filtered=False))  # noqa: B023
        each(f"sample {m} rows, top-k 50, top-p 0.9",
             lambda: choose(logits, row, row, f, top_k, d, no_min, row, row))  # noqa: B023
        each(f"sample {m} rows, top-p 0.9",
             lambda: choose(logits, row, row, f, row * 0, d, no_min, row, row))  # noqa: B023
        history = torch.randint(0, 9, (m, 8192), device="cuda")
        limit = torch.full((5,), 8, device="cuda")
        for known in (500, 8000):
            known_X = torch.full((m,), known, device="cuda")
            each(f"look up {m} rows of {known}",
                 lambda: lookup(row, history, known_X, known_X, limit, 8, 1, 4))  # noqa: B023


# --- a whole pass ---------------------------------------------------------------------------------


def stack(context: int = 300) -> None:
    print(f"\nwhole pass in a CUDA graph, context {context}: ms (share of the wall)")
    for geometry in GEOMETRIES:
        decoder = build(geometry)
        fast = CudaDecoder(decoder)
        size = decoder.weight_bytes - (0 if geometry == "135M" else decoder.embedding_VD.nbytes)
        for m in (1, 8, 32, 64, 128, 256, 512):
            kv = fast.new_kv((context // 16 + 2) * 16 * m)
            ids = torch.randint(0, 1000, (m,), device="cuda")
            attn = paged([context] * m, [1] * m)

            def run() -> None:
                fast.logits(fast.forward(ids, attn, kv).last_TD)  # noqa: B023

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
        if kind == "sweep":
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


def warm(parts: list[str]) -> None:
    """Fill Triton's cache with all cores."""
    jobs: list[tuple] = []
    for geometry in GEOMETRIES:
        for kind in shapes(geometry):
            for m in (1, 64, 128, 512):
                is_split = kind in ("o", "down") and "tune" in parts
                splits = SPLITS[geometry] if is_split else (None,)
                tiles = candidates(geometry, kind, m) if {"tune", "check"} & set(parts) else []
                jobs += [("sweep", geometry, kind, m, tile, s) for tile in [*tiles, None] for s in splits]
            jobs += [("sweep", geometry, kind, m, None, None) for m in (17, 256)]
    jobs += [(check_attention,), (check_decoder,)] if "check" in parts else []
    jobs += [(small,)] if "small" in parts else []
    if "tune" in parts:
        jobs += [(functools.partial(tune_attention, geometry, case, False),)
                 for geometry in GEOMETRIES for case in ATTENTION]  # fmt: skip
    jobs.sort(key=lambda job: isinstance(job[0], str))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        problems = [p for p in pool.map(compile_job, jobs) if p]
    print(f"{len(jobs)} compile jobs, {len(problems)} problems", *problems[:5], sep="\n")


def main() -> None:
    parts = sys.argv[1:] or ["check", "small", "stack", "tune"]
    out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    start = time.time()

    def lap(name: str) -> None:
        print(f"[{name}: {time.time() - start:.0f} s]", flush=True)

    warm(parts)
    lap("compile")
    if "check" in parts:
        check_products()
        check_attention()
        check_decoder()
        lap("check")
    if "small" in parts:
        small()
        lap("small")
    if "stack" in parts:
        stack()
        lap("stack")
    if "tune" in parts:
        for geometry, case in itertools.product(GEOMETRIES, ATTENTION):
            tune_attention(geometry, case)
        lap("attention")
        tune(out)
        lap("tune")


if __name__ == "__main__":
    main()

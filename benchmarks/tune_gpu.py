"""Which tiles and warps are fastest: the measurements behind `tile_of` and attention's warps.

python benchmarks/tune_gpu.py [FILE.json]
"""

# ruff: noqa: B023
from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path

import torch
from kernels_gpu import BF16, GEOMETRIES, graph_ms, paged, product, shapes, warm

from hunch.kernels.gpu_attention import Tiling, Workspace, attention, tiles_of
from hunch.kernels.gpu_gemm import Tile

SPLITS = {"7B": (2, 4), "135M": (3, 8)}  # of o and down, tried
ROWS = (1, 64, 128, 256, 512)


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
                ms = graph_ms(lambda: [run(w, tile, split) for w in weights])
            except Exception as error:  # a tile that does not fit is a row of the table, no more
                print(geometry, kind, m, tile, split, repr(error)[:90])
                continue
            rows.append((ms / count * 1000, tile, split))
    rows.sort(key=lambda row: row[0])
    return [(blas, None, 0), *rows]


def tune(file: Path | None) -> None:
    best: dict[str, list] = {}
    for geometry in GEOMETRIES:
        print(f"\n{geometry}: us per product (TB/s), best tiles, cuBLAS")
        for kind, (n, k) in shapes(geometry).items():
            for m in ROWS:
                (blas, _, _), *rows = sweep(geometry, kind, m)
                best[f"{geometry} {kind} {m}"] = [[r[0], str(r[1]), r[2]] for r in rows]
                for us, tile, split in rows[:2]:
                    print(f"{kind:6} M={m:<4} {us:7.1f} {n * k * 2 / us / 1e6:5.2f} TB/s "
                          f"{2 * m * n * k / us / 1e6:6.1f} TF  {tile} split {split}"
                          f"   cublas {blas:.1f}")  # fmt: skip
    if file:
        file.write_text(json.dumps(best))


ATTENTION = (  # rows, context (0: new tokens of one sequence after 1000), tokens a tile, programs
    (1, 300, 1, 32), (1, 1000, 1, 32), (64, 300, 1, 1), (64, 1000, 1, 1), (64, 1000, 1, 2),
    (6, 0, 4, 8), (64, 0, 16, 1), (64, 0, 4, 2), (512, 0, 16, 1),
)  # fmt: skip


def tune_attention(geometry: str, case: tuple[int, int, int, int], is_timed: bool = True) -> None:
    """Warps of attention; any number gives the same bits."""
    _, _, heads, kv, head, _, _ = GEOMETRIES[geometry]
    m, context, block, programs = case
    attn = paged([context] * m, [1] * m) if context else paged([1000 + m], [m])
    slots = int(attn.table_SB.max() + 1) * 16
    q = torch.randn(m, heads, head, device="cuda", dtype=BF16)
    k, v = torch.randn(2, slots, kv, head, device="cuda", dtype=BF16)
    tiles = None if block == 1 else tiles_of(attn.spans, block).cuda()
    space = Workspace.create(64, heads, head, 8192, "cuda")
    rows = []
    for warps in (2, 4, 8) if block * heads // kv <= 16 else (4, 8):
        tiling = Tiling(tiles, block, programs, space, warps)

        def run() -> None:
            attention(q, k, v, attn, 0.1, torch.empty_like(q), tiling=tiling)

        us = graph_ms(lambda: [run() for _ in range(20)]) * 50 if is_timed else run()
        rows.append((us, warps))
    if is_timed:
        text = "  ".join(f"{us:.1f} ({w} warps)" for us, w in sorted(rows))
        print(f"{geometry} attention {m} x {context or 1000} block {block} x{programs}: {text}")


def main() -> None:
    jobs: list[tuple] = [
        (functools.partial(tune_attention, geometry, case, False),)
        for geometry, case in itertools.product(GEOMETRIES, ATTENTION)
    ]
    for geometry, m in itertools.product(GEOMETRIES, ROWS):
        for kind in shapes(geometry):
            splits = SPLITS[geometry] if kind in ("o", "down") else (1,)
            jobs += [("product", geometry, kind, m, tile, split)
                     for tile in candidates(geometry, kind, m) for split in splits]  # fmt: skip
    warm(jobs)
    for geometry, case in itertools.product(GEOMETRIES, ATTENTION):
        tune_attention(geometry, case)
    tune(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()

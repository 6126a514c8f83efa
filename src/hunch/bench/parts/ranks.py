"""What CPU ranks spend on each other, measured, beside what the simulator says of the same link.

First gathers of several sizes give the link; then passes of the model are timed, with the time its
gathers took on rank 0, and compared with the prediction for as many rows. With --stages, the layers
are in stages: the time of each gives a prediction for several steps under way, and these are timed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hunch.bench.collectives import Network, Pipeline, fit
from hunch.config import ModelConfig
from hunch.hub import resolve
from hunch.kernels.attention import AttnInputs, Span
from hunch.parallel.executor import Ranks, start_ranks
from hunch.parallel.group import DistGroup
from hunch.parallel.link import Link
from hunch.parallel.orders import Op, order
from hunch.parallel.split_target import SplitTarget

ROWS = (1, 8, 64)
REPEATS = 15


class Clock:
    """Adds up what a group's gathers take."""

    def __init__(self, group: Any) -> None:
        self.seconds = 0.0
        self._gather = group._all
        group._all = self

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        parts: torch.Tensor = self._gather(part)
        self.seconds += time.perf_counter() - began
        return parts


def inputs(num_rows: int) -> tuple[torch.Tensor, AttnInputs]:
    pos_T = torch.arange(num_rows)
    attn = AttnInputs(
        pos_T=pos_T,
        slot_T=pos_T.clone(),
        seq_T=torch.zeros_like(pos_T),
        table_SB=torch.arange(-(-num_rows // 16))[None],
        base_T=pos_T + 1,
        tree_TP=None,
        block_size=16,
        spans=(Span(0, num_rows, 0, 0, num_rows),),
    )
    return torch.full((num_rows,), 5), attn


def one_pass(target: SplitTarget, kv: Any, num_rows: int) -> None:
    target.logits(target.forward(*inputs(num_rows), kv).last_TD)


def gather_times(num_ranks: int, width: int) -> list[tuple[float, float]]:
    """Gathers of a pass's sizes with nothing between them, by processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(num_ranks), str(width), folder]
        others = [
            subprocess.Popen([sys.executable, "-m", __name__, str(rank), *words])
            for rank in range(1, num_ranks)
        ]
        times = _gather(0, num_ranks, width, Path(folder))
        for process in others:
            process.wait()
    return times


def _gather(rank: int, num_ranks: int, width: int, folder: Path) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    group = Link.in_folder(folder, rank, num_ranks, torch.device("cpu")).group(num_ranks)
    found = []
    for num_rows in ROWS:
        part, times = torch.zeros(num_rows, width), []
        for _ in range(20 * REPEATS):
            began = time.perf_counter()
            group.all_reduce(part)
            times.append(time.perf_counter() - began)
        found.append((part.numel() * 4.0, statistics.median(times)))
    return found


def measure(ranks: Ranks, path: Path, num_ranks: int) -> None:
    target = SplitTarget(ranks, path, ModelConfig(model=str(path)), num_ranks)
    group = target._part.group
    assert isinstance(group, DistGroup)
    clock, kv, spec = Clock(group), target.new_kv(128), target.spec
    network = Network(path.name, spec.width, spec.num_layers, spec.vocab_size, 0.0)
    found: dict[int, tuple[float, float]] = {}
    for num_rows in ROWS:
        passes, waits = [], []
        for _ in range(REPEATS):
            clock.seconds = 0.0
            began = time.perf_counter()
            one_pass(target, kv, num_rows)
            passes.append(time.perf_counter() - began)
            waits.append(clock.seconds)
        found[num_rows] = statistics.median(passes), statistics.median(waits)
    link = fit(gather_times(num_ranks, spec.width), num_ranks)
    print(f"{num_ranks} ranks: {link.seconds * 1e6:.0f} us, {link.bytes_per_second / 1e9:.2f} GB/s")
    for num_rows, (whole, waited) in found.items():
        said = network.exchange(num_rows, num_ranks, link).seconds
        print(
            f"{num_rows:3} rows: pass {whole * 1e3:7.1f} ms, gathers {waited * 1e3:7.1f} ms, "
            f"simulator {said * 1e3:7.1f} ms ({said / waited:.2f} of measured)"
        )


class Waits:
    """Adds up how long the last stage waits for the one before it."""

    def __init__(self, line: Any) -> None:
        self.seconds = 0.0
        self._receive = line.receive
        line.receive = self

    def __call__(self, *arguments: Any) -> torch.Tensor:
        began = time.perf_counter()
        found: torch.Tensor = self._receive(*arguments)
        self.seconds += time.perf_counter() - began
        return found


def measure_stages(ranks: Ranks, path: Path, num_stages: int) -> None:
    target = SplitTarget(ranks, path, ModelConfig(model=str(path)), 1, num_stages)
    waits, kv = Waits(target._part.line), target.new_kv(128)
    for num_rows in ROWS:
        ids_T, attn = inputs(num_rows)
        alone, last, together = [], [], []
        for _ in range(REPEATS):
            waits.seconds, began = 0.0, time.perf_counter()
            target.logits(target.forward(ids_T, attn, kv).last_TD)
            alone.append(time.perf_counter() - began)
            last.append(alone[-1] - waits.seconds)
        under_way = [target.begin(ids_T, attn, kv) for _ in range(num_stages)]
        for _ in range(REPEATS * num_stages):
            began = time.perf_counter()
            target.logits(target.finish(under_way.pop(0)).last_TD)
            under_way.append(target.begin(ids_T, attn, kv))
            together.append(time.perf_counter() - began)
        for begun in under_way:
            target.finish(begun)
        whole, own = statistics.median(alone), statistics.median(last)
        others = (whole - own) / (num_stages - 1)  # with the stream's way, which they share
        line = Pipeline((*(others for _ in range(num_stages - 1)), own), 0.0)
        said, took = line.period(num_stages) / num_stages, statistics.mean(together)
        print(
            f"{num_rows:3} rows in {num_stages} stages: alone {whole * 1e3:6.1f} ms (last stage "
            f"{own * 1e3:.1f}), each of {num_stages} under way {took * 1e3:6.1f} ms, simulator "
            f"{said * 1e3:6.1f} ms ({said / took:.2f} of measured)"
        )


def measure_orders(ranks: Ranks) -> None:
    """What it costs that drafts travel: nothing, as all orders up to some size are one message."""
    found = {}
    for size in (64, 128, 500):
        numbers, times = np.concatenate([order(Op.FREE, -1), np.zeros(size, np.int64)]), []
        for _ in range(20 * REPEATS):
            began = time.perf_counter()
            ranks.send(numbers)
            times.append(time.perf_counter() - began)
        found[size] = statistics.median(times)
    times_us = ", ".join(f"{size} numbers {1e6 * s:.0f} us" for size, s in found.items())
    print(f"orders: {times_us}")


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("hunch bench part ranks", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    given = parser.parse_args(words)
    ranks = start_ranks(given.stages if given.stages > 1 else given.ranks, "cpu")
    try:
        with torch.inference_mode():
            path = resolve(given.model).path
            if given.stages > 1:
                measure_stages(ranks, path, given.stages)
            else:
                measure_orders(ranks)
                measure(ranks, path, given.ranks)
    finally:
        ranks.close()


if __name__ == "__main__":  # a further rank of `gather_times`
    _gather(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

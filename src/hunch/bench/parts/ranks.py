"""The time CPU ranks spend on exchanges, measured and simulated for the same link.

Ranks compute passes side by side without exchanging anything, which gives the seconds of each
between two exchanges; gathers alone give the link. From these the simulator predicts a pass, and
passes are timed. With --stages, the layers are in stages: the time of each gives a prediction for
several steps under way, and these are timed. Every rank needs a core of its own: measurements while
others used it are left out.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.bench import collectives
from hunch.bench.collectives import Network, Pipeline, fit, in_step
from hunch.bench.parts import PartOptions
from hunch.config import ModelConfig
from hunch.errors import EngineError
from hunch.hub import resolve
from hunch.kernels.attention import AttnInputs
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.parallel.executor import Ranks, memory_folder, start_ranks
from hunch.parallel.follower import leave_with_parent
from hunch.parallel.group import NearGroup
from hunch.parallel.link import Link
from hunch.parallel.orders import Op, order
from hunch.parallel.part import Layout, Part
from hunch.parallel.split_target import SplitTarget

ROWS = (1, 8, 64)
REPEATS = 15
MAX_SECONDS = 8.0  # of tries at one number of rows
DISTURBED = 0.02  # share of its time that a rank may have waited for a core
EXCHANGES = 10  # of sums, timed after each pass
GO_BEFORE = "on Linux, `sudo chrt -f 10 hunch bench part ranks` goes before them"


class Recorder:
    """Memory between ranks that notes when this one computes and when it exchanges."""

    def __init__(self, group: NearGroup) -> None:
        self.is_alone = False  # exchanges return a rank's own part at once
        self.computed: list[float] = []  # seconds before each exchange, and after the last
        self.seconds = self.exchanged = 0.0
        self.rank, self.size, self._real = group.rank, group.size, group._memory
        self._since = 0.0
        group._memory = self

    def is_undisturbed(self, run: Callable[[], object], *, is_alone: bool) -> bool:
        """Time `run`, which all ranks begin together; False: a rank was disturbed."""
        disturbances = Disturbances()
        self._real.broadcast(torch.zeros(1))
        self.is_alone, self.computed, self.exchanged = is_alone, [], 0.0
        began = self._since = time.perf_counter()
        run()
        ended = time.perf_counter()
        self.computed.append(ended - self._since)
        self.seconds = ended - began
        return not self._real.sum(torch.tensor([float(disturbances.ended())])).any()

    def of_rank_0(self, answer: bool) -> bool:
        """Rank 0's value, on all ranks."""
        reply = torch.tensor([answer])
        self._real.broadcast(reply)
        return bool(reply)

    def gather(self, part: Tensor) -> Tensor:
        with self._exchange():
            return torch.stack([part] * self.size) if self.is_alone else self._real.gather(part)

    def sum(self, part: Tensor) -> Tensor:
        with self._exchange():
            return part if self.is_alone else self._real.sum(part)

    def broadcast(self, tensor: Tensor) -> None:
        with self._exchange():
            if not self.is_alone:
                self._real.broadcast(tensor)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        began = time.perf_counter()
        self.computed.append(began - self._since)
        yield
        self._since = time.perf_counter()
        self.exchanged += self._since - began


def inputs(num_rows: int) -> tuple[Tensor, AttnInputs]:
    return torch.full((num_rows,), 5), AttnInputs.first(num_rows, 16)


class Disturbances:
    """The time that other programs, and other machines on this host, take from a rank while it
    works.

    Linux counts how long a thread waited for a core while it could run, and how long the host gave
    this machine's cores to others. Elsewhere nothing counts as disturbed.
    """

    def __init__(self) -> None:
        self._had, self._began = _taken(), time.perf_counter()

    def ended(self) -> bool:
        """Whether there was a significant one since this was made."""
        waited, stolen = (now - had for now, had in zip(_taken(), self._had, strict=True))
        took = time.perf_counter() - self._began
        return stolen > 0 or waited > DISTURBED * took


def _taken() -> tuple[float, int]:
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    except (OSError, IndexError, ValueError):
        return 0.0, 0
    return waited / 1e9, stolen


@dataclass(slots=True)
class Times:
    """The undisturbed measurements of one rank at some number of rows."""

    passes: list[float] = field(default_factory=list)
    exchanged: list[float] = field(default_factory=list)
    computed: list[list[float]] = field(default_factory=list)  # with ranks that do not exchange
    gathers: list[tuple[float, float]] = field(default_factory=list)  # bytes of a part, seconds
    num_tries: int = 0


def run_rank(rank: int, num_ranks: int, path: Path, folder: Path) -> list[Times]:
    """One rank's passes and exchanges, in turn; all ranks do the same."""
    torch.set_num_threads(1)
    link = Link.in_folder(folder, rank, num_ranks, torch.device("cpu"))
    part = Part.load(link, path, ModelConfig(model=str(path), threads=1), Layout(num_ranks))
    if not isinstance(part.group, NearGroup):
        raise EngineError("ranks exchange by messages here, which this does not measure")
    recorder = Recorder(part.group)
    return [_time_rows(part, recorder, num_rows) for num_rows in ROWS]


def _time_rows(part: Part, recorder: Recorder, num_rows: int) -> Times:
    (ids_T, attn), kv = inputs(num_rows), part.new_kv(128, part.model.device)
    spec, times, end = part.spec, Times(), time.perf_counter() + MAX_SECONDS
    sent = [torch.zeros(num_rows, spec.width)] * EXCHANGES
    sent += [torch.zeros(num_rows, -(-spec.vocab_size // part.group.size))]

    def one_pass() -> None:
        part.logits(part.forward(ids_T, attn, kv).last_TD)

    one_pass()
    while True:
        if recorder.is_undisturbed(one_pass, is_alone=True):
            times.computed.append(recorder.computed)
        if recorder.is_undisturbed(one_pass, is_alone=False):
            times.passes.append(recorder.seconds)
            times.exchanged.append(recorder.exchanged)
        for one in sent:
            if recorder.is_undisturbed(partial(recorder.sum, one), is_alone=False):
                times.gathers.append((4.0 * one.numel(), recorder.seconds))
        times.num_tries += 1
        is_enough = min(len(times.computed), len(times.passes)) >= REPEATS
        if recorder.of_rank_0(is_enough or time.perf_counter() > end):
            return times


def measure(path: Path, num_ranks: int) -> None:
    """Measure passes of a model over processes of their own, beside the simulator's predictions."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        words = [str(num_ranks), str(path), folder]
        others = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), *words], stdin=subprocess.PIPE
            )
            for rank in range(1, num_ranks)
        ]
        own = run_rank(0, num_ranks, path, Path(folder))
        for process in others:
            process.wait()
        ranks = [own, *(_read(Path(folder), rank) for rank in range(1, num_ranks))]
    spec = ModelSpec.from_config(open_weights(path).config)
    network = Network(path.name, spec.width, spec.num_layers, spec.vocab_size, 0.0)
    link = measured_link(own, num_ranks)
    print(f"{num_ranks} ranks: {link.seconds * 1e6:.0f} us, {link.bytes_per_second / 1e9:.2f} GB/s")
    for num_rows, *every in zip(ROWS, *ranks, strict=True):
        first = every[0]
        if not first.passes or not first.computed:
            print(
                f"{num_rows:3} rows: others took the cores in each of {first.num_tries} tries; "
                f"{GO_BEFORE}"
            )
            continue
        took, waited = statistics.median(first.passes), statistics.median(first.exchanged)
        together = in_step([times.computed for times in every])
        alone = statistics.mean(map(sum, first.computed))
        exchange = network.exchange(num_rows, num_ranks, link).seconds
        expected, expected_wait = together + exchange, together - alone + exchange
        print(
            f"{num_rows:3} rows: pass {took * 1e3:6.1f} ms, simulator {expected * 1e3:6.1f} "
            f"({expected / took:.2f}); in exchanges {waited * 1e3:5.1f} ms, simulator "
            f"{expected_wait * 1e3:5.1f}, of which messages {exchange * 1e3:.1f}; "
            f"{len(first.passes)} of {first.num_tries} passes undisturbed"
        )


def measured_link(own: Sequence[Times], num_ranks: int) -> collectives.Link:
    gathers = [pair for times in own for pair in times.gathers]
    if len({size for size, _ in gathers}) < 2:
        num_tries = sum(times.num_tries for times in own)
        raise EngineError(f"others took the cores in nearly all of {num_tries} tries; {GO_BEFORE}")
    return fit(gathers, num_ranks)


def _read(folder: Path, rank: int) -> list[Times]:
    return [Times(**times) for times in json.loads((folder / f"{rank}.json").read_text())]


class Waits:
    """Adds up how long the last stage waits for the one before it."""

    def __init__(self, line: Any) -> None:
        self.seconds = 0.0
        self._receive = line.receive
        line.receive = self

    def __call__(self, *arguments: Any) -> Tensor:
        began = time.perf_counter()
        found: Tensor = self._receive(*arguments)
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
        expected, took = line.period(num_stages) / num_stages, statistics.mean(together)
        print(
            f"{num_rows:3} rows in {num_stages} stages: alone {whole * 1e3:6.1f} ms (last stage "
            f"{own * 1e3:.1f}), each of {num_stages} under way {took * 1e3:6.1f} ms, simulator "
            f"{expected * 1e3:6.1f} ms ({expected / took:.2f} of measured)"
        )


def measure_orders(ranks: Ranks) -> None:
    """Measure orders of several sizes: sending drafts costs nothing, as orders up to some size are
    one message."""
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
    parser = PartOptions("ranks", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    given = parser.parse_args(words)
    path = resolve(given.model).path
    if given.stages == 1:
        with torch.inference_mode():
            measure(path, given.ranks)
    ranks = start_ranks(given.stages if given.stages > 1 else given.ranks, "cpu")
    try:
        with torch.inference_mode():
            if given.stages > 1:
                measure_stages(ranks, path, given.stages)
            else:
                measure_orders(ranks)
    finally:
        ranks.close()


if __name__ == "__main__":  # a further rank of `measure`
    rank, num_ranks, path, folder = sys.argv[1:]
    leave_with_parent()
    with torch.inference_mode():
        measured = run_rank(int(rank), int(num_ranks), Path(path), Path(folder))
    (Path(folder) / f"{rank}.json").write_text(json.dumps([asdict(times) for times in measured]))

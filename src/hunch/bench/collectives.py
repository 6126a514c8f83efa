"""What ranks exchange in a pass: bytes and seconds, from sizes and the speed of a link.

hunch adds the parts of a sum in the order of the ranks, whatever the batch: every rank gathers all
parts (in float32) and adds them itself. So a pass has two gathers per layer; at its end hidden
states are sent and parts of the logits received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hunch.errors import ConfigError

FLOAT_BYTES = 4  # parts of sums, and logits
STATE_BYTES = 2  # hidden states


@dataclass(frozen=True, slots=True)
class Link:
    """The link between any two ranks, one way; the seconds are those of the smallest gather."""

    name: str
    bytes_per_second: float
    seconds: float

    def gather_seconds(self, num_ranks: int, part_bytes: float) -> float:
        """Seconds until every rank has every part, as each receives those of all others."""
        if num_ranks == 1:
            return 0.0
        return self.seconds + (num_ranks - 1) * part_bytes / self.bytes_per_second


# Published bandwidths, one way. Latencies are of small NCCL gathers as commonly measured: between
# GPUs of a node some 10 us, over a network some 25 us.
LINKS = {
    "nvlink5": Link("NVLink 5 (B200)", 900e9, 10e-6),
    "nvlink4": Link("NVLink 4 (H100, H200)", 450e9, 10e-6),
    "nvlink3": Link("NVLink 3 (A100)", 300e9, 10e-6),
    "pcie5": Link("PCIe 5 x16", 64e9, 15e-6),
    "pcie4": Link("PCIe 4 x16", 32e9, 15e-6),
    "ndr": Link("InfiniBand NDR, 400 Gb/s", 50e9, 25e-6),
    "100gbe": Link("100 Gb Ethernet", 12.5e9, 40e-6),
}


@dataclass(frozen=True, slots=True)
class Network:
    """The sizes of a model that decide what its ranks exchange."""

    name: str
    width: int
    num_layers: int
    vocab_size: int
    read_bytes: float  # of weights that a pass over one row reads, in all

    def exchange(self, num_rows: int, num_ranks: int, link: Link) -> Exchange:
        """The exchange of one pass over this many packed tokens."""
        if num_ranks < 1 or num_rows < 1:
            raise ConfigError(f"{num_ranks} ranks and {num_rows} rows: both must be 1 or more")
        sums, states = num_rows * self.width * FLOAT_BYTES, num_rows * self.width * STATE_BYTES
        logits = num_rows * self.vocab_size * FLOAT_BYTES / num_ranks
        if num_ranks == 1:
            return Exchange(0, 0.0, 0.0)
        seconds = 2 * self.num_layers * link.gather_seconds(num_ranks, sums)
        seconds += link.seconds + states / link.bytes_per_second
        seconds += link.gather_seconds(num_ranks, logits)
        received = (num_ranks - 1) * (2 * self.num_layers * sums + logits) + states
        return Exchange(2 * self.num_layers + 2, received, seconds)

    def pipeline(
        self, num_rows: int, num_ranks: int, num_stages: int, link: Link, reading: float
    ) -> Pipeline:
        """Stages that share a pass over this many rows equally; reading takes this long."""
        whole = reading + self.exchange(num_rows, num_ranks, link).seconds
        hop = link.seconds + num_rows * self.width * STATE_BYTES / link.bytes_per_second
        return Pipeline((whole / num_stages,) * num_stages, hop)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One pass: messages, bytes that a rank receives, seconds in which it computes nothing."""

    num_messages: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages with the seconds each takes for a step; the last one's include verdict and draft."""

    stages: tuple[float, ...]
    hop: float  # seconds in which the stream gets from one to the next

    @property
    def alone(self) -> float:
        """Seconds of a step while no other is under way."""
        return sum(self.stages) + (len(self.stages) - 1) * self.hop

    def period(self, num_steps: int) -> float:
        """Seconds in which each of this many steps under way is done once.

        Either the slowest stage is always busy, or a step comes back before the others are done.
        """
        return max(num_steps * max(self.stages), self.alone)

    def bubble(self, num_steps: int) -> float:
        """The share of all stages' time in which they have nothing to do."""
        return 1 - num_steps * sum(self.stages) / (len(self.stages) * self.period(num_steps))


# Llama 3.1 8B and 70B, Qwen3-235B-A22B: sizes of their config.json; 16-bit weights.
NETWORKS = {
    "8B": Network("8B", 4096, 32, 128256, 16e9),
    "70B": Network("70B", 8192, 80, 128256, 141e9),
    "235B": Network("235B MoE", 4096, 94, 151936, 44e9),
}


def rows_of(
    link: Link,
    memory_bytes_per_second: float,
    num_ranks: int,
    sizes: Sequence[int] = (1, 8, 64),
    num_stages: int = 1,
) -> list[dict[str, float | int | str]]:
    """A table: each network at each number of rows, beside the time that its weights take to read.

    With stages, which share out the layers, a pass goes through all of them: its exchange is that
    of the ranks of one stage after the other, and the stream between stages. `period` is the time
    in which the rows, shared out over as many steps as stages, get a token each.

    With many rows a mixture of experts reads more than the active weights counted here, so its
    share of exchange is an upper bound.
    """
    found: list[dict[str, float | int | str]] = []
    for network in NETWORKS.values():
        reading = network.read_bytes / num_ranks / memory_bytes_per_second
        for size in sizes:
            cost = network.exchange(size, num_ranks, link)
            line = network.pipeline(-(-size // num_stages), num_ranks, num_stages, link, reading)
            found.append(
                {
                    "network": network.name,
                    "rows": size,
                    "ranks": num_ranks,
                    "messages": cost.num_messages,
                    "megabytes": cost.num_bytes / 1e6,
                    "exchange_ms": 1e3 * cost.seconds,
                    "weights_ms": 1e3 * reading,
                    "share": cost.seconds / (cost.seconds + reading),
                    "hop_ms": 1e3 * line.hop,
                    "pass_ms": 1e3 * line.alone,
                    "period_ms": 1e3 * line.period(min(num_stages, size)),
                    "idle": line.bubble(min(num_stages, size)),
                }
            )
    return found


def in_step(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """Seconds that ranks compute in a pass when each exchange waits for the slowest.

    Given, for each rank and each of several passes, the seconds that it computes before each
    exchange and after the last. As delays of two ranks are independent, every pass of one is
    combined with each of the others'.
    """
    count = min(map(len, ranks))
    total = 0.0
    for shift in range(count):
        for turn in range(count):
            passes = [one[(turn + rank * shift) % count] for rank, one in enumerate(ranks)]
            total += sum(map(max, zip(*passes, strict=True)))
    return total / count**2


def fit(parts: Sequence[tuple[float, float]], num_ranks: int, name: str = "measured") -> Link:
    """The link that explains measured gathers: (bytes of a part, seconds).

    By least squares of the errors' shares, so that small gathers count as much as large ones.
    """
    if len({size for size, _ in parts}) < 2:
        raise ConfigError("two sizes at least are needed to tell latency from bandwidth")
    xs = [(num_ranks - 1) * size for size, _ in parts]
    ys = [seconds for _, seconds in parts]
    weights = [1 / seconds**2 for seconds in ys]
    whole = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / whole
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / whole
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    rise = zip(weights, xs, ys, strict=True)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in rise) / spread
    slope = max(slope, 1e-13)
    return Link(name, 1 / slope, max(mean_y - slope * mean_x, 0.0))

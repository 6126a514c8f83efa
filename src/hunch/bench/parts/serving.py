"""The cost of a token outside of the model: CPU microseconds of the server's processes.

The engine is the real one, over a runner that computes nothing, so only Python is measured:
planning, results, messages between the processes, events, sockets. CPU seconds are measured, not
the clock, so that other work of the machine does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from hunch.bench.environment import own_seconds, processes
from hunch.bench.parts import PartOptions
from hunch.bench.parts.streams import read_all, request_of
from hunch.bench.peers import Peer, starting
from hunch.config import Config, ModelConfig, ScheduleConfig
from hunch.engine.engine import Engine
from hunch.types import Capacity, DecodedRows, RowResult, StepPlan, StepResult

NAME = "hunch.bench.parts.serving"


class EmptyRunner:
    """Commits the tokens of a fixed text, one per row and step, with a pause for each step."""

    depth = 1

    def __init__(self, config: Config) -> None:
        self.capacity = Capacity(
            num_blocks=65536, block_size=16, max_rows=config.schedule.num_rows, max_len=8192,
            max_nodes=0,
        )  # fmt: skip
        self._left: dict[int, int] = {}  # per row: tokens to come
        self._known: dict[int, int] = {}
        self._results: deque[StepResult] = deque()
        self._seconds = float(os.environ.get("STEP_SECONDS", "0"))

    def submit(self, plan: StepPlan) -> None:
        rows, decoded = list[RowResult](), list[list[int]]()
        for start in plan.starts:
            self._left[start.row] = start.request.max_tokens
            self._known[start.row] = len(start.tokens)
        for work in plan.work:
            row = work.row
            left, known = self._left[row], self._known[row]
            token = 500 + known % 1000
            self._left[row], self._known[row] = left - 1, known + 1
            if work.num_tokens == 1 and left > 1:
                decoded.append([token])
                continue
            decoded.append([])
            result = RowResult(row=row, num_processed=work.num_tokens)
            if left > 0:
                result.tokens, result.computed = [token], (known,)
                result.finish = "length" if left == 1 else None
            rows.append(result)
        columns = DecodedRows(tokens=decoded)
        self._results.append(StepResult(id=plan.id, rows=rows, decoded=columns))

    def collect(self) -> StepResult:
        if self._seconds:
            time.sleep(self._seconds)
        return self._results.popleft()

    def has_result(self) -> bool:
        return not self._seconds

    def reset(self) -> None:
        pass

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def build_engine(config: Config) -> Engine:
    from hunch.loading import load_text

    return Engine(config, EmptyRunner(config), load_text(config))


def serve(port: int, workers: int, has_router: bool) -> int:
    from hunch.server import run
    from hunch.server.replicas import Replicas
    from hunch.server.settings import ServeConfig

    if has_router:  # a server with one engine has none
        run.new_engine = lambda config, settings, factory: Replicas(config, factory, 1)
    settings: dict[str, Any] = {"port": port, "log_level": "warning", "served_model_names": ("m",)}
    if workers > 1:
        settings["workers"] = workers
    return run.serve(
        Config(model=ModelConfig(), schedule=ScheduleConfig(max_num_seqs=512)),
        ServeConfig(**settings),
        engine_factory=f"{NAME}:build_engine",
    )


def family(pid: int) -> dict[int, str]:
    """The server's processes and their parts."""
    names = {pid: "http"}
    for child in processes(pid)[1:]:
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        names[child] = "engine" if b"engine_process" in command else "worker"
    return names


def server(workers: int, *, has_router: bool = False) -> Peer:
    command = (sys.executable, "-m", NAME, "{port}", str(workers), str(int(has_router)))
    return Peer("the server", command)


def measure(pid: int, port: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    names = family(pid)
    before = {one: own_seconds(one) for one in names}
    requests = [request_of("127.0.0.1", number, num_tokens) for number in range(num_streams)]
    began = time.perf_counter()
    gaps = sorted(asyncio.run(read_all("127.0.0.1", port, requests))[1])
    seconds = time.perf_counter() - began
    total = num_streams * num_tokens
    found = {
        "tokens_per_second": total / seconds,
        "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))] if gaps else 0.0,
    }
    for part in ("http", "worker", "engine"):
        spent = sum(own_seconds(one) - before[one] for one in names if names[one] == part)
        found[f"{part}_us_per_token"] = 1e6 * spent / total
    return found


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("serving", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 200])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--router", action="store_true", help="beside a server that routes to its one engine"
    )
    args = parser.parse_args(words)
    peers = [server(args.workers)]
    if args.router:
        peers.append(server(1, has_router=True))
    with ExitStack() as stack:
        servers = [stack.enter_context(starting(peer)) for peer in peers]
        for one in servers:
            one.wait()
        for num_streams in args.streams:
            found: list[list[dict[str, float]]] = [[] for _ in servers]
            for number in range(1 + args.rounds):  # the servers in turn; the first round warms up
                for rounds, one in zip(found, servers, strict=True):
                    num_tokens = args.tokens if number else 32
                    rounds.append(measure(one.process.pid, one.port, num_streams, num_tokens))
            for has_router, (_, *rounds) in enumerate(found):
                line = {key: round(median(one[key] for one in rounds), 1) for key in rounds[0]}
                how = {"router": bool(has_router)} if args.router else {}
                print(json.dumps({"streams": num_streams, **how, **line}), flush=True)


if __name__ == "__main__":  # a server that `main` starts
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"))

"""Runs the tests marked `gpu` on a machine with a GPU, in several pytest processes side by side.

    python tools/gpu_tests.py [FOLDER_OR_FILE ...] [--lanes 8] [--limit 1800] [--logs gpu-logs]

Compiling kernels is what takes the time, and one pytest process compiles one kernel after another.
So the tests are shared among lanes, each a process with a time limit and a log of its own; tests of
one function stay together where that leaves the lanes about equal. Nothing need be installed but
what the tests import: src/ and tests/ are put on the path.

Exit code: 0 if every test passed or was skipped, 1 if one failed or did not run, 2 if there is no
GPU or no test to run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
MAX_LANES = 8
# The project's own options ask for less output, and leave the tests for a GPU out.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib"),
    *("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"),
)
DONE = re.compile(r"^(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=["tests"], help="folders or files of tests")
    parser.add_argument("--lanes", type=int, default=default_lanes(), help="pytest processes")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each lane")
    parser.add_argument("--marks", default="gpu", help='which tests: "gpu and not slow"')
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"), help="folder for the logs")
    args = parser.parse_args(argv)
    if args.lanes < 1 or args.limit <= 0:
        parser.error("--lanes and --limit must be above 0")
    if not has_gpu():
        print("error: no CUDA device here; these tests need one", file=sys.stderr)
        return 2
    ids, problem = collect(args.folders, args.marks, root)
    if problem:
        print(f"error: the tests could not be collected\n{problem}", file=sys.stderr)
        return 2
    if not ids:
        print(f"error: no test is marked {args.marks!r} in {args.folders}", file=sys.stderr)
        return 2
    logs = args.logs if args.logs.is_absolute() else root / args.logs
    logs.mkdir(parents=True, exist_ok=True)
    lanes = [Lane(logs / f"lane{n}.log", some) for n, some in enumerate(plan(ids, args.lanes))]
    print(f"{len(ids)} tests in {len(lanes)} lanes; logs: {logs}", flush=True)
    run(lanes, args.limit, root)
    print(summary(lanes))
    return 0 if all(lane.is_good for lane in lanes) else 1


def default_lanes() -> int:
    return max(1, min(MAX_LANES, (os.cpu_count() or 1) // 2))


def has_gpu() -> bool:
    """Asked in another process: a context of this one would hold memory of the GPU."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


def environment(root: Path, num_lanes: int = 1) -> dict[str, str]:
    paths = [str(root / "src"), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    threads = max(1, (os.cpu_count() or 1) // num_lanes)
    path = os.pathsep.join(filter(None, paths))
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": path}


def collect(folders: Sequence[str], marks: str, root: Path) -> tuple[list[str], str]:
    """The ids of the marked tests; what pytest said where it could not read them all."""
    command = [*PYTEST, "--collect-only", "-q", "-m", marks, *folders]
    done = subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 5):  # 5: none was found
        return [], "\n".join([*lines[-30:], *done.stderr.splitlines()[-10:]])
    end = lines.index("") if "" in lines else len(lines)
    return [line for line in lines[:end] if "::" in line], ""


def plan(ids: Iterable[str], num_lanes: int) -> list[list[str]]:
    """Ids shared among lanes: the largest functions first, each to the lane with the fewest."""
    groups: dict[str, list[str]] = {}
    for name in ids:
        groups.setdefault(name.partition("[")[0], []).append(name)
    most = -(-sum(map(len, groups.values())) // num_lanes)
    pieces = [some[n : n + most] for some in groups.values() for n in range(0, len(some), most)]
    lanes: list[list[str]] = [[] for _ in range(num_lanes)]
    for piece in sorted(pieces, key=len, reverse=True):
        min(lanes, key=len).extend(piece)
    return [lane for lane in lanes if lane]


@dataclass
class Lane:
    """A pytest process and what came of its tests, as its log says."""

    log: Path
    ids: list[str]
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    is_late: bool = False
    outcome: dict[str, str] = field(default_factory=dict)  # by id; the last word counts

    def start(self, root: Path, num_lanes: int, out: IO[bytes]) -> None:
        command = [*PYTEST, "-v", "--tb=short", "-m", "", *self.ids]
        env = {**environment(root, num_lanes), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=root, env=env, stdout=out, stderr=out, start_new_session=True
        )

    def stop(self) -> None:
        """End the process and those that it started."""
        assert self.process is not None
        self.is_late = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read_log(self) -> None:
        mine = set(self.ids)
        for line in self.log.read_text(errors="replace").splitlines():
            found = DONE.match(line)
            if found and found[1] in mine:
                worse = self.outcome.get(found[1]) in ("FAILED", "ERROR")
                self.outcome[found[1]] = self.outcome[found[1]] if worse else found[2]

    @property
    def bad(self) -> list[str]:
        """What failed, and what never ended."""
        names = {"FAILED": "failed", "ERROR": "failed", None: "did not end"}
        ends = ((name, self.outcome.get(name)) for name in self.ids)
        return [f"{names[end]}: {name}" for name, end in ends if end in names]

    @property
    def is_good(self) -> bool:
        return not self.bad and not self.is_late and self.code == 0

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.returncode


def run(lanes: list[Lane], limit: float, root: Path) -> None:
    """All lanes at once, until each has ended or its time is up."""
    began = time.monotonic()
    outs = [lane.log.open("wb") for lane in lanes]
    for lane, out in zip(lanes, outs, strict=True):
        lane.start(root, len(lanes), out)
    try:
        left = list(lanes)
        while left:
            time.sleep(0.1)
            for lane in list(left):
                assert lane.process is not None
                lane.seconds = time.monotonic() - began
                if lane.process.poll() is None and lane.seconds < limit:
                    continue
                if lane.process.returncode is None:
                    lane.stop()
                lane.read_log()
                left.remove(lane)
                print(line_of(lane), flush=True)
    finally:
        for lane in lanes:
            if lane.process is not None and lane.process.poll() is None:
                lane.stop()
        for out in outs:
            out.close()


def line_of(lane: Lane) -> str:
    counts = Counter(lane.outcome.values())
    said = ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items()))
    unrun = len(lane.ids) - len(lane.outcome)
    how = "stopped at the limit" if lane.is_late else f"exit code {lane.code}"
    more = f", {unrun} did not end" if unrun else ""
    return f"{lane.log.name}: {said or 'nothing ran'}{more}; {lane.seconds:.0f} s, {how}"


def summary(lanes: list[Lane]) -> str:
    """Every test that is not well, and how many there were."""
    counts = Counter(end.lower() for lane in lanes for end in lane.outcome.values())
    unrun = sum(len(lane.ids) - len(lane.outcome) for lane in lanes)
    lines = [f"{bad} ({lane.log.name})" for lane in lanes for bad in lane.bad]
    total = [f"{count} {name}" for name, count in sorted(counts.items())]
    total += [f"{unrun} did not end"] if unrun else []
    longest = max(lane.seconds for lane in lanes)
    return "\n".join([*lines, f"{', '.join(total)} in {longest:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())

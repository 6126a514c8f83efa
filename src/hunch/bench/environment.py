"""Where and how a measurement was made, and whether the machine did other work meanwhile."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hunch

BUSY, TAKEN = 0.10, 0.03  # shares of the CPUs used by others from which on to warn
PACKAGES = ("torch", "triton", "transformers", "numpy")

_ARM_PARTS = {  # of ARM's own cores
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd83": "Neoverse V3AE",
    "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}


def describe(**more: Any) -> dict[str, Any]:
    """Machine, versions, commit, command and time; `more` is added as it is."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["hunch", *sys.argv[1:]]),
        "hunch": hunch.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": memory_bytes(),
        "gpu": _gpu(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside of one."""
    root = Path(hunch.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def cpu_name() -> str:
    """The CPU's name by its maker."""
    parts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            parts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if "model name" in parts:
        return parts["model name"]
    if "CPU part" in parts:  # ARM gives numbers only
        maker, part = parts.get("CPU implementer"), parts["CPU part"]
        known = _ARM_PARTS.get(part) if maker == "0x41" else None
        return known or f"ARM implementer {maker}, part {part}"
    return platform.processor() or platform.machine()


def machine_of(described: Mapping[str, Any]) -> str:
    """The name of the machine of a measurement: its GPU, else its CPU."""
    cpu = f"{described.get('cpu')}, {described.get('num_cpus')} CPUs"
    return str(described.get("gpu") or cpu)


def memory_bytes() -> int | None:
    """The machine's memory; None: unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # if torch was not used, no GPU was
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


class BusyWatch:
    """The shares of this machine's CPUs that others used since this was made, and that its host
    took.

    Servers that are measured are not counted as others if their processes are known. No process
    sees what the host of a virtual machine takes. Threads that wait for each other lose far more
    than that share.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = frozenset(pids)
        self._began = _all_seconds()
        self._own = self._own_seconds()

    def shares(self) -> dict[str, float]:
        """The shares, by their names in a report; empty if the system does not have them."""
        now = _all_seconds()
        if now is None or self._began is None:
            return {}
        busy, taken, total = (
            after - before for after, before in zip(now, self._began, strict=True)
        )
        if total <= 0:
            return {}
        others = max(0.0, busy - (self._own_seconds() - self._own))
        return {"busy_share": others / total, "taken_share": taken / total}

    def _own_seconds(self) -> float:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own + sum(cpu_seconds(pid) or 0.0 for pid in self._pids)


def processes(pid: int) -> list[int]:
    """A process and all it started; none if the system does not have them."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in processes(int(child)))]


def own_seconds(pid: int) -> float:
    """Processor time of a process; 0 where it has left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process and of those it started; None: unknown."""
    family = processes(pid)
    return sum(map(own_seconds, family)) if family else None


def own_bytes(name: str) -> int:
    """Memory of this process, by a line of Linux's /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def local_servers(urls: Iterable[str]) -> set[int]:
    """Processes that listen at those of the URLs that are on this machine, as far as they are
    visible."""
    ports = set()
    for url in urls:
        split = urlsplit(url[url.find("http") :])
        if split.hostname in ("localhost", "127.0.0.1", "::1"):
            ports.add(split.port or 80)
    wanted = {f"socket:[{socket}]" for socket in _listening(ports)} if ports else set()
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        try:
            if os.readlink(link) in wanted:
                found.add(int(link.parts[2]))
        except OSError:  # it ended meanwhile
            continue
    return found


def _listening(ports: set[int]) -> set[str]:
    """The sockets that listen on these ports."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) in ports:
                found.add(fields[9])
    return found


def _all_seconds() -> tuple[float, float, float] | None:
    """Seconds all CPUs were busy, seconds their host took, and seconds they had."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    values = [int(field) / ticks for field in fields]
    total, taken = sum(values), values[7]
    # Idle and waiting for disks are not busy.
    return total - values[3] - values[4] - taken, taken, total


def busy_words(shares: Mapping[str, Any]) -> list[str]:
    """A warning if others used the machine too."""
    notes = []
    if (shares.get("busy_share") or 0.0) >= BUSY:
        notes.append(
            f"other processes used {shares['busy_share']:.0%} of the CPUs meanwhile: compare "
            "ratios, not tokens per second"
        )
    if (shares.get("taken_share") or 0.0) >= TAKEN:
        notes.append(
            f"the host of this virtual machine took {shares['taken_share']:.0%} of its CPUs away "
            "meanwhile (steal): threads that wait for each other stand still then; measure again"
        )
    return notes

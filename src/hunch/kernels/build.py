"""Builds the C++ kernels on first use, for this CPU, and remembers the result."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

log = logging.getLogger("hunch")

SOURCES = Path(__file__).parent / "cpu"  # a model's pass on a CPU
# Contraction would let the compiler fuse a product and a sum in one place and not in another.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off")
# What `make wheels` puts into a wheel. By machine and best first: the compiler's flags, and what
# /proc/cpuinfo must name for the CPU to run it (macOS has no such file: see _apple_cpu).
PREBUILT = Path(__file__).parent / "prebuilt"
HASWELL = {"avx2", "fma", "f16c", "bmi2", "movbe"}
VARIANTS: dict[str, dict[str, tuple[tuple[str, ...], set[str]]]] = {
    "aarch64": {
        "i8mm": (("-march=armv8.2-a+dotprod+fp16+i8mm",), {"asimddp", "asimdhp", "i8mm"}),
        "neon": (("-march=armv8.2-a+dotprod+fp16",), {"asimddp", "asimdhp"}),
    },
    "x86_64": {
        "avx512": (
            ("-march=cascadelake",),  # the first with VNNI; later ones run the same instructions
            {"avx512_vnni", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"} | HASWELL,
        ),
        "avx2": (("-march=haswell",), HASWELL),
    },
}
HOW_TO_GET_A_COMPILER = (
    "install one (Debian or Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
    "xcode-select --install) or name it in CXX"
)


@cache
def load_library() -> ctypes.CDLL | None:
    """The CPU kernels, built if needed; None, after one warning, where they cannot be built."""
    ready = prebuilt(SOURCES)
    if ready is not None:
        return ctypes.CDLL(str(ready))
    compiler = find_compiler()
    reason = f"no C++ compiler found; {HOW_TO_GET_A_COMPILER}"
    if compiler is not None:
        try:
            return ctypes.CDLL(str(build(compiler)))
        except (subprocess.CalledProcessError, OSError) as error:
            reason = _why_not_built(compiler, error)
    log.warning("hunch runs on torch alone, which is several times slower on a CPU: %s", reason)
    return None


def _why_not_built(compiler: str, error: subprocess.CalledProcessError | OSError) -> str:
    detail = (getattr(error, "stderr", "") or str(error)).strip()
    cannot_run = isinstance(error, OSError) and error.filename == compiler
    if not cannot_run and (isinstance(error, OSError) or os.strerror(errno.ENOSPC) in detail):
        what = detail.splitlines()[0]
        return (
            f"kernels cannot be kept in {cache_dir()} ({what}); name another folder in HUNCH_CACHE"
        )
    return f"building with {compiler} failed: {detail[-400:]}"


def prebuilt(sources: Path) -> Path | None:
    """A library that came with the wheel and that this CPU can run; the best there is."""
    machine, has = platform.machine().lower(), set(_cpu().split())
    for variant, (_, needed) in VARIANTS.get(machine.replace("arm64", "aarch64"), {}).items():
        file = PREBUILT / f"{sources.name}-{variant}.so"
        if needed <= has and file.is_file():
            return file
    return None


def find_compiler() -> str | None:
    """$CXX, or the first C++ compiler on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def cpu_flags() -> tuple[str, ...]:
    """What makes the compiler use everything this CPU has."""
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def cache_dir() -> Path:
    root = os.environ.get("HUNCH_CACHE")
    if root:
        return Path(root) / "kernels"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hunch" / "kernels"


def build(compiler: str) -> Path:
    """The shared library for this compiler and this CPU."""
    files = sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256()
    for part in (*FLAGS, *cpu_flags(), compiler, _version(compiler), _cpu()):
        digest.update(part.encode() + b"\0")
    for file in files:
        digest.update(file.read_bytes())
    folder = cache_dir()
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
        if not library.exists():
            started = time.perf_counter()
            print("hunch: building CPU kernels (once for this machine) ...", file=sys.stderr)
            sources_only = [file for file in files if file.suffix == ".cpp"]
            compile_library((compiler,), sources_only, library, cpu_flags())
            took = time.perf_counter() - started
            print(f"hunch: built in {took:.0f} s, kept in {folder}", file=sys.stderr)
    return library


def compile_library(
    compiler: tuple[str, ...],
    files: list[Path],
    library: Path,
    flags: tuple[str, ...],
    link_flags: tuple[str, ...] = (),
) -> None:
    """A compiler for each core, then the link; the library appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        objects = [Path(work) / f"{file.stem}.o" for file in files]

        def compile_file(file: Path, to: Path) -> None:
            command = [*compiler, *FLAGS, *flags, "-c", str(file), "-o", str(to)]
            subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # more at once would only take memory
            list(pool.map(compile_file, files, objects))
        built = Path(work) / library.name
        subprocess.run(
            [*compiler, "-shared", "-pthread", *link_flags, *map(str, objects), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
        )
        os.replace(built, library)


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def _cpu() -> str:
    """What the compiler's idea of this CPU depends on."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return _apple_cpu()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    starts = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(starts)}))


def _apple_cpu() -> str:
    """By Linux's names: what every Apple CPU has, and the matrix instructions of an M2."""
    command = ["/usr/sbin/sysctl", "-n", "hw.optional.arm.FEAT_I8MM"]
    has_i8mm = subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1"
    return "asimddp asimdhp i8mm" if has_i8mm else "asimddp asimdhp"


def vector_unit() -> str:
    """What the built kernels compute with; 'none' where they could not be built."""
    library = load_library()
    if library is None:
        return "none"
    library.hunch_vector_unit.restype = ctypes.c_char_p
    return str(library.hunch_vector_unit().decode())


def num_cores() -> int:
    """Cores this process may use: hyperthreads count once, a container's quota counts.

    OMP_NUM_THREADS says another number, as for torch.
    """
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if told.isdigit() and int(told) > 0:
        return int(told)
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cpus is None:
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return _within_quota(len(cores))


def num_cpus() -> int:
    """Processes that can run here at a time: hyperthreads count, and so does the quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return _within_quota(len(os.sched_getaffinity(0)))


def _within_quota(num: int) -> int:
    """At most what a container may use."""
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            num = min(num, max(1, int(limit) // int(period)))
    return num

"""Installs torch into the running environment: a CPU build where there is no NVIDIA GPU.

    python tools/install_torch.py torch==2.13.0 [--cpu-index URL] [--dry-run]

On Linux the ordinary package index carries torch with CUDA, gigabytes that a machine without a GPU
cannot use. So without one this asks, in order: the indexes and wheel directories pip is configured
for, for a build marked +cpu; torch's index of CPU builds (--cpu-index, empty: skipped); and only
then takes the CUDA build, which runs on a CPU too. Sizes are said before anything is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
CPU_SIZE = "about 200 MB"
CUDA_SIZE = f"{2.7 if IS_X86 else 2.9} GB with CUDA's libraries"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("requirement", help="a release, say torch==2.13.0")
    parser.add_argument("--cpu-index", default="", help="an index of CPU builds")
    parser.add_argument("--dry-run", action="store_true", help="resolve, install nothing")
    args = parser.parse_args()
    name, _, version = args.requirement.partition("==")
    if is_installed(name, version):
        return 0
    if platform.system() != "Linux" or has_gpu():
        size = CUDA_SIZE if platform.system() == "Linux" else CPU_SIZE
        return install(args.requirement, f"{args.requirement}: {size}", args.dry_run)
    if version and "+" not in version:
        local = f"{args.requirement}+cpu"
        if install(local, f"no GPU found: looking for {local}", args.dry_run, is_try=True) == 0:
            return 0
    if args.cpu_index:
        words = (
            f"no GPU found: {args.requirement} as a CPU build, {CPU_SIZE}, from torch's own index"
        )
        there = ("--index-url", args.cpu_index, "--retries", "1")
        if install(args.requirement, words, args.dry_run, *there) == 0:
            return 0
        print(f"{args.cpu_index} did not answer, or has no such build", file=sys.stderr)
    words = f"no CPU build is offered here: {args.requirement} from the ordinary index, {CUDA_SIZE}"
    return install(args.requirement, words, args.dry_run)


def is_installed(name: str, version: str) -> bool:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not version or found.partition("+")[0] == version.partition("+")[0]


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU with its driver."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def install(requirement: str, words: str, is_dry: bool, *options: str, is_try: bool = False) -> int:
    """pip's exit code; its own bars tell the size of each file."""
    print(words, file=sys.stderr, flush=True)
    command = [*PIP, "install", *options, requirement]
    if is_dry:
        command.append("--dry-run")
    errors = subprocess.DEVNULL if is_try else None  # that it is not there is no error
    return subprocess.run(command, stderr=errors, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

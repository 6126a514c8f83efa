"""Every form of the quantised products against plain arithmetic: this CPU's, the one without a
vector unit, and those of other CPUs where a cross compiler and an emulator are installed."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hunch.kernels.build import SOURCES, VARIANTS, cpu_flags, find_compiler

IS_ARM = platform.machine() in ("aarch64", "arm64")
CROSS = "aarch64-linux-gnu" if platform.machine() == "x86_64" else "x86_64-linux-gnu"
FOREIGN = VARIANTS["aarch64" if CROSS.startswith("aarch64") else "x86_64"]
EMULATED = {"neon", "avx2"}  # what qemu's user mode computes


def check(compiler, flags, folder, *run):
    program = folder / "forms"
    files = [SOURCES / name for name in ("gemm.cpp", "matrix.cpp", "blocks.cpp")]
    flags = ("-O2", "-std=c++17", "-ffp-contract=off", "-pthread", f"-I{SOURCES}", *flags)
    test = Path(__file__).with_name("simd_forms.cpp")
    subprocess.run([compiler, *flags, test, *files, "-o", program], check=True)
    ended = subprocess.run([*run, program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("form", ["this CPU's", "no vector unit's"])
def test_products_of_this_machine(form, tmp_path):
    plain = ("-march=armv8-a",) if IS_ARM else ("-march=x86-64",)
    check(find_compiler(), cpu_flags() if form == "this CPU's" else plain, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(set(FOREIGN) & EMULATED))
def test_products_of_other_machines(variant, tmp_path):
    emulator = shutil.which(f"qemu-{CROSS.split('-')[0]}")
    compiler = shutil.which(f"{CROSS}-g++")
    if emulator is None or compiler is None:
        pytest.skip(f"needs {CROSS}-g++ and qemu")
    flags, _ = FOREIGN[variant]
    check(compiler, flags, tmp_path, emulator, "-L", f"/usr/{CROSS}", "-cpu", "max")

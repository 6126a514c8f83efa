"""Every form of the quantised products against plain arithmetic: this CPU's, the one without a
vector unit, and those of other CPUs where a cross compiler and an emulator are installed."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hunch.kernels.build import SOURCES, VARIANTS, _cpu, cpu_flags, find_compiler

IS_ARM = platform.machine() in ("aarch64", "arm64")
CROSS = "aarch64-linux-gnu" if platform.machine() == "x86_64" else "x86_64-linux-gnu"
FOREIGN = VARIANTS["aarch64" if CROSS.startswith("aarch64") else "x86_64"]
EMULATED = {"neon", "i8mm", "avx2"}  # what qemu's user mode computes


def check(compiler, flags, folder, *run):
    """What the program prints: the largest errors, and hashes of the products' bits."""
    program = folder / "forms"
    files = [SOURCES / name for name in ("gemm.cpp", "matrix.cpp", "blocks.cpp")]
    flags = ("-O2", "-std=c++17", "-ffp-contract=off", "-pthread", f"-I{SOURCES}", *flags)
    test = Path(__file__).with_name("simd_forms.cpp")
    subprocess.run([compiler, *flags, test, *files, "-o", program], check=True)
    ended = subprocess.run([*run, program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def emulator(machine):
    return shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("form", ["this CPU's", "no vector unit's"])
def test_products_of_this_machine(form, tmp_path):
    plain = ("-march=armv8-a",) if IS_ARM else ("-march=x86-64",)
    check(find_compiler(), cpu_flags() if form == "this CPU's" else plain, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(set(FOREIGN) & EMULATED))
def test_products_of_other_machines(variant, tmp_path):
    program, compiler = emulator(CROSS.split("-")[0]), shutil.which(f"{CROSS}-g++")
    if program is None or compiler is None:
        pytest.skip(f"needs {CROSS}-g++ and qemu")
    flags, _ = FOREIGN[variant]
    check(compiler, flags, tmp_path, program, "-L", f"/usr/{CROSS}", "-cpu", "max")


@pytest.mark.slow
def test_matrix_instructions_give_the_bits_of_dot_products(tmp_path):
    """ARM's i8mm: another order of weights and activations, not one other bit."""
    compiler = find_compiler() if IS_ARM else shutil.which("aarch64-linux-gnu-g++")
    program = emulator("aarch64")
    run = (program, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max") if program else ()
    if IS_ARM and "i8mm" in _cpu().split():
        run = ()
    elif program is None:
        pytest.skip("needs a CPU with i8mm or qemu")
    if compiler is None:
        pytest.skip("needs a C++ compiler for ARM")
    printed = {}
    for variant, (flags, _) in VARIANTS["aarch64"].items():
        printed[variant] = check(compiler, flags, tmp_path, *run)
    assert printed["i8mm"] == printed["neon"]

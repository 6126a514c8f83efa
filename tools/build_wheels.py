"""Builds wheels that carry the CPU kernels, one per platform, from any of these machines.

    python tools/build_wheels.py [--platform linux-x86_64] [--out dist]      # or: make wheels

Needs `pip install ziglang build hatchling` (make wheels does it): zig brings a compiler for every
platform below, and old systems' C libraries. Which kernels run is chosen where the wheel is used;
a system compiler is needed only where none of them fits the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from hunch.kernels.build import PREBUILT, SOURCES, VARIANTS, compile_library  # noqa: E402


class Platform(NamedTuple):
    target: str  # zig's name of it
    tag: str  # the wheel's
    machine: str


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64", "x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64", "aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", "aarch64"),
}
CPUS = {
    "avx512": "cascadelake",
    "avx2": "haswell",
    "i8mm": "neoverse_n1+i8mm",  # no SVE: some CPUs with i8mm have none
    "neon": "neoverse_n1",
}  # zig's names
APPLE = {"i8mm": "apple_m1+i8mm", "neon": "apple_m1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", choices=sorted(PLATFORMS), action="append")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels-only", action="store_true", help="no wheels")
    args = parser.parse_args()
    for name in args.platform or PLATFORMS:
        build_kernels(PLATFORMS[name])
        if not args.kernels_only:
            print(build_wheel(PLATFORMS[name], args.out))
            shutil.rmtree(PREBUILT)
    return 0


def build_kernels(platform: Platform) -> None:
    """Every variant for the platform's machines, where a wheel takes them from."""
    if PREBUILT.exists():
        shutil.rmtree(PREBUILT)
    PREBUILT.mkdir()
    names = APPLE if "macos" in platform.target else CPUS
    print(f"{platform.tag}: the first link builds zig's C++ library too, once", flush=True)
    for variant in VARIANTS[platform.machine]:
        compiler = (sys.executable, "-m", "ziglang", "c++", "-target", platform.target)
        library = PREBUILT / f"{SOURCES.name}-{variant}.so"
        # Linked for any CPU: zig builds its C++ library, half of all the work, for what the link
        # names, and so once per platform and not once per variant.
        cpu = (f"-mcpu={names[variant]}",)
        compile_library(compiler, sorted(SOURCES.glob("*.cpp")), library, cpu, ("-s",))
        print(f"{library.relative_to(ROOT)} ({library.stat().st_size // 1000} kB)", flush=True)


def build_wheel(platform: Platform, out: Path) -> Path:
    """The package with what lies in PREBUILT, under the platform's tag."""
    made = out / "any"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(made)]
    subprocess.run([*command, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = made.glob("*-py3-none-any.whl")
    retag = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform.tag]
    subprocess.run([*retag, str(wheel)], check=True, stdout=subprocess.DEVNULL)
    (tagged,) = made.glob(f"*-{platform.tag}.whl")
    target = out / tagged.name
    tagged.replace(target)
    made.rmdir()
    return target


if __name__ == "__main__":
    sys.exit(main())

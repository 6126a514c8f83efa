"""Builds the C++ kernels for every CPU of a machine type into the package, for a wheel.

    python tools/build_kernels.py [--machine x86_64] [--compiler x86_64-linux-gnu-g++]

Then `python -m build --wheel` makes a wheel that needs no compiler where it is installed. Where
there is one, the kernels are still built for the very CPU.
"""

from __future__ import annotations

import argparse
import platform
import sys

from hunch.kernels.build import PREBUILT, SOURCES, VARIANTS, compile_library, find_compiler


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machine", default=platform.machine(), choices=sorted(VARIANTS))
    parser.add_argument("--compiler", default=find_compiler(), help="a C++ compiler for it")
    args = parser.parse_args()
    if args.compiler is None:
        sys.exit("no C++ compiler found; name one with --compiler")
    PREBUILT.mkdir(exist_ok=True)
    for kind, (flags, _) in VARIANTS[args.machine].items():
        library = PREBUILT / f"{SOURCES.name}-{kind}.so"
        # Older systems' C++ libraries will do: it brings its own.
        compile_library(
            args.compiler,
            sorted(SOURCES.glob("*.cpp")),
            library,
            (*flags, "-static-libstdc++", "-static-libgcc"),
        )
        print(f"{library} ({library.stat().st_size // 1000} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

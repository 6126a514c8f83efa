"""The process behind `gpu_compile`: compiles kernels in forked workers.

    python -m hunch.kernels.gpu_compile_server

The first line of its input has Triton's version, the number of workers and the kind of GPU; each
further line describes a kernel. It answers each with a line, which is empty if all went well.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pkgutil import iter_modules

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import hunch.kernels
from hunch.kernels import gpu_launch


class NamedGpu:
    """As much of a driver as compiling needs: the kind of GPU."""

    launcher_cls = utils = None

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def compile_for(target: GPUTarget, *, is_early: bool) -> None:
    """Compile kernels for this GPU from now on."""
    driver.set_active(NamedGpu(target))
    gpu_launch.HAS_EARLY_START, gpu_launch.EARLY = is_early, tl.constexpr(is_early)


def compile_kernel(module: str, name: str, source: str, description: str) -> None:
    kernel = getattr(import_module(module), name)
    # Triton's own hash of the code depends on the order of kernels, as it leaves out the constants
    # of functions that it has not seen before.
    kernel.hash = source
    # Triton would take a constant "int8" or "bf16" for its type of that name: another constant for
    # the kernel, under the same name in the cache. Ours are strings; types are not noted (`Noter`).
    tl.dtype.is_dtype = staticmethod(lambda word: False)
    kernel.preload(description)


def warm_up(target: GPUTarget) -> None:
    """Load what every worker needs, before they are forked."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    for found in iter_modules(hunch.kernels.__path__):
        if found.name.startswith("gpu_"):
            import_module(f"hunch.kernels.{found.name}")
    triton_key()  # reads all of Triton
    make_backend(target).hash()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print must not be taken for an answer
    version, count, is_early, about = json.loads(sys.stdin.readline())
    if version != triton.__version__:
        sys.exit(f"Triton {triton.__version__} here, {version} there")
    target = GPUTarget(**about)
    compile_for(target, is_early=is_early)
    warm_up(target)

    def answer(done: Future[None]) -> None:
        error = done.exception()
        answers.write("\n" if error is None else f"{type(error).__name__}\n")

    with ProcessPoolExecutor(count, mp_context=get_context("fork")) as workers:
        for line in sys.stdin:
            workers.submit(compile_kernel, *json.loads(line)).add_done_callback(answer)


if __name__ == "__main__":
    main()

"""`pytest -p compile_only`: Triton kernels are compiled for a GPU that is not there, and never run.

Triton's interpreter takes code that its compiler refuses. With this plugin each launch compiles the
kernel to machine code of compute capability 9.0 and does nothing else, so tests about results fail
and mean nothing; what counts is the summary, and its number of kernels that did not compile, or
would take more shared memory than such a GPU has.

    TRITON_INTERPRET=0 PYTHONPATH=src:tests pytest -p compile_only --tb=no tests/kernels

COMPILE_FOR=89 asks for another capability.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hunch.kernels import gpu_launch

CAPABILITY = int(os.environ.get("COMPILE_FOR", "90"))
KILOBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # of shared memory


class AbsentGpu:
    """As much of a driver as compiling asks for."""

    launcher_cls = utils = None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


launched: set[str] = set()
refused: dict[str, str] = {}
_run = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    launched.add(self.fn.__name__)
    try:
        done = _run(self, *args, grid=grid, warmup=True, **options)
    except Exception as error:  # counted, and raised again
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        refused.setdefault(self.fn.__name__, f"{error}\n{root}")
        raise
    size = 0 if done is None else done.metadata.shared
    if size > gpu_launch.SHARED_BYTES:
        refused.setdefault(self.fn.__name__, f"{size} bytes of shared memory: {options}")
    return done


def pytest_configure(config: pytest.Config) -> None:
    driver.set_active(AbsentGpu())
    JITFunction.run = compile_only
    is_new = CAPABILITY >= 90
    gpu_launch.HAS_EARLY_START, gpu_launch.EARLY = is_new, tl.constexpr(is_new)
    gpu_launch.HAS_BULK_COPIES = is_new
    gpu_launch.SHARED_BYTES = KILOBYTES[CAPABILITY] * 1024


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, words in refused.items():
        terminalreporter.write_line(f"{name} does not compile: {words}")
    terminalreporter.write_line(f"compiled {len(launched)} kernels, refused {len(refused)}")

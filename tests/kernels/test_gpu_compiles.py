"""Every Triton kernel compiles for a GPU; its interpreter, which other tests use, takes more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


def compiled(*tests: str, capability: int = 90) -> int:
    """How many kernels these tests launch, all of which must compile, and fit on such a GPU."""
    command = [sys.executable, "-m", "pytest", "-p", "compile_only", "-q", "--tb=no", *tests]
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}
    env["COMPILE_FOR"] = str(capability)
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True)
    found = re.search(r"compiled (\d+) kernels, refused (\d+)", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    assert found[2] == "0", done.stdout[-6000:]
    assert int(found[1]) > 0, "nothing was launched"
    return int(found[1])


def test_one_of_each_kind() -> None:
    """A product, a sum with its norm, attention; the slow tests below compile all."""
    names = "test_gated_product", "test_add_norm[False-3]", "test_attention[1-1-None-None]"
    assert compiled(*(f"tests/kernels/test_gpu_kernels.py::{name}" for name in names)) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path", sorted(p.name for p in (TESTS / "kernels").glob("test_gpu_*.py") if p != Path(__file__))
)
def test_those_of_every_kernel_test(path: str) -> None:
    compiled(f"tests/kernels/{path}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ["test_gpu_kernels.py", "test_gpu_quant.py"])
def test_those_of_a_gpu_with_less_shared_memory(path: str) -> None:
    compiled(f"tests/kernels/{path}", capability=89)

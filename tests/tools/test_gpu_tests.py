"""The runner of GPU tests: how it shares tests among lanes, and what it says of them."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_tests.py"
TESTS = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, "a b"])
def test_good(size):
    assert size

def test_without_a_mark():
    raise AssertionError

@pytest.mark.gpu
def test_bad():
    assert os.environ.get("STAND_IN") == "good"

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="not today")
def test_left_out():
    raise AssertionError

@pytest.mark.gpu
def test_endless():
    if os.environ.get("STAND_IN") == "late":
        Path("late").touch()
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gpu_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -m 'not gpu'\nmarkers = gpu: x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(tool, "has_gpu", lambda: True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    return tmp_path


def test_lanes_are_equal_and_lose_nothing(tool: ModuleType) -> None:
    ids = [f"a.py::test_many[{n}]" for n in range(11)] + ["a.py::test_one", "b.py::test_two[x]"]
    lanes = tool.plan(ids, 3)
    assert sorted(name for lane in lanes for name in lane) == sorted(ids)
    assert max(map(len, lanes)) <= 5
    together = [f"b.py::test_few[{n}]" for n in range(3)]
    assert together in tool.plan([*together, "a.py::test_one", "a.py::test_two"], 2)
    assert tool.plan(ids[:1], 8) == [ids[:1]]  # no empty lanes


def test_every_marked_test_runs_once(
    tool: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAND_IN", "good")
    assert tool.main(["tests", "--lanes", "2", "--limit", "120"], root=folder) == 0
    said = capsys.readouterr().out
    assert "6 tests in 2 lanes" in said
    assert "5 passed, 1 skipped in" in said.splitlines()[-1]
    logs = [path.read_text() for path in sorted((folder / "gpu-logs").iterdir())]
    assert len(logs) == 2
    assert "without_a_mark" not in "".join(logs)


def test_failures_and_late_lanes_are_named(
    tool: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clock() -> float:
        """The time is up as soon as the last test has begun, however slow the machine is."""
        return time.monotonic() + 3600 * (folder / "late").exists()

    monkeypatch.setenv("STAND_IN", "late")
    monkeypatch.setattr(tool, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    assert tool.main(["tests", "--lanes", "1", "--limit", "1800"], root=folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "failed: tests/test_some.py::test_bad (lane0.log)" in lines
    assert "did not end: tests/test_some.py::test_endless (lane0.log)" in lines
    assert lines[-1].startswith("1 failed, 3 passed, 1 skipped, 1 did not end in")
    assert any("stopped at the limit" in line for line in lines)


def test_nothing_to_run_is_an_error(
    tool: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tool.main(["tests", "--marks", "gpu and slow"], root=folder) == 2
    (folder / "tests" / "test_broken.py").write_text("import nothing_like_it\n")
    assert tool.main(["tests"], root=folder) == 2
    assert "nothing_like_it" in capsys.readouterr().err
    monkeypatch.setattr(tool, "has_gpu", lambda: False)
    assert tool.main(["tests"], root=folder) == 2
    assert "no CUDA device" in capsys.readouterr().err

"""Every example runs: scripts in this process, the notebook's cells one after the other."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from hunch.hub import ModelFiles

EXAMPLES = Path(__file__).parents[1] / "examples"
SERVED = {"openai_client.py": "openai", "langchain_chat.py": "langchain_openai"}
SCRIPTS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if path.name not in (*SERVED, "local_server.py")
)


# One in every run of the tests; `make examples`, a job of its own in CI, runs them all.
ALONE = "offline.py"
EACH = [name if name == ALONE else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]


@pytest.mark.parametrize("name", EACH)
def test_a_script_runs(
    name: str, default_files: ModelFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runpy.run_path(str(EXAMPLES / name), run_name="example")
    sys.modules["example"] = type(sys)("example")  # where own_drafter's class is looked up
    vars(sys.modules["example"]).update(module)
    try:
        module["main"]()
    finally:
        del sys.modules["example"]
    out = capsys.readouterr().out
    assert len(out.splitlines()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SERVED))
def test_a_script_with_a_server_runs(
    name: str,
    default_files: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec(SERVED[name]) is None:
        pytest.skip(f"{SERVED[name]} is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


def notebook_cells() -> list[str]:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_whole() -> None:
    cells = notebook_cells()
    assert len(cells) >= 6
    for cell in cells:
        compile(cell, "cell", "exec")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs(default_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    format = pytest.importorskip("nbformat")
    monkeypatch.setenv("HUNCH_QUICK", "1")
    notebook: Any = format.read(EXAMPLES / "tour.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    texts = json.dumps(notebook)
    assert "were guessed" in texts
    assert "passes for" in texts
    assert "image/png" in texts

"""The seconds the metrics say were saved, against the same requests without speculation."""

from __future__ import annotations

import importlib.util
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from hunch import LLM
from hunch.hub import ModelFiles

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_time_saved.py"


def load_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # it shares the start of a server
    spec = importlib.util.spec_from_file_location("serve_time_saved", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_time_saved_agrees_with_an_a_b_run(
    default_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process's own seconds, so that it holds on a busy machine too."""
    script = load_script(monkeypatch)
    monkeypatch.setattr("hunch.step.runner.perf_counter", time.process_time)
    monkeypatch.setattr("hunch.step.calibrate.perf_counter", time.process_time)
    monkeypatch.setattr(script.time, "perf_counter", time.process_time)
    options = {"max_model_len": 1024, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM("smollm2-135m", speculate="ngram", threads=1, **options) as llm:
        run = partial(script.run_offline, llm)
        script.compare(run, 1, 16)
        report = script.compare(run, 1, 64)
    assert report["saved_by_clock"] > 0.05 * report["plain_seconds"]
    assert report["ratio"] == pytest.approx(1, abs=0.15)

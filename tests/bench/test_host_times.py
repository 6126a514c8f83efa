"""What the host does in a step is told by work, without what the work called."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from hunch import LLM, SamplingParams
from hunch.bench.parts.requests import WORK, HostTimes
from hunch.engine.engine import Engine
from tiny_models import write_llama


def test_times_of_an_engines_steps(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", width=32, layers=1)
    step, times = Engine.step, HostTimes()
    with LLM(str(model), device="cpu", kv_bytes=1_000_000, max_model_len=64) as llm:
        with times.measured():
            llm.generate("the model", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        num_timed = len(times.steps)
        llm.generate("the model", SamplingParams(temperature=0, max_tokens=5))
    assert Engine.step is step
    assert len(times.steps) == num_timed == 5
    assert all(one["planning"] > 0 and one["the rest"] > 0 for one in times.steps)
    assert all(name in str(times) for name in WORK)

"""The part that measures a GPU's idle time: what of it runs without one."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from hunch import LLM
from hunch.bench.parts import idle
from stand_in import stand_in
from tiny_models import write_llama


def test_first_tokens_are_timed_one_request_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(idle, "seconds_of", lambda graph, device: 0.5)
    path = write_llama(tmp_path / "model", width=32, layers=1)
    size = {"device": "cpu", "kv_bytes": 2_000_000, "max_model_len": 64}
    with LLM(str(path), speculate="off", **size) as llm:
        waited, seconds = idle.first_tokens(llm, 20, 2)
        assert 0.0 < waited < 60.0
        assert seconds == 0.5, "of the captured pass"
        assert llm.stats()["finished"] == {"length": 4}

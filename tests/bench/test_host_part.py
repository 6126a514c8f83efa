"""What a GPU's host does is measured without one: requests run to their ends, and lines say it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from engine.fake_runner import FakeCodec
from hunch.bench.parts import host
from hunch.step.step_graphs import StepGraphs


@pytest.mark.parametrize("method", ["off", "ngram:num_nodes=3:adaptive=false"])
def test_requests_stay_and_flow(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = FakeCodec()
    codec.vocab_size, codec.letters = host.SPEC.vocab_size, "x" * host.SPEC.vocab_size
    monkeypatch.setattr(host, "load_text", lambda config: codec)
    monkeypatch.setattr(host, "WARM", 4)
    capture, ended = StepGraphs._capture, list[int]()
    stop = host.Traffic.stop

    def note(traffic: host.Traffic) -> None:
        ended.append(traffic.loop.engine.stats()["finished"].get("length", 0))
        stop(traffic)

    monkeypatch.setattr(host.Traffic, "stop", note)
    host.main(["--rows", "3", "--methods", method, "--tokens", "9", "--steps", "12"])
    assert StepGraphs._capture is capture
    lines = capsys.readouterr().out.splitlines()
    loads = [re.search(r"3 rows  (\w+) +\d+ us per step", line) for line in lines]
    assert [found and found[1] for found in loads] == ["stay", "flow"]
    assert ended[0] == 0 < ended[1]

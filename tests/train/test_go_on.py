"""A drafter goes on learning from served answers: measured on others, swapped in between steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train_setup import ENGINE

import hunch.adapt
from hunch import LLM, SamplingParams
from hunch.adapt import NetworkAdapter, packed
from hunch.errors import ConfigError, ModelFormatError
from hunch.models.swap import copy_network, tensors_of
from hunch.train.go_on import GoOn, WentOn, go_on, job_for, unpack
from hunch.train.regenerate import read_answers

FEW = {"steps": 2}  # a drafter that has all to learn
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def asked_for(job: Any, out: Path, **words: Any) -> GoOn:
    return GoOn(target=job.target, drafter=str(job.out), out=str(out), device="cpu", **words)


def test_what_is_no_better_is_not_written(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = train("draft", **FEW)
    monkeypatch.setattr("hunch.train.go_on.RATE", 0.0)
    texts = read_answers(job.out / "work" / "answers")
    found = go_on(asked_for(job, tmp_path / "new", epochs=0.1), texts)
    assert not found.is_better
    assert found.after == found.before
    assert not (tmp_path / "new").exists()


def test_other_drafters_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    asked = GoOn(target="t", drafter=str(tmp_path), out="o", device="cpu")
    with pytest.raises(ConfigError, match="hunch train"):
        job_for(asked)


def test_what_is_asked_goes_through_a_pipe() -> None:
    asked = GoOn(target="t", drafter="d", out="o", device="cpu")
    texts = [(np.arange(5, dtype=np.uint32), 2), (np.arange(7, dtype=np.uint32), 3)]
    found, back = unpack(json.dumps(asdict(asked)).encode() + b"\n" + packed(texts))
    assert found == asked
    assert [back.text(i).tolist() for i in range(2)] == [list(range(5)), list(range(7))]
    assert back.prompt_len.tolist() == [2, 3]


@pytest.mark.parametrize("method", ["draft", pytest.param("block", marks=pytest.mark.slow)])
def test_a_better_network_of_the_same_shape_drafts_and_changes_no_text(
    method: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    job, _ = train(method, **FEW)
    new = tmp_path / "new"
    texts = read_answers(job.out / "work" / "answers")
    learned = go_on(asked_for(job, new, epochs=40), texts)
    assert learned.is_better
    assert learned.after > learned.before
    shapes = [
        {name: tensor.shape for name, tensor in load_file(path / "model.safetensors").items()}
        for path in (job.out, new)
    ]
    assert shapes[0] == shapes[1]
    prompts = [texts.text(i)[: texts.prompt_len[i]].tolist() for i in range(12)]
    name = {"draft": "draft", "block": "dspark"}[method]
    speculate = f"{name}:{job.out}:adaptive=false:adapt=true"
    with LLM(str(job.target), speculate=speculate, **ENGINE) as llm:
        (adapter,) = llm.engine.adapter.several
        assert isinstance(adapter, NetworkAdapter)
        found = []
        for _ in range(2):
            outputs = [o.outputs[0] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
            steps = sum(output.stats["steps"] for output in outputs)
            found.append(([o.token_ids for o in outputs], steps))
            adapter._found = adapter._drafter.load_network(str(new)), str(new), "better"
            adapter._take(adapter._found)
    assert found[0][0] == found[1][0]
    assert found[1][1] < found[0][1]


def test_numbers_are_copied_where_captured_steps_read_them(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    from hunch.models.load import load_decoder
    from hunch.models.weights import open_weights

    job, _ = train("draft", **FEW)
    one, other = (load_decoder(open_weights(str(job.target))) for _ in range(2))
    places = [tensor.data_ptr() for tensor in tensors_of(one)]
    for tensor in tensors_of(other):
        if tensor.is_floating_point():
            tensor.mul_(0.5)
    assert copy_network(one, other) > 10
    assert [tensor.data_ptr() for tensor in tensors_of(one)] == places
    for ours, theirs in zip(tensors_of(one), tensors_of(other), strict=True):
        torch.testing.assert_close(ours, theirs)
    other.layers.pop()
    with pytest.raises(ModelFormatError, match="another shape"):
        copy_network(one, other)


class Fake:
    """A drafter that tells what it took."""

    path = "old"

    def __init__(self) -> None:
        self.taken: list[str] = []

    def load_network(self, path: str) -> str:
        return path

    def take_network(self, network: str) -> None:
        self.taken.append(network)


def adapter_of(drafter: Fake, monkeypatch: pytest.MonkeyPatch, **found: Any) -> NetworkAdapter:
    monkeypatch.setattr(hunch.adapt, "IDLE", 0.0)
    words = WentOn(**{"before": 1.5, "after": 1.8, "steps": 20, "is_better": True, **found})
    adapter = NetworkAdapter(drafter, "target", "cpu", first=4, pause=0.0)
    monkeypatch.setattr(adapter, "_ask", lambda *_: json.dumps(asdict(words)).encode())
    return adapter


@pytest.mark.parametrize("is_better", [True, False])
def test_only_what_is_better_is_taken(is_better: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Fake()
    adapter = adapter_of(drafter, monkeypatch, is_better=is_better)
    adapter.add([1, 2], [3, 4, 5, 6])
    adapter.wait(300.0)
    adapter.apply()
    assert len(drafter.taken) == is_better
    assert adapter._path == (drafter.taken[0] if is_better else "old")
    adapter.close()


def state_of(process: Any) -> str:
    text = Path(f"/proc/{process.pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_training_stands_still_while_there_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunch.adapt, "IDLE", 0.3)
    adapter = NetworkAdapter(Fake(), "target", "cpu")
    command = [sys.executable, "-c", "while True: pass"]
    adapter._process = process = subprocess.Popen(command)

    def becomes(states: str) -> bool:
        ends = monotonic() + 300
        while monotonic() < ends:
            if state_of(process) in states:
                return True
            sleep(0.01)
        return False

    try:
        adapter.apply()
        assert becomes("T")
        sleep(0.4)
        adapter._signal(is_stopped=not adapter._is_idle)
        assert becomes("R")
        adapter.apply()
        assert becomes("T")
    finally:
        adapter.close()
        code = process.wait(300)
    assert code != 0

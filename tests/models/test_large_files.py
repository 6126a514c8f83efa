"""Loading a model of several files: what it takes of memory, and pieces that add up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from builders import tiny_config
from hunch.models.load import tensor_shapes
from hunch.models.spec import ModelSpec
from hunch.models.staging import Stage, new_pieces
from hunch.models.weights.base import iterate

LOAD = """
import sys, threading, torch
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights

def private():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

torch.cat([torch.zeros(2).to("meta")] * 2)  # torch loads what it needs for such a device
weights = open_weights(sys.argv[1])
done, peak = threading.Event(), [0]
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], private())
before = private()
watcher = threading.Thread(target=watch)
watcher.start()
load_decoder(weights, dtype="bfloat16", device="meta")
done.set()
watcher.join()
print(weights.nbytes, peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells memory by /proc")
def test_the_host_never_holds_the_model(tmp_path):
    """To a device that keeps nothing: what stays is what loading itself takes."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 4096}
    config = tiny_config(**sizes, num_hidden_layers=12, num_attention_heads=8)
    names: dict[str, str] = {}
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    shapes = tensor_shapes(ModelSpec.from_config(config))
    for number, (name, shape) in enumerate(shapes.items()):
        shard = number * len(shards) // len(shapes)
        shards[shard][name] = torch.ones(shape, dtype=torch.bfloat16)
        names[name] = f"model-{shard}.safetensors"
    for number, tensors in enumerate(shards):
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shards.clear()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size, peak = map(int, done.stdout.split())
    assert size > 250e6
    assert peak < size / 4  # one of four files


def test_pieces_add_up():
    source = torch.arange(1000, dtype=torch.float32).bfloat16().view(10, 100)
    target = torch.zeros_like(source)
    Stage([torch.zeros(256, dtype=torch.uint8) for _ in range(2)]).copy(source, target)
    assert torch.equal(source, target)


def test_pieces_made_during_inference_serve_afterwards():
    with torch.inference_mode():
        stage = Stage(new_pieces(256, is_pinned=False))
    source, target = torch.arange(100.0), torch.zeros(100)
    stage.copy(source, target)
    assert torch.equal(source, target)


def test_a_bar_shows_only_what_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(iterate("abc", title="loading")) == ["a", "b", "c"]
    assert not capsys.readouterr().err
    assert list(iterate("abc", title="loading", delay=-1.0)) == ["a", "b", "c"]

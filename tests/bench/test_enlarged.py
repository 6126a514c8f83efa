"""A model enlarged: the same text at another cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hunch import LLM, SamplingParams
from hunch.bench.device.enlarged import SIZES, EnlargedWeights
from hunch.config import DEFAULT_MODEL
from hunch.hub import resolve
from hunch.models.weights import open_weights
from tiny_models import write_llama


def _with_biases(path: Path) -> None:
    """The Llama as a Qwen2."""
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]
    names += [name for name in tensors if name.endswith("v_proj.weight")]
    noise = torch.Generator().manual_seed(1)
    for name in names:
        shape = tensors[name].shape[:1]
        tensors[name.replace("weight", "bias")] = torch.randn(shape, generator=noise)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("has_biases", [False, True])
def test_the_text_stays_the_same(tmp_path: Path, has_biases: bool) -> None:
    path = str(write_llama(tmp_path / "model"))
    if has_biases:
        _with_biases(tmp_path / "model")
    small = open_weights(resolve(path))
    old = small.config
    size = {
        "hidden_size": 2 * old["hidden_size"],
        "intermediate_size": old["intermediate_size"] + 16,
        "num_attention_heads": 2 * old["num_attention_heads"],
        "num_key_value_heads": old["num_key_value_heads"],
        "head_dim": 2 * old["head_dim"],
        "num_hidden_layers": old["num_hidden_layers"] + 1,
    }
    params = SamplingParams(temperature=0, max_tokens=16)
    more = {"dtype": "float32", "threads": 1, "max_num_seqs": 1}
    with LLM(path, speculate="off", **more) as plain:
        expected = plain.generate("fast token the model", params)[0].outputs[0].token_ids
    weights = EnlargedWeights(small, size, "cpu")
    with LLM(path, weights=weights, speculate="ngram", **more) as large:
        assert large.generate("fast token the model", params)[0].outputs[0].token_ids == expected
        other = large.sibling("off")
        assert other.generate("fast token the model", params)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("name", ["7b", "1b", "70b"])
def test_every_size_has_room_for_the_heads_of_the_default_model(name: str) -> None:
    """Nine heads, three to a group: with fewer to a group, two would stand in one place."""
    small = open_weights(resolve(DEFAULT_MODEL))
    assert EnlargedWeights(small, SIZES[name], "cpu").config["num_hidden_layers"] >= 30
    crowded = SIZES[name]["num_attention_heads"] // 2
    with pytest.raises(ValueError, match="heads that share keys"):
        EnlargedWeights(small, {**SIZES[name], "num_key_value_heads": crowded}, "cpu")

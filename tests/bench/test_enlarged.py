"""A model enlarged: the same text at another cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hunch import LLM, SamplingParams
from hunch.bench.device.enlarged import SIZES, EnlargedWeights
from hunch.config import DEFAULT_MODEL
from hunch.hub import resolve
from hunch.models.weights import open_weights
from tiny_models import write_llama


def test_the_text_stays_the_same(tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "model"))
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


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_room_for_the_heads_of_the_default_model(name: str) -> None:
    """Nine heads, three to a group: with fewer to a group, two would stand in one place."""
    small = open_weights(resolve(DEFAULT_MODEL))
    assert EnlargedWeights(small, SIZES[name], "cpu").config["num_hidden_layers"] >= 30
    crowded = SIZES[name]["num_attention_heads"] // 2
    with pytest.raises(ValueError, match="heads that share keys"):
        EnlargedWeights(small, {**SIZES[name], "num_key_value_heads": crowded}, "cpu")

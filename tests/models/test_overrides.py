"""Values in place of config.json's: the same as a copy of the files that has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hunch import LLM, SamplingParams
from hunch.errors import ConfigError
from hunch.models.load import spec_of
from hunch.models.weights import open_weights, with_overrides
from tiny_models import write_llama

ENGINE = {"device": "cpu", "dtype": "float32", "kv_bytes": 8_000_000, "speculate": "off"}
YARN = {"rope_type": "yarn", "factor": 4.0}
OF_512 = {**YARN, "original_max_position_embeddings": 512}


def text_of(path: Path, **arguments: Any) -> tuple[list[int], int]:
    with LLM(str(path), **ENGINE, **arguments) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        answer = llm.generate("the model says a guess", params, use_tqdm=False)[0].outputs[0]
        return answer.token_ids, llm.engine.capacity.max_len


def test_overrides_are_as_good_as_other_files(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    plain, _ = text_of(model)
    assert text_of(model, hf_overrides={}) == (plain, 512)
    assert text_of(model, hf_overrides={"max_model_len": 64}) == (plain, 512)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    scaled = OF_512
    changed = {"rope_theta": 50.0, "rope_scaling": scaled, "max_position_embeddings": 2048}
    (copy / "config.json").write_text(json.dumps({**config, **changed}))
    wanted = text_of(copy)
    assert wanted[0] != plain
    assert wanted[1] == 2048
    assert text_of(model, hf_overrides={"rope_theta": 50.0, "rope_scaling": YARN}) == wanted
    newer = {"rope_parameters": {**YARN, "rope_theta": 50.0}}
    assert text_of(model, hf_overrides=json.dumps(newer)) == wanted


def test_a_new_rope_stretches_what_the_model_was_trained_at(tmp_path: Path) -> None:
    path = write_llama(tmp_path)  # of 512 positions
    for given, wanted in (
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 384}}, 1536),
        ({"rope_scaling": OF_512, "max_position_embeddings": 1000}, 2048),  # as in vLLM
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
    ):
        weights = with_overrides(open_weights(path), json.dumps(given))
        assert spec_of(weights).max_len == wanted


def test_what_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    weights = open_weights(write_llama(tmp_path))
    for text, words in (
        ("[1]", "not a JSON object"),
        ("{", "is not JSON"),
        ('{"eos_token_id": 3}', "eos_token_id belongs to the files"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_overrides(weights, text)

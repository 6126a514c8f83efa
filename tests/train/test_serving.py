"""Where the time of a training run goes, and that the target is loaded once for all its stages."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from train_setup import ENGINE

from builders import tiny_config, tiny_weights
from hunch.models.load import load_decoder
from hunch.models.source import EXPAND
from hunch.train.clock import Clock, account_text
from hunch.train.serving import Serving
from hunch.train.speeds import Speed, compare_speeds, odd_ones


def test_parts_of_stages_are_told_apart(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock.json", 1.0)
    with clock.stage("other"):
        with clock.stage("measure"), clock.part("capture"):
            time.sleep(0.02)
            clock.move("load", 0.015)
        with clock.stage("train"):
            clock.move("read", -0.5)
            clock.move("read", 1.0)
    assert clock.of("measure") >= 0.02
    assert clock.spent["measure/load"] == 0.015
    assert clock.spent["train/read"] == 0.5
    found = Clock(tmp_path / "clock.json", 1.0).account()  # a job that goes on knows it
    assert set(found) == {"other", "measure", "capture", "load", "train", "read"}
    assert sum(found.values()) == pytest.approx(clock.gone)
    assert next(iter(found)) == "read"
    assert account_text({"train": 60.2, "load": 30.0, "write": 0.1}) == "of 90 s: train 60, load 30"


def test_engines_of_other_sizes_share_a_target(target: Path) -> None:
    serving = Serving(str(target))
    answers = []
    for num_rows in (1, 4):
        with serving.engine({**ENGINE, "max_num_seqs": num_rows}) as llm:
            assert llm.engine.config.schedule.num_rows == num_rows
            answers.append(llm.generate("the model", use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert serving.num_loads == 1


def test_tokens_per_pass_are_told_by_what_prompts_ask_for(target: Path) -> None:
    clock = Clock()
    with Serving(str(target)).engine(ENGINE) as llm:
        prompts = [llm.tokenizer.encode(text) for text in ("the model", "a guess", "to the model")]
        asked, said = {"lookups": "ngram"}, ("chat", "code", "chat")
        words = {"seconds": 20.0, "max_tokens": 12}
        found = compare_speeds(llm, asked, prompts, categories=said, clock=clock, **words)
    assert found.num_prompts == 3
    assert found.by_category["lookups"].keys() == {"chat", "code"}
    assert min(found.by_category["lookups"].values()) >= 1.0
    assert clock.account()["capture"] > 0, "building engines is no comparing"


def test_training_reads_the_weights_that_serve_where_they_are_numbers() -> None:
    weights = tiny_weights(tiny_config("Qwen2ForCausalLM", head_dim=32))
    decoder = load_decoder(weights, hold=EXPAND)
    serving = Serving("t")
    assert serving.decoder(weights) is None
    serving.target = SimpleNamespace(decoder=decoder)  # type: ignore[assignment]
    assert serving.decoder(weights) is decoder
    decoder.layers[0].attn.out.weight = object()  # type: ignore[assignment,union-attr]
    assert serving.decoder(weights) is None, "few bits"
    other = load_decoder(weights, dtype="bfloat16")
    serving.target = SimpleNamespace(decoder=other)  # type: ignore[assignment]
    assert serving.decoder(weights) is None, "another precision than training's"
    assert other.dtype == torch.bfloat16


def test_kernels_of_a_gpu_leave_the_weights_as_they_were_read() -> None:
    pytest.importorskip("triton")
    from hunch.models.cuda import CudaDecoder

    weights = tiny_weights(tiny_config("Qwen2ForCausalLM", head_dim=32))
    decoder = load_decoder(weights, dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in decoder.named_tensors()}
    assert CudaDecoder(decoder).decoder is decoder
    after = dict(decoder.named_tensors())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_answer_in_which_something_was_compiled_is_asked_for_again() -> None:
    usual = [Speed(20, 10, 0.010), Speed(30, 10, 0.011), Speed(12, 10, 0.009)]
    assert odd_ones(usual) == []
    assert odd_ones([*usual, Speed(20, 10, 0.2)]) == [3]
    assert odd_ones([*usual, Speed(40, 20, 0.021)]) == []  # longer, with steps like the others

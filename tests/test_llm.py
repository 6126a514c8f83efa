"""The front door: what users type, and what they hear when it is wrong."""

import asyncio
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import hunch.sglang as sgl
from hunch import LLM, BeamSearchParams, HunchError, SamplingParams
from hunch.compat.metrics import Metric
from hunch.errors import (
    CapacityError,
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    RequestError,
    TemplateError,
    UnsupportedModelError,
)
from hunch.step.runner import Runner
from hunch.text.tokenizer import Tokenizer
from tiny_models import write_llama

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SMALL = {"max_num_seqs": 4, "kv_bytes": 4_000_000, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("front") / "model")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), speculate="ngram", **SMALL) as made:
        yield made


def test_vllms_ngram_example(model: Path) -> None:
    prompts = ["The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(
        model=str(model),
        tensor_parallel_size=1,
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
        use_v2_block_manager=True,
    )
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        assert output.prompt == prompts[0]
        assert isinstance(output.outputs[0].text, str)
        assert len(output.outputs[0].token_ids) <= 16


def test_the_vocabulary_is_listed_for_draft_models_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(tokenizer: object) -> None:
        raise AssertionError("that takes a while")

    monkeypatch.setattr(Tokenizer, "vocab", listed)
    with LLM(str(model), speculate="ngram", **SMALL) as llm:
        assert llm.generate("a b", SamplingParams(max_tokens=2))[0].finished
    with pytest.raises(AssertionError, match="takes a while"):
        LLM(str(model), speculate=f"draft:{model}", **SMALL)


def test_passes_are_timed_at_the_start_only_where_their_cost_decides(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Runner] = []
    monkeypatch.setattr("hunch.step.assemble.calibrate", timed.append)
    for options in ({"speculate": "off"}, {"always_draft": True}):
        LLM(str(model), **{"speculate": "ngram"} | options, **SMALL).close()
    assert not timed
    LLM(str(model), speculate="ngram", **SMALL).close()
    assert len(timed) == 1


def test_a_bare_string(llm: LLM) -> None:
    (output,) = llm.generate("The future of AI is")
    assert output.prompt == "The future of AI is"
    assert output.finished


def test_sglangs_example(model: Path) -> None:
    args = sgl.ServerArgs(model_path=str(model), speculative_algorithm="NGRAM")
    engine = sgl.Engine(server_args=args, **SMALL)
    answers = engine.generate(["a b a b", "c"], {"temperature": 0, "max_new_tokens": 30})
    assert [set(answer) >= {"text", "meta_info"} for answer in answers] == [True, True]
    sampling = {"temperature": 0, "max_new_tokens": 30}
    alone = engine.generate("a b a b", sampling)
    assert alone["text"] == answers[0]["text"]
    assert sgl.stream_and_merge(engine, "a b a b", sampling) == alone["text"]
    plain = {"temperature": 0, "max_new_tokens": 2}
    engine.generate("c", plain, rid="mine", image_data=None)
    for name, word in (("image_data", "only text"), ("lora_path", "lora=PATH"), ("x", "not known")):
        with pytest.raises(RequestError, match=f"{name}: .*{word}"):
            engine.generate("c", plain, **{name: "y"})
    vector = engine.encode("a b")
    assert vector["embedding"] == engine.embed(["a b"])[0].outputs.embedding
    assert engine.encode(["a b", "c"])[0]["embedding"] == vector["embedding"]
    one = SamplingParams(temperature=0, max_tokens=1)
    chat = [{"role": "user", "content": "a b"}]
    (before,) = engine.chat(chat, one, chat_template="{{ messages[0].content }}")
    assert engine.beam_search("a b", BeamSearchParams(1, 1))[0].sequences[0].cum_logprob < 0
    assert engine.tokenizer_manager.tokenizer is engine.tokenizer
    asyncio.run(engine.async_generate("c", plain))  # from now on in a thread of its own
    (after,) = engine.chat(chat, one, chat_template="{{ messages[0].content }}")
    assert after.outputs[0].token_ids == before.outputs[0].token_ids

    async def merged() -> str:
        news = sgl.async_stream_and_merge(engine, "a b a b", sampling)
        return "".join([text async for text in news])

    assert asyncio.run(merged()) == alone["text"]
    engine.flush_cache()
    assert engine.get_server_info()["steps"] > 0
    with pytest.raises(ImportError, match="write prompts as texts"):
        from hunch.sglang import function  # noqa: F401
    engine.shutdown()


def test_token_ids_and_prompt_dicts(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.tokenizer.encode("the model")
    texts = {
        output.outputs[0].text
        for output in llm.generate(
            ["the model", ids, {"prompt": "the model"}, {"prompt_token_ids": ids}], greedy
        )
    }
    assert len(texts) == 1
    assert llm.generate(ids, greedy)[0].outputs[0].text in texts
    older = llm.generate(prompt_token_ids=[ids], sampling_params=greedy)
    assert older[0].outputs[0].text in texts


def test_arrays_and_other_iterables_are_prompts_too(llm: LLM) -> None:
    def ask(prompts: Any) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    plain = ask([[5, 6, 7]])
    assert ask(torch.tensor([5, 6, 7])) == ask([numpy.array([5, 6, 7])]) == plain
    assert ask(torch.tensor([[5, 6, 7], [5, 6, 7]])) == plain * 2
    assert ask(prompt for prompt in ["the", "model"]) == ask(["the", "model"])


def test_streams_side_by_side(llm: LLM) -> None:
    """Each step is made for one of them and brings both on."""
    prompts = ["the model", "of a token"]
    plain = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", ""]
    for outputs in zip_longest(*streams):
        for at, output in enumerate(outputs):
            texts[at] = output.outputs[0].text if output else texts[at]
    assert texts == plain


def test_chat_uses_the_template(llm: LLM) -> None:
    message = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(message, SamplingParams(temperature=0, max_tokens=4))
    assert llm.tokenizer.decode(output.prompt_token_ids) == "<|user|>hi\n<|assistant|>"


def test_vllms_names_around_a_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert params.clone() == params
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    (output,) = llm.chat(messages, params)
    assert output.prompt == text
    assert output.prompt_token_ids == ids


def test_times_of_a_request_by_vllms_names(llm: LLM) -> None:
    before = time.time()
    (output,) = llm.generate("the model", SamplingParams(temperature=0, max_tokens=4))
    metrics = output.metrics
    times = [
        before,
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
        time.time(),
    ]
    assert times == sorted(times)
    assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.time_in_queue == metrics.scheduled_ts - metrics.arrival_time
    assert metrics.last_token_ts == metrics.last_token_time
    started, *_ = llm.stream("the model", SamplingParams(max_tokens=4))
    assert started.metrics is None


def test_vllms_example_of_speculation_counts_acceptance(model: Path) -> None:
    from hunch.v1.metrics.reader import Counter, Vector

    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with LLM(model=str(model), speculative_config=ngram, disable_log_stats=False) as llm:
        outputs = llm.generate("a b a b a b", SamplingParams(temperature=0, max_tokens=24))
        found = {metric.name: metric for metric in llm.get_metrics()}
    assert all(isinstance(metric, Metric) for metric in found.values())
    drafts, accepted = (
        found[f"vllm:spec_decode_num_{what}"] for what in ("drafts", "accepted_tokens")
    )
    assert isinstance(drafts, Counter)
    assert drafts.value > 0
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(positions, Vector)
    assert sum(positions.values) == accepted.value <= 3 * drafts.value
    assert len(positions.values) <= 3
    assert found["vllm:generation_tokens"].value == len(outputs[0].outputs[0].token_ids)
    first = found["vllm:time_to_first_token_seconds"]
    assert first.count == first.buckets["+Inf"] == 1


def test_a_picture_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="hunch reads text alone"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": None}})


def test_an_answer_may_go_on_with_what_was_begun(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (output,) = llm.chat(messages, params, continue_final_message=True)
    text = llm.tokenizer.decode(output.prompt_token_ids)
    assert text.startswith("<|user|>hi")
    assert text.endswith("Well")
    with pytest.raises(RequestError, match="is not the assistant's"):
        llm.chat(messages[:1], params, continue_final_message=True)


def test_requests_leave_no_circles_and_the_collector_comes_back(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    llm.generate(["warm"], params)
    gc.collect()
    llm.generate(["one", "two", "three"] * 4, params)
    assert gc.collect() < 12  # the collector rests while answers are made
    assert gc.isenabled()


def test_stream_grows_and_leaving_it_aborts(llm: LLM) -> None:
    lengths = []
    stream = llm.stream("the model", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    for output in stream:
        lengths.append(len(output.outputs[0].token_ids))
        if len(lengths) == 3:
            break
    stream.close()
    assert lengths == sorted(lengths)
    llm.generate("a", SamplingParams(max_tokens=1))
    assert llm.stats()["num_running"] == 0


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        (b"bytes", {}, "bytes b'bytes' given"),
        (["a", "b"], {}, "whole numbers; 'a' is among them"),
        ("half \ud800", {}, "at character 5 is half of a character"),
        ("the " * 600, {}, r"context|longer"),
        ([10_000_000], {}, "10000000"),
        ([-1], {}, "-1"),
        ("a", {"logit_bias": {10_000_000: 1.0}}, "10000000"),
        ("a", {"allowed_token_ids": [10_000_000]}, "10000000"),
    ],
)
def test_a_bad_request_is_named_and_breaks_nothing(
    llm: LLM, prompt: object, params: dict, word: str
) -> None:
    with pytest.raises(RequestError, match=word):
        llm.generate([prompt], SamplingParams(**params))
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e39},  # more than float32 holds
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": ""},
        {"repetition_penalty": 0},
        {"seed": -2},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_bad_sampling_parameters(params: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


def test_scores_of_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, prompt_logprobs=-1, n=2)
    (output,) = llm.generate("abc", params)
    size = llm.tokenizer.vocab_size
    for scores in (output.prompt_logprobs[1], *output.outputs[0].logprobs):
        assert set(scores) == set(range(size))
        assert sum(math.exp(entry.logprob) for entry in scores.values()) == pytest.approx(1)


def test_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()


def test_mixed_good_and_bad_prompts_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", ""])
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished
    assert not llm.engine.has_work()


def test_unknown_names(model: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        LLM("smollm2-136m")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(model), max_modl_len=5)


def spoil(model: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy)
    return copy


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: cut(d / "model.safetensors", 4000), ModelFormatError),
        (lambda d: cut(d / "model.safetensors", 3), ModelFormatError),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 5000), ModelFormatError),
        (lambda d: (d / "config.json").write_text("{"), ModelFormatError),
        (lambda d: (d / "model.safetensors").unlink(), HunchError),
        (
            lambda d: (d / "config.json").write_text(
                json.dumps(
                    json.loads((d / "config.json").read_text()) | {"architectures": ["MambaLM"]}
                )
            ),
            UnsupportedModelError,
        ),
    ],
    ids=["cut", "stub", "noise", "broken config", "no weights", "unknown architecture"],
)
def test_spoiled_files(
    model: Path, tmp_path: Path, change: Callable[[Path], None], error: type[Exception]
) -> None:
    with pytest.raises(error):
        LLM(str(spoil(model, tmp_path, change)), **SMALL)


def shorten(folder: Path, num_tokens: int) -> None:
    """A vocabulary that the model was never resized to: its last tokens have no embedding."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:num_tokens].clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": num_tokens}))


def test_a_tokenizer_with_more_tokens_than_the_model(model: Path, tmp_path: Path) -> None:
    folder = spoil(model, tmp_path, lambda copy: shorten(copy, 260))
    with LLM(str(folder), speculate="prediction", **SMALL) as llm:
        plain = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match=r"to 259: the tokenizer's last 27 tokens are unk"):
            llm.generate("abc token", GREEDY)
        # Of the words of other parameters, those tokens do nothing: end-of-text is one of them.
        odd = SamplingParams(
            temperature=0,
            max_tokens=6,
            min_tokens=3,
            prediction="a fast token",
            bad_words=[" token"],
        )
        assert llm.generate("abc", odd)[0].outputs[0].token_ids == plain
        structured = SamplingParams(structured_outputs={"choice": [" token"]}, max_tokens=8)
        assert llm.generate("abc", structured)[0].finished


def test_weights_that_are_no_numbers(model: Path, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
        save_file(tensors, folder / "model.safetensors")

    with pytest.raises(ModelFormatError, match=r"copy: model\.layers\.1\.mlp\.up_proj\.weight has"):
        LLM(str(spoil(model, tmp_path, damage)), speculate="off", **SMALL)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", -4, r"config\.json: hidden_size=-4"),
        ("num_hidden_layers", 9999, "the config counts 9999 layers and the files hold 2.*Download"),
    ],
)
def test_an_error_in_a_config_says_whose(
    model: Path, tmp_path: Path, key: str, value: int, words: str
) -> None:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    with pytest.raises(ModelFormatError, match=f"copy: {words}"):
        LLM(str(spoil(model, tmp_path, damage)), **SMALL)


def test_a_config_that_counts_fewer_layers_is_followed_with_a_word(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(model), hf_overrides={"num_hidden_layers": 1}, **SMALL) as llm:
        assert llm.engine.runner.target.spec.num_layers == 1
    assert "holds 2 layers and its config counts 1" in caplog.text


@pytest.mark.parametrize("speculate", ["draft:/nowhere", "auto:draft=/nowhere", "nowhere:Drafter"])
def test_a_drafter_that_is_not_there_is_told_before_the_target_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, speculate: str
) -> None:
    monkeypatch.setattr("hunch.loading.load_target_of", None)
    with pytest.raises(HunchError, match="nowhere"):
        LLM(str(model), speculate=speculate, **SMALL)


def test_hostile_templates(model: Path, llm: LLM) -> None:
    message = [{"role": "user", "content": "hi"}]
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{% if %}",
    ):
        with pytest.raises(TemplateError):
            llm.chat(message, chat_template=template)


def test_no_memory_for_one_requests_kv(model: Path) -> None:
    llm = LLM(str(model), num_blocks=2, speculate="off", threads=1)
    with pytest.raises((CapacityError, RequestError), match=r"block|KV|memory|room"):
        llm.generate("the model " * 20, SamplingParams(max_tokens=100))
    with pytest.raises(CapacityError):
        LLM(str(model), kv_bytes=10)


def test_a_sibling_shares_the_weights_and_writes_the_same_text(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(str(model), speculate="off", **SMALL) as plain:
        other = plain.sibling("ngram:adaptive=false")
        assert other.engine.runner.target is plain.engine.runner.target
        (expected,), (found,) = (
            llm.generate("fast token fast token", params) for llm in (plain, other)
        )
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.stats["drafted"] > 0
        assert expected.stats["drafted"] == 0
        assert 0 < found.stats["first_token_seconds"] < 600
        other.close()

"""Every argument of LLM and of hunch.sglang.Engine has its effect, is refused, or is named once."""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import hunch
from hunch import LLM, SamplingParams, compat
from hunch import sglang as sgl
from hunch.compat import config_from_sglang, config_from_vllm
from hunch.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpecConfig,
    say_once,
)
from hunch.errors import ConfigError, HunchError, QueueFullError, RequestError
from tiny_models import write_llama

SOURCE = Path(hunch.__file__).parent


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("options") / "model")
    with LLM(str(path), speculate="ngram", dtype="float32", max_model_len=128, threads=1) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    level = logging.getLogger("hunch").level
    say_once.cache_clear()
    yield
    logging.getLogger("hunch").setLevel(level)


# --- LLM ----------------------------------------------------------------------------------------

NGRAM = {"speculative_model": "[ngram]"}
# By section of the config: arguments that stand there under their own name, as they were given.
AS_GIVEN: dict[str, dict[str, Any]] = {
    "model": {
        "model": "m", "tokenizer": "t", "revision": "r", "download_dir": "d", "dtype": "bfloat16",
        "device": "cpu", "max_model_len": 9, "seed": 3, "lora": "a", "threads": 2,
        "kernels": "torch", "chat_template": "{{x}}", "tool_call_parser": "hermes",
        "reasoning_parser": "off", "logprobs_mode": "processed_logprobs", "kv_cache_dtype": "fp8",
        "quantization": "int8", "activation_bits": 14,
    },
    "cache": {
        "engines_per_device": 2, "block_size": 8, "kv_bytes": 99, "num_blocks": 7,
        "gpu_memory_utilization": 0.5, "enable_prefix_caching": False,
    },
    "schedule": {"max_queue": 4, "depth": 1},
    "parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "spec": {"verifier": "block"},
}  # fmt: skip
# The others -> what is given with them, where they end up, what stands there.
HONOURED: dict[str, tuple[dict[str, Any], Callable[[Config], Any], Any]] = {
    **{
        name: ({name: value}, attrgetter(f"{section}.{name}"), value)
        for section, given in AS_GIVEN.items()
        for name, value in given.items()
    },
    "hf_overrides": (
        {"hf_overrides": {"rope_theta": 5.0}},
        lambda c: c.model.hf_overrides,
        '{"rope_theta": 5.0}',
    ),
    "kv_events_config": (
        {"kv_events_config": {"enable_kv_cache_events": True}},
        lambda c: c.cache.kv_events is not None,
        True,
    ),
    "max_num_seqs": ({"max_num_seqs": 3}, lambda c: c.schedule.num_rows, 3),
    "max_num_batched_tokens": ({"max_num_batched_tokens": 33}, lambda c: c.schedule.num_tokens, 33),
    "speculate": ({"speculate": "suffix"}, lambda c: c.spec.method, "suffix"),
    "always_draft": ({"always_draft": True}, lambda c: c.spec.always, True),
    "speculative_model": ({"speculative_model": "p"}, lambda c: c.spec.path, "p"),
    "num_speculative_tokens": (
        {**NGRAM, "num_speculative_tokens": 6},
        lambda c: c.spec.options["num_nodes"],
        "6",
    ),
    "ngram_prompt_lookup_max": (
        {**NGRAM, "ngram_prompt_lookup_max": 6},
        lambda c: c.spec.options["max_match"],
        "6",
    ),
    "ngram_prompt_lookup_min": (
        {**NGRAM, "ngram_prompt_lookup_min": 2},
        lambda c: c.spec.options["min_match"],
        "2",
    ),
    "speculative_device": (
        {"speculative_model": "p", "speculative_device": "cpu"},
        lambda c: c.spec.device,
        "cpu",
    ),
    "speculative_draft_tensor_parallel_size": (
        {"speculative_model": "p", "speculative_draft_tensor_parallel_size": 1},
        lambda c: c.spec.draft_tensor_parallel_size,
        1,
    ),
    "speculative_disable_by_batch_size": (
        {**NGRAM, "speculative_disable_by_batch_size": 8},
        lambda c: c.spec.max_batch,
        7,
    ),
    "speculative_max_model_len": (
        {"speculative_model": "p", "speculative_max_model_len": 99},
        lambda c: c.spec.options.get("window"),
        "99",
    ),
    "spec_decoding_acceptance_method": (
        {"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
        lambda c: c.spec.verifier,
        "typical",
    ),
    "speculative_config": (
        {"speculative_config": {"method": "ngram"}},
        lambda c: c.spec.method,
        "ngram",
    ),
}
NAMED: dict[str, Any] = {  # argument -> a value that gets a word in the log
    "use_v2_block_manager": False,
    "enforce_eager": True,
    "enable_auto_tool_choice": True,
    "enable_lora": False,
    "max_loras": 4,
    "max_lora_rank": 16,
    "max_seq_len_to_capture": 1024,
    "compilation_config": 3,
    "enable_chunked_prefill": False,
    "disable_log_stats": False,
    "disable_log_requests": False,
    "disable_custom_all_reduce": True,
    "distributed_executor_backend": "ray",
    "worker_use_ray": True,
    "generation_config": "a/file",
    "limit_mm_per_prompt": {"image": 5},
    "disable_chunked_mm_input": True,
    "async_scheduling": True,
    "speculative_model_quantization": "awq",
    "swap_space": 4,
    "cpu_offload_gb": 10,
    "tokenizer_mode": "slow",
    "load_format": "pt",
    "speculative_disable_mqa_scorer": True,
    "disable_logprobs_during_spec_decoding": True,
    "trust_remote_code": True,
    "guided_decoding_backend": "xgrammar",
    "structured_outputs_config": {"backend": "xgrammar"},
    "max_logprobs": 20,
    "model_impl": "transformers",
    "enable_expert_parallel": True,
    "disable_cascade_attn": True,
    "disable_async_output_proc": True,
    "enable_sleep_mode": True,
    "model_loader_extra_config": {"device": "cuda"},
    "mm_processor_kwargs": {"num_crops": 4},
    "use_tqdm_on_load": True,
    "skip_tokenizer_init": True,
}
REFUSED: dict[str, Any] = {  # argument -> a value that is an error
    "data_parallel_size": 2,
    "tokenizer_mode": "mistral",
    "load_format": "dummy",
    "dp_size": 2,
    "task": "score",
    "runner": "draft",
    "scheduling_policy": "lottery",
}


def test_every_argument_is_in_one_of_the_tables() -> None:
    """A new argument, of hunch's own or of another engine's, needs a line in one of them."""
    assert compat.known_arguments() == {*HONOURED, *NAMED, *REFUSED}


@pytest.mark.parametrize("name", HONOURED)
def test_an_argument_arrives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given, read, expected = HONOURED[name]
    assert read(config_from_vllm(**given)) == expected
    rest = {key: value for key, value in given.items() if key != name}
    assert name in ("speculative_config",) or _read(rest, read) != expected
    assert caplog.messages == []


def _read(given: dict[str, Any], read: Callable[[Config], Any]) -> Any:
    try:
        return read(config_from_vllm(**given))
    except KeyError:
        return None


@pytest.mark.parametrize("name", NAMED)
def test_an_argument_without_meaning_is_named_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        config_from_vllm(**{name: NAMED[name]})
    assert len(caplog.messages) == 1
    assert re.match(rf"{name}=.* has no effect: \w+", caplog.messages[0])


def test_what_hunch_does_anyway_needs_no_word(caplog: pytest.LogCaptureFixture) -> None:
    given = {"enforce_eager": False, "swap_space": 0, "load_format": "auto", "tokenizer": None}
    config_from_vllm(**given, enable_chunked_prefill=True, trust_remote_code=False)
    assert caplog.messages == []


@pytest.mark.parametrize("take", [config_from_vllm, config_from_sglang])
def test_flags_of_servers_are_arguments_too(
    take: Callable[..., Config], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve` and `LLM` take the same names, and so do SGLang's server and its engine."""
    monkeypatch.setenv("HF_TOKEN", "")
    config = take(model="m", num_gpu_blocks_override=64, kv_cache_memory_bytes="2K", nnodes=1)
    assert (config.cache.num_blocks, config.cache.kv_bytes) == (64, 2048)
    take(model="m", hf_token="t0", enable_dbo=False, logits_processors=None, lora_paths=[])
    assert (os.environ["HF_TOKEN"], caplog.messages) == ("t0", [])
    take(model="m", served_model_name="x", max_num_partial_prefills=2, enable_metrics=True)
    assert [text.partition("=")[0] for text in caplog.messages] == [
        "served_model_name", "max_num_partial_prefills", "enable_metrics"
    ]  # fmt: skip
    for given, word in (
        ({"nnodes": 2}, "nnodes=2 is not supported; only '1'"),
        ({"logits_processors": ["x:Y"]}, "never runs code"),
        ({"lora_paths": ["x"]}, "give lora=PATH"),
        ({"num_blocks": 3, "num_gpu_blocks_override": 4}, "not both"),
        ({"num_block": 4}, "is not known; did you mean 'num_blocks'"),
    ):
        with pytest.raises(ConfigError, match=word):
            take(model="m", **given)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is not supported; only"):
        config_from_vllm(**{name: REFUSED[name]})


def test_every_field_of_the_config_is_read_by_something() -> None:
    text = "".join(
        path.read_text()
        for path in SOURCE.rglob("*.py")
        if path.name != "config.py" and path.parent.name != "compat"
    )
    text += (SOURCE / "compat" / "vllm.py").read_text().partition("def unused_arguments")[2]
    sections = (ModelConfig, CacheConfig, ScheduleConfig, ParallelConfig, SpecConfig)
    resolved = {"max_num_seqs": "num_rows", "max_num_batched_tokens": "num_tokens"}
    for section in sections:
        for field in fields(section):
            name = resolved.get(field.name, field.name)
            assert re.search(rf"\.{name}\b", text), f"nothing reads {section.__name__}.{name}"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"speculative_draft_tensor_parallel_size": "banana"}, "banana.*whole number"),
        ({"speculative_draft_tensor_parallel_size": 2}, "must divide tensor_parallel_size=1"),
        ({**NGRAM, "num_speculative_tokens": "five"}, "'five' must be a whole number"),
        ({**NGRAM, "ngram_prompt_lookup_max": 0}, "ngram_prompt_lookup_max=0 must be .* 1 or more"),
        (
            {**NGRAM, "ngram_prompt_lookup_max": 2, "ngram_prompt_lookup_min": 3},
            "above ngram_prompt_lookup_max=2",
        ),
        ({**NGRAM, "speculative_disable_by_batch_size": -3}, "-3 must be .* 2 or more"),
        ({"max_model_len": "4k"}, "max_model_len='4k' must be a whole number"),
        ({"max_num_seqs": 3.5}, "max_num_seqs=3.5 must be a whole number"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"gpu_memory_utilization": "most"}, "'most' must be a number"),
        ({"enable_prefix_caching": "no"}, "'no' must be true or false"),
        ({"model": 7}, "model=7 must be a text"),
        ({"dtype": 16}, "dtype=16 must be a text"),
        ({"speculate": 5}, "speculate=5 must be a text"),
        ({"always_draft": "sometimes"}, "'sometimes' must be true or false"),
        ({"speculative_config": 5}, "a dict or a JSON object"),
        ({"speculative_config": {"method": "ngram", "model": "x/y"}}, "reads no model"),
        ({**NGRAM, "speculative_config": {"model": "[ngram]"}}, "and beside it"),
        ({"verifier": "exact", "spec_decoding_acceptance_method": "strict"}, "not both"),
    ],
)
def test_mistakes_are_errors_of_ours(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config_from_vllm(**given)


WRONG = ("five", "4k", 3.5, True, -7, [1], {"a": 1}, object(), b"x", float("nan"))


@pytest.mark.parametrize("take", [config_from_vllm, config_from_sglang])
def test_no_value_of_any_argument_is_an_error_of_pythons(take: Callable[..., Config]) -> None:
    """What hunch does not take, it says in its own words."""
    names = compat.known_arguments() if take is config_from_vllm else compat.known_to_sglang()
    for name in sorted(names):
        beside = NGRAM if name in compat.known_arguments() and "ngram" in name else {}
        for value in WRONG:
            with contextlib.suppress(HunchError):
                take(**{"model": "m", **beside, name: value})


@pytest.mark.parametrize(("given", "bits"), [("auto", "auto"), ("14", 14), (8, 8)])
def test_activation_bits_are_a_number_or_left_to_the_model(given: Any, bits: Any) -> None:
    assert config_from_vllm(activation_bits=given).model.activation_bits == bits
    for wrong in (16, "fine", 8.0, True):
        with pytest.raises(ConfigError, match="activation_bits"):
            config_from_vllm(activation_bits=wrong)


def test_lookup_lengths_of_another_method_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config_from_vllm(speculative_model="a/draft", ngram_prompt_lookup_max=4)
    assert "ngram_prompt_lookup_max has no effect: what drafts is auto" in caplog.text


@pytest.mark.parametrize(
    ("given", "device", "word"),
    [
        ({"gpu_memory_utilization": 0.8}, "cpu", "on a CPU: kv_bytes"),
        ({"gpu_memory_utilization": 0.8}, "cuda", None),
        ({"gpu_memory_utilization": 0.8, "kv_bytes": 9}, "cuda", "beside kv_bytes"),
        ({"activation_bits": 8}, "cuda", "activation_bits has no effect"),
        ({"activation_bits": 8}, "cpu", None),
        ({"activation_bits": "auto"}, "cuda", None),
        ({"kv_bytes": 9, "num_blocks": 9}, "cpu", "kv_bytes has no effect beside num_blocks"),
        ({**NGRAM, "speculative_draft_tensor_parallel_size": 1}, "cpu", "ngram has no model"),
    ],
)
def test_what_a_device_does_not_use_is_named(
    given: dict[str, Any], device: str, word: str | None
) -> None:
    words = compat.unused_arguments(config_from_vllm(**given), device)
    assert (word in words[0]) if word else words == []


def test_the_word_is_said_when_the_engine_is_built(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    model = llm.config.model.model
    LLM(model, gpu_memory_utilization=0.8, max_model_len=64, speculate="off").close()
    assert "gpu_memory_utilization has no effect on a CPU" in caplog.text


def test_a_fixed_mode_guesses_the_same_in_every_run(llm: LLM) -> None:
    """Nothing in it depends on the clock."""
    counts = []
    for _ in range(2):
        with LLM(
            llm.config.model.model, always_draft=True, dtype="float32", max_model_len=128, threads=1
        ) as one:
            one.generate("fast token fast token fast token fast", None)
            counts.append({key: one.stats()[key] for key in ("steps", "drafted", "accepted")})
    assert counts[0] == counts[1]
    assert counts[0]["drafted"] > 0


@pytest.mark.parametrize(("num_requests", "is_drafted"), [(3, True), (4, False), (6, False)])
def test_from_so_many_requests_on_nobody_drafts(
    llm: LLM, num_requests: int, is_drafted: bool
) -> None:
    """Not one node: neither of requests that were just admitted, nor of those before them."""
    with LLM(
        llm.config.model.model, **NGRAM, num_speculative_tokens=4, always_draft=True,
        speculative_disable_by_batch_size=4, dtype="float32", max_model_len=128, threads=1,
    ) as one:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        one.generate(["fast token fast token fast token fast"] * num_requests, params)
        assert (one.stats()["drafted"] > 0) == is_drafted


# --- hunch.sglang.Engine ------------------------------------------------------------------------

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "p"}
SGLANG_SAME: dict[str, tuple[Any, str]] = {  # what is given, and where it ends up
    "tokenizer_path": ("t", "model.tokenizer"),
    "context_length": (9, "model.max_model_len"),
    "mem_fraction_static": (0.4, "cache.gpu_memory_utilization"),
    "tp_size": (2, "parallel.tensor_parallel_size"),
    "pp_size": (2, "parallel.pipeline_parallel_size"),
    "random_seed": (5, "model.seed"),
    "max_running_requests": (3, "schedule.num_rows"),
    "chunked_prefill_size": (64, "schedule.num_tokens"),
    "page_size": (32, "cache.block_size"),
    "speculative_draft_model_path": ("p", "spec.path"),
}
SGLANG: dict[str, tuple[dict[str, Any], Callable[[Config], Any], Any]] = {
    **{
        name: ({name: value}, attrgetter(place), value)
        for name, (value, place) in SGLANG_SAME.items()
    },
    "model_path": ({}, lambda c: c.model.model, "m"),
    "disable_radix_cache": (
        {"disable_radix_cache": True},
        lambda c: c.cache.enable_prefix_caching,
        False,
    ),
    "log_level": (
        {"log_level": "error"},
        lambda c: logging.getLogger("hunch").level,
        logging.ERROR,
    ),
    "speculative_algorithm": ({"speculative_algorithm": "NGRAM"}, lambda c: c.spec.method, "ngram"),
    # A chain of 3 guesses is checked with 4 tokens, and both ways to ask for it are the same.
    "speculative_num_steps": (
        {**EAGLE, "speculative_num_steps": 3},
        lambda c: c.spec.options,
        {"num_nodes": "3"},
    ),
    "speculative_num_draft_tokens": (
        {**EAGLE, "speculative_num_draft_tokens": 4},
        lambda c: c.spec.options,
        {"num_nodes": "3"},
    ),
    "speculative_eagle_topk": (
        {**EAGLE, "speculative_num_steps": 5, "speculative_eagle_topk": 8,
         "speculative_num_draft_tokens": 32},
        lambda c: c.spec.options,
        {"tree": "dynamic", "branch": "8", "width": "8", "depth": "5", "num_nodes": "31"},
    ),
}  # fmt: skip
SGLANG_NAMED: dict[str, Any] = {
    "cuda_graph_max_bs": 8,
    "disable_cuda_graph": True,
    "enable_torch_compile": True,
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "skip_server_warmup": False,
}


def test_every_argument_of_sglang_is_in_one_of_the_tables() -> None:
    own = compat.known_to_sglang() - compat.known_arguments()
    assert own == {*SGLANG, *SGLANG_NAMED}


@pytest.mark.parametrize("name", SGLANG)
def test_an_argument_of_sglang_arrives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given, read, expected = SGLANG[name]
    assert read(config_from_sglang(model_path="m", **given)) == expected
    assert caplog.messages == []


@pytest.mark.parametrize("name", SGLANG_NAMED)
def test_an_argument_of_sglang_without_meaning_is_named_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        config_from_sglang(model_path="m", **{name: SGLANG_NAMED[name]})
    assert [re.match(rf"{name}=.* has no effect: ", text) is not None for text in caplog.messages]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("given", "options", "word"),
    [
        # A chain: num_steps is its length, whatever num_draft_tokens says.
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}, {"num_nodes": "3"}, None),
        ({"num_steps": 3, "num_draft_tokens": 9}, {"num_nodes": "3"}, "num_draft_tokens=9"),
        ({"eagle_topk": 1, "num_draft_tokens": 6}, {"num_nodes": "5"}, None),
        (
            {"eagle_topk": 4, "num_draft_tokens": 16},
            {"tree": "dynamic", "branch": "4", "width": "4", "num_nodes": "15"},
            None,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", [{"algorithm": "EAGLE3"}, {}])
def test_steps_width_and_size_of_sglang_together(
    given: dict[str, int],
    options: dict[str, str],
    word: str | None,
    algorithm: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {**given, **algorithm, "draft_model_path": "p"}
    spec = config_from_sglang(
        model_path="m", **{f"speculative_{name}": value for name, value in asked.items()}
    ).spec
    assert (spec.method, spec.path) == ("eagle3" if algorithm else "auto", "p")
    assert spec.options == options
    assert (word in caplog.text) if word else caplog.messages == []


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"speculative_num_steps": 3}, "also give speculative_algorithm"),
        ({**EAGLE, "speculative_num_steps": "three"}, "'three' must be a whole number"),
        ({**EAGLE, "speculative_num_draft_tokens": 1}, "2 or more"),
        ({**EAGLE, "speculate": "off"}, "not both"),
        ({"speculative_algorithm": "TELEPATHY"}, "telepathy"),
        ({"model": "n"}, "not both"),
        ({"contxt_length": 5}, "context_length"),
        ({"log_level": "loud"}, "loud"),
    ],
)
def test_mistakes_with_sglang_are_errors_of_ours(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config_from_sglang(model_path="m", **given)


def test_sglang_generates_every_sample_and_refuses_what_it_does_not_know(llm: LLM) -> None:
    model = llm.config.model.model
    with sgl.Engine(model_path=model, context_length=64, dtype="float32") as engine:
        many = {"n": 2, "max_new_tokens": 3, "temperature": 1.0}
        assert len(engine.generate("the model", many)) == 2
        assert len(engine.generate(["the model", "a"], many)) == 4
        assert isinstance(engine.generate("the model", {"max_new_tokens": 2}), dict)
        scored = engine.generate("the model", {"max_new_tokens": 2}, return_logprob=True)
        assert len(scored["meta_info"]["output_token_logprobs"]) == 2
        for wrong in (
            lambda: engine.generate("x", input_ids=[1]),
            lambda: engine.generate(),
            lambda: engine.generate("x", "hot"),
            lambda: engine.generate("x", {"json_schema": "{}", "regex": "a"}),
        ):
            with pytest.raises(RequestError):
                wrong()
        _check_streams_and_asyncio(engine)


def _check_streams_and_asyncio(engine: sgl.Engine) -> None:
    """SGLang's four ways to generate say the same."""
    how = {"temperature": 0, "max_new_tokens": 4}
    plain = engine.generate(["the model", "a"], how)
    streamed = list(engine.generate("the model", how, stream=True))
    assert streamed[-1]["text"] == plain[0]["text"]
    assert streamed[0]["meta_info"]["finish_reason"] is None

    async def ask() -> tuple[Any, Any]:
        both = await engine.async_generate(["the model", "a"], how)
        stream = await engine.async_generate("the model", how, stream=True)
        return both, [part async for part in stream]

    both, parts = asyncio.run(ask())
    assert [answer["text"] for answer in both] == [answer["text"] for answer in plain]
    assert parts[-1]["text"] == plain[0]["text"]
    assert engine.generate("a", how)["text"] == plain[1]["text"]  # beside its own thread


# --- on an engine -------------------------------------------------------------------------------

SEEN: dict[str, Callable[[LLM], Any]] = {  # what a user can see of an argument that arrived
    "max_model_len": lambda llm: llm.engine.capacity.max_len,
    "block_size": lambda llm: llm.engine.capacity.block_size,
    "num_blocks": lambda llm: llm.engine.capacity.num_blocks,
    "max_num_seqs": lambda llm: llm.engine.capacity.max_rows,
    "kernels": lambda llm: llm.engine.capacity.kernels,
    "dtype": lambda llm: str(_runner(llm).target.dtype),
    "depth": lambda llm: _runner(llm).depth,
    "threads": lambda llm: torch.get_num_threads(),
    "seed": lambda llm: _ids(llm, SamplingParams(temperature=2.0, max_tokens=8)),
    "chat_template": lambda llm: llm.encode_chat([{"role": "user", "content": "a"}]),
    "logprobs_mode": lambda llm: _first_logprob(llm),
    "enable_prefix_caching": lambda llm: _hits(llm),
    "max_num_batched_tokens": lambda llm: _steps(llm),
    "max_queue": lambda llm: _waiting(llm),
    "speculate": lambda llm: next(iter(llm.engine.capacity.methods)),
    "verifier": lambda llm: llm.config.spec.is_lossy,
}
GIVEN: dict[str, Any] = {
    "max_model_len": 96, "block_size": 8, "num_blocks": 40, "max_num_seqs": 3, "kernels": "torch",
    "dtype": "bfloat16", "depth": 1, "threads": 2, "seed": 3, "chat_template": "{{ 1 + 1 }}",
    "logprobs_mode": "processed_logprobs", "enable_prefix_caching": False,
    "max_num_batched_tokens": 16, "max_queue": 2, "speculate": "suffix", "verifier": "typical",
}  # fmt: skip


def _runner(llm: LLM) -> Any:
    return llm.engine.runner


def _ids(llm: LLM, params: SamplingParams) -> list[int]:
    return llm.generate("the model", params)[0].outputs[0].token_ids


def _first_logprob(llm: LLM) -> float:
    params = SamplingParams(temperature=0.5, max_tokens=1, logprobs=1, allowed_token_ids=[70, 71])
    (answer,) = llm.generate("the model", params)[0].outputs
    assert answer.logprobs
    return round(next(iter(answer.logprobs[0].values())).logprob, 3)


def _hits(llm: LLM) -> bool:
    before = llm.stats()["prefix_hits"]
    for _ in range(2):
        llm.generate("a prompt that is long enough for a block of it to be kept", None)
    return bool(llm.stats()["prefix_hits"] > before)


def _steps(llm: LLM) -> int:
    before = llm.stats()["num_steps"]
    llm.generate([list(range(40, 84))], SamplingParams(max_tokens=1))
    return int(llm.stats()["num_steps"]) - int(before)


def _waiting(llm: LLM) -> int:
    for count in range(12):
        try:
            llm.engine.add(f"w{count}", [65], SamplingParams(max_tokens=1))
        except QueueFullError:
            break
    while llm.engine.has_work():
        llm.engine.step()
    return count


def test_arguments_of_an_engine_change_what_a_user_sees(llm: LLM) -> None:
    num_threads = torch.get_num_threads()
    try:
        with LLM(llm.config.model.model, **GIVEN) as other:
            given = {name: see(other) for name, see in SEEN.items()}
    finally:
        torch.set_num_threads(num_threads)
    plain = {name: see(llm) for name, see in SEEN.items()}
    assert [name for name in SEEN if given[name] == plain[name]] == []
    assert set(GIVEN) == set(SEEN)

"""Arguments that vLLM's and SGLang's users already have in their scripts."""

import argparse
import copy
import os
import pickle
from dataclasses import asdict
from typing import Any

import pytest

import hunch
from hunch import SamplingParams, TextPrompt, TokensPrompt
from hunch.compat import (
    VllmCalls,
    config_from_sglang,
    config_from_vllm,
    sampling_from_sglang,
    wishes_of,
)
from hunch.config import DEFAULT_MODEL, say_once
from hunch.engine_args import ServerArgs, arguments_of
from hunch.errors import ConfigError, RequestError


def test_ngram_by_the_flat_arguments() -> None:
    config = config_from_vllm(
        model="facebook/opt-6.7b",
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
        ngram_prompt_lookup_min=2,
        tensor_parallel_size=1,
        use_v2_block_manager=True,
        enforce_eager=True,
    )
    assert config.model.model == "facebook/opt-6.7b"
    assert config.spec.method == "ngram"
    assert config.spec.path is None
    assert config.spec.options == {"num_nodes": "5", "max_match": "4", "min_match": "2"}


def test_ngram_by_speculative_config() -> None:
    for bundle in (
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
    ):
        spec = config_from_vllm(speculative_config=bundle).spec
        assert spec.method == "ngram"
        assert spec.options == {"num_nodes": "5", "max_match": "4", "min_match": "1"}


def test_a_draft_by_path_is_detected_later() -> None:
    spec = config_from_vllm(speculative_model="some/dir", num_speculative_tokens=5).spec
    assert (spec.method, spec.path) == ("auto", "some/dir")
    assert spec.options == {"num_nodes": "5"}


def test_disable_by_batch_size_means_off_from_that_size_on() -> None:
    spec = config_from_vllm(speculative_model="[ngram]", speculative_disable_by_batch_size=8).spec
    assert spec.max_batch == 7


def test_our_own_short_way() -> None:
    spec = config_from_vllm(speculate="ngram:max_match=3:num_nodes=8", verifier="exact").spec
    assert spec.method == "ngram"
    assert spec.options == {"max_match": "3", "num_nodes": "8"}


def test_a_path_with_a_colon_survives() -> None:
    spec = config_from_vllm(speculate="auto:C:/models/draft:num_nodes=2").spec
    assert spec.path == "C:/models/draft"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"max_model_length": 10}, "max_model_len"),
        ({"speculate": "ngrm"}, "ngram"),
        ({"speculate": "off", "speculative_model": "[ngram]"}, "not both"),
        ({"speculative_config": {"prompt_lookup_maximum": 3}}, "prompt_lookup_max"),
        ({"speculative_config": "{"}, "not JSON"),
        ({"speculative_config": {"method": "telepathy"}}, "telepathy"),
        ({"num_speculative_tokens": 5}, "speculative_model"),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": 0}, "1 or more"),
        ({"quantization": "hqq"}, "quantization"),
        ({"dtype": "float8"}, "dtype"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"verifier": "exakt"}, "exact"),
        ({"threads": 10**6}, "from 1 to 1024"),
    ],
)
def test_mistakes_are_named(arguments: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config_from_vllm(**arguments)


@pytest.mark.parametrize(
    ("given", "spec"),
    [  # the examples of vLLM's pages about speculative decoding
        ({"method": "suffix", "num_speculative_tokens": 32}, "suffix:num_nodes=32"),
        ({"method": "ngram_gpu", "prompt_lookup_max": 5}, "ngram:max_match=5:min_match=1"),
        ({"method": "mtp", "num_speculative_tokens": 1}, "mtp:num_nodes=1"),
        ({"method": "glm4_moe_mtp", "num_speculative_tokens": 1}, "mtp:num_nodes=1"),
        ({"method": "mlp_speculator", "model": "a/b"}, "mlp:a/b"),
        ({"model": "a/b", "max_model_len": 99, "revision": "main"}, "auto:a/b:window=99"),
        (
            {"method": "draft_model", "model": "a/b", "use_heterogeneous_vocab": True},
            "draft:a/b:cross_vocab=true",
        ),
        (
            {"method": "eagle", "model": "a/b", "draft_tensor_parallel_size": 1,
             "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
            "eagle:a/b:num_nodes=2",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_examples_of_speculative_config(given: dict, spec: str) -> None:
    made = config_from_vllm(speculative_config=given).spec
    assert (str(made), made.verifier) == (spec, "exact")
    assert made.revision == given.get("revision")


def test_a_key_of_speculative_config_without_effect_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_once.cache_clear()
    given = {"method": "suffix", "suffix_decoding_min_token_prob": 0.1, "quantization": None}
    assert config_from_vllm(speculative_config=given).spec.method == "suffix"
    assert "suffix_decoding_min_token_prob=0.1 has no effect" in caplog.text
    given = {"method": "dspark", "model": "P", "dspark_draft_topk": 32, "markov_topk": None}
    assert str(config_from_vllm(speculative_config=given).spec) == "dspark:P"
    assert "dspark_draft_topk=32 has no effect" in caplog.text
    with pytest.raises(ConfigError, match="synthetic:tokens_per_pass"):
        config_from_vllm(speculative_config={"rejection_sample_method": "synthetic"})


TREES = {  # method and vLLM's tree -> what drafts
    ("eagle", "[(0,), (0, 0), (0, 0, 0)]"): "num_nodes=3",
    ("eagle", "[(0,), (1,), (0, 0), (0, 1)]"): "tree=fixed:num_nodes=4:depth=2:branch=2",
    ("eagle3", "[(0,), (0, 0), (0, 1)]"): "tree=dynamic:num_nodes=3:depth=2:branch=2:width=1",
    ("mtp", "[(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]"): (
        "tree=dynamic:num_nodes=5:depth=3:branch=2:width=2"
    ),
    ("medusa", "[[0], [1], [0, 0]]"): "tree=static:choices=0/1/0.0",
}


@pytest.mark.parametrize(("method", "tree"), TREES)
def test_vllms_tree_by_its_paths(method: str, tree: str) -> None:
    given = {"method": method, "model": "P", "speculative_token_tree": tree}
    made = config_from_vllm(speculative_config=given).spec
    assert str(made) == f"{method}:P:{TREES[method, tree]}"
    num_nodes = tree.count("(") or 3
    again = {**given, "num_speculative_tokens": num_nodes}
    assert config_from_vllm(speculative_config=again).spec == made
    with pytest.raises(ConfigError, match=f"has {num_nodes} nodes"):
        config_from_vllm(speculative_config={**given, "num_speculative_tokens": 9})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("[(0,), (1, 0)]", r"\(1, 0\) needs node \(1,\)"),
        ("[(0,), (2,)]", r"\(2,\) needs node \(1,\)"),
        *((wrong, "list of paths") for wrong in ("", "[0]", "[()]", "f()", "(" * 9999, "[(-1,)]")),
        *((wrong, "list of paths") for wrong in (5, [["0"]], "[(True,)]", "[(0.5,)]", "[{}]")),
    ],
)
def test_a_tree_that_is_none(tree: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_vllm(
            speculative_config={"method": "eagle", "model": "P", "speculative_token_tree": tree}
        )


def test_keys_of_vllms_0_33() -> None:
    quiet = {"xpress_topc": 2, "disable_eagle_block_drop": True, "tensor_parallel_size": None}
    made = config_from_vllm(speculative_config={"method": "ngram", **quiet}).spec
    assert made.method == "ngram"
    for wrong, words in (("tensor_parallel_size", "draft_tensor"), ("fly_window_size", "typical")):
        with pytest.raises(ConfigError, match=words):
            config_from_vllm(speculative_config={"method": "ngram", wrong: 2})
    with pytest.raises(ConfigError, match="kv_bytes='x' must be"):
        config_from_vllm(kv_cache_memory_bytes="x")
    asks = {"watermarking": False, "stream_interval": 1, "trace_decode_token_ids": None}
    assert SamplingParams(**asks) == SamplingParams()
    with pytest.raises(RequestError, match="no watermark"):
        SamplingParams(watermarking=True)


def test_sglang_arguments() -> None:
    config = config_from_sglang(
        model_path="m",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        mem_fraction_static=0.7,
        tp_size=1,
        random_seed=3,
    )
    assert config.model.model == "m"
    assert config.model.seed == 3
    assert config.cache.gpu_memory_utilization == 0.7
    assert (config.spec.method, config.spec.options) == ("ngram", {"num_nodes": "5"})


def test_sglang_sampling() -> None:
    params = sampling_from_sglang({"temperature": 0, "max_new_tokens": 30, "stop": ["x"]})
    assert (params.temperature, params.max_tokens, params.stop) == (0, 30, ["x"])
    with pytest.raises(RequestError, match="temperature"):
        sampling_from_sglang({"temprature": 0})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("json_schema", "json"),
        ("regex", "regex"),
        ("ebnf", "grammar"),
        ("structural_tag", "structural_tag"),
    ],
)
def test_sglang_grammars(theirs: str, ours: str) -> None:
    params = sampling_from_sglang({theirs: "{}"})
    assert getattr(params.structured_outputs, ours) == "{}"


def test_sglangs_other_sampling_parameters_may_ask_for_nothing() -> None:
    nothing = {"json_schema": "", "regex": None, "custom_params": {}, "stop_regex": ""}
    assert sampling_from_sglang({**nothing, "ebnf": "", "stream_interval": 1}) == SamplingParams(
        max_tokens=128
    )
    for wrong, word in (
        ({"custom_params": {"a": 1}}, "may be chosen"),
        ({"stop_regex": "x"}, "give stop"),
        ({"stream_interval": 4}, "as it grows"),
    ):
        with pytest.raises(RequestError, match=word):
            sampling_from_sglang(wrong)


def test_vllms_other_sampling_fields_may_ask_for_nothing() -> None:
    plain = {"best_of": 1, "use_beam_search": False, "detokenize": True, "logits_processors": None}
    assert SamplingParams(temperature=0.5, **plain) == SamplingParams(temperature=0.5)
    others = {"truncate_prompt_tokens": None, "output_kind": None, "extra_args": None}
    assert SamplingParams(**others) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"use_beam_search": True}, "BeamSearchParams"),
        ({"best_of": 4}, "ask for n answers"),
        ({"logits_processors": [print]}, "logit_bias"),
        ({"truncate_prompt_tokens": 9}, "the last tokens"),
        ({"temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_vllms_other_sampling_fields_are_refused_with_what_to_do(given: dict, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        SamplingParams(**given)


def test_arguments_of_a_call_are_known_or_ask_for_nothing() -> None:
    given = {"lora_request": None, "priority": None, "chat_template_content_format": "auto"}
    assert wishes_of("chat", {**given, "tools": ()}, {"tools": 0}) == {"tools": ()}
    for wrong, word in (
        ({"lora_request": object()}, "merged"),
        ({"temperature": 0}, "it goes into SamplingParams"),
        ({"foo": 1}, "'foo' is not an argument"),
    ):
        with pytest.raises(RequestError, match=word):
            wishes_of("chat", wrong, {})


def test_methods_of_vllm_that_are_missing_say_what_to_do() -> None:
    llm = VllmCalls()
    with pytest.raises(AttributeError, match="beam_search searches"):
        _ = llm.beam_search
    with pytest.raises(AttributeError, match="frees all memory"):
        _ = llm.release_memory_occupation  # SGLang's
    with pytest.raises(AttributeError, match="no attribute 'foo'"):
        _ = llm.foo
    assert not hasattr(llm, "collective_rpc")


def test_values_of_sampling_parameters_as_vllm_takes_them() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True, logit_bias={"5": 1.0, 6: -1})
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert params.logit_bias == {5: 1.0, 6: -1}
    assert SamplingParams(detokenize=False, skip_clone=True) == SamplingParams()


def test_sampling_parameters_change_under_the_checks_of_their_construction() -> None:
    params = SamplingParams(temperature=0.5)
    params.max_tokens, params.seed, params.stop = 9, -1, "end"
    params.logit_bias, params.stop_token_ids = {"5": 1.0}, [7]
    params.guided_decoding = {"choice": ["a"]}
    params.speculation = {"mode": "off"}
    params.output_kind, params.detokenize = 0, False  # vLLM's alone
    made = SamplingParams(
        temperature=0.5, max_tokens=9, stop=["end"], logit_bias={5: 1.0}, stop_token_ids=[7],
        structured_outputs={"choice": ["a"]}, speculation={"mode": "off"},
    )  # fmt: skip
    assert params == made
    wrong: list[tuple[str, Any, str]] = [
        ("temperature", -1, "from 0 .greedy. to 100"),
        ("seed", 1.5, "whole number"),
        ("logit_bias", {5: 1000}, "from -100 to 100"),
        ("structured_outputs", 3, "a dict of its fields"),
        ("speculation", {"mod": "off"}, "did you mean 'mode'"),
        ("use_beam_search", True, "BeamSearchParams"),
        ("max_token", 5, "did you mean 'max_tokens'"),
    ]
    for name, value, word in wrong:
        with pytest.raises(RequestError, match=word):
            setattr(params, name, value)
    assert params == made  # what was refused changed nothing


def test_limits_of_sampling_parameters_may_be_changed_in_any_order() -> None:
    params = SamplingParams()
    params.min_tokens = 20  # above max_tokens, for now
    with pytest.raises(RequestError, match="min_tokens=20 is above max_tokens=16"):
        params.clone()
    params.max_tokens = 50
    assert params.clone() == SamplingParams(min_tokens=20, max_tokens=50)


def test_copies_of_sampling_parameters_are_their_own() -> None:
    params = SamplingParams(stop="x", logit_bias={5: 1.0}, seed=3)
    for other in (copy.copy(params), copy.deepcopy(params), params.clone(),
                  pickle.loads(pickle.dumps(params))):  # fmt: skip
        assert other == params
        other.seed = 4
        assert params.seed == 3


def test_lists_of_sampling_parameters_grow_as_vllms_do() -> None:
    given = ["a"]
    params: Any = SamplingParams(stop=given, max_tokens=9)
    params.stop += ["b"]
    params.stop.append("c")
    params.stop_token_ids.append(7)
    params.bad_words += ("d",)
    assert given == ["a"]
    copied = params.clone()
    params.stop.append("e")
    assert copied.stop == ["a", "b", "c"]
    assert (copied.stop_token_ids, copied.bad_words) == ([7], ["d"])
    assert SamplingParams().stop == SamplingParams().stop_token_ids == []
    params.stop.append("")
    with pytest.raises(RequestError, match="not empty"):
        params.clone()  # as every call does


def test_structured_outputs_do_not_change() -> None:
    with pytest.raises(AttributeError, match=r"replace\(params, regex='a'\)"):
        hunch.StructuredOutputsParams(json={}).regex = "a"  # type: ignore[misc]


def test_names_of_vllm_that_are_missing_say_what_to_do() -> None:
    for name in ("LoRARequest", "ModelRegistry", "ScoringOutput"):
        with pytest.raises(ImportError, match=f"hunch has no {name}: \\w+"):
            getattr(hunch, name)
    assert not hasattr(hunch, "Banana")


def test_vllms_prompt_types_are_dicts() -> None:
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}


def test_a_dtype_of_torch_and_what_stands_in_config_json():
    import torch

    assert config_from_vllm(dtype=torch.bfloat16).model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"rope_theta: give it in hf_overrides"):
        config_from_vllm(rope_theta=1e6)


def test_biases_beyond_the_limits_are_the_limits() -> None:
    made = SamplingParams.from_optional(logit_bias={"5": 200.0, 6: float("-inf"), 7: 1})
    assert made.logit_bias == {5: 100, 6: -100, 7: 1}


def test_sampling_parameters_from_optional_values() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, stop=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None)
    assert SamplingParams.from_optional().max_tokens == 16


def test_structured_outputs_take_vllms_other_fields() -> None:
    hunch.GuidedDecodingParams(choice=["a"], backend="xgrammar:no-fallback")  # until 0.10
    plain = hunch.StructuredOutputsParams(choice=["a", "b"])
    assert plain == hunch.GuidedDecodingParams.from_optional(choice=["a", "b"], backend="xgrammar")
    given = {"json": {}, "disable_fallback": True, "disable_any_whitespace": True}
    assert hunch.GuidedDecodingParams(**given, whitespace_pattern=None).json == {}
    assert hunch.StructuredOutputsParams(json={}, disable_additional_properties=True).json == {}
    with pytest.raises(RequestError, match="did you mean 'regex'"):
        hunch.StructuredOutputsParams(regexp="a")

    class Car:  # as pydantic's classes look
        @staticmethod
        def model_json_schema() -> dict:
            return {}

    with pytest.raises(RequestError, match=r"give Car.model_json_schema\(\)"):
        hunch.StructuredOutputsParams(json=Car)


@pytest.mark.parametrize(
    "line",
    [
        "from hunch.sampling_params import GuidedDecodingParams, SamplingParams",
        "from hunch.inputs import TokensPrompt",
        "from hunch.outputs import CompletionOutput, RequestOutput",
        "from hunch.engine.arg_utils import AsyncEngineArgs, EngineArgs",
        "from hunch.engine.async_llm_engine import AsyncLLMEngine",
        "from hunch.engine.llm_engine import LLMEngine",
        "from hunch.utils import FlexibleArgumentParser, random_uuid",
        "from hunch.usage.usage_lib import UsageContext",
        "from hunch.v1.engine.async_llm import AsyncLLM",
        "from hunch.entrypoints.llm import LLM",
        "from hunch.sampling_params import RequestOutputKind",
        "from hunch.distributed import cleanup_dist_env_and_memory",
        "from hunch.inputs import PromptType, TextPrompt",
        "from hunch.inputs.data import SingletonPrompt, TokensPrompt",
        "from hunch.logger import init_logger",
        "from hunch.logprobs import Logprob",
        "from hunch.outputs import EmbeddingOutput, EmbeddingRequestOutput, PoolingRequestOutput",
        "from hunch.pooling_params import PoolingParams",
        "from hunch.sequence import Logprob, RequestMetrics",
        "from hunch.transformers_utils.tokenizer import get_tokenizer",
        "from hunch.tokenizers import get_tokenizer",
        "from hunch.version import __version__",
    ],
)
def test_vllms_modules_have_the_names_of_hunch(line: str) -> None:
    found: dict = {}
    exec(line, found)
    names = line.partition(" import ")[2].split(", ")
    assert [found[name] for name in names] == [getattr(hunch, name) for name in names]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from hunch.v1.sample.logits_processor import LogitsProcessor", "logit_bias"),
        (
            "from hunch.v1.sample.logits_processor.builtin import process_dict_updates",
            "structured_outputs",
        ),
        ("from hunch.lora.request import LoRARequest", "merges an adapter into the weights"),
        ("from hunch.distributed import destroy_model_parallel", "close"),
        ("from hunch.sglang.utils import print_highlight", "hunch serve"),
        ("from hunch import ClassificationOutput", "generates and embeds"),
        ("from hunch.outputs import ScoringRequestOutput", "generates and embeds"),
        ("from hunch.outputs import Banana", "cannot import name 'Banana'"),
        ("from hunch.utils import get_open_port", "tensor_parallel_size"),
        ("from hunch.assets.image import ImageAsset", "text alone"),
        ("import hunch.multimodal", "text alone"),
        ("from hunch.benchmarks.datasets import get_samples", "hunch bench"),
        ("from hunch.v1.core.sched.output import SchedulerOutput", "inside vLLM"),
        ("from hunch.platforms import current_platform", "ask torch"),
        ("from hunch.sampling_params import Banana", "cannot import name 'Banana'"),
        ("import hunch.bananas", "No module named"),
    ],
)
def test_what_vllms_modules_have_and_hunch_has_not(line: str, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        exec(line)


def test_vllms_name_of_the_config_can_be_imported() -> None:
    from hunch.config import Config, VllmConfig

    assert VllmConfig is Config


def test_vectors_are_printed_as_vllms_examples_do(capsys: pytest.CaptureFixture[str]) -> None:
    from hunch.utils.print_utils import print_embeddings  # type: ignore[import-not-found]

    print_embeddings([0.5, 1.0, 2.0, 3.0, 4.0])
    print_embeddings([0.5], prefix="One")
    lines = ["Embeddings: [0.5, 1.0, 2.0, 3.0, ...] (size=5)", "One: [0.5] (size=1)"]
    assert capsys.readouterr().out.splitlines() == lines


def test_engine_arguments_are_attributes() -> None:
    args = hunch.EngineArgs(model="m", max_model_len=99, kv_cache_memory_bytes="1K")
    given = {name: value for name, value in asdict(args).items() if value is not None}
    assert given == args.given() == {"model": "m", "max_model_len": 99, "kv_bytes": 1024}
    assert (args.max_model_len, args.tensor_parallel_size) == (99, None)
    assert config_from_vllm(**asdict(args)).model.max_model_len == 99
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        hunch.EngineArgs(max_model_length=99)


def test_flags_of_vllm_serve_beside_an_engines() -> None:
    parser = hunch.EngineArgs.add_cli_args(hunch.FlexibleArgumentParser())
    parser.add_argument("--served", type=int)

    def given(words: str) -> dict[str, Any]:
        found = hunch.EngineArgs.from_cli_args(parser.parse_args(words.split())).given()
        return {name: value for name, value in found.items() if name != "model"}

    assert given("--max-model-len 1k --max-num-batched-tokens 2K") == {
        "max_model_len": 1000, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    words = "--served-model-name a --kv_cache_memory_bytes=1K --disable-sliding-window --seed 3"
    assert given(words) == {"kv_bytes": 1024, "seed": 3}
    assert config_from_vllm(**given("--max-model-len auto")).model.max_model_len is None
    assert parser.parse_known_args(["--num-gpu-blocks-override", "9", "--mine"])[1] == ["--mine"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scheduler-cls x", "never runs code"),
        ("--enable-prompt-embeds", "text or tokens"),
        ("--mine 3", "unrecognized arguments: --mine 3"),
        ("--max-model-len long", "invalid number value: 'long'"),
    ],
)
def test_flags_that_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = hunch.EngineArgs.add_cli_args(hunch.FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert said in capsys.readouterr().err


def test_values_that_vllm_takes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_from_vllm(model="m", max_model_len=-1).model.max_model_len is None
    spec = {"model": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert str(config_from_vllm(speculative_config=spec).spec).startswith("ngram:num_nodes=5")
    config_from_vllm(override_pooler_config={}, guided_decoding_disable_any_whitespace=True)
    with pytest.raises(ConfigError, match="give a dict"):
        config_from_vllm(hf_overrides=lambda config: config)
    with pytest.raises(ConfigError, match="only 1; a program or"):
        config_from_vllm(data_parallel_size=2)
    monkeypatch.setenv("HF_TOKEN", "mine")
    config_from_vllm(hf_token=True)
    assert os.environ["HF_TOKEN"] == "mine"


@pytest.mark.parametrize("make", [hunch.EngineArgs, hunch.AsyncEngineArgs])
def test_a_program_has_the_flags_of_engine_arguments(make: Any) -> None:
    parser = make.add_cli_args(hunch.FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    assert make.from_cli_args(parser.parse_args([])).given() == {"model": DEFAULT_MODEL}
    words = "--model m --max_model_len=64 -tp 1 --enforce-eager --max-tokens 5"
    words += " --speculative-config.method ngram --speculative-config.num-speculative-tokens 3"
    args = parser.parse_args(words.split())
    assert args.max_tokens == 5
    taken = make.from_cli_args(args).given()
    assert taken.pop("speculative_config") == {"method": "ngram", "num_speculative_tokens": 3}
    assert taken == {
        "model": "m",
        "max_model_len": 64,
        "tensor_parallel_size": 1,
        "enforce_eager": True,
    }
    rest = {name: value for name, value in vars(args).items() if name != "max_tokens"}
    assert config_from_vllm(**rest).spec.method == "ngram"  # as vLLM's examples call LLM(**args)


def test_sglangs_server_arguments() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = "--model-path m --tp 1 --mem-fraction-static 0.5 --disable-radix-cache"
    args = ServerArgs.from_cli_args(parser.parse_args(words.split()))
    config = config_from_sglang(**asdict(args))
    assert (config.model.model, config.cache.gpu_memory_utilization) == ("m", 0.5)
    assert not config.cache.enable_prefix_caching
    assert arguments_of({"server_args": args, "log_level": "error"})["model_path"] == "m"


def test_mistakes_say_where_an_argument_goes() -> None:
    with pytest.raises(ConfigError, match=r"goes into SamplingParams\(temperature=...\)"):
        config_from_vllm(model="m", temperature=0)
    with pytest.raises(ConfigError, match="'method' of speculative_config"):
        config_from_vllm(speculative_config={"num_speculative_tokens": 5})


def test_keys_of_speculative_config_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    keys = {"attention_backend": "FLASH_ATTN", "draft_load_config": {}, "kv_cache_dtype": "fp8"}
    older = {"disable_logprobs": False, "disable_mqa_scorer": False}
    spec = config_from_vllm(speculative_config={"method": "ngram", **keys, **older}).spec
    assert spec.method == "ngram"
    assert len(caplog.messages) == len(keys)


@pytest.mark.parametrize("given", [{"task": "embed"}, {"runner": "pooling"}, {"convert": "embed"}])
def test_a_model_that_embeds_is_any_model(given: dict) -> None:
    assert config_from_vllm(model="m", **given).model == config_from_vllm(model="m").model

"""The names users hold on to."""

import dataclasses

import pytest

import hunch
from hunch import errors
from hunch.registry import DRAFTERS, MODELS, VERIFIERS, resolve


def test_public_names() -> None:
    assert sorted(hunch.__all__) == [
        "AsyncEngineArgs",
        "AsyncLLM",
        "CompletionOutput",
        "HunchError",
        "LLM",
        "RequestOutput",
        "SamplingParams",
        "Speculation",
        "StructuredOutput",
        "TextPrompt",
        "TokensPrompt",
    ]
    for name in hunch.__all__:
        assert getattr(hunch, name).__name__ == name


def test_every_error_is_a_hunch_error() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert issubclass(value, errors.HunchError), name


@pytest.mark.parametrize(
    "table", [DRAFTERS, VERIFIERS, MODELS], ids=["drafters", "verifiers", "models"]
)
def test_every_registry_line_resolves(table: dict[str, str]) -> None:
    for name in table:
        found = resolve(table, name)
        assert callable(found.walk if table is VERIFIERS else found)


def test_sampling_parameters() -> None:
    assert [field.name for field in dataclasses.fields(hunch.SamplingParams)] == [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "ignore_eos",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
        "speculation",
        "prediction",
        "output_kind",
        "pooling",
    ]

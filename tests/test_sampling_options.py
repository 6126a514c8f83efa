"""Every sampling parameter has its effect on a text; mistakes in them are errors of ours."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from hunch import LLM, RequestOutput, SamplingParams
from hunch.errors import RequestError
from tiny_models import write_llama

PROMPT = "fast token fast token the model and the model and"
GREEDY = {"temperature": 0, "max_tokens": 12}
HOT = {"temperature": 1.0, "max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("options") / "model")
    with LLM(str(path), speculate="ngram", dtype="float32", max_model_len=128, threads=1) as llm:
        yield llm


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def first(llm: LLM, **given: Any) -> int:
    return ids(answer(llm, **given))[0]


def differs(**given: Any) -> Callable[[LLM], bool]:
    """The parameter, beside others given with it, changes what is sampled."""
    (name, value), *rest = given.items()
    base = {**HOT, **dict(rest)}

    def check(llm: LLM) -> bool:
        one, other = (
            llm.generate([PROMPT] * 3, SamplingParams(**params))
            for params in (base, {**base, name: value})
        )
        return [ids(o) for o in one] != [ids(o) for o in other]

    return check


def answer(llm: LLM, **given: Any) -> Any:
    return llm.generate(PROMPT, SamplingParams(**{**GREEDY, **given}))[0]


def text_of(llm: LLM, **given: Any) -> str:
    return str(answer(llm, **given).outputs[0].text)


EFFECTS: dict[str, Callable[[LLM], bool]] = {
    "n": lambda llm: len(answer(llm, n=3).outputs) == 3,
    "temperature": differs(temperature=2.0),
    "top_p": differs(top_p=0.1),
    "top_k": differs(top_k=1),
    "min_p": differs(min_p=0.9),
    "repetition_penalty": differs(repetition_penalty=5.0),
    "presence_penalty": differs(presence_penalty=2.0),
    "frequency_penalty": differs(frequency_penalty=2.0),
    "logit_bias": lambda llm: first(llm, logit_bias={65: 100}) == 65,
    "bad_words": lambda llm: first(llm, bad_words=[text_of(llm, max_tokens=1)]) != first(llm),
    "allowed_token_ids": lambda llm: set(ids(answer(llm, allowed_token_ids=[70, 71]))) <= {70, 71},
    "min_tokens": lambda llm: (
        len(ids(answer(llm, stop_token_ids=[first(llm)]))) == 1
        and len(ids(answer(llm, stop_token_ids=[first(llm)], min_tokens=4))) >= 4
    ),
    "max_tokens": lambda llm: len(ids(answer(llm, max_tokens=3, ignore_eos=True))) == 3,
    "stop": lambda llm: answer(llm, stop=text_of(llm)[2:4]).outputs[0].finish_reason == "stop",
    "stop_token_ids": lambda llm: len(ids(answer(llm, stop_token_ids=[first(llm)]))) == 1,
    "include_stop_str_in_output": lambda llm: text_of(
        llm, stop=text_of(llm)[2:4], include_stop_str_in_output=True
    ).endswith(text_of(llm)[2:4]),
    "skip_special_tokens": lambda llm: (
        "<|end|>" in text_of(llm, skip_special_tokens=False, ignore_eos=True, logit_bias=END)
        and "<|end|>" not in text_of(llm, ignore_eos=True, logit_bias=END)
    ),
    "ignore_eos": lambda llm: (
        len(ids(answer(llm, logit_bias=END))) == 1
        and len(ids(answer(llm, logit_bias=END, ignore_eos=True))) == 12
    ),
    "seed": differs(seed=2),
    "logprobs": lambda llm: len((answer(llm, logprobs=2).outputs[0].logprobs or [{}])[0]) >= 2,
    "prompt_logprobs": lambda llm: answer(llm, prompt_logprobs=1).prompt_logprobs is not None,
    "pooling": lambda llm: len(answer(llm, pooling="mean").embedding or ()) == 64,
    "structured_outputs": lambda llm: (
        text_of(llm, structured_outputs={"choice": ["zebra"]}) == "zebra"
    ),
    "speculation": lambda llm: (
        answer(llm, speculation={"mode": "off"}).outputs[0].stats["drafted"] == 0
        and answer(llm, max_tokens=60, ignore_eos=True).outputs[0].stats["drafted"] > 0
    ),
    "prediction": lambda llm: (
        "prediction"
        in answer(llm, prediction=ids(answer(llm, ignore_eos=True)), ignore_eos=True)
        .outputs[0]
        .stats["drafters"]
    ),
}
END: dict[int, float] = {}  # a bias towards end-of-text; its id is the model's to say


def test_every_sampling_parameter_is_tried() -> None:
    elsewhere = {"output_kind"}  # of AsyncLLM alone: tests/test_async_llm.py
    assert set(EFFECTS) | elsewhere == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_sampling_parameter_has_its_effect(llm: LLM, name: str) -> None:
    END[llm.tokenizer.eos_ids[0]] = 100.0
    assert EFFECTS[name](llm)


def test_one_object_may_be_changed_between_calls_and_during_them(llm: LLM) -> None:
    params = SamplingParams(**HOT)
    for seed in (1, 2, 3):
        params.seed, params.max_tokens = seed, 4 + seed
        new = SamplingParams(temperature=1.0, max_tokens=4 + seed, seed=seed)
        assert ids(llm.generate(PROMPT, params)[0]) == ids(llm.generate(PROMPT, new)[0])
    whole = ids(llm.generate(PROMPT, params)[0])
    begun = llm.stream(PROMPT, params)
    params.seed, params.max_tokens, params.temperature = 9, 1, 0
    *_, last = begun
    assert ids(last) == whole


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": "hot"}, {"n": True}, {"n": "five"}, {"top_k": 1.5}, {"stop": 5},
        {"stop": [1]}, {"bad_words": 3}, {"stop_token_ids": 7}, {"logit_bias": [1]},
        {"logit_bias": {"a": 1}}, {"allowed_token_ids": 5}, {"prediction": 5}, {"seed": "x"},
        {"structured_outputs": "x"}, {"speculation": "off"}, {"speculation": {"mod": "off"}},
        {"speculation": {"max_nodes": "five"}}, {"speculation": {"mode": 3}}, {"best_of": 2},
        {"ignore_eos": "yes"}, {"min_tokens": "4k"}, {"max_tokens": 3.5}, {"temprature": 0},
        {"n": 10**9},
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_in_sampling_are_errors_of_ours(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        SamplingParams(**given)


def test_what_is_not_given_is_no_other_objects() -> None:
    changed = SamplingParams()
    for values in (changed.stop, changed.bad_words, changed.stop_token_ids):
        values.append("x")
    with pytest.raises(RequestError, match="stop_token_ids"):
        changed.clone()
    assert SamplingParams() == SamplingParams(stop=(), bad_words=(), stop_token_ids=())


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (5, None), ([5.5], None), ({"promt": "x"}, None), ({}, None), ("x", "hot"), ("x", 3),
        (["x"], [{"temprature": 0}]), ({"prompt": "x", "multi_modal_data": {"image": 1}}, None),
        (["x", "y"], [SamplingParams()]),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_in_prompts_are_errors_of_ours(llm: LLM, prompts: Any, params: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, params)
    with pytest.raises(RequestError, match="not both"):
        llm.generate("x", SamplingParams(), sampling_params=SamplingParams())

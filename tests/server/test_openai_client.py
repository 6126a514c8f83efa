"""The official client against a live server: what users of other servers bring with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.fake_engine import expected_text
from server.live_server import LiveServer

MODEL = "bytes"
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Say something."}]
RENDERED = "user: Say something.\nassistant: "


@pytest.fixture(scope="module")  # a client takes 60 ms to read certificates
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["bytes", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_completion_is_the_models_text_whatever_drafts(client: openai.OpenAI, mode: str) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=5,
        max_tokens=40,
        extra_body={"speculation": {"mode": mode}},
    )
    assert answer.choices[0].text == expected_text(PROMPT, 5, 40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 40


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI, mode: str) -> None:
    chunks = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=5,
        max_tokens=40,
        stream=True,
        extra_body={"speculation": {"mode": mode}},
    )
    assert "".join(c.choices[0].text for c in chunks) == expected_text(PROMPT, 5, 40)


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    wanted = expected_text(RENDERED, 9, 50)
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, seed=9, max_tokens=50)
    assert plain.choices[0].message.content == wanted
    assert plain.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            seed=9,
            max_completion_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == wanted
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 50
    assert chunks[-1].choices == []


def test_without_max_tokens_a_chat_goes_on_to_the_context(client: openai.OpenAI) -> None:
    for most in (None, 1_000_000):  # clients ask for more than a model has
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, seed=1, max_tokens=most)
        assert answer.usage is not None
        assert answer.usage.total_tokens == 512


def test_several_answers_each_have_their_own_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[PROMPT, "Other"], seed=5, max_tokens=12, n=2
    )
    texts = [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]
    wanted = [expected_text(p, 5, 12, sample) for p in (PROMPT, "Other") for sample in (0, 1)]
    assert texts == wanted
    streamed = [""] * 4
    for chunk in client.completions.create(
        model=MODEL, prompt=[PROMPT, "Other"], seed=5, max_tokens=12, n=2, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == wanted


def test_token_id_prompts_and_echo(client: openai.OpenAI) -> None:
    ids = list(PROMPT.encode())
    by_ids = client.completions.create(model=MODEL, prompt=ids, seed=2, max_tokens=8, echo=True)
    assert by_ids.choices[0].text == PROMPT + expected_text(PROMPT, 2, 8)
    two = client.completions.create(model=MODEL, prompt=[ids, ids], seed=2, max_tokens=8)
    assert [choice.text for choice in two.choices] == [expected_text(PROMPT, 2, 8)] * 2


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = expected_text(PROMPT, 5, 60)
    stop = whole[20:23]
    wanted = whole[: whole.index(stop)]
    arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 5, "max_tokens": 60}
    answer = client.completions.create(**arguments, stop=[stop])
    assert answer.choices[0].text == wanted
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.completions.create(**arguments, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


def test_logprobs_of_chat_and_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, seed=9, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    assert [len(entry.top_logprobs) for entry in content] == [3] * 6
    assert all(entry.logprob == -0.5 for entry in content)
    done = client.completions.create(
        model=MODEL, prompt="abc", seed=9, max_tokens=4, logprobs=2, echo=True
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens[:3] == ["a", "b", "c"]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert len(logprobs.tokens) == 7


def test_the_answer_says_how_it_was_drafted(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=5,
        max_tokens=40,
        extra_body={"speculation": {"mode": "auto", "origins": True}},
    )
    report = answer.model_extra["hunch"]
    origins = report["answers"][0]["origins"]
    assert len(origins) == 40
    assert origins.count("oracle") == report["stats"]["accepted"] > 10
    counts = report["stats"]["drafters"]["oracle"]
    assert counts["accepted"] == report["stats"]["accepted"]
    assert report["stats"]["tokens_per_pass"] > 1.5
    plain = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=5,
        max_tokens=40,
        extra_body={"speculation": {"mode": "off", "origins": True}},
    )
    assert set(plain.model_extra["hunch"]["answers"][0]["origins"]) == {"target"}


def test_streamed_pieces_are_the_text_and_the_last_chunk_has_the_stats(
    client: openai.OpenAI,
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            seed=9,
            max_tokens=60,
            stop=["zzz"],
            stream=True,
            extra_body={"speculation": {"origins": True}},
        )
    )
    pieces = [p for c in chunks for p in (c.model_extra or {}).get("hunch", {}).get("pieces", [])]
    assert "".join(text for text, *_ in pieces) == expected_text(RENDERED, 9, 60)
    assert {origin for _, origin, *_ in pieces} == {"oracle", "target"}
    overruled = [piece for piece in pieces if len(piece) == 3]
    assert overruled
    assert {origin for _, origin, _ in overruled} == {"target"}
    stats = chunks[-1].model_extra["hunch"]["stats"]
    assert {"tokens_per_second", "acceptance_rate", "per_position", "speedup"} <= set(stats)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prediction_is_drafted_from_and_counted(client: openai.OpenAI, is_streamed: bool) -> None:
    wanted = expected_text(RENDERED, 9, 40)
    wrong = wanted[:20] + "##" + wanted[22:]
    arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT, "seed": 9, "max_tokens": 40}
    arguments["prediction"] = {"type": "content", "content": wrong}
    if is_streamed:
        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(**arguments, stream=True, stream_options=options)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage, steps = chunks[-1].usage, chunks[-1].model_extra["hunch"]["stats"]["steps"]
    else:
        answer = client.chat.completions.create(**arguments)
        text, usage = answer.choices[0].message.content, answer.usage
        steps = answer.model_extra["hunch"]["stats"]["steps"]
    assert text == wanted
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 40 - steps
    assert 1 <= details.rejected_prediction_tokens <= 6
    assert steps < 14


def test_without_a_prediction_none_is_counted(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=20)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize("prediction", ["text", {"type": "text", "content": "x"}, {"content": 5}])
def test_a_prediction_of_another_form_is_refused(client: openai.OpenAI, prediction: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        client.chat.completions.create(model=MODEL, messages=CHAT, prediction=prediction)


def test_errors_come_as_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="the context of 512") as caught:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="only these are loaded"):
        client.completions.create(
            model=MODEL, prompt="x", extra_body={"speculation": {"mode": "medusa"}}
        )
    with pytest.raises(openai.BadRequestError, match="the chat template failed"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "BAD TEMPLATE"}]
        )

"""Fields as clients send them: nulls, numbers at their ends, OpenAI's and vLLM's names."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from hunch.config import Config, SpecConfig
from hunch.server.params import sampling_defaults
from hunch.server.run import hiding
from hunch.server.schemas import ChatBody
from hunch.server.settings import ServeConfig
from hunch.types import recommended
from server.fake_engine import expected_text, expected_tokens
from server.live_server import LiveServer, Start, wait_for

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
NO_THINKING = {"enable_thinking": False, "thinking": False}
HIDDEN_LOW = {"reasoning_effort": "low", "include_reasoning": False}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(COMPLETE, {"prompt": "x", "max_tokens": 8, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 8, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: LiveServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", server.url + path, json={**fields, "stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_null_stands_for_the_default(server: LiveServer) -> None:
    names = "n temperature top_p top_k stop stream stream_options logit_bias presence_penalty user"
    names += " frequency_penalty response_format logprobs timeout speculation min_tokens ignore_eos"
    nulls = dict.fromkeys(names.split())
    assert complete(server, **nulls, echo=None)["choices"] == complete(server)["choices"]
    chat_nulls = {**nulls, "top_logprobs": None, "modalities": None}
    message = {"role": "user", "content": "hello", "name": None, "tool_call_id": None}
    assert chat(server, **chat_nulls, messages=[message])["choices"] == chat(server)["choices"]


def test_fields_that_only_matter_to_openai_are_taken(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=4,
        safety_identifier="a",
        prompt_cache_key="b",
        verbosity="low",
        modalities=["text"],
        service_tier="auto",
        store=False,
        metadata={"a": "b"},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert list(made)[-1].usage.completion_tokens == 4


def test_an_unknown_name_is_an_error_with_the_nearest_known_one(server: LiveServer) -> None:
    for path, near in ((COMPLETE, "temperature"), (CHAT, "temperature")):
        body = {"prompt": "x"} if path == COMPLETE else {"messages": HELLO}
        answer = server.post(path, {**body, "temprature": 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "temprature"
        assert f"did you mean {near}?" in error["message"]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"regex": "[ab]", "min_new_tokens": 2}, {"guided_regex": "[ab]", "min_tokens": 2}),
        ({"n_predict": -1, "repeat_penalty": 1.1}, {"max_tokens": -1, "repetition_penalty": 1.1}),
        ({"max_new_tokens": 3, "max_tokens": 4}, {"max_tokens": 4}),
        ({"json_schema": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"enable_thinking": False}, {"chat_template_kwargs": NO_THINKING}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": NO_THINKING}),
        (
            {"documents": [1], "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"documents": [1], "a": 1}},
        ),
        ({"reasoning": {"effort": "low", "exclude": True}}, HIDDEN_LOW),
        ({"use_beam_search": False, "length_penalty": 1.0, "typical_p": 1, "best_of": 1}, {}),
        ({"provider": {}, "usage": {"include": True}, "cache_prompt": True, "rid": "a"}, {}),
        ({"lora_path": None, "whatever": None}, {}),
        ({"mm_payload": "tensors", "media_io_kwargs": {}, "routed_experts_prompt_start": 0}, {}),
    ],
)
def test_names_of_other_servers_mean_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert ChatBody(messages=HELLO, **given) == ChatBody(messages=HELLO, **ours)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_beam_search", True, "LLM.beam_search does it"),
        ("length_penalty", True, "only 1 is taken"),
        ("functions", [{"name": "f"}], "as tools"),
        ("guided_whitespace_pattern", "[ ]?", "guided_grammar or guided_regex"),
        ("spaces_between_special_tokens", False, "only True is taken"),
        ("extra_body", {"top_k": 1}, "beside the others"),
        ("repetition_detection", {"max_pattern_size": 5}, "send repetition_penalty"),
        ("separate_reasoning", False, "a field of its own"),
        ("repetiton_penalty", 1, "did you mean repetition_penalty?"),
    ],
)
def test_what_other_servers_do_and_this_one_does_not_is_said(
    server: LiveServer, field: str, value: Any, message: str
) -> None:
    answer = server.post(CHAT, {"messages": HELLO, field: value, "regex": "a", "rid": "b"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]


def test_tools_without_a_schema_are_named(server: LiveServer) -> None:
    tools = [{"type": "custom", "custom": {"name": "shell"}}]
    answer = server.post(CHAT, {"messages": HELLO, "tools": tools})
    assert answer.status_code == 400
    assert "only tools of the kind function" in answer.json()["error"]["message"]


def test_parts_that_are_no_text_are_named(server: LiveServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    parts = [{"type": "text", "text": "what is this?"}, image]
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages.0.content.1.type"
    assert "image_url are not read" in error["message"]
    assert error["message"].endswith("the server takes text alone")


def test_seeds_below_zero(server: LiveServer) -> None:
    first, second = (complete(server, seed=-5)["choices"] for _ in range(2))
    assert first == second
    seeds = {complete(server, seed=-1)["hunch"]["answers"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_max_tokens_of_minus_one_is_what_fits(server: LiveServer) -> None:
    assert complete(server, max_tokens=-1)["usage"]["completion_tokens"] == 511
    assert chat(server, max_completion_tokens=-1)["usage"]["total_tokens"] == 512


def test_max_tokens_of_zero_scores_the_prompt(server: LiveServer) -> None:
    made = complete(server, prompt="hello", max_tokens=0, echo=True, logprobs=1)
    (choice,) = made["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("hello")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert made["usage"]["completion_tokens"] == 0
    assert chat(server, max_tokens=0)["choices"][0]["message"]["content"] == ""


def test_prompt_logprobs_come_with_a_streamed_echo_too(server: LiveServer) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "seed": 1, "echo": True, "logprobs": 1}
    whole = server.post(COMPLETE, body).json()["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in events(server, COMPLETE, **body) if c["choices"]]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in parts if part for x in part[key]] == whole[key]
    assert len(whole["tokens"]) == 8


def test_logprob_bytes_of_split_characters_add_up(server: LiveServer) -> None:
    made = chat(server, logprobs=True, max_tokens=200)
    content = made["choices"][0]["logprobs"]["content"]
    raw = bytes(value for entry in content for value in entry["bytes"])
    assert raw.decode() == made["choices"][0]["message"]["content"]
    assert "\ufffd" in {entry["token"] for entry in content}  # some were split


def test_best_of_gives_the_likeliest(server: LiveServer) -> None:
    made = complete(server, n=2, best_of=4)
    assert [choice["index"] for choice in made["choices"]] == [0, 1]
    assert made["choices"][0]["logprobs"] is None
    every = {expected_text("x", 1, 8, sample) for sample in range(4)}
    assert {choice["text"] for choice in made["choices"]} <= every
    assert made["usage"]["completion_tokens"] == 4 * 8  # of all that were made
    assert len(made["hunch"]["answers"]) == 2
    refused = server.post(COMPLETE, {"prompt": "x", "best_of": 2, "stream": True})
    assert refused.json()["error"]["param"] == "best_of"


def test_cached_tokens_are_counted_and_a_salt_keeps_them_apart(server: LiveServer) -> None:
    def cached(**fields: Any) -> int:
        usage = complete(server, prompt="a prompt of many tokens " * 8, **fields)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 176  # all but the last block, which decides the next token
    assert cached(cache_salt="yours") == 0


def test_urgent_requests_go_first(start_server: Start) -> None:
    server = start_server(env={"FAKE_STEP_SECONDS": "0.01"}, max_num_seqs=1)

    def ask(priority: int) -> None:
        body = {"prompt": "x", "max_tokens": 20, "priority": priority}
        server.post(COMPLETE, body, headers={"X-Request-Id": f"priority{priority}"})

    threads = [threading.Thread(target=ask, args=(priority,)) for priority in (0, 5, -5)]
    with server.holding("steps"):
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda number=number: server.stats()["num_open"] > number)
    for thread in threads:
        thread.join()
    wait_for(lambda: len(server.ended()) == 3)
    assert server.ended() == ["priority0", "priority-5", "priority5"]


def test_prompt_logprobs_and_token_ids_as_vllm_gives_them(server: LiveServer) -> None:
    ids = expected_tokens(list(b"hello"), 1, 4)
    (choice,) = complete(
        server, prompt="hello", max_tokens=4, prompt_logprobs=0, return_token_ids=True
    )["choices"]
    assert choice["prompt_token_ids"] == list(b"hello")
    assert choice["token_ids"] == ids
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["101"]["logprob"] == -0.5
    made = chat(server, prompt_logprobs=0, return_token_ids=True)
    assert len(made["prompt_logprobs"]) == len(made["prompt_token_ids"])
    assert made["usage"]["completion_tokens"] == len(made["choices"][0]["token_ids"])
    chunks = events(server, COMPLETE, prompt="hello", max_tokens=4, seed=1, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == list(b"hello")
    assert [t for one in choices for t in one.get("token_ids", [])] == ids


def test_the_last_message_is_continued(server: LiveServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    made = chat(server, messages=messages, continue_final_message=True, return_token_ids=True)
    assert bytes(made["prompt_token_ids"]) == b"user: hello\nassistant: Well, I"
    refused = server.post(CHAT, {"messages": HELLO, "continue_final_message": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_a_continued_message_may_be_repeated(server: LiveServer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    asked = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    plain = chat(server, **asked)["choices"][0]["message"]["content"]
    whole = chat(server, **asked, echo=True)["choices"][0]["message"]["content"]
    assert whole == f"Well, {plain}"
    chunks = events(server, CHAT, max_tokens=8, seed=1, **asked, echo=True)
    told = [choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]]
    assert "".join(told) == whole
    assert chat(server, echo=True)["choices"] == chat(server)["choices"]  # the user's is not


def test_tokens_of_scores_by_their_ids(server: LiveServer) -> None:
    given = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    (choice,) = chat(server, **given, return_tokens_as_token_ids=True)["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names
    (plain,) = chat(server, **given)["choices"]
    assert choice["message"] == plain["message"]
    assert plain["logprobs"]["content"][0]["token"] != names[0]
    given = {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = complete(server, **given)["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in scores["top_logprobs"] for name in top)
    assert (
        scores["text_offset"]
        == complete(server, logprobs=2)["choices"][0]["logprobs"]["text_offset"]
    )


def test_a_prompt_is_cut_to_its_end(server: LiveServer) -> None:
    made = complete(server, prompt="abcdef", truncate_prompt_tokens=3, return_token_ids=True)
    assert made["choices"][0]["prompt_token_ids"] == list(b"def")
    made = complete(server, prompt="a" * 600, truncate_prompt_tokens=-1)
    assert made["usage"] | {"completion_tokens_details": 0, "prompt_tokens_details": 0} == {
        "prompt_tokens": 511,
        "completion_tokens": 1,
        "total_tokens": 512,
        "completion_tokens_details": 0,
        "prompt_tokens_details": 0,
    }


LONG = "a" * 5000
CUT = {"truncate_prompt_tokens": 9}


@pytest.mark.parametrize(
    ("path", "fields", "cut"),
    [
        (COMPLETE, {"prompt": LONG}, CUT),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, CUT),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 16}, {"truncation": "auto"}),
        ("/v1/embeddings", {"input": LONG}, CUT),
        ("/api/embed", {"model": "bytes", "input": LONG, "truncate": False}, {"truncate": True}),
    ],
)
def test_a_prompt_much_longer_than_the_context_is_cut_too(
    server: LiveServer, path: str, fields: dict[str, Any], cut: dict[str, Any]
) -> None:
    assert server.post(path, fields).status_code == 400
    answer = server.post(path, fields | cut)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stop": [""]}, "stop.0", "stop.0: String should have at least 1 character"),
        ({"stop": 5}, "stop", "stop: Input should be a valid string; stop: a list [...] is needed"),
        ({"speculation": "off"}, "speculation", "speculation: an object {...} is needed"),
        ({"prompt": "x"}, "prompt", "prompt: /v1/completions takes it"),
        ({"tools": [{"name": "f"}]}, "tools.0.name", 'tools.0.name: it stands within "function"'),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "logit_bias.a: String should match"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "logit_bias: token id 999"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs: 99 given"),
        ({"reasoning_effort": "x"}, "reasoning_effort", "reasoning_effort must be one of none, "),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: a call is asked for"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "messages.0.content.0.text: Field required",
        ),
    ],
)
def test_a_fault_is_named_by_the_field_it_is_in(
    server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = server.post(CHAT, {"messages": HELLO, **fields})
    fault = answer.json()["error"]
    assert (answer.status_code, fault["param"]) == (400, param), fault
    assert fault["message"].startswith(words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[]", "the body is no JSON object: send {...}"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b'{"prompt": []}', "prompt: List should have at least 1 item after validation, not 0"),
        (b'{"messages": []}', "messages: /v1/chat/completions takes them"),
    ],
)
def test_what_is_wrong_with_a_body_is_said_once(
    server: LiveServer, body: bytes, words: str
) -> None:
    answer = server.post(COMPLETE, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)


def test_usage_in_every_chunk(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, CHAT, messages=HELLO, max_tokens=90, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 90
    assert len(set(counts)) > 1


def test_a_stream_says_what_ended_it(server: LiveServer) -> None:
    for path, fields, text in (
        (COMPLETE, {"prompt": "x"}, complete(server)["choices"][0]["text"]),
        (CHAT, {"messages": HELLO}, chat(server)["choices"][0]["message"]["content"]),
    ):
        asked: Any = {**fields, "max_tokens": 8, "seed": 1, "stop": [text[3:5], "none of it"]}
        choices = [chunk["choices"][0] for chunk in events(server, path, **asked)]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == text[3:5]
        assert not any("stop_reason" in choice for choice in choices[:-1])
        choices = [chunk["choices"][0] for chunk in events(server, path, **asked | {"stop": None})]
        assert choices[-1]["stop_reason"] is None


def test_an_empty_name_is_the_servers_model(server: LiveServer) -> None:
    """Scripts send it whose variable for the model is empty; vLLM and llama.cpp take it."""
    assert complete(server, model="")["model"] == "bytes"
    assert chat(server, model="")["model"] == "bytes"
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()


def test_how_drafting_went_under_vllms_names(server: LiveServer) -> None:
    for made in (
        complete(server, max_tokens=40),
        events(server, COMPLETE, prompt="x", seed=1, max_tokens=40)[-1],
    ):
        found = made["metrics"]["speculative_decoding"]
        stats = made["hunch"]["stats"]
        assert found["num_draft_tokens"] == stats["drafted"] > 0
        assert found["num_accepted_draft_tokens"] == stats["accepted"]
        histogram = found["acceptance_histogram"]
        assert sum(histogram) == found["num_spec_steps"]
        assert sum(n * count for n, count in enumerate(histogram)) == stats["accepted"]
        assert len(histogram) == found["num_spec_tokens"] + 1
    undrafted = complete(server, max_tokens=4, speculation={"mode": "off"})
    found = undrafted["metrics"]["speculative_decoding"]
    assert found["mean_acceptance_length"] == found["num_draft_tokens"] == 0


def test_sampling_as_the_model_recommends_it(tmp_path: Any) -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 99, "min_p": "odd"}
    found = recommended(own)
    assert found["temperature"] == 0.6
    assert (found["top_k"], found["max_tokens"], found["min_p"]) == (20, 99, 0.0)
    assert recommended({"do_sample": False, "temperature": 1.0})["temperature"] == 0
    assert sampling_defaults(ServeConfig(generation_config="vllm"), own)["temperature"] == 1.0
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert sampling_defaults(ServeConfig(generation_config=str(tmp_path)), own)["top_p"] == 0.5
    for where in ("auto", "vllm", str(tmp_path)):
        settings = ServeConfig(generation_config=where, override_generation_config='{"top_k": 7}')
        assert sampling_defaults(settings, own)["top_k"] == 7


def test_an_operators_values_for_templates_are_the_defaults() -> None:
    body = ChatBody(messages=HELLO, chat_template_kwargs={"a": 2})
    assert body.wish({"a": 1, "b": 1}).template_values == {"a": 2, "b": 1}


def test_wrong_guesses_are_hidden_where_keys_share_texts(
    start_server: Start, server: LiveServer
) -> None:
    hiding = start_server(hides_guesses=True, force_usage=True)
    body = {"prompt": "x", "max_tokens": 60, "seed": 1, "speculation": {"origins": True}}
    lengths = {}
    for one in (server, hiding):
        chunks = events(one, COMPLETE, **body)
        pieces = [p for c in chunks for p in c.get("hunch", {}).get("pieces", [])]
        assert "".join(piece[0] for piece in pieces) == expected_text("x", 1, 60)
        lengths[one.port] = {len(piece) for piece in pieces}
        assert ("usage" in chunks[-1]) == (one is hiding)
    assert lengths == {server.port: {2, 3}, hiding.port: {2}}


@pytest.mark.parametrize(
    ("speculate", "keys", "is_hiding"),
    [
        ("suffix:shared=true", ("a", "b"), True),
        ("suffix:shared=true", ("a",), False),
        ("suffix", ("a", "b"), False),
    ],
)
def test_guesses_are_hidden_by_themselves(
    speculate: str, keys: tuple[str, ...], is_hiding: bool
) -> None:
    config = Config(spec=SpecConfig.parse(speculate))
    assert hiding(config, ServeConfig(api_keys=keys)).hides_guesses is is_hiding

"""SGLang's and llama.cpp's own paths, and benchmarks of vLLM and SGLang as clients."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from server.fake_engine import expected_text, expected_tokens
from server.live_server import LiveServer, Start

SAMPLING = {"temperature": 0.7, "max_new_tokens": 8, "sampling_seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(start_server: Start) -> LiveServer:
    """Steps that can be told apart by the clock, and the news alone in events of /generate."""
    env = {"FAKE_STEP_SECONDS": "0.04"}
    return start_server(env=env, incremental_streaming_output=True, max_model_len=30_000)


def events(text: str) -> list[Any]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def test_generate_as_sglang_answers(server: LiveServer) -> None:
    answer = server.post("/generate", {"text": "Hello", "sampling_params": SAMPLING}).json()
    assert answer["text"] == expected_text("Hello", 5, 8)
    assert answer["output_ids"] == expected_tokens(list(b"Hello"), 5, 8)
    about = answer["meta_info"]
    assert about["finish_reason"] == {"type": "length", "length": 8}
    assert (about["prompt_tokens"], about["completion_tokens"]) == (5, 8)
    assert about["spec_accept_length"] >= 1
    assert about["e2e_latency"] > 0
    by_ids = {"input_ids": list(b"Hello"), "sampling_params": SAMPLING, "rid": "mine"}
    again = server.post("/generate", by_ids).json()
    assert (again["text"], again["meta_info"]["id"]) == (answer["text"], "mine")


def test_generate_takes_batches_with_parameters_of_their_own(server: LiveServer) -> None:
    body: dict[str, Any] = {"text": ["one", "two"], "sampling_params": SAMPLING}
    texts = [answer["text"] for answer in server.post("/generate", body).json()]
    assert texts == [expected_text("one", 5, 8), expected_text("two", 5, 8)]
    body["sampling_params"] = [SAMPLING, {**SAMPLING, "max_new_tokens": 3, "sampling_seed": 9}]
    texts = [answer["text"] for answer in server.post("/generate", body).json()]
    assert texts == [expected_text("one", 5, 8), expected_text("two", 9, 3)]
    chunks = events(server.post("/generate", {**body, "stream": True}).text)
    assert chunks.pop() == "[DONE]"
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert [last[0], last[1]] == texts
    several = {"text": "x", "sampling_params": {**SAMPLING, "n": 2}}
    assert len(server.post("/generate", several).json()) == 2


def test_streams_of_generate_tell_all_so_far(server: LiveServer, slow: LiveServer) -> None:
    body = {"text": "Hello", "sampling_params": SAMPLING, "stream": True, "return_logprob": True}
    chunks = events(server.post("/generate", body).text)
    assert chunks.pop() == "[DONE]"
    text = expected_text("Hello", 5, 8)
    assert all(text.startswith(chunk["text"]) for chunk in chunks)
    assert chunks[-1]["text"] == text
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 8
    chunks = events(slow.post("/generate", body).text)[:-1]
    assert "".join(chunk["text"] for chunk in chunks) == text
    scores = [one for chunk in chunks for one in chunk["meta_info"]["output_token_logprobs"]]
    assert [token for _, token, _ in scores] == expected_tokens(list(b"Hello"), 5, 8)


def test_generate_shows_scores_in_sglangs_form(server: LiveServer) -> None:
    body = {
        "text": "abc", "sampling_params": SAMPLING, "return_logprob": True, "top_logprobs_num": 2,
        "logprob_start_len": 0, "return_text_in_logprobs": True,
    }  # fmt: skip
    about = server.post("/generate", body).json()["meta_info"]
    read = about["input_token_logprobs"]
    assert [token for _, token, _ in read] == list(b"abc")
    assert read[0] == [None, ord("a"), None]
    assert read[1][0] < 0
    assert about["input_top_logprobs"][0] is None
    assert all(len(top) == 2 for top in about["output_top_logprobs"])
    plain = server.post("/generate", {**body, "logprob_start_len": -1}).json()["meta_info"]
    assert plain["input_token_logprobs"] == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "x", "input_ids": [1]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "rid": "one"},
        {"text": ["a", "b"], "return_logprob": [True, False]},
        {"text": "x", "sampling_params": {"temprature": 1}},
        {"text": "x", "sampling_params": {"stop_regex": "a+"}},
        {"text": "x", "sampling_params": {"stream": True}},
        {"text": "x", "lora_path": "other"},
        {"text": "x", "token_ids_logprob": [1]},
        {"text": "x", "image_data": "cat.png"},
        {"input_ids": [[1], [99999]]},
    ],
)
def test_generate_refuses_what_it_cannot_do(server: LiveServer, body: dict[str, Any]) -> None:
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_generate_says_what_it_takes_in_place_of_a_prompt(server: LiveServer) -> None:
    answer = server.post("/generate", {"prompt": "x", "max_tokens": 4}).json()
    assert answer["error"]["message"].endswith("/generate text")


def test_what_sglangs_clients_ask_about_a_server(server: LiveServer) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = server.get(path).json()
        assert info["is_generation"] is True
        assert info["tokenizer_path"]
    for path in ("/get_server_info", "/server_info"):
        assert "avg_spec_accept_length" in server.get(path).json()["internal_states"][0]
    assert server.get("/get_load").json()[0]["num_reqs"] == 0
    assert server.get("/health_generate").status_code == 200
    assert server.get("/v1/health").status_code == 200
    assert server.get("/load").json() == {"server_load": 0}
    assert server.post("/ping").status_code == 200
    assert server.post("/start_profile", {}).status_code == 501


def test_flushing_forgets_prefixes_unless_requests_run(slow: LiveServer) -> None:
    server = slow
    body = {"prompt": "a" * 200, "max_tokens": 2}

    def num_cached() -> int:
        usage = server.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert server.post("/flush_cache").text.startswith("Cache flushed")
    assert num_cached() == 0
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    assert num_cached() == 0
    assert server.post("/flush_cache", headers={"origin": "http://evil.example"}).status_code == 403
    long = {"prompt": "b", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", server.url + "/v1/completions", json=long) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.post("/flush_cache").status_code == 400
        assert server.post("/reset_prefix_cache").json() == {"success": False}
        num_cached()
        held_too = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        assert server.post(held_too).json() == {"success": True}
        assert num_cached() == 0
        assert server.post("/reset_prefix_cache?reset_running_requests=x").status_code == 400
        assert next(lines, None) is not None  # it goes on
    assert server.post("/flush_cache?timeout=60").status_code == 200  # its end was waited for


DEFAULTS_OF_LLAMA_CPP: dict[str, Any] = {
    "n_indent": 0, "grammar": "", "sse_ping_interval": -1, "lora": [], "n_discard": 0,
    "backend_sampling": False, "reasoning_format": "none", "reasoning_in_content": False,
    "generation_prompt": "", "chat_format": "Content-only", "preserved_tokens": [],
    "grammar_lazy": False, "grammar_triggers": [], "adaptive_target": -1.0, "adaptive_decay": 0.9,
    "samplers": ["top_k"], "t_max_prompt_ms": 500, "response_fields": ["content"],
}  # fmt: skip


def test_options_of_llama_cpp_that_ask_for_nothing(server: LiveServer) -> None:
    body = {"n_predict": 8, "seed": 5}
    plain = server.post("/completion", {**body, "prompt": "Hello"}).json()["content"]
    asked = {**body, **DEFAULTS_OF_LLAMA_CPP, "prompt": {"prompt_string": "Hello"}}
    assert server.post("/completion", asked).json()["content"] == plain
    several = {**body, "prompt": ["Hello", {"prompt_string": "Hello"}]}
    assert [one["content"] for one in server.post("/completion", several).json()] == [plain] * 2
    picture = {"prompt_string": "Hello", "multimodal_data": ["AAAA"]}
    answer = server.post("/completion", {**body, "prompt": picture})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    wrong = server.post("/completion", {**asked, "lora": [{"id": 0, "scale": 1}]})
    assert "send it as model" in wrong.json()["error"]["message"]


def test_completion_as_llama_cpp_answers(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": "Hello", "n_predict": 8, "seed": 5, "temperature": 0.7}
    body |= {"ignore_eos": True, "cache_prompt": True, "samplers": ["top_k", "temperature"]}
    text, tokens = expected_text("Hello", 5, 8), expected_tokens(list(b"Hello"), 5, 8)
    answer = server.post("/completion", {**body, "n_probs": 2, "return_tokens": True}).json()
    assert (answer["content"], answer["tokens"]) == (text, tokens)
    assert (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert answer["timings"]["predicted_n"] == 8
    scores = answer["completion_probabilities"]
    assert [score["id"] for score in scores] == tokens
    assert all(len(score["top_logprobs"]) == 2 for score in scores)
    chunks = events(server.post("/completion", {**body, "stream": True}).text)
    assert "".join(chunk["content"] for chunk in chunks) == text
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    mixed = {**body, "prompt": [72, "el", 108, "o"]}
    assert server.post("/completion", mixed).json()["content"] == text
    several = server.post("/completion", {**body, "prompt": ["Hello", [72, "i"]]}).json()
    assert [one["content"] for one in several] == [text, expected_text("Hi", 5, 8)]
    word = server.post("/completion", {**body, "stop": [text[2:4]]}).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", text[2:4])
    assert server.post("/completions", {**body, "speculative.n_max": 2}).json()["content"] == text
    assert server.post("/completion", {**body, "speculative.n_max": -2}).status_code == 400
    banned = server.post("/completion", {**body, "logit_bias": [[101, False]]})
    assert banned.status_code == 200
    for wrong in ({"mirostat": 2}, {"repeat_penalty": 1.2, "repeat_last_n": 64}, {"prompt": []}):
        assert server.post("/completion", {**body, **wrong}).status_code == 400


def test_a_bias_of_a_text_says_where_ids_come_from(server: LiveServer) -> None:
    answer = server.post("/completion", {"prompt": "x", "logit_bias": [[5, 1], ["Hello", 3]]})
    assert answer.status_code == 400
    assert "'Hello' is no token id; POST /tokenize" in answer.json()["error"]["message"]


def test_slots_and_tokens_as_llama_cpp_tells_them(server: LiveServer) -> None:
    slots = server.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(len(slots)))
    assert not any(slot["is_processing"] for slot in slots)
    assert server.get("/slots?fail_on_no_slot=1").status_code == 200
    plain = server.post("/tokenize", {"content": "né"}).json()["tokens"]
    assert plain == list("né".encode())
    pieces = server.post("/tokenize", {"content": "né", "with_pieces": True}).json()["tokens"]
    assert pieces[0] == {"id": 110, "piece": "n"}
    assert pieces[1]["piece"] == [0xC3]
    named = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "b"]
    back = server.post("/detokenize", {"tokens": plain}).json()
    assert back["content"] == back["prompt"] == back["text"] == "né"


def test_invocations_take_chats_and_prompts(server: LiveServer) -> None:
    asked = {"max_tokens": 4, "seed": 1}
    chat = {"messages": [{"role": "user", "content": "x"}], **asked}
    assert server.post("/invocations", chat).json()["object"] == "chat.completion"
    assert server.post("/invocations", {"prompt": "x", **asked}).json()["choices"][0]["text"]
    assert server.post("/invocations", {"what": 1}).status_code == 400


# --- benchmarks as clients ------------------------------------------------------------------------


def test_vllms_benchmark_measures_this_server(slow: LiveServer) -> None:
    """Its bodies, and what it takes from the events: the first one is its first token."""
    server = slow
    usage = {"stream_options": {"include_usage": True}, "stream": True, "ignore_eos": True}
    completion = {
        "model": "bytes", "prompt": "Hello", "repetition_penalty": 1.0, "max_tokens": 6,
        "logprobs": None, **usage, "temperature": 0.0,
    }  # fmt: skip
    content = [{"type": "text", "text": "Hello"}]
    chat = {
        "model": "bytes", "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 6, **usage,
    }  # fmt: skip
    headers = {"x-request-id": "bench-0"}
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        began, first, counted = time.monotonic(), None, None
        with server.client.stream("POST", server.url + path, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if chunk["choices"]:
                    first = first or time.monotonic() - began
                elif chunk["usage"]:
                    counted = chunk["usage"]["completion_tokens"]
        assert counted == 6
        assert first is not None
        assert first > 0.04  # not before the prompt was read
    assert server.post("/tokenize", {"model": "bytes", "prompt": "Hello"}).json()["count"] == 5
    names = server.get("/metrics").text
    assert "vllm:spec_decode_num_drafts_total" in names
    lists = {**completion, "prompt": ["a", "b"], "stream": False, "stream_options": None}
    assert len(server.post("/v1/completions", lists).json()["choices"]) == 2


def test_sglangs_benchmark_measures_this_server(server: LiveServer) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    body = {
        "text": "Hello", "sampling_params": sampling, "stream": True, "lora_path": "",
        "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
    }  # fmt: skip
    chunks = events(server.post("/generate", body).text)[:-1]
    assert all(chunk["text"] for chunk in chunks)
    assert chunks[-1]["meta_info"]["completion_tokens"] == 6
    assert chunks[-1]["meta_info"]["spec_accept_length"] > 0
    assert server.post("/flush_cache?timeout=60").status_code == 200
    openai = {
        "model": "bytes", "prompt": "Hello", "best_of": 1, "max_tokens": 6, "stream": True,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    # It takes the first choice of every chunk for granted.
    answer = events(server.post("/v1/completions", openai).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in answer)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/rerank", "/v1/embeddings"),
        ("/v1/images/generations", "text alone"),
        ("/v1/load_lora_adapter", "--lora-modules"),
        ("/v1/fine_tuning/jobs", "hunch train"),
        ("/embeddings", "/v1/embeddings"),
        ("/slots/0", "found again by themselves"),
        ("/v1/nothing", "no POST /v1/nothing$"),
        ("/v1/v1/chat/completions", r"did you mean /v1/chat/completions\?"),
        ("/v1/completion", r"did you mean /v1/completions\?"),
    ],
)
def test_paths_of_others_that_are_missing_say_what_to_do(
    server: LiveServer, path: str, word: str
) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404
    assert re.search(word, answer.json()["error"]["message"])

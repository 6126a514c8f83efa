"""Texts as vectors: by OpenAI's client and Ollama's path, and against transformers' states."""

from __future__ import annotations

import math
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from hunch import LLM
from server.live_server import LiveServer
from tiny_models import write_llama

PATH = "/v1/embeddings"


def vector_of(text: str, pooling: str = "last") -> list[float]:
    """What the server's model, whose states are a byte and its square, must give, with length 1."""
    states = [(byte, byte * byte) for byte in text.encode()]
    found = states[-1] if pooling == "last" else [sum(c) / len(states) for c in zip(*states)]  # noqa: B905
    return [number / math.hypot(*found) for number in found]


@pytest.mark.parametrize("encoding", [None, "float", "base64"])  # None: base64, unseen
def test_openais_client_gets_vectors(server: LiveServer, encoding: str | None) -> None:
    texts = ["Hello", "a longer text " * 20, "é"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        more = {} if encoding is None else {"encoding_format": encoding}
        found = client.embeddings.create(model="bytes", input=texts, **more)  # type: ignore[arg-type]
        mean = client.embeddings.create(
            model="bytes", input=list(b"Hello"), extra_body={"pooling": "mean"}
        )
    if encoding != "base64":
        for text, item in zip(texts, found.data, strict=True):
            assert item.embedding == pytest.approx(vector_of(text), abs=1e-6)
        assert [item.index for item in found.data] == [0, 1, 2]
    else:
        assert isinstance(found.data[0].embedding, str)
    assert found.usage.prompt_tokens == sum(len(text.encode()) for text in texts)
    assert mean.data[0].embedding == pytest.approx(vector_of("Hello", "mean"), abs=1e-6)


def test_many_texts_and_raw_states(server: LiveServer) -> None:
    texts = [f"text number {number}" for number in range(300)]
    fields = {"pooling": "mean", "normalize": False, "dimensions": 2}
    data = server.post(PATH, {"input": texts, **fields}).json()["data"]
    assert len(data) == 300
    assert data[7]["embedding"][0] == pytest.approx(sum(texts[7].encode()) / len(texts[7]))
    server.wait_idle()


def test_fields_of_vllms_embeddings(server: LiveServer) -> None:
    quiet = {"padding": "do_not_pad", "embed_dtype": "float32", "endianness": "native"}
    notes = {"request_id": "a", "priority": 1, "cache_salt": "s", "mm_processor_kwargs": {}}

    def vector(**fields: object) -> object:
        return server.post(PATH, {"input": "Hello", **fields}).json()["data"][0]["embedding"]

    assert vector(**quiet, **notes, use_activation=True) == vector()
    assert vector(use_activation=False) == vector(normalize=False) != vector()


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "the input is empty"),
        ({"input": ["a", ""]}, 400, "the input is empty"),
        ({"input": [999]}, 400, "token ids"),
        ({"input": "a", "dimensions": 1}, 400, "2 numbers"),
        ({"input": "a", "pooling": "max"}, 400, "'last' or 'mean'"),
        ({"input": "a" * 600}, 400, "context"),
        ({"input": "a", "model": "other"}, 404, "other"),
        ({"input": "a", "embed_dtype": "float16"}, 400, "only 'float32' is taken"),
        ({"messages": [{"role": "user", "content": "a"}]}, 400, "/v1/chat/completions takes them"),
        ({"input": ["a"] * 2049}, 400, "2049 texts given"),
    ],
)
def test_what_cannot_be_is_said(
    server: LiveServer, fields: dict[str, object], status: int, word: str
) -> None:
    answer = server.post(PATH, fields)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_ollamas_path(server: LiveServer) -> None:
    body = {"model": "bytes:latest", "input": ["Hello", "b" * 511 + "c" * 89]}
    answer = server.post("/api/embed", body).json()
    assert answer["embeddings"] == [pytest.approx(vector_of(text)) for text in ("Hello", "b")]
    assert answer["prompt_eval_count"] == 5 + 511
    assert server.post("/api/embed", {**body, "truncate": False}).status_code == 400
    older = server.post("/api/embeddings", {"model": "bytes", "prompt": "Hello"}).json()
    assert older == {"embedding": pytest.approx(vector_of("Hello"))}


def test_states_are_transformers_whatever_the_steps(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model
    texts = ["the fast model of guessing", "a", "the token and " * 15]
    found: dict[tuple[str, int], list[list[float]]] = {}
    for size in (16, 512):
        with LLM(str(path), dtype="float32", max_num_batched_tokens=size, max_num_seqs=4) as llm:
            for pooling in ("last", "mean"):
                outputs = llm.embed(texts, pooling=pooling, normalize=False)
                found[pooling, size] = [output.outputs.embedding for output in outputs]
                for output in outputs:
                    with torch.inference_mode():
                        ids = torch.tensor([output.prompt_token_ids])
                        states = theirs(ids).last_hidden_state[0]
                    wanted = states[-1] if pooling == "last" else states.mean(0)
                    assert output.outputs.embedding == pytest.approx(wanted.tolist(), abs=1e-4)
    for pooling in ("last", "mean"):  # to the last bit, however the texts were cut into steps
        assert found[pooling, 16] == found[pooling, 512]

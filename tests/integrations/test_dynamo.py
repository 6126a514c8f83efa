"""A worker under NVIDIA Dynamo's own runtime and frontend, on this machine, without etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("dynamo.common.backend")

from dynamo._core import Context
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from hunch import LLM, SamplingParams
from hunch.errors import ConfigError
from hunch.integrations.dynamo import HunchEngine, read_arguments
from server.live_server import free_port
from tiny_models import write_llama

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "kv_bytes": 8_000_000, "threads": 1}
WORDS = ["--speculate", "ngram", *(f"--{name}={value}" for name, value in SMALL.items())]
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "target")


def request(**options: Any) -> dict[str, Any]:
    return {
        "token_ids": PROMPT,
        "sampling_options": {"temperature": 0.8, "seed": 3, **options},
        "stop_conditions": {"max_tokens": 24, "ignore_eos": True},
        "output_options": {"logprobs": 1},
    }


def test_flags_are_dynamos_and_the_engines() -> None:
    text = "--namespace mine --discovery-backend file --model some --served-model-name 135"
    words = text.split()
    runtime, arguments = read_arguments([*words, "--tensor-parallel-size", "2", "--enforce_eager"])
    assert (runtime.namespace, runtime.component, runtime.endpoint) == (
        "mine", "backend", "generate",
    )  # fmt: skip
    assert arguments == {
        "model": "some", "served_model_name": "135", "tensor_parallel_size": 2,
        "enforce_eager": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="follows no flag"):
        read_arguments(["some"])


def test_the_engine_answers_tells_mistakes_and_survives_its_process(model: Path) -> None:
    with LLM(str(model), speculate="off", **SMALL) as llm:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, n=2)
        plain = [list(one.token_ids) for one in llm.generate([PROMPT], params)[0].outputs]

    async def ask(engine: HunchEngine, wish: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk async for chunk in engine.generate(wish, Context())]

    async def work() -> None:
        words = ["--model", str(model), "--discovery-backend", "mem", *WORDS]
        engine, place = await HunchEngine.from_args(words)
        assert place.served_model_name == "target"
        registered = await engine.start(7)
        assert registered.llm.context_length == 256
        assert registered.llm.total_kv_blocks > 0
        answer = await ask(engine, request(n=2))
        for place, tokens in enumerate(plain):
            mine = [chunk for chunk in answer if chunk["index"] == place]
            assert [token for chunk in mine for token in chunk["token_ids"]] == tokens
            assert [chunk["finish_reason"] for chunk in mine if "finish_reason" in chunk] == [
                "length"
            ]
            assert all(len(chunk["log_probs"]) == len(chunk["token_ids"]) for chunk in mine)
        assert answer[-1]["completion_usage"]["total_tokens"] == len(PROMPT) + 48
        with pytest.raises(InvalidArgument, match="top_p"):
            await ask(engine, request(top_p=7))
        assert (await ask(engine, await engine.health_check_payload()))[-1]["finish_reason"]
        long = request() | {"stop_conditions": {"max_tokens": 200, "ignore_eos": True}}
        running = asyncio.create_task(ask(engine, long))
        while not engine._kept.engine.num_open:
            await asyncio.sleep(0.01)
        pid = engine._kept.engine.pid
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineShutdown, match="SIGKILL"):
            await running
        assert time.monotonic() - began < 300
        while engine._kept.trouble() is not None:  # it is started again
            await asyncio.sleep(0.1)
        assert engine._kept.engine.pid != pid
        again = await ask(engine, request())
        assert [token for chunk in again for token in chunk["token_ids"]] == plain[0]
        await engine.cleanup()
        await engine.cleanup()

    asyncio.run(asyncio.wait_for(work(), 900))


@contextmanager
def process(words: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as file:
        started = subprocess.Popen([sys.executable, *words], env=env, stdout=file, stderr=file)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(300)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def low_port() -> int:
    """A free port that Dynamo can read: it holds this one in 16 bits with a sign."""
    for port in range(21000, 32000):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_for(url: str, worker: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and worker.poll() is None:
        try:
            if httpx.get(f"{url}/v1/models", timeout=300).json()["data"]:
                return
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def test_dynamos_frontend_serves_it(model: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "store"),
        "DYN_SYSTEM_PORT": str(low_port()),
    }
    frontend = ["-m", "dynamo.frontend", "--http-port", str(port), "--namespace", "tests"]
    worker = ["-m", "hunch.integrations.dynamo", "--namespace", "tests", "--model", str(model)]
    with ExitStack() as stack:
        front = {name: value for name, value in env.items() if name != "DYN_SYSTEM_PORT"}
        stack.enter_context(process(frontend, front, tmp_path / "frontend"))
        started = stack.enter_context(process([*worker, *WORDS], env, tmp_path / "worker"))
        wait_for(url, started, tmp_path / "worker")
        body = {"model": "target", "prompt": "the model and", "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        system = f"http://127.0.0.1:{env['DYN_SYSTEM_PORT']}"
        metrics = httpx.get(f"{system}/metrics", timeout=300).text
    with LLM(str(model), speculate="off", **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        expected = llm.generate("the model and", params)[0].outputs[0]
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
    assert "hunch:num_requests_waiting" in metrics


def test_dynamos_router_knows_which_prefixes_are_cached(model: Path, tmp_path: Path) -> None:
    """By the KV events that the engine sends: the second time, the prompt is known to be there."""
    port, events = free_port(), f"tcp://*:{low_port()}"
    url = f"http://127.0.0.1:{port}"
    env = {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "store"),
        "DYN_EVENT_PLANE": "zmq",
    }
    frontend = ["-m", "dynamo.frontend", "--http-port", str(port), "--namespace", "tests"]
    worker = ["-m", "hunch.integrations.dynamo", "--namespace", "tests", "--model", str(model)]
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": events})
    with ExitStack() as stack:
        kv = ["--router-mode", "kv"]
        stack.enter_context(process([*frontend, *kv], env, tmp_path / "frontend"))
        told = [*worker, *WORDS, "--kv-events-config", config]
        started = stack.enter_context(process(told, env, tmp_path / "worker"))
        wait_for(url, started, tmp_path / "worker")
        body = {
            "model": "target",
            "prompt": "the model and the guess and the token and the draft " * 2,
            "max_tokens": 4,
            "nvext": {"extra_fields": ["timing"]},
        }
        rates, end = [], time.monotonic() + 300
        while time.monotonic() < end and not (rates and rates[-1] > 0):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
            rates.append(answer["nvext"]["timing"]["kv_hit_rate"])
            time.sleep(0.3)
    assert rates[0] == 0
    assert rates[-1] > 0.5

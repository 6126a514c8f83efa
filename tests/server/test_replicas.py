"""Several engines behind one address: routing by beginnings, and streams that outlive an engine."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hunch import LLM, SamplingParams
from hunch.config import ConfigError
from hunch.server.replicas import merged
from hunch.server.routing import PIECE, Router
from hunch.server.settings import ServeConfig
from parallel.test_served import followers
from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start, api_server, wait_for
from server.test_lifecycle import COMPLETE, read_stream
from server.test_operations import read
from tiny_models import write_llama

KINDS: list[dict[str, Any]] = [
    {},
    {"stop": ["\x00\x01never"]},
    {"logprobs": 2},
    {"presence_penalty": 0.5, "speculation": {"mode": "off"}},
]


def engines(server: LiveServer) -> list[int]:
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def pair(start_server: Start) -> LiveServer:
    return start_server(replicas=2, max_num_seqs=128, env={"FAKE_STEP_SECONDS": "0.02"})


@pytest.mark.parametrize("num_streams", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_streams_go_on_when_their_engine_is_killed(num_streams: int, pair: LiveServer) -> None:
    server = pair
    assert set(read(server)["hunch_engine_process_start_time_seconds"]) == {("0",), ("1",)}
    bodies = [
        {"prompt": f"Once {seed}", "max_tokens": 120, "seed": seed, **KINDS[seed % len(KINDS)]}
        for seed in range(num_streams)
    ]
    with ThreadPoolExecutor(num_streams) as pool:
        with server.holding("steps", after=10):  # in the middle of the texts
            running = [pool.submit(read_stream, server, body) for body in bodies]
            wait_for(lambda: server.stats()["num_open"] == num_streams)
            os.kill(engines(server)[0], signal.SIGKILL)
        found = [one.result(PATIENCE) for one in running]
    expected = [expected_text(f"Once {seed}", seed, 120) for seed in range(num_streams)]
    assert found == [(text, None) for text in expected]
    assert server.stats()["engine"]["num_moved"] > 0
    wait_for(lambda: server.stats()["engine"]["num_replicas_up"] == 2)
    assert "the engine was started again" in server.log()
    assert server.get("/health").status_code == 200
    now = read(server)
    assert now["hunch:num_replicas"] == now["hunch:num_replicas_up"] == {(): 2}
    assert now["hunch:requests_moved_total"] == {(): server.stats()["engine"]["num_moved"]}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_real_engine_is_killed_under_200_streams(
    num_ranks: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Every text is the one that plain decoding gives, with nobody killed; with ranks, one of them
    dies, and its engine with it."""
    model = write_llama(tmp_path_factory.mktemp("tiny") / "target")
    num_streams = 200 if num_ranks == 1 else 50
    bodies = [
        {
            "prompt": f"the model and {seed}",
            "max_tokens": 100,
            "temperature": 0.8,
            "seed": seed,
            "ignore_eos": True,
            **KINDS[seed % len(KINDS)],
        }
        for seed in range(num_streams)
    ]
    small = {"max_model_len": 256, "threads": 1, "kv_bytes": 200_000_000}
    names = ("max_tokens", "temperature", "seed", "ignore_eos", "presence_penalty")
    with LLM(str(model), speculate="off", tensor_parallel_size=num_ranks, **small) as llm:
        params = [
            SamplingParams(**{name: body[name] for name in names if name in body})
            for body in bodies
        ]
        outputs = llm.generate([body["prompt"] for body in bodies], params)
    words = f"--model {model} --replicas 2 -tp {num_ranks} --speculate ngram --max-num-seqs 128"
    words += "".join(f" --{name} {value}" for name, value in small.items())
    log = tmp_path / "log"
    with (
        api_server(words.split(), log) as url,
        httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(num_streams) as pool,
    ):
        server = SimpleNamespace(url=url.removesuffix("/v1"), client=client)
        running = [pool.submit(read_stream, server, body) for body in bodies]

        def stats() -> Any:
            return client.get(f"{server.url}/stats").json()

        wait_for(lambda: stats()["engine"].get("generation_tokens", 0) > 10 * num_streams)
        (pid,) = re.findall(r"INFO serving .*engine_pid=(\d+)", log.read_text())
        victim = int(pid) if num_ranks == 1 else followers(log)[0]
        os.kill(victim, signal.SIGKILL)
        found = [one.result(PATIENCE) for one in running]
        num_moved = stats()["engine"]["num_moved"]
        wait_for(lambda: "the engine was started again" in log.read_text())
    assert found == [(output.outputs[0].text, None) for output in outputs]
    assert num_moved > num_streams // 8


def test_answers_that_are_no_streams_go_on_too(pair: LiveServer) -> None:
    """Several answers of a request, and one whose seed the server chose."""
    body = {"prompt": "Twice", "max_tokens": 80, "seed": 5, "n": 2}
    with ThreadPoolExecutor(8) as pool:
        with pair.holding("steps", after=10):
            running = [pool.submit(pair.post, COMPLETE, body) for _ in range(7)]
            running.append(pool.submit(pair.post, COMPLETE, {"prompt": "Thrice", "max_tokens": 80}))
            wait_for(lambda: pair.stats()["num_open"] == 15)
            os.kill(engines(pair)[1], signal.SIGKILL)
        answers = [one.result(PATIENCE).json() for one in running]
    texts = [expected_text("Twice", 5, 80, sample) for sample in range(2)]
    for answer in answers[:-1]:
        assert [choice["text"] for choice in answer["choices"]] == texts
    assert len(answers[-1]["choices"][0]["text"]) > 0


def test_beginnings_stay_together_and_loads_stay_near() -> None:
    router = Router(3)
    prompts = [[group] * (4 * PIECE) for group in range(6)]
    homes = [router.choose(prompt, "", [2, 2, 2]) for prompt in prompts]
    again = [router.choose([*prompt, 7], "", [2, 2, 2]) for prompt in prompts]
    assert again == homes
    busy = [50 if index == homes[0] else 1 for index in range(3)]
    assert router.choose(prompts[0], "", busy) != homes[0]
    down = [None if index == homes[1] else 0 for index in range(3)]
    assert router.choose(prompts[1], "", down) != homes[1]


def test_a_salt_makes_another_beginning() -> None:
    router = Router(2)
    prompt = [1] * (2 * PIECE)
    assert router.choose(prompt, "a", [0, 3]) == 0
    assert router.choose(prompt, "a", [1, 0]) == 0
    assert router.choose(prompt, "b", [1, 0]) == 1


def test_reports_of_engines_become_one() -> None:
    reports = [
        {"steps": 10, "acceptance_rate": 0.5, "latency_ms": {"p50": 4.0}, "accepted_per": [3, 1]},
        {"steps": 30, "acceptance_rate": 0.9, "latency_ms": {"p50": 8.0}, "accepted_per": [1]},
    ]
    assert merged(reports) == {
        "steps": 40,
        "acceptance_rate": pytest.approx(0.8),
        "latency_ms": {"p50": pytest.approx(7.0)},
        "accepted_per": [4, 1],
    }


def test_replicas_and_workers_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServeConfig(replicas=2, workers=2)

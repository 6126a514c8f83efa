"""Under load and in trouble: overload, deadlines, clients that leave, signals, a dead engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from hunch.config import Config
from hunch.server import remote
from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start, wait_for

COMPLETE = "/v1/completions"
SLOW = {"FAKE_STEP_SECONDS": "0.03"}
LONG = {"prompt": "Once", "seed": 3, "max_tokens": 300, "speculation": {"mode": "off"}}
ENDLESS = {**LONG, "max_tokens": 50_000}  # 25 minutes by the clock of the slow engine
ROOM = 60_000  # tokens of a context


def read_stream(
    server: LiveServer, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[str, dict[str, Any] | None]:
    """The text of a stream, and the error it ended with."""
    text, error = "", None
    with server.client.stream(
        "POST", server.url + COMPLETE, json={**body, "stream": True}, headers=headers
    ) as answer:
        if answer.status_code != 200:
            return "", json.loads(answer.read())["error"]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            error = chunk.get("error") or error
            text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    return text, error


@pytest.fixture(scope="module")
def slow(start_server: Start) -> LiveServer:
    return start_server(env=SLOW, max_num_seqs=2, max_queue=2, max_model_len=ROOM)


def test_a_full_queue_says_when_to_come_back(slow: LiveServer) -> None:
    with ThreadPoolExecutor(5) as pool:
        body = {**LONG, "max_tokens": 40}
        with slow.holding("steps"):
            first = [pool.submit(read_stream, slow, body) for _ in range(4)]
            wait_for(lambda: slow.stats()["num_open"] == 4)
            refused = slow.post(COMPLETE, body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        wanted = expected_text("Once", 3, 40)
        assert [future.result() for future in first] == [(wanted, None)] * 4
    slow.wait_idle()


def test_requests_are_served_in_the_order_they_came(slow: LiveServer) -> None:
    names = [f"in-order-{number}" for number in range(4)]

    def ask(name: str) -> None:
        read_stream(slow, {**LONG, "max_tokens": 40}, {"X-Request-Id": name})

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    with slow.holding("steps"):
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(lambda number=number: slow.stats()["num_open"] == number + 1)
    for thread in threads:
        thread.join()
    wait_for(lambda: set(names) <= set(slow.ended()))
    ends = [name for name in slow.ended() if name in names]
    assert set(ends[:2]) == set(names[:2])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    slow: LiveServer, stream: bool
) -> None:
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: slow.stats()["engine"]["num_running"] == 1)
        before = slow.stats()["engine"]["generation_tokens"]
    engine = slow.wait_idle()
    assert engine["generation_tokens"] - before < 49_000
    assert engine["kv_usage"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_with_a_reason(slow: LiveServer, stream: bool) -> None:
    body = {**LONG, "timeout": 0.3}
    if stream:
        text, error = read_stream(slow, body)
        assert expected_text("Once", 3, 300).startswith(text)
        assert error is not None
    else:
        answer = slow.post(COMPLETE, body)
        assert answer.status_code == 408
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"


def test_a_client_does_not_try_again_what_reached_its_deadline(slow: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none")  # of two more attempts
    before = slow.log().count('"status": 408')
    with pytest.raises(openai.APIStatusError, match="deadline"):
        client.completions.create(model="bytes", prompt="x", extra_body={**LONG, "timeout": 0.3})
    slow.wait_idle()
    assert slow.log().count('"status": 408') == before + 1
    slow.wait_idle()


def test_a_reader_that_stalls_does_not_stall_others(server: LiveServer) -> None:
    body = json.dumps({**LONG, "n": 16, "max_tokens": 500, "stream": True, "logprobs": 20}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with server.holding("steps"):
            sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            wait_for(lambda: server.stats()["num_open"] == 16)
        for seed in range(5):
            text, error = read_stream(server, {"prompt": "a", "seed": seed, "max_tokens": 30})
            assert (text, error) == (expected_text("a", seed, 30), None)
        wait_for(lambda: server.stats()["engine"]["num_running"] == 0)  # it was generated anyway


def test_sigterm_lets_running_streams_finish_and_refuses_new_ones(start_server: Start) -> None:
    server = start_server(env={"FAKE_STEP_SECONDS": "0.02"}, drain_timeout=PATIENCE)
    body = {**LONG, "max_tokens": 60}
    with ThreadPoolExecutor(50) as pool:
        with server.holding("steps"):
            streams = [pool.submit(read_stream, server, {**body, "seed": s}) for s in range(50)]
            wait_for(lambda: server.stats()["num_open"] == 50)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.get("/ready").status_code == 503)
            refused = server.post(COMPLETE, body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert server.get("/health").status_code == 200
        for seed, stream in enumerate(streams):
            assert stream.result() == (expected_text("Once", seed, 60), None)
    assert server.process.wait(PATIENCE) == 0


def test_after_the_drain_limit_the_rest_is_told(start_server: Start) -> None:
    server = start_server(env=SLOW, drain_timeout=0.3, max_model_len=ROOM)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read_stream, server, ENDLESS) for _ in range(8)]
        wait_for(lambda: server.stats()["num_open"] == 8)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            text, error = stream.result()
            assert expected_text("Once", 3, 2 * len(text)).startswith(text)
            assert error is not None
            assert "shutting down" in error["message"]
    assert server.process.wait(PATIENCE) == 0


def test_a_killed_engine_is_told_to_everyone(start_server: Start) -> None:
    server = start_server(env=SLOW, death_grace=PATIENCE, engine_restarts=0, max_model_len=ROOM)
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(read_stream, server, ENDLESS) for _ in range(4)]
        whole = pool.submit(server.post, COMPLETE, ENDLESS)
        wait_for(lambda: server.stats()["num_open"] == 5)
        os.kill(server.engine_pid, signal.SIGKILL)
        for stream in streams:
            error = stream.result()[1]
            assert error is not None
            assert error["code"] == "engine_unavailable"
        assert whole.result().status_code == 503
        assert server.get("/health").status_code == 503
        assert server.post(COMPLETE, LONG).status_code == 503
    server.process.send_signal(signal.SIGTERM)  # else it would tell clients for minutes
    assert server.process.wait(PATIENCE) == 1
    assert "was killed by SIGKILL" in server.log()


def test_a_server_without_an_engine_leaves(start_server: Start) -> None:
    server = start_server(death_grace=0.1, engine_restarts=0)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.process.wait(PATIENCE) == 1
    assert "the server leaves" in server.log()


def test_a_dead_and_a_hung_engine_are_started_again(start_server: Start) -> None:
    server = start_server(env=SLOW, engine_restarts=2, engine_timeout=6)
    short = {**LONG, "max_tokens": 5}
    pids = [server.engine_pid]
    with server.holding("load"):
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: server.get("/health").status_code == 503)
    wait_for(lambda: server.get("/ready").status_code == 200)
    pids.append(server.engine_pid)
    assert server.post(COMPLETE, short).json()["choices"][0]["text"] == expected_text("Once", 3, 5)

    with server.holding("load"):
        os.kill(pids[1], signal.SIGSTOP)
        late = server.post(COMPLETE, {**short, "timeout": 0.5})  # it is not even accepted
        assert late.json()["error"]["code"] == "deadline_exceeded"
        for path in ("/health", "/ready"):
            wait_for(lambda path=path: server.get(path).status_code == 503)
        assert "has not answered" in server.get("/health").json()["error"]["message"]
    wait_for(lambda: server.get("/ready").status_code == 200)
    pids.append(server.engine_pid)
    assert len(set(pids)) == 3
    assert server.post(COMPLETE, short).json()["choices"][0]["text"] == expected_text("Once", 3, 5)
    assert server.log().count("it is started again") == 2


def test_a_machine_that_stood_still_is_no_silence_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(remote, "SILENT_SECONDS", 0.2)

    async def listen() -> None:
        engine = remote.RemoteEngine(Config(), "nobody:builds_it")
        engine._look()
        for _ in range(3):
            time.sleep(0.5)  # as nobody would who listens
            await asyncio.sleep(0)
            assert engine.trouble() is None
            engine._take({"op": "alive", "step_seconds": 0.0})
        while engine.trouble() is None:
            await asyncio.sleep(0.01)
        assert "has not answered" in engine.trouble()
        engine._take({"op": "alive", "step_seconds": 0.0})
        assert engine.trouble() is None

    asyncio.run(asyncio.wait_for(listen(), PATIENCE))


def test_an_error_nobody_foresaw_ends_one_request_alone(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 3, "guided_regex": "unforeseen"}
    answer = server.post(COMPLETE, body)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a bug" not in answer.text
    assert "ZeroDivisionError: a bug" in server.log()
    del body["guided_regex"]
    assert server.post(COMPLETE, body).status_code == 200


def test_the_engine_leaves_when_the_server_is_killed(start_server: Start) -> None:
    server = start_server()
    pid = server.engine_pid
    server.process.kill()
    server.process.wait()

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"

    wait_for(is_gone)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_both_processes(
    start_server: Start, number: signal.Signals
) -> None:
    server = start_server(env={"FAKE_LOAD_SECONDS": "600"}, is_expected_to_serve=False)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    wait_for(lambda: bool(children.read_text()))
    (engine_pid,) = map(int, children.read_text().split())
    time.sleep(0.3)
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE) == 0
    wait_for(lambda: not Path(f"/proc/{engine_pid}").exists())
    assert "stopped before the model was loaded" in server.log()
    assert "Traceback" not in server.log()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_reason(start_server: Start) -> None:
    server = start_server(model="missing", is_expected_to_serve=False)
    assert server.process.wait(PATIENCE) == 1
    assert "there is no such model" in server.log()


def test_logs_are_json_lines_with_request_ids_and_no_prompts(server: LiveServer) -> None:
    headers = {"X-Request-Id": "find-me"}
    server.post(COMPLETE, {"prompt": "top secret words", "max_tokens": 3}, headers=headers)
    wait_for(lambda: "find-me" in server.log())
    lines = [json.loads(line) for line in server.log().splitlines()]
    mine = [line for line in lines if line.get("request_id") == "find-me"]
    assert any(line["message"] == "http" and line["status"] == 200 for line in mine)
    assert any(line["message"] == "request" and line["output_tokens"] == 3 for line in lines)
    assert "top secret words" not in server.log()


def test_a_status_line_appears_as_vllm_prints_it(start_server: Start) -> None:
    server = start_server(stats_interval=0.3)
    server.post(COMPLETE, {"prompt": "x", "max_tokens": 200})
    wait_for(lambda: "Avg generation throughput" in server.log())
    wait_for(lambda: "SpecDecoding metrics: Mean acceptance length" in server.log())

"""On a Ray that the tests start: routes, health, ranks, scaling, drain, and Ray Serve LLM."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from hunch import LLM, SamplingParams  # noqa: E402
from hunch.errors import ConfigError  # noqa: E402
from server.live_server import free_port  # noqa: E402
from tiny_models import write_llama  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
BODY = {"prompt": "the model", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SMALL = {"max_model_len": 256, "kv_bytes": 8_000_000, "threads": 1, "device": "cpu"}
LONG = {**BODY, "max_tokens": 240, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield write_llama(tmp_path_factory.mktemp("tiny") / "target")
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def run(model: Path) -> Iterator[Callable[..., None]]:
    """Run an application of these arguments in place of the one before."""
    from hunch.integrations.ray import build_app

    def start(**arguments: Any) -> None:
        arguments = {"num_cpus": 0.5, **arguments}
        serve.run(build_app({"model": str(model), **SMALL, **arguments}))

    yield start
    serve.delete("default")


def read_stream(body: dict[str, Any], path: str = "/v1/completions") -> list[str]:
    """The pieces of a stream's text."""
    pieces = []
    with httpx.stream("POST", f"{URL}{path}", json=body, timeout=300) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                pieces += [choice["text"] for choice in event["choices"]]
    return pieces


def plain(model: Path, num_tokens: int, **arguments: Any) -> str:
    with LLM(str(model), speculate="off", **SMALL, **arguments) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate("the model", params)[0].outputs[0].text


def num_replicas() -> int:
    deployments = serve.status().applications["default"].deployments.values()
    return sum(one.replica_states.get("RUNNING", 0) for one in deployments)


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.25)


def test_it_answers_as_a_server_of_its_own(run: Callable[..., None], model: Path) -> None:
    run()
    answer = httpx.post(f"{URL}/v1/completions", json=BODY, timeout=300).json()
    text = answer["choices"][0]["text"]
    assert text == plain(model, 12)
    pieces = read_stream({**BODY, "stream": True})
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert httpx.get(f"{URL}/v1/models", timeout=300).json()["data"][0]["id"] == "target"
    assert "hunch:num_requests_waiting" in httpx.get(f"{URL}/metrics", timeout=300).text
    for pid in engines():  # a dead engine comes back
        os.kill(pid, signal.SIGKILL)
    post = lambda: httpx.post(f"{URL}/v1/completions", json=BODY, timeout=300)  # noqa: E731
    wait_until(lambda: post().status_code == 200, 300, "no engine came back")
    assert post().json()["choices"][0]["text"] == text


def test_ranks_share_a_placement_group(run: Callable[..., None], model: Path) -> None:
    run(tensor_parallel_size=2, num_cpus=1.5)
    groups = [
        group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"
    ]
    assert [(group["bundles"], group["strategy"]) for group in groups] == [
        ({0: {"CPU": 1.5}}, "STRICT_PACK")
    ]
    answer = httpx.post(f"{URL}/v1/completions", json=BODY, timeout=300).json()
    assert answer["choices"][0]["text"] == plain(model, 12, tensor_parallel_size=2)


def test_replicas_come_with_the_queue_and_leave_when_it_is_gone(
    run: Callable[..., None], model: Path
) -> None:
    run(
        max_replicas=2,
        target_ongoing_requests=2,
        autoscaling_config={
            "upscale_delay_s": 1,
            "downscale_delay_s": 20,
            "look_back_period_s": 2,
            "metrics_interval_s": 0.5,
        },
    )
    done, texts = threading.Event(), set()

    def ask() -> None:
        while not done.is_set():
            texts.add("".join(read_stream(LONG)))

    with ThreadPoolExecutor(10) as pool:
        running = [pool.submit(ask) for _ in range(10)]
        try:
            wait_until(lambda: num_replicas() == 2, 300, "no replica came")
        finally:
            done.set()
        for one in running:
            one.result(300)
    done.clear()
    with ThreadPoolExecutor(1) as pool:  # whatever the one that leaves was answering is finished
        one = pool.submit(ask)
        try:
            wait_until(lambda: num_replicas() == 1, 300, "no replica left")
        finally:
            done.set()
        one.result(300)
    assert texts == {plain(model, 240)}


def test_streams_are_finished_before_a_deployment_leaves(
    run: Callable[..., None], model: Path
) -> None:
    run()
    text = plain(model, 240)
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(read_stream, LONG) for _ in range(16)]
        wait_until(
            lambda: (
                'num_requests_running{engine="0",model_name="target"} 0'
                not in httpx.get(f"{URL}/metrics", timeout=300).text
            ),
            300,
            "nothing runs",
        )
        pool.submit(run, speculate="off").result(300)  # another version takes its place
        assert [("".join(one.result(300))) for one in running] == [text] * 16


@pytest.mark.timeout(900)  # Ray's ingress imports vLLM
def test_ray_serve_llm_runs_it_by_name(model: Path) -> None:
    llm = pytest.importorskip("ray.serve.llm")
    config = llm.LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": str(model)},
        engine_kwargs={**SMALL, "speculate": "ngram", "tensor_parallel_size": 2},
        deployment_config={
            "ray_actor_options": {"num_cpus": 0.5},
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
        },
        server_cls="hunch.integrations.ray_llm:HunchServer",
    )
    app = llm.build_openai_app({"llm_configs": [config]})
    serve.run(app)
    try:
        text = plain(model, 12, tensor_parallel_size=2)
        body = {**BODY, "model": "tiny"}
        given = httpx.post(f"{URL}/v1/completions", json=body, timeout=300)
        assert given.status_code == 200, given.text
        answer = given.json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens"] == 12
        assert "".join(read_stream({**body, "stream": True})) == text
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(
            f"{URL}/v1/chat/completions", json={**chat, "max_tokens": 5}, timeout=300
        ).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["usage"]["completion_tokens"] <= 5
        wrong = httpx.post(f"{URL}/v1/completions", json={**body, "n": 99}, timeout=300)
        assert wrong.status_code == 400
        assert "n" in wrong.json()["error"]["message"]
        found = httpx.post(
            f"{URL}/tokenize", json={"model": "tiny", "prompt": "a b"}, timeout=300
        ).json()
        assert found["count"] == len(found["tokens"]) > 0
        groups = ray.util.placement_group_table().values()
        bundles = [group["bundles"] for group in groups if group["state"] == "CREATED"]
        assert bundles == [{0: {"CPU": 0.5}}]
    finally:
        serve.delete("default")


def test_what_a_replica_takes_of_a_node(model: Path) -> None:
    llm = pytest.importorskip("ray.serve.llm")
    from hunch.integrations.ray_llm import HunchServer

    def options(**given: Any) -> dict[str, Any]:
        loading = {"model_id": "tiny", "model_source": str(model)}
        return HunchServer.get_deployment_options(
            llm.LLMConfig(model_loading_config=loading, **given)
        )

    found = options(engine_kwargs={"tensor_parallel_size": 4}, accelerator_type="H100")
    assert found["ray_actor_options"]["num_gpus"] == 4
    assert found["placement_group_bundles"] == [
        {"CPU": 4.0, "GPU": 4.0, "accelerator_type:H100": 0.001}
    ]
    assert found["placement_group_strategy"] == "STRICT_PACK"
    scaled = options(deployment_config={"autoscaling_config": {"max_replicas": 4}})
    assert scaled["autoscaling_config"] == {"max_replicas": 4, "target_ongoing_requests": 32}
    alone = options(engine_kwargs={"device": "cpu"}, deployment_config={"num_replicas": 3})
    assert "placement_group_bundles" not in alone
    assert alone["num_replicas"] == 3
    assert alone["ray_actor_options"] == {"num_cpus": 1.0}
    with pytest.raises(ConfigError, match="2 bundles"):
        options(placement_group_config={"bundles": [{"GPU": 1}] * 2})
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        options(engine_kwargs={"tensor_paralel_size": 4})


def engines() -> list[int]:
    """Processes of engines that descend from this process's Ray, which started its raylet."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"hunch.server.engine_process" in words and _is_ours(int(folder.name)):
                found.append(int(folder.name))
    return found


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False

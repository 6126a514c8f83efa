"""A deployment on a Ray that the test starts: the server's own routes, health, and a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from tiny_models import write_llama  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
URL = "http://127.0.0.1:8000"
BODY = {"prompt": "the model", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from hunch.integrations.ray import build_app

    model = write_llama(tmp_path_factory.mktemp("tiny") / "target")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    arguments = {"model": str(model), "max_model_len": 256, "kv_bytes": 8_000_000, "threads": 1}
    serve.run(build_app({**arguments, "device": "cpu", "num_cpus": 0.5}))
    yield URL
    serve.shutdown()
    ray.shutdown()


def test_it_answers_as_a_server_of_its_own(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
    text = answer["choices"][0]["text"]
    pieces = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "target"
    assert "hunch:num_requests_waiting" in httpx.get(f"{url}/metrics").text


def test_a_dead_engine_comes_back(url: str) -> None:
    for line in Path("/proc").iterdir():
        if line.name.isdigit():
            try:
                words = (line / "cmdline").read_bytes()
            except OSError:
                continue
            if b"hunch.server.engine_process" in words and _is_ours(int(line.name)):
                os.kill(int(line.name), signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200:
            return
        time.sleep(0.5)
    pytest.fail("no engine came back")


def _is_ours(pid: int) -> bool:
    """Whether it descends from this process's Ray, which has started its raylet below it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False

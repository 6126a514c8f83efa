"""A rank that dies under a server: every stream ends cleanly, and the engine is started again."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server.live_server import PATIENCE, api_server, wait_for

NUM_STREAMS = 50
BODY = {
    "prompt": "the model and the guess",
    "max_tokens": 150,
    "temperature": 0,
    "ignore_eos": True,
}


def read(url: str, seed: int) -> tuple[str, str, float]:
    """A stream's text, the error it ended with, and when that was."""
    body = {**BODY, "stream": True, "seed": seed}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=PATIENCE) as answer:
        events = [line for line in answer.iter_lines() if line]
    news = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    text = "".join(choice["text"] for one in news for choice in one.get("choices", ()))
    errors = [one["error"]["message"] for one in news if "error" in one]
    assert errors or events[-1] == "data: [DONE]"
    return text, "".join(errors), time.monotonic()


def followers(log: Path) -> list[int]:
    """Processes of ranks other than 0, of any engine of this machine that this server started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"hunch.parallel.follower" in words and f"pid={parent}" in log.read_text():
            found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_rank_is_killed_under_fifty_streams(tiny_model: Path, tmp_path: Path) -> None:
    words = f"--model {tiny_model} -tp 2 --speculate ngram --dtype float32 --max-model-len 256"
    log = tmp_path / "log"
    with api_server([*words.split(), "--threads", "1", "--max-num-seqs", "64"], log) as url:
        whole = httpx.post(f"{url}/completions", json=BODY, timeout=PATIENCE).json()
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            running = [pool.submit(read, url, seed) for seed in range(NUM_STREAMS)]
            time.sleep(1.0)
            (victim,) = followers(log)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            ends = [one.result(PATIENCE) for one in running]
        text = whole["choices"][0]["text"]
        broken = [(said, error, when) for said, error, when in ends if error]
        assert broken
        for said, error, when in broken:  # what was said is right, and the error says why it ends
            assert "rank 1" in error
            assert "SIGKILL" in error
            assert text.startswith(said)
            assert when - killed < 5
        assert {said for said, error, _ in ends if not error} <= {text}
        wait_for(lambda: "the engine was started again" in log.read_text())
        again = httpx.post(f"{url}/completions", json=BODY, timeout=PATIENCE).json()
        assert again["choices"][0]["text"] == whole["choices"][0]["text"]

"""A server keeps the prompts it was asked where it was told to, and a trainer can read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hunch.errors import ConfigError
from hunch.server.prompts import PromptLog
from hunch.train.prompts import read_prompts
from server.live_server import Start


def test_prompts_are_added_to_a_file(start_server: Start, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "from before"}\n')
    server = start_server(prompt_log=str(path))
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for route, body in (("chat/completions", chat), ("completions", {"prompt": ["a", "b"]})):
        answer = server.post(f"/v1/{route}", body)
        assert answer.status_code == 200, answer.text
    refused = server.post("/v1/completions", {"prompt": ""})
    assert refused.status_code == 400
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 4
    assert "hello" in records[1]["prompt"]
    assert all(record["prompt_ids"] for record in records[1:])
    assert len(read_prompts(path).records) == 4


def test_a_place_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt_log"):
        PromptLog(str(tmp_path / "nowhere" / "prompts.jsonl"))


def test_a_full_disk_ends_the_log_alone() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    log = PromptLog(str(full))
    log.write([1], "a")
    assert not log.is_open
    log.write([2], "b")  # and requests go on

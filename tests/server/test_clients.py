"""Clients and agents' frameworks, unmodified, through a whole turn with a tool.

They need other versions of common packages than hunch's own tests, so they run in an interpreter
of their own: HUNCH_CLIENTS_PYTHON names it (`pip install` there what `hunch[clients]` lists).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.client_scripts import CLIENTS
from server.live_server import LiveServer, Start
from tiny_models import write_llama

PYTHON = os.environ.get("HUNCH_CLIENTS_PYTHON", sys.executable)
SCRIPT = Path(__file__).parent / "client_scripts.py"


@pytest.fixture(scope="module")
def talker(start_server: Start) -> LiveServer:
    return start_server(max_model_len=8192)


@pytest.mark.slow
@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_a_turn_with_a_tool(talker: LiveServer, client: str) -> None:
    known = f"import importlib.util as u, sys; sys.exit(u.find_spec({client!r}) is None)"
    if subprocess.run([PYTHON, "-c", known]).returncode:
        pytest.skip(f"{client} is not installed for {PYTHON}")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(SCRIPT), client, talker.url], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"answer": "It is warm in Rome."}
    assert "Traceback" not in talker.log()


@pytest.mark.slow
def test_guidellm_measures_it(talker: LiveServer, tmp_path: Path) -> None:
    command = Path(PYTHON).parent / "guidellm"
    if not command.exists():
        pytest.skip(f"guidellm is not installed for {PYTHON}")
    model = write_llama(tmp_path / "model")  # for its tokenizer
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(f'{{"prompt": "Tell me of ship {n}."}}\n' for n in range(6)))
    found = tmp_path / "found.json"
    words = [
        "--backend", f"kind=openai_http,target={talker.url}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={model}",
        "--data", f"kind=json_file,path={asked}",
        "--output", f"kind=json,path={found}",
        "--disable-progress",
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([command, "run", *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    (measured,) = json.loads(found.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
    assert measured["metrics"]["output_tokens_per_second"]["successful"]["mean"] > 0

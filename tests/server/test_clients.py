"""Clients and agents' frameworks, unmodified, through a whole turn with a tool.

They need other versions of common packages than hunch's own tests, so they run in an interpreter
of their own: HUNCH_CLIENTS_PYTHON names it (`pip install` there what `hunch[clients]` lists).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server.client_scripts import CLIENTS
from server.live_server import LiveServer

PYTHON = os.environ.get("HUNCH_CLIENTS_PYTHON", sys.executable)
SCRIPT = Path(__file__).parent / "client_scripts.py"


@pytest.fixture(scope="module")
def talker(start_server: Callable[..., LiveServer]) -> LiveServer:
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

"""schemathesis over the server's own OpenAPI document: strange bodies never break it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from server.live_server import Start

CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance,unsupported_method"


@pytest.mark.parametrize(
    ("phases", "num_examples"),
    [("fuzzing", 2), pytest.param("coverage,fuzzing,stateful", 100, marks=pytest.mark.slow)],
)
def test_no_request_makes_the_server_fail(
    start_server: Start, phases: str, num_examples: int
) -> None:
    server = start_server(limits={"max_tokens": 8}, log_level="warning")
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", CHECKS, "--max-examples", str(num_examples), "--seed", "1"]
    command += ["--phases", phases, "--request-timeout", "300", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.log()
    assert server.wait_idle()["kv_usage"] == 0

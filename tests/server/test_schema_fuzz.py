"""schemathesis over the server's own OpenAPI document: strange bodies never break it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from server.live_server import LiveServer

CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance,unsupported_method"


def test_no_request_makes_the_server_fail(start_server: Callable[..., LiveServer]) -> None:
    server = start_server(limits={"max_tokens": 8}, log_level="warning")
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += ["--checks", CHECKS, "--max-examples", "15", "--seed", "1", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--request-timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.log()
    assert server.wait_idle()["kv_usage"] == 0

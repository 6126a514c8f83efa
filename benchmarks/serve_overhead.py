"""What the server costs: tokens per second offline and over HTTP, for one stream and for several.

Rounds alternate between the two, so that whatever else the machine does falls on both alike; the
figures are medians. Client, server and engine share the machine, as they do for anyone who tries.

    python benchmarks/serve_overhead.py --rounds 7 --streams 1 16
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from statistics import median

from hunch import LLM, SamplingParams

PROMPT = "Once upon a time, in a small town by the sea, there lived an old clockmaker who"


def start(
    model: str, speculate: str, max_len: int, *flags: str
) -> tuple[subprocess.Popen[bytes], int]:
    """A server on a free port, ready to answer."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    words = [sys.executable, "-m", "hunch.entrypoints.openai.api_server", "--port", str(port)]
    words += [
        "--model",
        model,
        "--speculate",
        speculate,
        "--max-model-len",
        str(max_len),
        "--log-level",
        "warning",
        *flags,
    ]
    process = subprocess.Popen(words)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def read_stream(port: int, num_tokens: int) -> None:
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
         "stream": True}
    ).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head.encode() + body)
        tail = b""
        while data := sock.recv(1 << 16):
            tail = (tail + data)[-100:]
    assert b"[DONE]" in tail, "the stream broke off"


def over_http(port: int, num_streams: int, num_tokens: int) -> float:
    """Tokens per second of so many streams at once."""
    threads = [
        threading.Thread(target=read_stream, args=(port, num_tokens)) for _ in range(num_streams)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_streams * num_tokens / (time.perf_counter() - began)


def offline(llm: LLM, num_streams: int, num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([PROMPT] * num_streams, params)
    return num_streams * num_tokens / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    max_len = args.tokens + 64
    process, port = start(args.model, args.speculate, max_len)
    report = {}
    try:
        with LLM(args.model, speculate=args.speculate, max_model_len=max_len) as llm:
            for num_streams in args.streams:
                over_http(port, num_streams, 16)
                offline(llm, num_streams, 16)
                pairs = [
                    (
                        offline(llm, num_streams, args.tokens),
                        over_http(port, num_streams, args.tokens),
                    )
                    for _ in range(args.rounds)
                ]
                here, there = (median(column) for column in zip(*pairs, strict=True))
                report[f"{num_streams} streams"] = {
                    "offline_tokens_per_second": round(here, 1),
                    "server_tokens_per_second": round(there, 1),
                    "cost": round(1 - median(b / a for a, b in pairs), 4),
                }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's documentation example, but for the module path, with the default model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from hunch import LLM, SamplingParams
from hunch.hub import ModelFiles

PROMPT = "A robot may not injure a human being"
COMMAND = (
    "--host 0.0.0.0 --port PORT --model smollm2-135m --seed 42 -tp 1 --speculative_model [ngram] "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8 "
    "--max-model-len 512"
)


@pytest.fixture(scope="module")
def url(default_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = COMMAND.replace("PORT", str(port)).split()
    log: Path = tmp_path_factory.mktemp("default") / "log"
    command = [sys.executable, "-m", "hunch.entrypoints.openai.api_server", *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "HUNCH_API_KEY": ""})
    end = time.monotonic() + 120
    while "serving smollm2-135m" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/v1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_client_lists_models_and_completes_with_the_offline_text(url: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    with LLM("smollm2-135m", speculate="off", max_model_len=512) as llm:
        outputs = llm.generate([PROMPT, PROMPT], [greedy, sampled])
    wanted = [output.outputs[0].text for output in outputs]
    with openai.OpenAI(base_url=url, api_key="EMPTY") as client:
        model = client.models.list().data[0].id
        for params, text in zip((greedy, sampled), wanted, strict=True):
            whole = client.completions.create(
                model=model,
                prompt=PROMPT,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
                max_tokens=24,
            )
            assert whole.choices[0].text == text
            chunks = client.completions.create(
                model=model,
                prompt=PROMPT,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
                max_tokens=24,
                stream=True,
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
        )
        assert chat.choices[0].message.content

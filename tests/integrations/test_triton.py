"""Triton's Python backend, against its published interface: Triton itself is no package to install.

`FakeUtils` has the names of triton_python_backend_utils that a decoupled model uses.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hunch import LLM, SamplingParams
from hunch.errors import EngineError
from tiny_models import write_llama

REPOSITORY = Path(__file__).parents[2] / "examples" / "triton" / "hunch"
FINAL = 1
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "kv_bytes": 8_000_000, "threads": 1}


class FakeTensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class FakeSender:
    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[Any, int]] = queue.Queue()
        self.is_gone = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put((response, flags))

    def is_cancelled(self) -> bool:
        return self.is_gone

    def read(self) -> tuple[list[Any], int]:
        """Everything up to the last answer."""
        found = []
        while True:
            response, flags = self.sent.get(timeout=300)
            if response is not None:
                found.append(response)
            if flags & FINAL:
                return found, flags


class FakeRequest:
    def __init__(self, **inputs: Any) -> None:
        self.sender = FakeSender()
        self.inputs = {
            name: FakeTensor(name, np.array([value if isinstance(value, bool) else value.encode()]))
            for name, value in inputs.items()
        }

    def get_response_sender(self) -> FakeSender:
        return self.sender


FakeUtils = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=FakeTensor,
    TritonError=str,
    InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
        output_tensors=output_tensors, error=error
    ),
    get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
)


def text_of(response: Any) -> str:
    assert response.error is None
    (tensor,) = response.output_tensors
    assert tensor.name() == "text_output"
    return str(tensor.as_numpy()[0].decode())


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture
def model(model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the repository's model.py, as Triton loads it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeUtils)
    spec = importlib.util.spec_from_file_location("model", REPOSITORY / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "1").mkdir()
    arguments = {"model": str(model_files), "speculate": "ngram", **SMALL}
    (tmp_path / "1" / "model.json").write_text(json.dumps(arguments))
    made = module.TritonPythonModel()
    made.initialize({"model_repository": str(tmp_path), "model_version": "1"})
    yield made
    made.finalize()


def test_streams_whole_answers_and_mistakes(model: Any, model_files: Path) -> None:
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    prompt = "the model and the guess"
    requests = [
        FakeRequest(text_input=prompt, stream=True, sampling_parameters=json.dumps(params)),
        FakeRequest(text_input=prompt, sampling_parameters=json.dumps(params)),
        FakeRequest(text_input=prompt, sampling_parameters="{not json"),
        FakeRequest(text_input=prompt, sampling_parameters='{"temperatur": 1}'),
        FakeRequest(
            text_input=prompt,
            sampling_parameters=json.dumps(params),
            exclude_input_in_output=False,
        ),
    ]
    assert model.execute(requests) is None
    answers = [request.sender.read()[0] for request in requests]
    with LLM(str(model_files), speculate="off", **SMALL) as llm:
        expected = llm.generate(prompt, SamplingParams(**params))[0].outputs[0].text
    assert len(answers[0]) > 1
    assert "".join(map(text_of, answers[0])) == expected
    assert [text_of(answer) for answer in answers[1]] == [expected]
    assert "no JSON" in answers[2][0].error
    assert "temperature" in answers[3][0].error
    assert text_of(answers[4][0]) == prompt + expected


def test_a_client_that_leaves_ends_its_request(model: Any) -> None:
    request = FakeRequest(
        text_input="a",
        stream=True,
        sampling_parameters='{"max_tokens": 200, "ignore_eos": true, "temperature": 0}',
    )
    model.execute([request])
    request.sender.sent.get(timeout=300)
    request.sender.is_gone = True
    found, _ = request.sender.read()
    assert len(found) < 200
    assert not model._open


def test_an_engine_that_died_is_started_again_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise EngineError("rank 1 was killed")

    def ask() -> Any:
        request = FakeRequest(text_input="a", sampling_parameters='{"max_tokens": 3}')
        model.execute([request])
        return request.sender.read()[0][0]

    monkeypatch.setattr(model._llm.engine, "step", die)
    assert "rank 1 was killed" in ask().error
    assert ask().error is None
    monkeypatch.setattr(model._llm.engine, "step", die)
    for _ in range(2):  # nobody waits for an answer that cannot come
        assert "rank 1 was killed" in ask().error


def test_the_repository_says_what_the_model_takes() -> None:
    text = (REPOSITORY / "config.pbtxt").read_text()
    for name in ("text_input", "stream", "sampling_parameters", "exclude_input_in_output"):
        assert f'name: "{name}"' in text
    assert "decoupled: true" in text
    assert json.loads((REPOSITORY / "1" / "model.json").read_text())["model"] == "smollm2-135m"

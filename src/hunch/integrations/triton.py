"""NVIDIA Triton Inference Server: a model of its Python backend that answers in pieces (decoupled).

`examples/triton` is a model repository to copy. Inputs and outputs have the names of Triton's own
vLLM backend: `text_input`, `stream`, `sampling_parameters` (JSON), `exclude_input_in_output`, and
`text_output`. `1/model.json` holds the arguments of `hunch.LLM`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from hunch.errors import HunchError, RequestError
from hunch.llm import LLM
from hunch.types import RequestOutput, SamplingParams

ARGUMENTS = "model.json"
RESTARTS = 1  # times an engine that died is started again

log = logging.getLogger("hunch")


@dataclass(slots=True)
class Asked:
    """A request of Triton's on its way through the engine."""

    sender: Any
    prompt: str
    is_streaming: bool
    is_echoed: bool
    num_sent: int = 0  # characters


class TritonPythonModel:
    """What Triton calls. One thread runs the engine; Triton's own only hands over requests."""

    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as utils  # there inside Triton alone

        self._utils = utils
        folder = Path(args["model_repository"]) / args["model_version"]
        path = folder / ARGUMENTS
        self._arguments = json.loads(path.read_text()) if path.is_file() else {}
        self._llm = LLM(**self._arguments)
        self._restarts = RESTARTS  # that are left
        self._trouble: HunchError | None = None  # why nothing is answered any more
        self._numbers = count()
        self._coming: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._open: dict[str, Asked] = {}
        self._thread = threading.Thread(target=self._run, name="hunch-engine", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Decoupled: nothing is returned, answers go through each request's sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                prompt = _text(self._utils.get_input_tensor_by_name(request, "text_input"))
                if prompt is None:
                    raise RequestError("text_input is missing")
                asked = Asked(
                    sender,
                    prompt,
                    self._flag(request, "stream", default=False),
                    not self._flag(request, "exclude_input_in_output", default=True),
                )
                self._coming.put((asked, self._params(request)))
            except HunchError as error:
                self._fail(sender, error)

    def finalize(self) -> None:
        self._coming.put(None)
        self._thread.join()
        self._llm.close()

    def _params(self, request: Any) -> SamplingParams:
        text = _text(self._utils.get_input_tensor_by_name(request, "sampling_parameters"))
        try:
            given = json.loads(text) if text else {}
        except ValueError as error:
            raise RequestError(f"sampling_parameters is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise RequestError("sampling_parameters must be a JSON object")
        return SamplingParams(**given)

    def _flag(self, request: Any, name: str, *, default: bool) -> bool:
        tensor = self._utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])

    def _run(self) -> None:
        """Requests in, steps, answers out; until `finalize`."""
        while True:
            has_work = self._trouble is None and self._llm.engine.has_work()
            try:
                item = self._coming.get(block=not has_work)
                if item is None:
                    return
                self._add(*item)
                continue  # as long as more have come
            except queue.Empty:
                pass
            try:
                outputs = self._llm.engine.step()
            except HunchError as error:  # the engine is of no use any more
                self._bury(error)
                continue
            for output in outputs:
                self._tell(output)

    def _bury(self, error: HunchError) -> None:
        """Tell everybody, and start another engine; without one, every request gets the error."""
        for asked in self._open.values():
            self._fail(asked.sender, error)
        self._open.clear()
        self._llm.close()
        self._trouble = error
        if not self._restarts:
            log.error("the engine died: %s", error)
            return
        self._restarts -= 1
        log.error("the engine died: %s; it is started again", error)
        try:
            self._llm = LLM(**self._arguments)
        except HunchError as second:
            log.error("the engine did not start again: %s", second)
            return
        self._trouble = None

    def _add(self, asked: Asked, params: SamplingParams) -> None:
        if self._trouble is not None:
            self._fail(asked.sender, self._trouble)
            return
        request_id = f"triton-{next(self._numbers)}"
        ids = self._llm.tokenizer.encode(asked.prompt)
        try:
            self._llm.engine.add(request_id, ids, params, stream=asked.is_streaming)
        except HunchError as error:
            self._fail(asked.sender, error)
            return
        self._open[request_id] = asked

    def _tell(self, output: RequestOutput) -> None:
        asked = self._open.get(output.request_id)
        if asked is None:
            return
        if asked.sender.is_cancelled():
            del self._open[output.request_id]
            self._llm.engine.abort(output.request_id)
            asked.sender.send(flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        texts = [choice.text for choice in output.outputs]
        if asked.is_streaming:  # the first answer as it grows
            texts = [texts[0][asked.num_sent :]]
        if asked.is_echoed and not asked.num_sent:
            texts = [asked.prompt + text for text in texts]
        asked.num_sent = len(output.outputs[0].text)
        flags = 0
        if output.finished:
            del self._open[output.request_id]
            flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        values = np.array([text.encode() for text in texts], dtype=np.object_)
        tensor = self._utils.Tensor("text_output", values)
        asked.sender.send(self._utils.InferenceResponse(output_tensors=[tensor]), flags=flags)

    def _fail(self, sender: Any, error: HunchError) -> None:
        problem = self._utils.TritonError(str(error))
        response = self._utils.InferenceResponse(error=problem)
        sender.send(response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _text(tensor: Any) -> str | None:
    if tensor is None:
        return None
    value = tensor.as_numpy().reshape(-1)[0]
    return value.decode() if isinstance(value, bytes) else str(value)

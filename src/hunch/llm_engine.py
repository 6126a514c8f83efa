"""vLLM's LLMEngine: a program adds requests and makes the steps itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from hunch.compat import VllmCalls, config_from_vllm, wishes_of
from hunch.config import Config, ModelConfig
from hunch.engine.engine import Engine
from hunch.engine_args import EngineArgs, UsageContext, check_plain
from hunch.loading import build_engine, load_text
from hunch.offline import OfflineRequests
from hunch.prompts import Prompt, params_for
from hunch.text.tokenizer import Tokenizer
from hunch.types import RequestOutput, RequestOutputKind, SamplingParams

Params = SamplingParams | Mapping[str, Any] | None


class LLMEngine(VllmCalls):
    """Requests and steps of one model.

    >>> engine = LLMEngine.from_engine_args(EngineArgs("smollm2-135m"))
    >>> engine.add_request("0", "The future of AI is", SamplingParams(max_tokens=32))
    >>> while engine.has_unfinished_requests():
    ...     outputs = engine.step()
    """

    def __init__(
        self, config: Config, engine: Engine, requests: OfflineRequests, tokenizer: Tokenizer
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._engine, self._requests = engine, requests
        self._open: dict[str, RequestOutputKind] = {}
        self._before: dict[str, RequestOutput] = {}  # the last outputs, of those with DELTA

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext | None = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """vLLM's further arguments mean nothing here: steps are made in this process."""
        check_plain(stat_loggers)
        config = config_from_vllm(**engine_args.given())
        tokenizer = load_text(config)
        engine = build_engine(config, tokenizer)
        return cls(config, engine, OfflineRequests(engine, tokenizer), tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params = None,
        arrival_time: float | None = None,
        *,
        sampling_params: Params = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a request; lower priorities go first. `arrival_time` is taken, and measured all the
        same."""
        wishes_of("add_request", others, {})
        (one,) = params_for(1, params, sampling_params)
        is_streaming = one.output_kind != RequestOutputKind.FINAL_ONLY
        how: dict[str, Any] = {"names": [request_id], "priorities": [priority]}
        self._requests.add([prompt], [one], stream=is_streaming, **how)
        self._open[request_id] = RequestOutputKind(one.output_kind)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Make one step; the requests that it brought on, finished ones for the last time."""
        outputs = self._requests.step(self._open) if self._open else []
        return [self._news(output) for output in outputs]

    def _news(self, output: RequestOutput) -> RequestOutput:
        before = self._before.pop(output.request_id, None)
        if output.finished:
            del self._open[output.request_id]
        elif self._open[output.request_id] == RequestOutputKind.DELTA:
            self._before[output.request_id] = output
        return output.since(before)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests without a further output; an unknown one may just have finished."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        ids &= set(self._open)
        self._requests.end(ids)
        for one in ids:
            del self._open[one]
            self._before.pop(one, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """As it was given, with the context that the engine has."""
        return replace(self.config.model, max_model_len=self._engine.capacity.max_len)

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def reset_cache(self, *, is_held_too: bool = False) -> bool:
        with self._requests.lock:
            return self._engine.reset_cache(is_held_too=is_held_too)

    def shutdown(self) -> None:
        """Give the model's memory back."""
        if self._requests.is_own_process:
            self._engine.close()

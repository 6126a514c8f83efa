"""NVIDIA Dynamo: a worker whose engine is hunch's, behind Dynamo's frontend and router.

    python -m hunch.integrations.dynamo --model HuggingFaceTB/SmolLM2-135M-Instruct

Flags are Dynamo's own (`--namespace`, `--endpoint`, `--discovery-backend`, ...) and the arguments
of `hunch.LLM`. Dynamo turns text into tokens and back, finds stop strings and routes; requests come
as token ids. A request that names its seed and is moved to another worker goes on with the same
text. Needs `pip install ai-dynamo`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
)
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable
from prometheus_client import CollectorRegistry

from hunch.compat import config_from_vllm, json_or_text
from hunch.config import DEFAULT_MODEL, Config
from hunch.errors import ConfigError, HunchError, QueueFullError, RequestError
from hunch.hub import resolve
from hunch.server.embedded import KeptEngine
from hunch.server.metrics import PREFIX, VLLM, BothNames, EngineCollector
from hunch.server.settings import ServeConfig
from hunch.types import USUAL_SAMPLING, RequestOutput, SamplingParams, recommended

SNAPSHOT_SECONDS = 1.0  # between two reports to Dynamo's router
# Names that Dynamo's sampling options share with ours.
_SAMPLING = (*USUAL_SAMPLING, "n", "presence_penalty", "frequency_penalty", "seed")
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
OVER = -1  # in place of a count: the answer's end was told
_FORMS = ("json", "regex", "choice", "grammar")


class HunchEngine(LLMEngine):  # type: ignore[misc]  # no types are published
    """What Dynamo's worker drives: one engine in a process of its own."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        settings = ServeConfig(served_model_names=(name,), max_queue=4096)
        self._kept = KeptEngine(config, settings)
        self._defaults: Mapping[str, Any] = {}
        self._publisher: Any = None
        self._reports: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[HunchEngine, WorkerConfig]:
        """An engine that is not started yet, and where Dynamo finds it."""
        runtime, arguments = read_arguments(sys.argv[1:] if argv is None else argv)
        name = str(arguments.pop("served_model_name", ""))
        config = config_from_vllm(**{"model": DEFAULT_MODEL, **arguments})
        name = name or os.path.basename(config.model.model)
        files = resolve(config.model.model)
        if files.is_gguf:
            raise ConfigError(
                f"model={config.model.model!r} is a GGUF file; Dynamo's frontend reads the "
                "tokenizer from a directory in Hugging Face form: give one, or a hub id"
            )
        path = str(files.path)
        place = WorkerConfig.from_runtime_config(runtime, model_name=path, served_model_name=name)
        return cls(config, name), place

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model; Dynamo's router is told what there is room for."""
        text = await self._kept.open()
        self._defaults = recommended(text.generation_config)
        self._reports = asyncio.create_task(self._report())
        info = self._kept.engine.info
        return EngineConfig(
            model=str(resolve(self.config.model.model).path),
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=info.max_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.num_blocks,
                max_num_seqs=info.max_rows,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """A request's tokens as they come."""
        normalize_request_token_ids(request)
        engine, request_id = self._kept.engine, str(context.id())
        try:
            params = read_params(request, self._defaults)
            stream = await engine.submit(list(request["token_ids"]), params, request_id=request_id)
            sent = [0] * params.n
            try:
                async for output in stream:
                    for chunk in chunks(output, sent):
                        yield chunk
            finally:  # no effect on one that is over
                stream.abort()
        except QueueFullError as error:
            raise WorkerUnavailable(str(error)) from error
        except RequestError as error:
            raise InvalidArgument(str(error)) from error
        except HunchError as error:  # Dynamo tries another worker
            raise EngineShutdown(str(error)) from error

    async def abort(self, context: Any) -> None:
        self._kept.engine.abort(str(context.id()))

    async def cleanup(self) -> None:
        if self._reports is not None:
            self._reports.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reports
        await self._kept.close()

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1)
        return payload

    # --- what its router and its /metrics are told ------------------------------------------------

    async def register_prometheus(self, metrics: Any) -> None:
        registry = CollectorRegistry()
        own = EngineCollector(self._kept.engine, {"model_name": self.name})
        registry.register(BothNames(own))
        register_engine_registry(metrics, registry, prefix_filters=[PREFIX, VLLM])

    async def kv_event_sources(self) -> list[Any]:
        """With `--kv-events-config`, Dynamo's router knows which prefixes are in the KV cache."""
        events = self.config.cache.kv_events
        if events is None:
            return []
        endpoint = events.endpoint.replace("*", "127.0.0.1")
        return [ZmqSource(endpoint=endpoint, topic=events.topic, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def _report(self) -> None:
        while True:
            if self._publisher is not None:
                self._publisher.publish(0, self._snapshot())
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def _snapshot(self) -> Any:
        stats, num_blocks = self._kept.engine.stats(), self._kept.engine.info.num_blocks
        usage, asked = stats.get("kv_usage") or 0.0, stats.get("prefix_queries") or 0
        return ComponentSnapshot(
            kv_used_blocks=round(usage * num_blocks),
            kv_total_blocks=num_blocks,
            gpu_cache_usage=usage,
            dp_rank=0,
            kv_cache_hit_rate=stats["prefix_hits"] / asked if asked else None,
        )


def read_arguments(words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Dynamo's own flags, with the endpoint's three names apart, and the engine's arguments."""
    parser = argparse.ArgumentParser(
        "python -m hunch.integrations.dynamo",
        description="A worker for NVIDIA Dynamo. Arguments of hunch.LLM are flags too.",
        allow_abbrev=False,
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    given, rest = parser.parse_known_args(words)
    runtime = DynamoRuntimeConfig.from_cli_args(given)
    runtime.validate()
    endpoint = runtime.endpoint or f"dyn://{runtime.namespace}.backend.generate"
    runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
    return runtime, _pairs(rest)


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """`--name value` and `--name=value`; a name alone is a switch."""
    found: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} follows no flag; arguments are given as --NAME VALUE")
        name, equals, value = word[2:].partition("=")
        if not equals:
            has_value = bool(left) and not left[0].startswith("--")
            value = left.pop(0) if has_value else "true"
        name = name.replace("-", "_")
        found[name] = value if name in ("model", "served_model_name") else json_or_text(value)
    return found


def read_params(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Dynamo's three groups of options as our parameters; stop strings are its own business."""
    sampling = request.get("sampling_options") or {}
    stopping = request.get("stop_conditions") or {}
    wishes = request.get("output_options") or {}
    found = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    found |= {name: stopping[name] for name in _STOPPING if stopping.get(name) is not None}
    found.setdefault("max_tokens", None)
    hidden = stopping.get("stop_token_ids_hidden") or ()
    found["stop_token_ids"] = [*(stopping.get("stop_token_ids") or ()), *hidden]
    for name in ("logprobs", "prompt_logprobs"):
        if wishes.get(name) is not None:
            found[name] = int(wishes[name])
    form = sampling.get("guided_decoding") or {}
    asked = {name: form[name] for name in _FORMS if form.get(name) is not None}
    if asked:
        found["structured_outputs"] = asked
    return SamplingParams(**{**defaults, **found})


def chunks(output: RequestOutput, sent: list[int]) -> list[dict[str, Any]]:
    """What is new of each answer; `sent` counts the tokens of each that were told, or is OVER."""
    found = []
    for place, choice in enumerate(output.outputs):
        if sent[place] == OVER:
            continue
        tokens, is_over = choice.token_ids[sent[place] :], choice.finish_reason is not None
        if not tokens and not is_over:
            continue
        chunk: dict[str, Any] = {"token_ids": tokens, "index": place}
        scores, best = extract_from_completion_output(choice, sent[place])
        if scores is not None:
            chunk |= {"log_probs": scores, "top_logprobs": best}
        sent[place] = len(choice.token_ids)
        if is_over:
            chunk["finish_reason"] = choice.finish_reason
            sent[place] = OVER
        found.append(chunk)
    if output.finished and found:
        num_prompt = len(output.prompt_token_ids)
        num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        found[-1]["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }
        scores = extract_prompt_logprobs_from_completion_output(output)
        if scores is not None:
            found[-1]["engine_data"] = {"prompt_logprobs": scores}
    return found


def main() -> None:
    try:
        run(HunchEngine)
    except HunchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

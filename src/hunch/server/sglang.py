"""SGLang's own paths: /generate, and what its clients and benchmarks ask a server about itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from hunch.compat import Scores, answer_of
from hunch.server.answers import OutputEvents
from hunch.server.cursor import Delta
from hunch.server.events import checked
from hunch.server.problems import ProblemError
from hunch.server.schemas import (
    MAX_COUNT,
    CompletionBody,
    Ids,
    KnownElsewhere,
    Named,
    Some,
    SpeculationBody,
)
from hunch.server.service import Service
from hunch.server.summary import Json
from hunch.types import RequestOutput, SamplingParams, recommended

HEALTH_SECONDS = 20.0  # that a token may take before the server counts as dead
MAX_FLUSH_SECONDS = 60.0  # that a flush may wait for requests to end

Options = Annotated[dict[str, Any], Named]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Place = Annotated[int, Field(ge=-1, le=MAX_COUNT)]


class GenerateBody(KnownElsewhere):
    """POST /generate."""

    model: str | None = None
    text: str | Some[str] | None = None
    input_ids: Ids | Some[Ids] | None = None
    sampling_params: Options | Some[Options] | None = None
    stream: bool = False
    return_logprob: bool | Some[bool] = False
    top_logprobs_num: Count | Some[Count] = 0
    logprob_start_len: Place | Some[Place] = -1
    return_text_in_logprobs: bool = False
    rid: str | Some[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculation: SpeculationBody | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def prompts(self) -> str | list[Any]:
        given = self.text if self.input_ids is None else self.input_ids
        if given is None or None not in (self.text, self.input_ids):
            raise ProblemError(400, "give either text or input_ids")
        return given

    def alike(self, name: str) -> Any:
        """A field that may be given per prompt, where it is the same for all."""
        given = getattr(self, name)
        values = given if isinstance(given, list) else [given]
        if any(value != values[0] for value in values):
            raise ProblemError(400, f"{name} must be the same for all prompts", param=name)
        return values[0]

    def scores(self) -> Scores | None:
        if not self.alike("return_logprob"):
            return None
        num_top, first = self.alike("top_logprobs_num"), self.alike("logprob_start_len")
        return Scores(num_top=num_top, first=first, has_text=self.return_text_in_logprobs)


def add_sglang(app: FastAPI, service: Service) -> None:
    _add_about(app, service)
    _add_upkeep(app, service)

    @app.post("/generate", response_class=Response)
    async def generate(body: GenerateBody, request: Request) -> Response:
        prompts = body.prompts
        is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
        prompts = [prompts] if is_one else list(prompts)
        count = len(prompts)
        bodies = _bodies(service, body, prompts)
        ids = [body.rid] if isinstance(body.rid, str) else body.rid
        if ids is not None and len(ids) != count:
            raise ProblemError(400, f"{len(ids)} rids given for {count} prompts", param="rid")
        shape = GenerateShape(
            scores=body.scores(),
            is_one=is_one and bodies[0].n == 1,
            is_incremental=service.settings.incremental_streaming_output,
            names=ids,
            num_answers=bodies[0].n,
        )
        return await service.complete(bodies, request, lambda: shape)


def _add_about(app: FastAPI, service: Service) -> None:
    """What is served, and how busy it is."""

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        settings = service.settings
        return {
            "model_path": service.model_path,
            "tokenizer_path": service.tokenizer_path,
            "served_model_name": settings.name,
            "is_generation": True,
            "preferred_sampling_params": settings.override_generation_config or None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "tool_call_parser": service.chat_format.tool_parser,
            "reasoning_parser": service.chat_format.reasoning_parser,
        }

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        info, settings, stats = service.engine.info, service.settings, service.engine.stats()
        return {
            **await model_info(),
            "version": settings.version,
            "host": settings.host,
            "port": settings.port,
            "context_length": info.max_len,
            "max_running_requests": info.max_rows,
            "max_queued_requests": settings.max_queue,
            "max_total_num_tokens": info.num_blocks * info.block_size,
            "page_size": info.block_size,
            "dp_size": settings.replicas,
            "internal_states": [
                {
                    "avg_spec_accept_length": stats.get("tokens_per_pass"),
                    "last_gen_throughput": stats.get("tokens_per_second"),
                    "num_running": stats.get("num_running"),
                    "num_waiting": stats.get("num_waiting"),
                }
            ],
        }

    @app.get("/get_load")
    async def get_load() -> list[dict[str, Any]]:
        stats, info = service.engine.stats(), service.engine.info
        num_slots = info.num_blocks * info.block_size
        return [
            {
                "dp_rank": 0,
                "num_reqs": (stats.get("num_running") or 0) + (stats.get("num_waiting") or 0),
                "num_waiting_reqs": stats.get("num_waiting") or 0,
                "num_tokens": round((stats.get("kv_usage") or 0) * num_slots),
            }
        ]


def _add_upkeep(app: FastAPI, service: Service) -> None:
    """Probes, and what benchmarks call before they begin."""

    @app.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        """Whether a token comes: of the requests that run, or else of one made for it."""
        if (trouble := service.engine.trouble()) is not None:
            raise ProblemError(503, trouble, code="engine_unavailable")
        if not service.engine.num_open:
            await _one_token(service)
        return {"status": "ok"}

    @app.post("/flush_cache", include_in_schema=False)
    async def flush_cache(request: Request, timeout: float = 0.0) -> Response:
        """Forget cached prefixes, unless requests run that may be using them."""
        if not await _flush(service, request, timeout):
            return Response("requests are running; nothing was flushed\n", status_code=400)
        return Response("Cache flushed.\n", media_type="text/plain")

    @app.post("/reset_prefix_cache", include_in_schema=False)
    async def reset_prefix_cache(
        request: Request, reset_running_requests: bool = False, reset_external: bool = False
    ) -> dict[str, bool]:
        """The same by vLLM's name: with `reset_running_requests`, beside running requests too.

        There is no external cache that `reset_external` could mean.
        """
        return {"success": await _flush(service, request, is_held_too=reset_running_requests)}

    @app.post("/start_profile", include_in_schema=False)
    @app.post("/stop_profile", include_in_schema=False)
    async def profile() -> None:
        message = "this server writes no profiles; /stats and /metrics say where its time goes"
        raise ProblemError(501, message)


def _bodies(service: Service, body: GenerateBody, prompts: list[Any]) -> list[CompletionBody]:
    """What each prompt asks for. SGLang's own defaults hold here, not the model's advice."""
    given, count = body.sampling_params or {}, len(prompts)
    several = given if isinstance(given, list) else [given] * count
    if len(several) != count:
        message = f"{len(several)} sampling_params given for {count} prompts"
        raise ProblemError(400, message, param="sampling_params")
    scores = body.scores()
    shared: Json = {**recommended(service.settings.sampling), "max_tokens": 128}
    asked: Json = {
        name: getattr(body, name)
        for name in ("model", "stream", "priority", "cache_salt", "speculation", "timeout")
    }
    if scores is not None:
        asked["logprobs"] = scores.num_top
        asked["prompt_logprobs"] = scores.num_top if scores.first >= 0 else None
    found: list[CompletionBody] = []
    known = {**shared, **asked}
    for prompt, options in zip(prompts, several, strict=True):
        if found and options == several[0]:
            found.append(found[0].model_copy(update={"prompt": prompt}))
        else:
            found.append(
                checked(CompletionBody, {**_ours(options, known), **asked, "prompt": prompt})
            )
    if any(one.n != found[0].n for one in found):
        raise ProblemError(400, "n must be the same for all prompts", param="sampling_params")
    return found


def _ours(options: Json, defaults: Json) -> Json:
    """Sampling parameters with their defaults; a null stands for one, and so does an empty text."""
    given = {k: v for k, v in options.items() if v is not None and v != ""}
    if options.get("max_new_tokens", 0) is None:
        given["max_new_tokens"] = -1
    for name, ours in (("max_new_tokens", "max_tokens"), ("sampling_seed", "seed")):
        if name in given:
            given[ours] = given.pop(name)
    if "prompt" in given or "model" in given or "stream" in given:
        raise ProblemError(400, "sampling_params say how to sample", param="sampling_params")
    return {**defaults, **given}


async def _one_token(service: Service) -> None:
    name = f"health-{uuid.uuid4().hex}"
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            params = SamplingParams(temperature=0, max_tokens=1)
            stream = await service.engine.submit([0], params, request_id=name, stream=False)
            try:
                async for _ in stream:
                    pass
            finally:
                stream.abort()
    except TimeoutError:
        message = f"no token came in {HEALTH_SECONDS:.0f} s"
        raise ProblemError(503, message, code="engine_unavailable") from None


async def _flush(
    service: Service, request: Request, seconds: float = 0.0, *, is_held_too: bool = False
) -> bool:
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
        raise ProblemError(403, "web pages may not do this", code="origin_not_allowed")
    end = time.monotonic() + min(max(seconds, 0.0), MAX_FLUSH_SECONDS)
    while not (is_done := await service.engine.reset_cache(is_held_too=is_held_too)):
        if time.monotonic() >= end:
            break
        await asyncio.sleep(0.05)
    return is_done


@dataclass(kw_only=True)
class GenerateShape(OutputEvents):
    """SGLang's dicts: all of an answer so far in every event, or with `is_incremental` what is new.

    Of several answers each event names its one.
    """

    scores: Scores | None
    is_one: bool
    is_incremental: bool
    names: list[str] | None  # by prompt, as the client calls them
    began: float = field(default_factory=time.monotonic)

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        for number, output in enumerate(outputs):
            for at in range(self.num_answers):
                self._outputs[number * self.num_answers + at] = output
        answers = [self._answer(index) for index in self._outputs]
        return answers[0] if self.is_one else answers

    def chunks(self, delta: Delta) -> list[Json]:
        answer = self._answer(delta.index)
        if self.is_incremental:
            answer |= {"text": delta.text, "output_ids": delta.token_ids}
            num_new = len(delta.token_ids)
            for name in ("output_token_logprobs", "output_top_logprobs"):
                if name in answer["meta_info"]:
                    told = answer["meta_info"][name]
                    answer["meta_info"][name] = told[len(told) - num_new :]
        return [answer if self.is_one else {**answer, "index": delta.index}]

    def _answer(self, index: int) -> Json:
        number, at = divmod(index, self.num_answers)
        answer = answer_of(self._outputs[index], at, self.scores)
        about = answer["meta_info"]
        if self.names is not None:
            about["id"] = self.names[number]
        if about["finish_reason"] is not None:
            about["e2e_latency"] = time.monotonic() - self.began
        return answer

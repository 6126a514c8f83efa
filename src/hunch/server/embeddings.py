"""Texts as vectors: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed`.

A vector is the state of a text's last token, or the mean of all its tokens' states, after the
model's last norm. Texts go through the engine as prompts, in the same steps as everybody's.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from hunch.pooling import misfit, params_to_pool, unit
from hunch.server.ollama import name_of
from hunch.server.problems import ProblemError, at_most
from hunch.server.schemas import MAX_COUNT, OLLAMA_FAULTS, Ids, KnownElsewhere, Some
from hunch.server.service import Service
from hunch.server.streaming import collect
from hunch.types import RequestOutput

MAX_AT_ONCE = 64  # texts of one request in the engine; others' requests get rows between them

Input = str | list[int]


class PooledBody(KnownElsewhere):
    """What both APIs have in common, and fields of ours."""

    model: str | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True  # vectors of length 1
    timeout: Annotated[float, Field(gt=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=MAX_COUNT)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class EmbeddingBody(PooledBody):
    """POST /v1/embeddings."""

    input: str | Some[str] | Ids | Some[Ids]
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    add_special_tokens: bool = True
    user: str | None = None


class OllamaEmbedBody(PooledBody):
    """POST /api/embed. Of a text that is too long the start is read, unless `truncate` is
    false."""

    model: str
    input: str | Some[str]
    truncate: bool = True
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaOneBody(PooledBody):
    """POST /api/embeddings, the older form for one text."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None


def add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        service.check_model(body.model)
        given = body.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        inputs: list[Input] = [given] if is_one else list(given)  # type: ignore[list-item, arg-type]
        how = {"most": body.truncate_prompt_tokens, "add_special_tokens": body.add_special_tokens}
        outputs, vectors = await _embed(service, body, request, inputs, **how)
        encode = _base64 if body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ]
        count = sum(len(output.prompt_token_ids) for output in outputs)
        return JSONResponse(
            {
                "id": f"embd-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "data": data,
                "model": body.model or service.settings.name,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    @app.post("/api/embed", response_class=Response, responses=OLLAMA_FAULTS)
    async def embed(body: OllamaEmbedBody, request: Request) -> Response:
        model = name_of(service, body.model)
        inputs: list[Input] = [body.input] if isinstance(body.input, str) else list(body.input)
        how = {"most": -1 if body.truncate else None, "keeps_start": True}
        began = time.monotonic()
        outputs, vectors = await _embed(service, body, request, inputs, **how)
        return JSONResponse(
            {
                "model": model,
                "embeddings": vectors,
                "total_duration": int((time.monotonic() - began) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": sum(len(one.prompt_token_ids) for one in outputs),
            }
        )

    @app.post("/api/embeddings", response_class=Response, responses=OLLAMA_FAULTS)
    async def embed_one(body: OllamaOneBody, request: Request) -> Response:
        name_of(service, body.model)
        how: dict[str, Any] = {"most": -1, "keeps_start": True}
        _, vectors = await _embed(service, body, request, [body.prompt], **how)
        return JSONResponse({"embedding": vectors[0]})


async def _embed(
    service: Service, body: PooledBody, request: Request, inputs: Sequence[Input], **how: Any
) -> tuple[list[RequestOutput], list[list[float]]]:
    """The texts as they were read, and their vectors; `how` are words of `Prompts.encode`."""
    at_most("input", len(inputs), service.settings.limits.max_inputs, "texts")

    async def work(deadline: float) -> list[RequestOutput]:
        ids = [await service.encode(one, param="input", **how) for one in inputs]
        return await _run(service, ids, body)

    outputs = await service.run(body.timeout, request, work)
    vectors = [output.embedding or [] for output in outputs]
    if problem := misfit(body.dimensions, len(vectors[0])):
        raise ProblemError(400, problem, param="dimensions")
    return outputs, [unit(vector) for vector in vectors] if body.normalize else vectors


async def _run(service: Service, ids: Sequence[list[int]], body: PooledBody) -> list[RequestOutput]:
    """All of them or none, some at a time."""
    name, params = f"embd-{uuid.uuid4().hex}", params_to_pool(body.pooling)
    options: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt or ""}
    outputs: dict[int, RequestOutput] = {}
    todo = iter(enumerate(ids))

    async def work() -> None:
        for number, one in todo:
            stream = await service.engine.submit(
                one, params, request_id=f"{name}-{number}", stream=False, **options
            )
            (outputs[number],) = await collect([stream])

    count = min(len(ids), MAX_AT_ONCE, service.engine.info.max_rows)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [outputs[number] for number in range(len(ids))]


def _base64(vector: Sequence[float]) -> str:
    """float32, least byte first, as OpenAI's clients ask for it."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

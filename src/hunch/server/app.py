"""The routes: OpenAI's API, what operators ask for, and the page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from hunch.errors import HunchError
from hunch.server.embeddings import add_embeddings
from hunch.server.events import checked
from hunch.server.guard import App, Guard, Keys
from hunch.server.llamacpp import add_llamacpp
from hunch.server.messages import add_messages
from hunch.server.ollama import add_ollama
from hunch.server.other_names import instead_of
from hunch.server.problems import ProblemError, faults, from_error, from_validation
from hunch.server.responses import Stored, add_responses
from hunch.server.schemas import ChatBody, CompletionBody, DetokenizeBody, ErrorBody, TokenizeBody
from hunch.server.service import Service, model_entry
from hunch.server.sglang import add_sglang
from hunch.server.streaming import ClientGoneError

ALL = sys.maxsize  # tokens that /tokenize counts: a text need not fit into a request
PROMPT_FIELDS = {  # path -> the field that holds what is read
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}
_SCRIPTS = (
    "app", "answers", "calls", "charts", "format", "pulse", "saved", "server", "vendor/highlight",
    "vendor/marked", "vendor/purify",
)  # fmt: skip
PAGE = {  # path -> file of hunch.web, media type
    "/": ("index.html", "text/html"),
    **{f"/static/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
    "/static/style.css": ("style.css", "text/css"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "cache-control": "no-cache",
    "x-frame-options": "DENY",
}
UNREADABLE = {  # by what reading the body as JSON raised
    UnicodeDecodeError: "the body is not UTF-8",
    ValueError: "the body holds a number of too many digits",
    RecursionError: "the body is nested too deep",
}


def build_app(
    service: Service, stored: Stored, over: Callable[[App], App] | None = None
) -> Guard | CORSMiddleware:
    """The whole ASGI application around one service; `over` stands between guard and routes."""
    app = build_routes(service, stored)
    return _guarded(app, app if over is None else over(app), service)


def build_routes(service: Service, stored: Stored) -> FastAPI:
    """Every path of one service."""
    app = FastAPI(
        title="hunch",
        version=service.settings.version,
        docs_url=None,  # its pages come from a CDN
        redoc_url=None,
        servers=[{"url": service.settings.mount or "/"}],
        responses=faults(ErrorBody),
    )
    _add_openai(app, service)
    _add_tokens(app, service)
    add_responses(app, service, stored)
    add_messages(app, service)
    add_ollama(app, service)
    add_llamacpp(app, service)
    add_sglang(app, service)
    add_embeddings(app, service)
    _add_operations(app, service)
    if service.settings.has_page:
        _add_page(app)
    _add_faults(app, service)
    _drop_default_faults(app)
    return app


def _guarded(app: FastAPI, inner: App, service: Service) -> Guard | CORSMiddleware:
    settings = service.settings
    posts = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    known = frozenset(route.path for route in app.routes)  # type: ignore[attr-defined]

    def answered(path: str, status: int, seconds: float) -> None:
        service.metrics.answered(path if path in known else "other", status, seconds)

    guard = Guard(
        inner,
        keys=Keys(settings.api_keys),
        public_paths=frozenset(
            {"/health", "/v1/health", "/ready", "/ping", *(PAGE if settings.has_page else ())}
        ),
        body_paths=frozenset(posts),
        max_body_bytes=settings.limits.max_body_bytes,
        hosts=settings.hosts,
        is_draining=lambda: service.is_draining,
        answered=answered,
        paths=known,
        mount=settings.mount,
    )
    if not settings.cors_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients send their own (x-stainless-*); origins are what counts
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def _add_openai(app: FastAPI, service: Service) -> None:
    def model(name: str) -> dict[str, Any]:
        return model_entry(name, service.settings.name, service)

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = service.settings.served_model_names
        return {"object": "list", "data": [model(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model(name)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/chat/completions", response_class=Response)  # llama.cpp has it too
    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/chat/completions/input_tokens")
    async def chat_tokens(body: ChatBody) -> dict[str, Any]:
        service.check_model(body.model)
        ids = await service.chat_ids(body)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    @app.post("/invocations", response_class=Response)
    async def invocations(body: dict[str, Any], request: Request) -> Response:
        """SageMaker's one path: a chat or a prompt, by what the body holds."""
        if "messages" in body:
            return await service.chat(checked(ChatBody, body), request)
        return await service.complete(checked(CompletionBody, body), request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        given = [one for one in (body.prompt, body.messages, body.content) if one is not None]
        if len(given) != 1:
            raise ProblemError(400, "give one of prompt, messages and content")
        if body.messages is not None:
            ids = await service.chat_ids(body.chat())
        elif body.content is not None:
            ids = []
            if body.content:
                ids = await service.encode(body.content, body.add_special, most=ALL)
        else:
            is_special = body.add_special_tokens is not False
            ids = await service.encode(body.prompt or "", is_special, most=ALL)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids)}
        found["max_model_len"] = service.engine.info.max_len
        if body.return_token_strs or body.with_pieces:
            pieces = [service.piece(token) for token in ids]
            found["token_strs"] = [p if isinstance(p, str) else "\ufffd" for p in pieces]
            if body.with_pieces:
                pairs = zip(ids, pieces, strict=True)
                found["tokens"] = [{"id": token, "piece": piece} for token, piece in pairs]
        return found

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        service.check_model(body.model)
        service.check_ids(body.tokens, "tokens")
        text = service.text.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text, "content": text, "text": text}  # vLLM's, llama.cpp's, SGLang's


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)  # as other servers and their platforms call it
    @app.get("/v1/health", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process is of use at all: 503 once the engine is dead or hung."""
        if (trouble := service.engine.trouble()) is not None:
            raise ProblemError(503, trouble, code="engine_unavailable")
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether to send requests here: 503 while draining."""
        if service.is_draining:
            raise ProblemError(503, "the server is shutting down", code="shutting_down")
        return await health()

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests that are open, as vLLM counts them."""
        return {"server_load": service.engine.num_open}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": service.settings.version}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        if service.settings.workers > 1:  # else counts would fall where another process answers
            await service.engine.share_counts(service.metrics.families())
        return Response(service.metrics.exposition(), media_type=media_type)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return service.overview()


def _add_page(app: FastAPI) -> None:
    folder = files("hunch.web")
    for path, (name, media_type) in PAGE.items():
        content = folder.joinpath(name).read_bytes()
        serve = partial(_static, content, media_type)
        app.add_route(path, serve, methods=["GET"], include_in_schema=False)


async def _static(content: bytes, media_type: str, request: Request) -> Response:
    return Response(content, media_type=media_type, headers=PAGE_HEADERS)


def _add_faults(app: FastAPI, service: Service) -> None:
    def respond(request: Request, problem: ProblemError) -> JSONResponse:
        return problem.response(request.url.path)

    async def on_hunch(request: Request, error: Exception) -> Response:
        assert isinstance(error, HunchError)
        if isinstance(error, ClientGoneError):
            return Response(status_code=499)
        problem = from_error(error, retry_after=service.retry_after())
        if problem.code == "context_length_exceeded":
            problem.param = problem.param or PROMPT_FIELDS.get(request.url.path)
        if request.url.path == "/v1/responses" and problem.param == "response_format":
            problem.param = "text.format"  # as it is called there
        if request.method == "POST":
            service.metrics.refused(problem.code or "invalid_request")
        return respond(request, problem)

    async def on_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if request.method == "POST":
            service.metrics.refused("invalid_request")
        return respond(request, from_validation(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = str(error.detail)
        for fault, told in UNREADABLE.items():
            if isinstance(error.__cause__, fault):
                text = told
                break
        if error.status_code in (404, 405):
            path, allowed = request.url.path, (error.headers or {}).get("Allow")
            text = f"this server has no {request.method} {path[:100]}"
            known = {str(getattr(route, "path", "")) for route in app.routes}
            text += f": send {allowed}" if allowed else instead_of(path[:100], known)
        response = respond(request, ProblemError(error.status_code, text))
        response.headers.update(error.headers or {})  # 405 says what is allowed
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        # The server logs the stack; the client learns only that it was not its fault.
        message = "the request failed inside the server"
        return respond(request, ProblemError(500, message, code="internal_error"))

    app.add_exception_handler(HunchError, on_hunch)
    app.add_exception_handler(RequestValidationError, on_body)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _drop_default_faults(app: FastAPI) -> None:
    """Bodies that do not fit get 400, as from OpenAI; FastAPI's document would say 422."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)

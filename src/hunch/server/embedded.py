"""A server's engine, and its routes, inside somebody else's server, which has the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from typing import Any

from hunch.config import Config
from hunch.server.app import build_app
from hunch.server.guard import App
from hunch.server.responses import Stored
from hunch.server.run import (
    ENGINE_FACTORY,
    TEXT_FACTORY,
    hiding,
    load,
    new_engine,
    new_service,
    started_again,
)
from hunch.server.settings import ServeConfig
from hunch.server.text import Text


class KeptEngine:
    """An engine in a process of its own, which is started again should it die."""

    def __init__(self, config: Config, settings: ServeConfig) -> None:
        self.config, self.settings = config, hiding(config, settings)
        self.engine = new_engine(config, settings, ENGINE_FACTORY)
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> Text:
        """Load the model; returns its tokenizer."""
        text = await load(self.config, self.engine, TEXT_FACTORY)
        self._watch = asyncio.create_task(self._keep())
        return text

    def trouble(self) -> str | None:
        """Why no request can be served now."""
        return self.engine.trouble()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.engine.close()

    async def _keep(self) -> None:
        for _ in range(self.settings.engine_restarts):
            await self.engine.died.wait()
            if not await started_again(self.engine):
                return


class Embedded(KeptEngine):
    """With the routes over it."""

    async def start(self) -> App:
        """Load the model; returns an ASGI application."""
        text = await self.open()
        service = new_service(self.config, self.settings, self.engine, text)
        return build_app(service, Stored(), lambda app: app)


class Reply:
    """The routes' answer to a body that came by no socket. Leaving `pieces` early aborts it."""

    def __init__(self, routes: App, path: str, body: Mapping[str, Any], request_id: str) -> None:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self._routes = routes
        self._body = json.dumps(body).encode()
        self._is_read = False
        self._left = asyncio.Event()
        self._sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    async def pieces(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """The status with each part of the body."""
        task = asyncio.create_task(self._run())
        status, has_more = 500, True
        try:
            while has_more:
                message = await self._sent.get()
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                has_more = message.get("more_body", False)
                if message.get("body"):
                    yield status, message["body"]
        finally:
            self._left.set()
            await task

    async def _run(self) -> None:
        try:
            await self._routes(self._scope, self._receive, self._sent.put)
        finally:  # whoever reads must not wait for an answer that broke off
            await self._sent.put({"type": "http.response.body"})

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

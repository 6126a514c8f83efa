"""A server's engine, and its routes, inside somebody else's server, which has the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hunch.config import Config
from hunch.errors import EngineError
from hunch.server import logs
from hunch.server.app import build_app
from hunch.server.guard import App
from hunch.server.run import (
    ENGINE_FACTORY,
    TEXT_FACTORY,
    hiding,
    load,
    new_engine,
    new_service,
)
from hunch.server.settings import ServeConfig
from hunch.server.text import Text


class KeptEngine:
    """An engine in a process of its own, which is started again should it die."""

    def __init__(
        self,
        config: Config,
        settings: ServeConfig,
        *,
        engine_factory: str = ENGINE_FACTORY,
        text_factory: str = TEXT_FACTORY,
    ) -> None:
        self.config, self.settings = config, hiding(config, settings)
        self._text_factory = text_factory
        self.engine = new_engine(config, settings, engine_factory)
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> Text:
        """Load the model; returns its tokenizer."""
        text = await load(self.config, self.engine, self._text_factory)
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
            logs.event(logging.ERROR, f"the engine died: {self.engine.death}; it is started again")
            try:
                await self.engine.start()
            except EngineError as error:
                logs.event(logging.ERROR, f"the engine did not start again: {error}")
                return
            logs.event(logging.WARNING, "the engine was started again", engine_pid=self.engine.pid)


class Embedded(KeptEngine):
    """With the routes over it."""

    async def start(self) -> App:
        """Load the model; returns an ASGI application."""
        text = await self.open()
        service = new_service(self.config, self.settings, self.engine, text)
        return build_app(service, lambda app: app)

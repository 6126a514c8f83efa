"""Several models behind one address: each has its own engine, loaded when it is first asked for.

`Switch` stands between the guard and the routes: it looks at the model a body names, sees that its
engine runs, and hands the request to the routes of that model, which know of no other. An engine
nobody has asked for some time, or that takes the memory another one needs, is put to sleep: its
process ends, and the next request for it starts another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from hunch.errors import HunchError
from hunch.server import logs
from hunch.server.guard import App, Receive, Scope, Send, replay
from hunch.server.metrics import Family, adapters_family, joined
from hunch.server.ollama import tag
from hunch.server.problems import ProblemError, no_model
from hunch.server.service import Service, model_entry
from hunch.server.settings import ServeConfig

LOOK_SECONDS = 1.0  # between two looks for models nobody uses

Open = Callable[[], Awaitable[tuple[Service, App]]]  # loads a model and builds its routes


class Model:
    """A model that may or may not be loaded."""

    def __init__(
        self, names: tuple[str, ...], open_model: Open | None = None, parent: str | None = None
    ) -> None:
        """Without `open_model` it is loaded, and adopted, before anybody can ask for it."""
        self.names = names
        self.parent = parent  # the model it is an adapter of
        self.is_kept = False  # somebody else starts its engine again when it dies
        self.service: Service | None = None  # once it was loaded for the first time
        self.num_busy = 0  # requests it is answering
        self.last_used = time.monotonic()
        self._open = open_model
        self._app: App | None = None
        self._waking = asyncio.Lock()

    @property
    def is_awake(self) -> bool:
        return self.service is not None and not self.service.engine.is_asleep

    def adopt(self, service: Service, app: App) -> None:
        """It was loaded, and is looked after, by somebody else."""
        self.service, self._app, self.is_kept = service, app, True

    async def wake(self) -> App:
        """Its routes, with the engine behind them loaded."""
        async with self._waking:
            if self.service is None:
                logs.event(logging.INFO, f"loading {self.names[0]}")
                assert self._open is not None
                self.service, self._app = await self._open()
            elif self.service.engine.is_asleep or (
                self.service.engine.death is not None and not self.is_kept
            ):
                logs.event(logging.INFO, f"loading {self.names[0]} again")
                await self.service.engine.start()
        assert self._app is not None
        return self._app

    async def sleep(self, reason: str) -> None:
        """End its process, unless somebody has just asked for it."""
        async with self._waking:
            if self.is_awake and not self.num_busy:
                assert self.service is not None
                logs.event(logging.INFO, f"unloading {self.names[0]}: {reason}")
                await self.service.engine.sleep()

    def num_bytes(self) -> int:
        """Memory its process holds."""
        assert self.service is not None
        try:
            status = Path(f"/proc/{self.service.engine.pid}/status").read_text()
        except OSError:
            return 0  # it has just left, or this is no Linux
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


class Switch:
    """ASGI application over the routes of every model."""

    def __init__(self, settings: ServeConfig, models: Sequence[Model]) -> None:
        self.settings = settings
        self.models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._loading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        path, is_post = scope["path"], scope["method"] == "POST"
        lists = {"/v1/models": self._list, "/metrics": self._metrics, "/api/tags": self._tags}
        if not is_post and path in lists:
            return await lists[path]()(scope, receive, send)
        model = self.models[0]
        if is_post:
            message = await receive()
            model, receive = self._asked(message.get("body", b"")), replay(message, receive)
        elif scope["method"] == "GET" and path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            return await JSONResponse(_entry(name, self._named(name)))(scope, receive, send)
        elif model.service is not None:  # a page, a probe: no reason to load anything
            assert model._app is not None
            return await model._app(scope, receive, send)
        model.num_busy += 1
        try:
            app = await self._ready(model)
            await app(scope, receive, send)
        finally:
            model.num_busy -= 1
            model.last_used = time.monotonic()

    def _asked(self, body: bytes) -> Model:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return self.models[0]  # whose routes say what is wrong with it
        name = given.get("model") or given.get("name") if isinstance(given, dict) else None
        return self._named(name) if isinstance(name, str) else self.models[0]

    def _named(self, name: str) -> Model:
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if found is None:
            raise no_model(name, self._by_name)
        return found

    async def _ready(self, model: Model) -> App:
        """Its routes; other models make room first, where there is a limit."""
        if model.is_awake:
            return await self._wake(model)
        async with self._loading:
            await self._make_room(model)
            app = await self._wake(model)
            await self._shrink(model)
            return app

    async def _wake(self, model: Model) -> App:
        try:
            return await model.wake()
        except HunchError as error:
            message = f"{model.names[0]} could not be loaded: {error}"
            raise ProblemError(503, message, code="engine_unavailable") from None

    async def _make_room(self, coming: Model) -> None:
        most = self.settings.max_loaded_models
        while most and len(self._awake()) >= most:
            if not await self._end_idle(coming, "another model is asked for"):
                raise ProblemError(
                    503,
                    f"{most} models are loaded and busy, which is as many as this server may hold",
                    code="models_busy",
                    retry_after=5,
                )

    async def _shrink(self, newest: Model) -> None:
        """Idle models leave while all together hold more memory than they may."""
        limit = self.settings.max_model_bytes
        while limit and sum(model.num_bytes() for model in self._awake()) > limit:
            if not await self._end_idle(newest, "memory is short"):
                return

    async def _end_idle(self, but: Model, reason: str) -> bool:
        """Unload the model that was idle for longest; False: none is."""
        idle = [model for model in self._awake() if not model.num_busy and model is not but]
        if idle:
            await min(idle, key=lambda model: model.last_used).sleep(reason)
        return bool(idle)

    def _awake(self) -> list[Model]:
        return [model for model in self.models if model.is_awake]

    async def watch(self) -> None:
        """Unload what nobody asks for, and end what hangs; the next request starts it again."""
        limit, patience = self.settings.idle_unload, self.settings.engine_timeout
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for model in self._awake():
                assert model.service is not None
                engine = model.service.engine
                if not model.is_kept and engine.silent_seconds() > patience:
                    engine.kill("it does not answer")
                idle = time.monotonic() - model.last_used
                if limit and not model.num_busy and idle > limit:
                    await model.sleep(f"nobody has asked it for {idle:.0f} s")

    async def drain(self, seconds: float) -> None:
        engines = [model.service.engine for model in self.models if model.service is not None]
        await asyncio.gather(*(engine.drain(seconds) for engine in engines))

    async def close(self) -> None:
        for model in self.models[1:]:  # the first one's belongs to whoever started the server
            if model.service is not None:
                await model.service.engine.close()

    def _list(self) -> Response:
        data = [_entry(name, model) for model in self.models for name in model.names]
        return JSONResponse({"object": "list", "data": data})

    def _tags(self) -> Response:
        named = [tag(name, model.service) for model in self.models for name in model.names]
        return JSONResponse({"models": named})

    def _metrics(self) -> Response:
        services = [model.service for model in self.models if model.service is not None]
        content = joined([service.metrics for service in services], self._adapters())
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _adapters(self) -> list[Family]:
        adapters = [model for model in self.models if model.parent is not None]
        if not adapters:
            return []
        loaded = [model.names[0] for model in adapters if model.is_awake]
        waiting = [model.names[0] for model in adapters if model.num_busy and not model.is_awake]
        room = self.settings.num_engines - 1
        return [adapters_family(loaded, waiting, min(room, len(adapters)))]


def _entry(name: str, model: Model) -> dict[str, Any]:
    """What a list of models says of one; who asks for no more need not have it loaded."""
    entry = model_entry(name, model.names[0], model.service)
    return {**entry, "parent": model.parent, "is_loaded": model.is_awake}

"""A server's life: bind, load, serve, drain on a signal, and leave with a reason if it must."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from hunch.chat.format import ChatFormat
from hunch.config import Config, SpecConfig
from hunch.errors import ConfigError, EngineError
from hunch.server import logs
from hunch.server.app import build_app, build_routes
from hunch.server.connections import KEEP_ALIVE_SECONDS, protocol
from hunch.server.engine_process import resolve
from hunch.server.guard import App
from hunch.server.listen import bind, forget, listen
from hunch.server.models import Model, Switch
from hunch.server.prompts import AnyEngine
from hunch.server.remote import RemoteEngine
from hunch.server.replicas import Replicas
from hunch.server.responses import Stored
from hunch.server.service import Service
from hunch.server.settings import ServeConfig
from hunch.server.status import StatusLines
from hunch.server.text import Text
from hunch.server.workers import JoinedEngine, Workers

ENGINE_FACTORY = "hunch.loading:build_engine"  # Config -> Engine, called in the engine's process
WATCH_SECONDS = 1.0  # between two looks at the engine
LEAVE_SECONDS = 10  # for answers that are complete to reach clients that read slowly
TEXT_FACTORY = "hunch.loading:load_text"  # Config -> Text, called in this one


def serve(
    config: Config,
    settings: ServeConfig,
    *,
    engine_factory: str = ENGINE_FACTORY,
    text_factory: str = TEXT_FACTORY,
) -> int:
    """Serve until told to stop; returns the exit code."""
    if config.spec.is_synthetic and not settings.allow_synthetic:
        raise ConfigError(
            f"speculate={config.spec.method!r} makes its drafts up, for benchmarks of the engine; "
            "to serve with it all the same give --allow-synthetic too"
        )
    parsers = config.model
    ChatFormat(  # a name that nobody knows is told before a model is loaded
        None, {}, tool_parser=parsers.tool_call_parser, reasoning_parser=parsers.reasoning_parser
    )
    settings = hiding(config, settings)
    logs.set_up(settings.log_format, settings.log_level)
    if settings.disable_log_requests:
        logs.hide_requests()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, settings, engine_factory, text_factory))


def hiding(config: Config, settings: ServeConfig) -> ServeConfig:
    """With several keys, what was drafted from the text of one is never shown to another."""
    asked = [config.spec.options.get(name, "").lower() for name in ("shared", "adapt")]
    is_shared = any(word in ("true", "1", "yes", "on") for word in asked)
    is_hiding = is_shared and len(settings.api_keys) > 1
    return replace(settings, hides_guesses=settings.hides_guesses or is_hiding)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (it has no Windows version): a third less time per token."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


async def _serve(
    config: Config, settings: ServeConfig, engine_factory: str, text_factory: str
) -> int:
    if settings.num_engines > 1:
        cache = replace(config.cache, engines_per_device=settings.num_engines)
        config = replace(config, cache=cache)
    sock = bind(settings)  # before the model is loaded: a taken port is told at once
    workers = Workers(config, settings, text_factory)
    workers.start(sock)
    if settings.workers > 1:  # nobody else knows how many wait in all
        config = replace(config, schedule=replace(config.schedule, max_queue=settings.max_queue))
    engine = new_engine(config, settings, engine_factory)
    engine.give_lines = workers.give
    loading = asyncio.create_task(load(config, engine, text_factory))
    _on_signals(loading.cancel)
    try:
        text = await loading
    except (EngineError, asyncio.CancelledError) as error:
        await _leave(sock, workers, engine)
        if isinstance(error, EngineError):
            logs.event(logging.ERROR, f"the engine did not start: {error}")
            return 1
        logs.event(logging.INFO, "stopped before the model was loaded")
        return 0
    service = new_service(config, settings, engine, text)
    stored = Stored()
    others = _further(config, settings, (engine_factory, text_factory), stored)
    switch = Switch(settings, [Model(settings.served_model_names), *others])
    if not settings.api_keys and not settings.is_local:
        logs.event(
            logging.WARNING,
            f"{settings.host} can be reached from other machines, and no --api-key is set: "
            "everybody who can reach it may use it",
        )
    keeper = Keeper(service, _server(service, stored, switch if others else None), workers, switch)
    names = ", ".join(settings.served_model_names)
    place = settings.uds or "{}:{}".format(*sock.getsockname()[:2])
    address = (
        f"{'https' if settings.ssl_keyfile else 'http'}{'+unix' * bool(settings.uds)}://{place}"
    )
    if not (service.chat_template or text.chat_template):
        word = "has no chat template: give one (--chat-template FILE), or use /v1/completions"
        logs.event(logging.WARNING, f"{names} {word}")
    try:
        listen(sock, settings)
    except ConfigError:  # whoever started this says why
        await _leave(sock, workers, engine)
        raise
    logs.event(logging.INFO, f"serving {names} on {address}", engine_pid=engine.pid)
    beside = [keeper.watch(), keeper.watch_workers(), StatusLines(service).run(), switch.watch()]
    await _run(keeper, sock, *beside)
    forget(settings)
    await switch.close()
    await _leave(sock, workers, engine)
    return keeper.exit_code


async def _leave(sock: socket.socket, workers: Workers, engine: AnyEngine) -> None:
    sock.close()
    await workers.close()
    await engine.close()


def new_engine(config: Config, settings: ServeConfig, factory: str) -> AnyEngine:
    options: dict[str, Any] = {
        "max_queue": settings.max_queue,
        "log_format": settings.log_format,
        "log_level": settings.log_level,
    }
    if settings.replicas > 1:
        return Replicas(config, factory, settings.replicas, **options)
    return RemoteEngine(config, factory, num_others=settings.workers - 1, **options)


def run_worker(
    engine: JoinedEngine, config: Config, settings: ServeConfig, text_factory: str
) -> int:
    """One of several HTTP processes over an engine that another one owns."""
    if settings.disable_log_requests:
        logs.hide_requests()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve_beside(engine, config, settings, text_factory))


async def _serve_beside(
    engine: JoinedEngine, config: Config, settings: ServeConfig, text_factory: str
) -> int:
    loading = asyncio.create_task(load(config, engine, text_factory))
    _on_signals(loading.cancel)
    try:
        text = await loading
    except (EngineError, asyncio.CancelledError):
        return 0  # the owner says why
    service = new_service(config, settings, engine, text)
    keeper = Keeper(service, _server(service, Stored()))
    await _run(keeper, bind(settings), keeper.follow())
    await engine.close()
    return keeper.exit_code


async def _run(keeper: Keeper, sock: socket.socket, *beside: Coroutine[Any, Any, None]) -> None:
    """Serve on this socket until the keeper decides to leave."""
    tasks = [asyncio.create_task(work) for work in (*beside, keeper.share_counts())]
    _on_signals(keeper.stop)
    await keeper.server.serve(sockets=[sock])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_service(config: Config, settings: ServeConfig, engine: AnyEngine, text: Text) -> Service:
    return Service(
        settings,
        engine,
        text,
        chat_template=config.model.chat_template,
        parsers=config.model,
        paths=(config.model.model, config.model.tokenizer or config.model.model),
    )


def _further(
    config: Config, settings: ServeConfig, factories: tuple[str, str], stored: Stored
) -> list[Model]:
    """Models beside the first one, and adapters of it, each loaded when it is asked for."""
    # Routers are told of the first one's KV cache alone.
    config = replace(config, cache=replace(config.cache, kv_events_config=None))
    # A drafter or template that was given belongs to the first one, and to its adapters.
    plain = replace(
        config.model, tokenizer=None, revision=None, chat_template=None, hf_overrides=""
    )
    spec = config.spec if config.spec.path is None else SpecConfig()
    found = []
    for name, path in settings.models:
        other = replace(config, model=replace(plain, model=path), spec=spec)
        found.append(Model((name,), _opening(other, settings, name, factories, stored)))
    for name, path in settings.adapters:
        adapted = replace(config, model=replace(config.model, lora=path))
        open_model = _opening(adapted, settings, name, factories, stored)
        found.append(Model((name,), open_model, settings.name))
    return found


def _opening(
    config: Config, settings: ServeConfig, name: str, factories: tuple[str, str], stored: Stored
) -> Callable[[], Coroutine[Any, Any, tuple[Service, App]]]:
    settings = replace(settings, served_model_names=(name,), models=(), adapters=())

    async def open_model() -> tuple[Service, App]:
        engine = new_engine(config, settings, factories[0])
        text = await load(config, engine, factories[1])
        service = new_service(config, settings, engine, text)
        return service, build_routes(service, stored)

    return open_model


def _server(service: Service, stored: Stored, switch: Switch | None = None) -> uvicorn.Server:
    def over(app: App) -> App:
        if switch is None:
            return app
        switch.models[0].adopt(service, app)
        return switch

    return _Server(
        uvicorn.Config(
            build_app(service, stored, over),
            log_config=None,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nothing here depends on a client's address
            http=protocol(service.settings.max_connections),
            ws="none",
            ssl_keyfile=service.settings.ssl_keyfile or None,
            ssl_certfile=service.settings.ssl_certfile or None,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LEAVE_SECONDS,
        )
    )


async def load(config: Config, engine: AnyEngine, text_factory: str) -> Text:
    text: Text = await asyncio.to_thread(lambda: resolve(text_factory)(config))
    await engine.start()
    return text


def _on_signals(act: Callable[[], object]) -> None:
    """What SIGTERM and Ctrl-C do from now on."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)


async def started_again(engine: AnyEngine) -> bool:
    """Whether an engine that died could be started another time; the log says what became of it."""
    logs.event(logging.ERROR, f"the engine died: {engine.death}; it is started again")
    try:
        await engine.start()
    except EngineError as error:
        logs.event(logging.ERROR, f"the engine did not start again: {error}")
        return False
    logs.event(logging.WARNING, "the engine was started again", engine_pid=engine.pid)
    return True


@dataclass
class Keeper:
    """Decides when a server leaves, and how."""

    service: Service
    server: uvicorn.Server
    workers: Workers | None = None
    switch: Switch | None = None
    exit_code: int = 0
    _drain: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """The first signal drains, the second leaves at once."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._finish())
            if self.workers is not None:
                self.workers.stop()
        else:
            self.server.should_exit = True
            self.server.force_exit = True

    async def _finish(self) -> None:
        """No new requests; the running ones get their time, then an error."""
        service = self.service
        seconds = service.settings.drain_timeout
        service.is_draining = True
        logs.event(logging.INFO, f"draining {service.engine.num_open} sequences", limit=seconds)
        others = [] if self.switch is None else [self.switch.drain(seconds)]
        await asyncio.gather(service.engine.drain(seconds), *others)
        self.server.should_exit = True

    async def watch(self) -> None:
        """A dead or hung engine is started again, a few times; the last one's death for good is
        the server's."""
        engine = self.service.engine
        engines = engine.engines if isinstance(engine, Replicas) else [engine]
        await asyncio.gather(*(self._keep(one) for one in engines))
        self.exit_code = 1
        logs.event(logging.ERROR, f"the engine died: {engine.death}; the server leaves")
        await asyncio.sleep(self.service.settings.death_grace)
        self.server.should_exit = True

    async def _keep(self, engine: RemoteEngine) -> None:
        """Until the engine has died for good."""
        for _ in range(self.service.settings.engine_restarts):
            await self._wait_dead(engine)
            if self.service.is_draining or not await started_again(engine):
                break
        await self._wait_dead(engine)

    async def follow(self) -> None:
        """Where another process owns the engine: it sends a line to each new one, or is gone."""
        engine = self.service.engine
        assert isinstance(engine, RemoteEngine)
        try:
            while True:
                await engine.died.wait()
                await engine.start()
        except EngineError as error:
            logs.event(logging.ERROR, f"{error}; this HTTP process leaves")
            self.exit_code = 1
            self.server.should_exit = True

    async def watch_workers(self) -> None:
        """A process that is missing would leave its share of the connections unanswered."""
        assert self.workers is not None
        await self.workers.watch()
        if self._drain is None:
            logs.event(logging.ERROR, "one of the HTTP processes died; the server leaves")
            self.exit_code = 1
            self.stop()

    async def share_counts(self) -> None:
        """Each process answers /metrics for all of them."""
        while self.service.settings.workers > 1:
            await asyncio.sleep(WATCH_SECONDS)
            await self.service.engine.share_counts(self.service.metrics.families())

    async def _wait_dead(self, engine: RemoteEngine) -> None:
        """Until the engine has died; one that shows no life is helped."""
        limit = self.service.settings.engine_timeout
        while not engine.died.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.died.wait(), WATCH_SECONDS)
            seconds = engine.silent_seconds()
            if seconds > limit:
                engine.kill(f"it has not answered for {seconds:.0f} s")
                await engine.died.wait()


class _Server(uvicorn.Server):
    """uvicorn, without its own idea of what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

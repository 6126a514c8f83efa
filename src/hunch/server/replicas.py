"""Several engines, each in a process of its own, that look like one to the HTTP side.

Whatever an engine was doing when it died goes on in another: the request is put again with the same
seed, and by the law its text is the same, so the reader of a stream sees a pause and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from hunch.config import Config
from hunch.errors import EngineError
from hunch.server import logs
from hunch.server.remote import EngineInfo, RemoteEngine, Watcher
from hunch.server.remote_stream import RemoteStream
from hunch.server.routing import Router
from hunch.types import Detokenizer, SamplingParams, new_seed

MAX_MOVES = 2  # engines that may die under a request before it is given up: it may be why they do
_SUMS = ("seconds", "tokens_per_second", "sum")  # ends of names of floats that add up


class Replicas:
    """The interface of RemoteEngine over several of them. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        factory: str,
        num_engines: int,
        *,
        max_queue: int = 256,
        **options: Any,
    ) -> None:
        self.engines = [
            RemoteEngine(
                as_replica(share_of(config, num_engines), index),
                factory,
                max_queue=max_queue,
                environ=gpus_of(index, num_engines, config.parallel.num_ranks),
                **options,
            )
            for index in range(num_engines)
        ]
        for engine in self.engines:
            engine.on_lost = self._move
        self._router = Router(num_engines)
        self._numbers, self._base_seed = count(), config.model.seed
        # Another verifier's text may depend on what was drafted, and when.
        self.continues = config.spec.verifier == "exact"
        self.died = asyncio.Event()  # set once nobody is left who could be started again
        self.give_lines: Callable[[list[Any]], None] = lambda lines: None
        self.counts: dict[int, Any] = {}
        self.is_asleep = False
        self.num_moved = 0  # requests that went on in another engine

    # --- as one engine ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all and wait until their models are loaded."""
        await asyncio.gather(*(engine.start() for engine in self.engines))
        info = self.engines[0].info
        self._router.set_room(info.num_blocks * info.block_size)

    @property
    def info(self) -> EngineInfo:
        """What all have room for together; the context is that of each."""
        infos = [engine.info for engine in self.engines]
        return replace(
            infos[0],
            max_rows=sum(info.max_rows for info in infos),
            num_blocks=sum(info.num_blocks for info in infos),
        )

    @property
    def pid(self) -> int:
        return self.engines[0].pid

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)

    @property
    def watcher(self) -> Watcher | None:
        return self.engines[0].watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        for engine in self.engines:
            engine.watcher = watcher

    @property
    def death(self) -> str | None:
        """Why nobody can serve; None while somebody can."""
        deaths = [engine.death for engine in self.engines]
        return None if None in deaths else deaths[0]

    def trouble(self) -> str | None:
        troubles = [engine.trouble() for engine in self.engines]
        return None if None in troubles else troubles[0]

    def silent_seconds(self) -> float:
        return min(engine.silent_seconds() for engine in self.engines)

    def check_size(self, num_sequences: int) -> None:
        self.engines[0].check_size(num_sequences)

    async def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        detokenizer: Detokenizer | None = None,
        **options: Any,
    ) -> RemoteStream:
        """Hand a request to the engine that suits it best."""
        if params.seed is None:  # the same one, should it have to be put again
            params = replace(params, seed=new_seed(self._base_seed, next(self._numbers)))
        engine = self._choose(prompt_ids, options.get("cache_salt", ""))
        return await engine.submit(
            prompt_ids, params, request_id=request_id, detokenizer=detokenizer, **options
        )

    def abort(self, request_id: str) -> None:
        for engine in self.engines:
            engine.abort(request_id)

    async def reset_cache(self, *, is_held_too: bool = False) -> bool:
        up = [engine for engine in self.engines if engine.death is None]
        resets = (engine.reset_cache(is_held_too=is_held_too) for engine in up)
        return all(await asyncio.gather(*resets))

    def stats(self) -> dict[str, Any]:
        """All engines' reports as one."""
        return merged([engine.stats() for engine in self.engines]) | {
            "num_replicas": len(self.engines),
            "num_replicas_up": sum(engine.death is None for engine in self.engines),
            "num_moved": self.num_moved,
        }

    async def drain(self, seconds: float, reason: str = "the server is shutting down") -> None:
        await asyncio.gather(*(engine.drain(seconds, reason) for engine in self.engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def kill(self, reason: str) -> None:
        for engine in self.engines:
            engine.kill(reason)

    async def sleep(self) -> None:
        self.is_asleep = True
        await self.close()

    async def share_counts(self, families: Any) -> None:
        """There are no other HTTP processes."""

    # --- as several -------------------------------------------------------------------------------

    def _choose(
        self, prompt_ids: Sequence[int], salt: str, but: RemoteEngine | None = None
    ) -> RemoteEngine:
        loads = [
            engine.num_open if engine.trouble() is None and engine is not but else None
            for engine in self.engines
        ]
        if not any(load is not None for load in loads):
            raise EngineError(self.trouble() or "no engine is up")
        return self.engines[self._router.choose(prompt_ids, salt, loads)]

    def _move(self, lost: RemoteEngine, stream: RemoteStream) -> bool:
        """Go on with a dead engine's stream elsewhere; False: there is no way."""
        self._router.forget(self.engines.index(lost))
        has_begun = bool(stream.num_tokens)
        if stream.num_moves >= MAX_MOVES or (has_begun and not self.continues):
            return False
        try:
            engine = self._choose(stream.output.prompt_token_ids, stream.salt, but=lost)
        except EngineError:
            return False
        self.num_moved += 1
        how = "goes on" if has_begun else "begins"
        logs.event(
            logging.WARNING,
            f"a request {how} in another replica",
            id=stream.id,
            tokens=stream.num_tokens,
            engine_pid=engine.pid,
        )
        engine.adopt(stream)
        return True


def as_replica(config: Config, index: int) -> Config:
    """Each engine tells of its own KV cache, at a port of its own."""
    text = config.cache.kv_events_config
    if text is None:
        return config
    told = json.dumps({**json.loads(text), "data_parallel_rank": index})
    return replace(config, cache=replace(config.cache, kv_events_config=told))


def share_of(config: Config, num_engines: int) -> Config:
    """The config of one of several engines: a machine's cores are shared out."""
    if config.model.threads is not None:
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // num_engines)
    return replace(config, model=replace(config.model, threads=threads))


def gpus_of(index: int, num_engines: int, size: int) -> Mapping[str, str]:
    """What an engine's process is told of the GPUs: each has `size` of its own."""
    name = "CUDA_VISIBLE_DEVICES"
    given = os.environ.get(name)
    places = given.split(",") if given else [str(n) for n in range(num_engines * size)]
    if given == "" or num_engines * size > len(places):
        return {}  # there are none, or too few: the engines say so themselves
    return {name: ",".join(places[index * size : (index + 1) * size])}


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several engines' statistics as one's: counts add up, shares are means by steps."""
    weights = [report.get("steps") or 0 for report in reports]
    return _merged([dict(report) for report in reports], weights)


def _merged(reports: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    keys = dict.fromkeys(key for report in reports for key in report)
    found: dict[str, Any] = {}
    for key in keys:
        pairs = [
            (report[key], weight)
            for report, weight in zip(reports, weights, strict=True)
            if report.get(key) is not None
        ]
        found[key] = _together(key, [value for value, _ in pairs], [weight for _, weight in pairs])
    return found


def _together(key: str, values: list[Any], weights: list[float]) -> Any:
    if not values:
        return None
    first = values[0]
    if isinstance(first, Mapping):
        return _merged(values, weights)
    if isinstance(first, list):
        if key == "bounds":
            return first
        longest = max(map(len, values))
        columns = [[v[i] for v in values if i < len(v)] for i in range(longest)]
        kept = [
            [w for v, w in zip(values, weights, strict=True) if i < len(v)] for i in range(longest)
        ]
        return [_together(key, col, w) for col, w in zip(columns, kept, strict=True)]
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, str):
        return first
    if all(isinstance(value, int) for value in values) or key.endswith(_SUMS):
        return sum(values)
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total

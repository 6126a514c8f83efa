"""Ray Serve: the whole HTTP server of `hunch serve` in each replica of a deployment.

    from ray import serve
    from hunch.integrations.ray import build_app

    serve.run(build_app({"model": "smollm2-135m", "speculate": "auto", "max_replicas": 4}))

or `serve run hunch.integrations.ray:build_app model=smollm2-135m`. Arguments are those of
`hunch.LLM`, and the ones of `Deployment`. With tensor_parallel_size=n each replica takes n GPUs of
one node, and starts its ranks there by itself. Needs the extra `ray`. Ray Serve LLM
has a class of its own, in `hunch.integrations.ray_llm`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ray import serve

from hunch.compat import config_from_vllm
from hunch.config import DEFAULT_MODEL
from hunch.errors import EngineError
from hunch.server.embedded import Embedded
from hunch.server.guard import App, Receive, Scope, Send
from hunch.server.settings import ServeConfig

DRAIN_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How many replicas there are, and when there are more."""

    served_model_name: str = ""  # default: the model's own
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int = 32  # open requests per replica that scaling aims at
    autoscaling_config: Mapping[str, Any] = field(default_factory=dict)  # more of Ray's, if needed
    max_ongoing_requests: int = 256
    num_cpus: float | None = None  # per replica; default: one for each rank
    num_gpus: float | None = None  # per replica; default: one for each rank on a machine with GPUs


_routes: App | None = None  # of this process's replica


class _WithLifespan:
    """The routes as a server wants them that asks applications to start up and shut down."""

    def __init__(self, routes: App) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._routes(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


def _app() -> _WithLifespan:
    """Called in a replica's process, once its constructor has loaded the model."""
    assert _routes is not None
    return _WithLifespan(_routes)


class Replica:
    """What Ray asks of one, whatever is over its engine."""

    _server: Embedded

    async def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        if (trouble := self._server.trouble()) is not None:
            raise EngineError(trouble)

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            await server.close()


@serve.deployment
@serve.ingress(_app)
class HunchServer(Replica):
    """A replica: an engine in a process of its own, and the HTTP routes over it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, arguments: Mapping[str, Any], name: str
    ) -> None:
        # Ray copies this class into its processes, but not the module it writes to.
        from hunch.integrations import ray as module

        config = config_from_vllm(**arguments)
        # Ray is the way in: names of hosts, and who may ask, are its business.
        settings = ServeConfig(served_model_names=(name,), host="0.0.0.0", max_queue=4096)
        self._server = Embedded(config, settings)
        module._routes = await self._server.start()


def build_app(arguments: Mapping[str, Any]) -> Any:
    """A Ray Serve application, for `serve.run` and `serve run`."""
    own = {one.name for one in fields(Deployment)}
    wishes = Deployment(**{key: value for key, value in arguments.items() if key in own})
    rest = {key: value for key, value in arguments.items() if key not in own}
    config = config_from_vllm(**rest)  # raises here, not in a replica
    size = config.parallel.tensor_parallel_size
    num_gpus = wishes.num_gpus
    if num_gpus is None and _has_gpus() and config.model.device != "cpu":
        num_gpus = size
    num_cpus = float(size) if wishes.num_cpus is None else wishes.num_cpus
    options: dict[str, Any] = {
        **placement(size, num_cpus, num_gpus or 0),
        "max_ongoing_requests": wishes.max_ongoing_requests,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
    }
    if wishes.max_replicas > wishes.min_replicas:
        options["autoscaling_config"] = {
            "min_replicas": wishes.min_replicas,
            "max_replicas": wishes.max_replicas,
            "target_ongoing_requests": wishes.target_ongoing_requests,
            **wishes.autoscaling_config,
        }
    else:
        options["num_replicas"] = wishes.min_replicas
    model = str(rest.get("model", DEFAULT_MODEL))
    name = wishes.served_model_name or os.path.basename(model)
    deployment: Any = HunchServer
    return deployment.options(**options).bind(rest, name)


def placement(
    num_ranks: int, num_cpus: float, num_gpus: float, others: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What a replica takes of a node. Ranks are children of the replica's process: all they need is
    in one bundle of a placement group, so that it is reserved on one node or not at all."""
    actor: dict[str, Any] = {"num_cpus": num_cpus}
    if num_gpus:
        actor["num_gpus"] = num_gpus
    if others:
        actor["resources"] = dict(others)
    if num_ranks == 1:
        return {"ray_actor_options": actor}
    bundle = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {}), **(others or {})}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
    }


def _has_gpus() -> bool:
    import ray

    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)

"""Ray Serve LLM: hunch as the server class behind Ray's own OpenAI ingress.

    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "smollm2", "model_source": "HuggingFaceTB/SmolLM2-135M"},
        engine_kwargs={"speculate": "auto", "tensor_parallel_size": 2},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
        server_cls="hunch.integrations.ray_llm:HunchServer",
    )
    serve.run(build_openai_app({"llm_configs": [config]}))

`engine_kwargs` are the arguments of `hunch.LLM`. Ray Serve LLM itself needs vLLM or SGLang to be
installed (`pip install ray[llm]`), for its types of requests and answers; neither is run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ray import serve

from hunch.compat import config_from_vllm
from hunch.errors import ConfigError
from hunch.integrations.ray import DRAIN_SECONDS, Deployment, Replica, placement
from hunch.server.embedded import Embedded, Reply
from hunch.server.settings import ServeConfig


def _asked(path: str, class_name: str) -> Callable[..., AsyncGenerator[Any, None]]:
    """A method that asks one of the routes."""

    async def ask(
        self: HunchServer, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        async for answer in self._ask(path, request, class_name):
            yield answer

    return ask


class HunchServer(Replica):
    """A replica: an engine in a process of its own. Ray's ingress calls the methods by name."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        self._llm_config = llm_config
        settings = ServeConfig(
            served_model_names=(llm_config.model_id,), host="0.0.0.0", max_queue=4096
        )
        self._server = Embedded(config_from_vllm(**engine_arguments(llm_config)), settings)
        self._routes = await self._server.start()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """The options of replicas: the user's, and room for every rank on one node."""
        config = config_from_vllm(**engine_arguments(llm_config))  # raises here, not in a replica
        options = copy.deepcopy(dict(llm_config.deployment_config))
        actor = dict(options.pop("ray_actor_options", None) or {})
        size = config.parallel.tensor_parallel_size
        has_gpus = config.model.device != "cpu" and llm_config.accelerator_config.kind != "cpu"
        others = dict(actor.pop("resources", {}))
        if llm_config.accelerator_type:
            others[f"accelerator_type:{llm_config.accelerator_type}"] = 0.001
        given = llm_config.placement_group_config or {}
        if given.get("bundles") and len(given["bundles"]) > 1:
            raise ConfigError(
                f"placement_group_config has {len(given['bundles'])} bundles; a replica of hunch "
                "and its ranks are one process tree on one node: give one bundle, or none"
            )
        (bundle,) = given.get("bundles") or [{}]
        num_cpus = bundle.get("CPU", actor.pop("num_cpus", float(size)))
        num_gpus = bundle.get("GPU", actor.pop("num_gpus", float(size * has_gpus)))
        found = placement(size, num_cpus, num_gpus, others)
        environment = {**actor.pop("runtime_env", {}), **(llm_config.runtime_env or {})}
        if environment:
            actor["runtime_env"] = environment
        found["ray_actor_options"] |= actor
        if isinstance(scaling := options.get("autoscaling_config"), Mapping):
            # Ray's own default here is so high that the queue never brings another replica.
            usual = {"target_ongoing_requests": Deployment.target_ongoing_requests}
            options["autoscaling_config"] = {**usual, **scaling}
        usual = {"max_ongoing_requests": Deployment.max_ongoing_requests}
        return {"graceful_shutdown_timeout_s": DRAIN_SECONDS, **usual, **options, **found}

    # --- what the ingress calls -------------------------------------------------------------------

    chat = _asked("/v1/chat/completions", "ChatCompletionResponse")
    completions = _asked("/v1/completions", "CompletionResponse")
    embeddings = _asked("/v1/embeddings", "EmbeddingResponse")
    tokenize = _asked("/tokenize", "TokenizeResponse")
    detokenize = _asked("/detokenize", "DetokenizeResponse")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What a request router of the user's own may read of this replica."""
        stats = self._server.engine.stats()
        return {name: stats.get(name, 0) for name in ("num_running", "num_waiting", "kv_usage")}

    async def llm_config(self) -> Any:
        return self._llm_config

    async def _ask(self, path: str, request: Any, class_name: str) -> AsyncGenerator[Any, None]:
        """Events as they come, as text; or one answer, or one error, of Ray's type."""
        body = request.model_dump(mode="json", exclude_unset=True)
        request_id = str(body.pop("request_id", "") or serve_request_id())
        whole, status = b"", 500
        async for status, piece in Reply(self._routes, path, body, request_id).pieces():
            if status == 200 and body.get("stream"):
                yield piece.decode()
            else:
                whole += piece
        if whole:
            yield _answer(class_name, status, json.loads(whole))


def engine_arguments(llm_config: Any) -> dict[str, Any]:
    source = llm_config.model_loading_config.model_source or llm_config.model_id
    if not isinstance(source, str):
        raise ConfigError("model_source must be a path or a hub id; mirrors are not fetched")
    return {"model": source, **llm_config.engine_kwargs}


def serve_request_id() -> str:
    """The id Ray Serve gave to the request that is being answered."""
    return str(serve.context._get_serve_request_context().request_id)


def _answer(class_name: str, status: int, found: Mapping[str, Any]) -> Any:
    # There only with ray[llm].
    from ray.llm._internal.serve.core.configs import openai_api_models as models

    if status == 200:
        return getattr(models, class_name)(**found)
    error = found["error"]
    info = models.ErrorInfo(message=error["message"], type=error["type"] or "error", code=status)
    return models.ErrorResponse(error=info)

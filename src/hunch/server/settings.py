"""What the HTTP side is told at its start: where to listen, whom to serve, how much to accept."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from hunch.chat.turn import OWN_VALUES
from hunch.config import json_object
from hunch.errors import ConfigError

LOG_FORMATS = ("text", "json")
NO_LIMIT = 2**31
_NOT_NEGATIVE = (
    "engine_restarts", "idle_unload", "max_loaded_models", "max_model_bytes", "max_queue",
    "drain_timeout", "stats_interval", "sse_keep_alive_interval", "death_grace",
)  # fmt: skip
_LEAST = dict.fromkeys(("max_connections", "workers", "replicas"), 1) | {"engine_timeout": 5}
_LEAST |= dict.fromkeys(_NOT_NEGATIVE, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that one request may ask for. Every field has a flag of the same name."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 64  # prompts in one /v1/completions body
    max_messages: int = 1024
    max_inputs: int = 2048  # texts of one /v1/embeddings body
    max_n: int = 16  # answers per prompt
    max_sequences: int = 64  # prompts times n
    max_tokens: int | None = None  # None: the model's context
    max_stop: int = 16  # stop strings, and stop token ids
    max_stop_chars: int = 256  # length of one stop string
    max_bad_words: int = 64
    max_logit_bias: int = 1024
    max_logprobs: int = 20  # -1: as many as there are tokens
    max_grammar_bytes: int = 64 * 1024  # a schema, regex, grammar, or all choices together
    max_tools: int = 128
    max_tools_bytes: int = 192 * 1024  # the schemas of all tools together

    def __post_init__(self) -> None:
        if self.max_logprobs == -1:
            object.__setattr__(self, "max_logprobs", NO_LIMIT)
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Everything `hunch serve` needs besides the engine's own configuration."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""  # a path: a Unix domain socket in place of host and port
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ("hunch",)  # the first is the one answers carry
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names clients may call it by, where that is checked
    ssl_keyfile: str = ""  # with ssl_certfile: https
    ssl_certfile: str = ""
    root_path: str = ""  # where a proxy mounts it
    max_connections: int = 4096  # of each HTTP process
    workers: int = 1  # HTTP processes over the one engine
    replicas: int = 1  # engines, each with a copy of the model, that share the requests
    models: tuple[tuple[str, str], ...] = ()  # further models: name, and what is loaded for it
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA adapters of the first: name and directory
    idle_unload: float = 0.0  # seconds without a request that unload a model; 0: never
    max_loaded_models: int = 0  # models loaded at once; 0: all that are asked for
    max_model_bytes: int = 0  # memory of all models' processes together; 0: no limit
    max_queue: int = 256  # sequences that may be open beyond those that run at once
    request_timeout: float = 600.0  # seconds from arrival to the last byte
    drain_timeout: float = 30.0  # seconds that running requests get after SIGTERM
    stats_interval: float = 10.0  # seconds between two status lines; 0: none
    engine_timeout: float = 15.0  # seconds without a sign of life that end a hung engine
    engine_restarts: int = 1  # times a dead or hung engine is started again
    death_grace: float = 1.0  # seconds to tell clients that the engine died, before leaving
    log_format: str = "text"
    log_level: str = "info"
    generation_config: str = "auto"  # auto: the model's; vllm or off: none; or a file
    override_generation_config: str = ""  # a JSON object that goes before it
    default_chat_template_kwargs: str = ""  # a JSON object that templates read
    sse_keep_alive_interval: float = 0.0  # seconds of silence that a comment ends; 0: none is sent
    return_tokens_as_token_ids: bool = False  # "token_id:5" for requests that do not say
    force_usage: bool = False  # streams end with their usage, asked for or not
    incremental_streaming_output: bool = False  # events of /generate hold what is new, not all
    disable_log_requests: bool = False  # no line per request, unless it failed
    prompt_log: str = ""  # a file that every prompt is added to; empty: none is kept
    allow_request_chat_template: bool = False
    allow_synthetic: bool = False  # serve with drafts made up for a benchmark
    has_page: bool = True
    hides_guesses: bool = False  # `origins` leave out what was guessed wrong
    version: str = "unknown"
    limits: Limits = field(default_factory=Limits)

    @property
    def name(self) -> str:
        """The model's, as answers carry it."""
        return self.served_model_names[0]

    @property
    def num_engines(self) -> int:
        """Engines that may be loaded at once, each with a model or an adapter of its own."""
        count = 1 + len(self.models) + len(self.adapters)
        return min(count, self.max_loaded_models or count)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.uds or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that are checked against the Host header; None: any will do.

        Who has a key, or asked the whole network in, is not protected by a name.
        """
        if self.api_keys or self.uds or not (self.is_local or self.allowed_hosts):
            return None
        return frozenset({"localhost", *(name.lower() for name in self.allowed_hosts)})

    @property
    def mount(self) -> str:
        """What a proxy puts before every path: nothing, or a slash and names."""
        names = self.root_path.strip("/")
        return f"/{names}" if names else ""

    @property
    def template_values(self) -> dict[str, Any]:
        return json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)

    @property
    def sampling(self) -> dict[str, Any]:
        """What goes before a model's own advice."""
        return json_object("override_generation_config", self.override_generation_config)

    def __post_init__(self) -> None:
        for name in ("default_chat_template_kwargs", "override_generation_config"):
            json_object(name, getattr(self, name))
        if taken := OWN_VALUES & self.template_values.keys():
            raise ConfigError(f"default_chat_template_kwargs: {min(taken)} is for requests to say")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 0 to 65535")
        if self.uds and self.workers > 1:
            raise ConfigError("uds: a socket of a file system goes with one HTTP process")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile go together")
        for name in ("ssl_keyfile", "ssl_certfile"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a file")
        if not self.served_model_names:
            raise ConfigError("served_model_name: at least one name is needed")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key: a key must not be empty")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format={self.log_format!r} must be one of {LOG_FORMATS}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level={self.log_level!r} must be debug, info, warning or error")
        if self.request_timeout <= 0:
            raise ConfigError(f"request_timeout={self.request_timeout} must be above 0")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be {least} or more")
        others = (*self.models, *self.adapters)
        if self.replicas > 1 and (self.workers > 1 or others):
            raise ConfigError("replicas above 1 go with one HTTP process and one model")
        if others and self.workers > 1:
            raise ConfigError("workers above 1 serve one model; give one, or --workers 1")
        names = [*self.served_model_names, *(name for name, _ in others)]
        if len(set(names)) < len(names):
            raise ConfigError(f"two models have the same name: {', '.join(names)}")

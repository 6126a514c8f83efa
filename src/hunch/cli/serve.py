"""hunch serve: an OpenAI-compatible server. Flags are its settings', vLLM's and SGLang's."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from hunch.compat import (
    config_from_sglang,
    known_arguments,
    translate_flags,
    without_effect,
    words_of_sglang,
)
from hunch.config import (
    DEFAULT_MODEL,
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from hunch.errors import ConfigError

# How `serve` must be registered: it reads its own flags, so that vLLM's are taken too.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

_HELP = {
    "host": "Address to listen on; 0.0.0.0 is every one the machine has.",
    "port": "Port to listen on; 0 takes a free one.",
    "cors_origins": "A web origin that may call the API; may be repeated.",
    "allowed_hosts": "A name clients may call this machine by; may be repeated.",
    "ssl_keyfile": "The key of a TLS certificate: https is served.",
    "ssl_certfile": "The TLS certificate.",
    "root_path": "Where a proxy mounts the server.",
    "max_connections": "Connections open at once, of each HTTP process.",
    "workers": "HTTP processes over the one engine.",
    "replicas": "Engines, each with a copy of the model; requests that begin alike share one.",
    "idle_unload": "Seconds without a request that unload a model; 0: never.",
    "max_loaded_models": "Models loaded at once; 0: all that are asked for.",
    "max_model_bytes": "Memory of all models' processes together; 0: no limit.",
    "max_queue": "Sequences that may wait; more get 429.",
    "request_timeout": "Seconds from a request's arrival to its last byte.",
    "drain_timeout": "Seconds that running requests get after SIGTERM.",
    "stats_interval": "Seconds between two status lines; 0: none.",
    "engine_timeout": "Seconds without a sign of life that end a hung engine.",
    "engine_restarts": "Times a dead or hung engine is started again.",
    "log_format": "text or json.",
    "log_level": "debug, info, warning or error.",
    "generation_config": "Sampling defaults: auto is the model's, off none, or a file.",
    "disable_log_requests": "Log no line for each request; failures are logged all the same.",
    "prompt_log": "A file to add every prompt to, for hunch train --resume; default: none.",
    "allow_request_chat_template": "Let requests bring their own (sandboxed) chat template.",
    "allow_synthetic": "Serve with --speculate synthetic, whose drafts are made up: benchmarks.",
    "max_body_bytes": "Bytes of a body.",
    "max_prompts": "Prompts of one /v1/completions body.",
    "max_messages": "Messages of a conversation.",
    "max_inputs": "Texts of one /v1/embeddings body.",
    "max_n": "Answers per prompt.",
    "max_sequences": "Prompts times answers.",
    "max_tokens": "Tokens of an answer; default: the model's context.",
    "max_stop": "Stop strings, and stop token ids.",
    "max_stop_chars": "Characters of one stop string.",
    "max_bad_words": "Bad words.",
    "max_logit_bias": "Tokens with a bias.",
    "max_logprobs": "Log-probabilities per token.",
    "max_grammar_bytes": "Bytes of a schema, regex or grammar, or of all choices together.",
    "max_tools": "Tools.",
    "max_tools_bytes": "Bytes of the schemas of all tools together.",
    "tokenizer": "Where the tokenizer is, if not beside the weights.",
    "revision": "Branch, tag or commit of the model on the hub.",
    "download_dir": "Where models are fetched to; default: the user's caches.",
    "dtype": "auto (as the files have it), float32, bfloat16, float16, fp8, int8 or int4.",
    "kv_cache_dtype": "Of keys and values: auto, or on a GPU fp8 or int8 for half the memory.",
    "quantization": "Form of the weights; default: as the files have it.",
    "device": "auto, cpu or cuda.",
    "max_model_len": "Longest prompt and answer together; default: the model's own.",
    "seed": "Seeds requests that bring none.",
    "threads": "CPU threads; default: OMP_NUM_THREADS, or the machine's cores.",
    "kernels": "auto, or torch: torch's own products alone.",
    "activation_bits": "8 or 14, on a CPU before quantised weights; 14 is nearer to float32.",
    "lora": "A LoRA adapter (PEFT's directory) to merge into the model.",
    "chat_template": "A template, or a file that holds one.",
    "tool_call_parser": "How tool calls are written (vLLM's names); auto: by the chat template.",
    "reasoning_parser": "How reasoning is marked (vLLM's names); auto: by the chat template.",
    "logprobs_mode": "raw_logprobs, or processed_logprobs: after penalties, filters and grammar.",
    "block_size": "Tokens of a block of the KV cache.",
    "kv_bytes": "Memory for KV; default: a share of what the device has free.",
    "num_blocks": "Blocks of the KV cache, in place of --kv-bytes.",
    "gpu_memory_utilization": "Share of a GPU's memory for weights and KV.",
    "engines_per_device": "Engines that share a GPU's memory, this one among them.",
    "enable_prefix_caching": "Keep what prompts begin with for later requests (on by default).",
    "kv_events_config": "Tell routers by ZeroMQ which prefixes are cached: vLLM's JSON object.",
    "max_num_seqs": "Requests that run at once; default: 64, on a GPU 256.",
    "max_num_batched_tokens": "Tokens of one step; default: 512, on a GPU 8192.",
    "depth": "Steps launched ahead of their results: 0 or 1; default: 1 on a GPU.",
    "tensor_parallel_size": "Devices over which every layer is split.",
    "pipeline_parallel_size": "Stages of layers, each on devices of its own.",
    "speculate": "What drafts: NAME[:PATH][:KEY=VALUE]...; default: auto.",
    "verifier": "Who judges drafts: exact, rejection, block (lossless) or typical (LOSSY).",
    "always_draft": "Draft whether it pays or not: the same guesses in every run.",
    "speculative_config": "vLLM's JSON object that says how to draft.",
    "speculative_model": "vLLM's name for a drafter's path, or [ngram].",
    "num_speculative_tokens": "vLLM's name for the length of a draft.",
    "ngram_prompt_lookup_max": "Longest match that ngram looks up [4].",
    "ngram_prompt_lookup_min": "Shortest match that ngram looks up [1].",
    "speculative_max_model_len": "Positions a drafter looks back.",
    "speculative_device": "Device of a draft model; default: the target's.",
    "speculative_draft_tensor_parallel_size": "Devices of a draft model.",
    "speculative_disable_by_batch_size": "Draft nothing from so many running requests on.",
    "spec_decoding_acceptance_method": "vLLM's name for the verifier.",
    "data_parallel_size": "vLLM's name for --replicas.",
    "dp_size": "SGLang's name for --replicas.",
    "task": "generate alone; /v1/embeddings is served beside it.",
    "runner": "generate alone; /v1/embeddings is served beside it.",
}
ADAPTING = {"auto", "suffix", "draft", "dspark"}  # methods that learn from what is served
_SWITCHES = (  # flags that take no value, most of them vLLM's
    "always_draft",
    "use_v2_block_manager",
    "enforce_eager",
    "enable_chunked_prefill",
    "disable_custom_all_reduce",
    "trust_remote_code",
    "speculative_disable_mqa_scorer",
    "disable_logprobs_during_spec_decoding",
    "worker_use_ray",
    "enable_auto_tool_choice",
    "enable_lora",
    "disable_radix_cache",
    "disable_cuda_graph",
    "enable_torch_compile",
    "skip_server_warmup",
    "disable_chunked_mm_input",
    "async_scheduling",
)
_ALIASES = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "allow_request_chat_template": ("--trust-request-chat-template",),
}
_OWN = (
    "api_keys",
    "served_model_names",
    "limits",
    "death_grace",
    "models",
    "adapters",
    "has_page",
    "hides_guesses",
    "version",
)


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, as OpenAI does; --help lists the flags."""
    raise typer.Exit(run(ctx.args))


def run(words: Sequence[str]) -> int:
    """Start a server from command-line words; returns its exit code."""
    from hunch import __version__
    from hunch.server.settings import Limits, ServeConfig

    given = _parse(translate_flags([_dashed(word) for word in words]))
    limits = Limits(**_take(given, Limits))
    settings = _take(given, ServeConfig)
    if given.pop("disable_log_stats", False):
        if settings.get("stats_interval"):
            raise ConfigError("--disable-log-stats and --stats-interval contradict each other")
        settings["stats_interval"] = 0.0
    by_flag, by_place = given.pop("model_flag", None), given.pop("model", [])
    if by_flag and by_place and by_place != [by_flag]:
        raise ConfigError(f"two models given: {by_place[0]!r} and --model {by_flag!r}; give one")
    (first, model), *others = map(_named, by_place or [by_flag or DEFAULT_MODEL])
    keys = given.pop("api_key", None) or _keys_from_environment()
    names = given.pop("served_model_name", None) or [first]
    adapters = map(_adapter, given.pop("lora_modules", None) or ())
    has_page = not given.pop("no_page", False)
    is_adapting = given.pop("adapt", False)
    config = _engine_config(model, given)
    if is_adapting:
        config = _adapting(config)
    for name in ("cors_origins", "allowed_hosts"):
        if name in settings:
            settings[name] = tuple(settings[name])
    try:
        from hunch.server.run import serve as serve_forever
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not installed; install hunch with its "
            "extra `serve` (in a checkout: pip install -e '.[serve]')"
        ) from None
    return serve_forever(
        config,
        ServeConfig(
            **settings,
            api_keys=tuple(keys),
            served_model_names=tuple(names),
            has_page=has_page,
            models=tuple(others),
            adapters=tuple(adapters),
            limits=limits,
            version=__version__,
        ),
    )


def _named(word: str) -> tuple[str, str]:
    """'NAME=MODEL', or a model that is its own name."""
    name, equals, model = word.partition("=")
    return (name, model) if equals and name and model else (word, word)


def _adapter(word: str) -> tuple[str, str]:
    """'NAME=PATH', or vLLM's {"name": NAME, "path": PATH}."""
    try:
        given = json.loads(word) if word.startswith("{") else {}
    except ValueError as error:
        raise ConfigError(f"--lora-modules {word}: not JSON ({error})") from None
    name, _, path = word.partition("=")
    if given:
        name, path = str(given.get("name") or ""), str(given.get("path") or "")
    if not name or not path:
        raise ConfigError(f"--lora-modules {word}: give NAME=PATH")
    if not (Path(path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora-modules {word}: {path} has no adapter_config.json; an adapter is a directory "
            "as PEFT writes it"
        )
    return name, path


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Flags by name; an unknown one is an error that names the nearest known one."""
    parser = _parser()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return vars(given)


def _engine_config(model: str, given: dict[str, Any]) -> Config:
    template = given.get("chat_template")
    if template is not None and "{" not in template:
        path = Path(template)
        if not path.is_file():
            raise ConfigError(f"chat_template: {template!r} is neither a template nor a file")
        given["chat_template"] = path.read_text(encoding="utf-8")
    return config_from_sglang(model=model, **given)


def _adapting(config: Config) -> Config:
    spec = config.spec
    if spec.method not in ADAPTING:
        raise ConfigError(
            f"--adapt teaches lookups and drafters of `hunch train`, and speculate={spec.method!r} "
            f"is neither; use auto or one of {', '.join(sorted(ADAPTING))}"
        )
    return replace(config, spec=replace(spec, options={**spec.options, "adapt": "true"}))


def _keys_from_environment() -> list[str]:
    """Keys in the environment are not shown by `ps`."""
    text = os.environ.get("HUNCH_API_KEY", "")
    return [key for key in text.split(",") if key]


def _take(given: dict[str, Any], section: type) -> dict[str, Any]:
    """The flags that are fields of `section`, taken out of `given`."""
    names = [field.name for field in fields(section)]
    return {name: given.pop(name) for name in names if name in given}


def _parser() -> argparse.ArgumentParser:
    from hunch.server.settings import Limits, ServeConfig

    parser = argparse.ArgumentParser(
        prog="hunch serve",
        usage="hunch serve [MODEL ...] [flags]",
        description="Serve a model over HTTP, as OpenAI does. Flags may use '-' or '_'.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "model",
        nargs="*",
        help=f"MODEL or NAME=MODEL; further ones are loaded when asked for [{DEFAULT_MODEL}]",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    server = parser.add_argument_group("server")
    server.add_argument("--api-key", action="append", help="required of clients; may be repeated")
    server.add_argument("--served-model-name", nargs="+", help="names clients may use")
    server.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="LoRA adapters of the first model, each served under its name",
    )
    server.add_argument(
        "--adapt",
        action="store_true",
        help="learn from served answers, which stay in memory: lookups from their phrases, a "
        "drafter of `hunch train` in idle time",
    )
    server.add_argument("--no-page", action="store_true", help="serve no page at /")
    server.add_argument(
        "--disable-log-stats", action="store_true", help="print no status lines, as in vLLM"
    )
    _add_fields(server, ServeConfig, skip=_OWN)
    _add_fields(parser.add_argument_group("limits per request"), Limits)
    engine = parser.add_argument_group("engine")
    for section in (ModelConfig, CacheConfig, ScheduleConfig, ParallelConfig):
        _add_fields(engine, section, skip=("model", "max_queue"))
    taken = {action.dest for action in parser._actions}
    unused = parser.add_argument_group("taken for vLLM's sake, without effect here")
    for name in sorted(known_arguments() - taken - {"model", "log_level"}):
        group = unused if name in without_effect() else engine
        _add(group, name, bool if name in _SWITCHES else _value)
    other = parser.add_argument_group("SGLang's names")
    for name in sorted(words_of_sglang()):
        _add(other, name, bool if name in _SWITCHES else _value)
    return parser


def _add_fields(group: Any, section: type, skip: Sequence[str] = ()) -> None:
    hints = get_type_hints(section)
    for field in fields(section):
        if field.name in skip:
            continue
        kinds = [
            kind for kind in (bool, int, float, str) if hints[field.name] in (kind, kind | None)
        ]
        default = None if field.default is MISSING else field.default
        _add(group, field.name, kinds[0] if kinds else tuple, default)


def _add(group: Any, name: str, kind: Any, default: Any = None) -> None:
    flags = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, ())]
    text = _HELP.get(name) or without_effect().get(name) or words_of_sglang()[name]
    if default not in (None, (), "") and kind is not bool:
        text = f"{text} [{default}]".strip()
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, dest=name, help=text)
    elif kind is tuple:
        group.add_argument(*flags, action="append", dest=name, help=text)
    else:
        group.add_argument(*flags, type=kind, dest=name, help=text, metavar="VALUE")


def _value(text: str) -> Any:
    """A number or JSON object where it is one; else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

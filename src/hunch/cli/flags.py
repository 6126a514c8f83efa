"""The flags of `hunch serve`: its settings', vLLM's and SGLang's, each with a word of help."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from hunch import EngineArgs
from hunch.compat import json_or_text, known_arguments, without_effect, words_of_sglang
from hunch.config import DEFAULT_MODEL, CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig

_DESCRIPTION = """\
Serve a model over HTTP with OpenAI's API, and a page at /.

  hunch serve                                        the default model
  hunch serve org/name:Q4_K_M --port 9000            a GGUF file of the hub
  hunch serve MODEL --speculate draft:PATH           a drafter you choose
  hunch serve MODEL --host 0.0.0.0 --api-key SECRET  for other machines

Flags may be written with '-' or '_'. Those of vLLM and SGLang are taken too."""
_METAVARS = {  # by the last word of a flag's name
    "bytes": "BYTES", "timeout": "SECONDS", "interval": "SECONDS", "unload": "SECONDS",
    "config": "JSON", "kwargs": "JSON", "keyfile": "FILE", "certfile": "FILE", "log": "FILE",
    "generation_config": "auto|off|FILE", "dir": "DIR", "lora": "DIR", "origins": "URL",
    "hosts": "NAME", "speculate": "METHOD",
}  # fmt: skip
_HELP = {
    "help_all": "Show the flags of vLLM and SGLang too, with what they mean here.",
    "adapt": "Learn from served answers, which stay in memory: lookups from their phrases, a "
    "drafter of `hunch train` in idle time.",
    "api_key": "Required of clients; may be repeated. Or set HUNCH_API_KEY.",
    "served_model_name": "Names that clients may use.",
    "lora_modules": "LoRA adapters of the first model, each served under its name.",
    "host": "Address to listen on; 0.0.0.0 is every one the machine has.",
    "port": "Port to listen on; 0 takes a free one.",
    "cors_origins": "A web origin that may call the API; may be repeated.",
    "allowed_hosts": "A name clients may call this machine by; may be repeated.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens by id, as token_id:5.",
    "uds": "A path: listen on a Unix domain socket there, not on a port.",
    "sse_keep_alive_interval": "Seconds of silence in a stream after which a comment is sent.",
    "ssl_keyfile": "The key of a TLS certificate: https is served.",
    "ssl_certfile": "The TLS certificate.",
    "root_path": "Where a proxy mounts the server.",
    "max_connections": "Connections open at once, of each HTTP process.",
    "workers": "HTTP processes over the one engine.",
    "replicas": "Engines, each with a copy of the model; prompts that begin alike share one.",
    "idle_unload": "Unload a model after so long without a request; 0: never.",
    "max_loaded_models": "Models loaded at once; 0: all that are asked for.",
    "max_model_bytes": "Memory of all models' processes together; 0: no limit.",
    "max_queue": "Requests that may wait; more are answered with 429.",
    "request_timeout": "From a request's arrival to its last byte.",
    "drain_timeout": "How long running requests may go on after SIGTERM.",
    "stats_interval": "Between two status lines; 0: none.",
    "engine_timeout": "Without a sign of life for so long, an engine counts as hung.",
    "engine_restarts": "How often a dead or hung engine is started again.",
    "log_format": "text or json.",
    "log_level": "debug, info, warning or error.",
    "generation_config": "Sampling defaults: auto is the model's, off none, or a file.",
    "override_generation_config": "Sampling defaults that go before those.",
    "default_chat_template_kwargs": "Values for the chat template.",
    "force_usage": "End every stream with its token counts, asked for or not.",
    "incremental_streaming_output": "Events of /generate hold what is new, not all so far.",
    "disable_log_requests": "Log no line for each request; failures are logged all the same.",
    "prompt_log": "A file to add every prompt to, for hunch train --resume; default: none.",
    "allow_request_chat_template": "Let requests bring their own (sandboxed) chat template.",
    "allow_synthetic": "Allow --speculate synthetic, whose guesses are made up, for benchmarks.",
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
    "max_logprobs": "Log-probabilities per token; -1: no limit.",
    "max_grammar_bytes": "Bytes of a schema, regex or grammar, or of all choices together.",
    "max_tools": "Tools.",
    "max_tools_bytes": "Bytes of the schemas of all tools together.",
    "tokenizer": "Where the tokenizer is, if not beside the weights.",
    "revision": "Branch, tag or commit of the model on the hub.",
    "download_dir": "Where models are fetched to; default: the user's caches.",
    "dtype": "auto (as the files have it), float32, bfloat16, float16, fp8, int8 or int4.",
    "kv_cache_dtype": "Of keys and values: auto, or fp8 or int8 for half the memory.",
    "quantization": "Form of the weights; default: as the files have it.",
    "device": "auto, cpu or cuda.",
    "max_model_len": "Longest prompt and answer together; default: the model's own.",
    "seed": "Seeds requests that bring none.",
    "threads": "CPU threads; default: OMP_NUM_THREADS, or the machine's cores.",
    "kernels": "auto, or torch to leave hunch's own out.",
    "activation_bits": "Bits of activations beside quantised weights on a CPU: 8 is faster, 14 "
    "nearer to float32; auto takes 14 for small models.",
    "hf_overrides": "A JSON object of values in place of config.json's; the text depends on them.",
    "lora": "A LoRA adapter (PEFT's directory) to merge into the model.",
    "chat_template": "A template, or a file that holds one.",
    "tool_call_parser": "How tool calls are written (vLLM's names); auto: by the chat template.",
    "reasoning_parser": "How reasoning is marked (vLLM's names); auto: by the chat template.",
    "logprobs_mode": "raw_logprobs, or processed_logprobs: after penalties, filters and grammar.",
    "block_size": "Tokens of a block of the KV cache.",
    "kv_bytes": "Memory for KV; default: a share of what the device has free.",
    "num_blocks": "Blocks of the KV cache, in place of --kv-bytes.",
    "gpu_memory_utilization": "Share of a GPU's memory for weights and KV.",
    "engines_per_device": "How many engines share the GPU's memory.",
    "enable_prefix_caching": "Reuse the KV of prompts that begin alike (on by default).",
    "kv_events_config": "Tell routers by ZeroMQ which prefixes are cached, in vLLM's form.",
    "max_num_seqs": "Requests that run at once; default: 64, on a GPU 256.",
    "max_num_batched_tokens": "Tokens of one step; default: 512, on a GPU 8192.",
    "depth": "Steps launched ahead of their results: 0 or 1; default: 1 on a GPU.",
    "tensor_parallel_size": "Devices over which every layer is split.",
    "pipeline_parallel_size": "Stages of layers, each on devices of its own.",
    "speculate": "What guesses: NAME[:PATH][:KEY=VALUE]..., say ngram or draft:PATH [auto]",
    "verifier": "How drafts are verified: exact (the text of plain decoding), rejection or block "
    "(the same chances), or typical (LOSSY) [exact]",
    "always_draft": "Draft whether it pays or not: the same guesses in every run.",
    "speculative_config": "vLLM's way to say how to draft.",
    "speculative_model": "vLLM's name for a drafter's path, or [ngram].",
    "num_speculative_tokens": "vLLM's name for the length of a draft.",
    "ngram_prompt_lookup_max": "Longest match that ngram looks up [4].",
    "ngram_prompt_lookup_min": "Shortest match that ngram looks up [1].",
    "speculative_max_model_len": "Positions a drafter looks back.",
    "speculative_device": "Device of a draft model; default: the target's.",
    "speculative_draft_tensor_parallel_size": "Devices of a draft model.",
    "speculative_disable_by_batch_size": "Draft nothing while this many requests or more run.",
    "spec_decoding_acceptance_method": "vLLM's name for the verifier.",
    "data_parallel_size": "vLLM's name for --replicas.",
    "dp_size": "SGLang's name for --replicas.",
    "task": "generate or embed: either way answers and /v1/embeddings are served.",
    "runner": "generate or pooling: either way answers and /v1/embeddings are served.",
    "scheduling_policy": "fcfs or priority; a request's own priority always counts.",
    "skip_tokenizer_init": "No effect: the tokenizer is read all the same.",
}
_ALIASES = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "allow_request_chat_template": ("--trust-request-chat-template",),
}
_OWN = (  # settings without a flag of their name
    "api_keys", "served_model_names", "limits", "death_grace", "models", "adapters", "has_page",
    "hides_guesses", "version",
)  # fmt: skip


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Flags by name; an unknown one is an error that names the nearest known one."""
    parser = make_parser()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return vars(given)


class _Wide(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **given: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **given})


class _HelpAll(argparse.Action):
    """Prints the help with the flags of other servers among the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        make_parser(is_whole=True).print_help()
        parser.exit()


def make_parser(is_whole: bool = False) -> argparse.ArgumentParser:
    """Takes every flag; its help has a line for each of other servers' only if it `is_whole`."""
    from hunch.server.settings import Limits, ServeConfig

    parser = argparse.ArgumentParser(
        prog="hunch serve",
        usage="hunch serve [MODEL ...] [flags]",
        description=_DESCRIPTION,
        formatter_class=_Wide,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, dest="help", help=_HELP["help_all"])
    parser.add_argument(
        "model",
        nargs="*",
        help=f"MODEL or NAME=MODEL; further ones are loaded when asked for [{DEFAULT_MODEL}]",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="The same, as a flag.")
    drafting = parser.add_argument_group("drafting")
    for name in ("speculate", "verifier"):
        _add(drafting, name, json_or_text)
    _add(drafting, "always_draft", bool)
    drafting.add_argument("--adapt", action="store_true", help=_HELP["adapt"])
    server = parser.add_argument_group("server")
    server.add_argument("--api-key", metavar="KEY", action="append", help=_HELP["api_key"])
    server.add_argument(
        "--served-model-name", metavar="NAME", nargs="+", help=_HELP["served_model_name"]
    )
    server.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=PATH", help=_HELP["lora_modules"]
    )
    server.add_argument("--no-page", action="store_true", help="Serve no page at /.")
    server.add_argument(
        "--disable-log-stats", action="store_true", help="Print no status lines, as in vLLM."
    )
    _add_fields(server, ServeConfig, skip=_OWN)
    engine = parser.add_argument_group("engine")
    for section in (ModelConfig, CacheConfig, ScheduleConfig, ParallelConfig):
        _add_fields(engine, section, skip=("model", "max_queue"))
    _add_fields(parser.add_argument_group("limits per request"), Limits)
    _add_names_of_others(parser, is_whole)
    return parser


def _add_names_of_others(parser: argparse.ArgumentParser, is_whole: bool) -> None:
    """vLLM's and SGLang's flags: a line each, or all their names at the end of the help."""
    taken = {action.dest for action in parser._actions} | {"model", "log_level"}
    vllm = sorted(known_arguments() - taken)
    idle = {name for name in vllm if name in without_effect()}
    idle |= {name for name, text in words_of_sglang().items() if text.startswith("No effect")}
    used = sorted({*vllm, *words_of_sglang()} - idle)
    for title, names in (
        ("vLLM's and SGLang's names", used),
        ("taken for their sake, without effect here", sorted(idle)),
    ):
        group = parser.add_argument_group(title if is_whole else None)
        for name in names:
            value_type = bool if EngineArgs.is_switch(name) else json_or_text
            _add(group, name, value_type, is_shown=is_whole)
        if not is_whole:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            width = shutil.get_terminal_size().columns - 4
            lines = textwrap.wrap(flags, width, break_on_hyphens=False)
            before = [parser.epilog] if parser.epilog else []
            indented = (f"  {line}" for line in lines)
            parser.epilog = "\n".join((*before, f"{title}:", *indented, ""))


def _add_fields(group: Any, section: type, skip: Sequence[str] = ()) -> None:
    hints = get_type_hints(section)
    for field in fields(section):
        if field.name in skip:
            continue
        hint = hints[field.name]
        types = [each for each in (bool, int, float, str) if hint in (each, each | None)]
        default = None if field.default is MISSING else field.default
        other = json_or_text if hint == int | str else tuple
        _add(group, field.name, types[0] if types else other, default)


def _add(
    group: Any, name: str, value_type: Any, default: Any = None, is_shown: bool = True
) -> None:
    flags = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, ())]
    text = _HELP.get(name) or without_effect().get(name) or words_of_sglang()[name]
    if default not in (None, (), "") and value_type is not bool:
        text = f"{text} [{default}]".strip()
    if not is_shown:
        text = argparse.SUPPRESS
    if value_type is bool:
        for flag in flags:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, dest=name, help=text)
            text = argparse.SUPPRESS  # another name need not be listed
        return
    word = (
        _METAVARS.get(name)
        or _METAVARS.get(name.rpartition("_")[2])
        or {int: "N", float: "X"}.get(value_type, "VALUE")
    )
    how = {"action": "append"} if value_type is tuple else {"type": value_type}
    group.add_argument(*flags, **how, dest=name, help=text, metavar=word)

"""SGLang's argument names, translated to our config; answers in SGLang's form."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hunch.compat.vllm import (
    GRAPHS,
    WEIGHTLESS,
    config_from_vllm,
    known_arguments,
    known_names,
    method_of,
    tell_no_effect,
    whole,
)
from hunch.config import Config, say_once
from hunch.errors import ConfigError, RequestError
from hunch.registry import unknown
from hunch.types import Logprob, RequestOutput, SamplingParams, plain_only

_SGLANG_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "cuda_graph_max_bs": ((), GRAPHS),
    "disable_cuda_graph": ((False,), GRAPHS),
    "enable_torch_compile": ((False,), "hunch's kernels are compiled already"),
    "attention_backend": ((), "hunch has one attention per device"),
    "sampling_backend": ((), "hunch has one way to sample"),
    "skip_server_warmup": ((True,), "there is no warm-up to skip"),
}
_SGLANG = {  # SGLang's engine arguments -> ours
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "random_seed": "seed",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
}
_SGLANG_SPEC = (  # what of SGLang's says how to draft
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
_SGLANG_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_SGLANG_ALONE: dict[str, tuple[tuple[Any, ...], str]] = {
    # SGLang's sampling parameters -> values that ask for nothing, and what to do in place of others
    "custom_params": (({},), "logit_bias, allowed_token_ids and grammars say what may be chosen"),
    "stop_regex": (("", []), "give stop, or a regex that the whole answer follows"),
    "stream_interval": ((1,), "an answer is told as it grows; leave out what comes between"),
}
_SGLANG_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_SGLANG_GRAMMARS |= {"structural_tag": "structural_tag"}


def known_to_sglang() -> set[str]:
    own = {*_SGLANG_SPEC, *_SGLANG_NO_EFFECT, "disable_radix_cache", "log_level"}
    return {*known_arguments(), *_SGLANG, *own}


def words_of_sglang() -> dict[str, str]:
    """What only SGLang has: name, and what it means here."""
    found = {name: f"SGLang's name for --{ours}." for name, ours in _SGLANG.items()}
    found |= dict.fromkeys(_SGLANG_SPEC, "SGLang's way to say how to draft.")
    found |= {name: f"No effect: {why}." for name, (_, why) in _SGLANG_NO_EFFECT.items()}
    found |= {"disable_radix_cache": "SGLang's name for --no-enable-prefix-caching."}
    return {name: text.replace("_", "-") for name, text in found.items() if name != "model_path"}


def config_from_sglang(**given: Any) -> Config:
    """Our config from SGLang's engine arguments; vLLM's and our own names are taken too."""
    given = {name: value for name, value in given.items() if value is not None}
    if "model_path" not in given and "model" not in given:
        raise ConfigError("model_path is missing")
    given = known_names(given, known_to_sglang())
    for name in given:
        if name in _SGLANG and _SGLANG[name] in given:
            raise ConfigError(f"give either {name} or {_SGLANG[name]}, not both")
    for name in [name for name in given if name in _SGLANG_NO_EFFECT]:
        tell_no_effect(name, given.pop(name), *_SGLANG_NO_EFFECT[name])
    if "log_level" in given:
        _set_log_level(given.pop("log_level"))
    if given.pop("disable_radix_cache", False):
        given["enable_prefix_caching"] = False
    asked = {name: given.pop(name) for name in _SGLANG_SPEC if name in given}
    if asked:
        if "speculate" in given:
            raise ConfigError(f"give either speculate or {', '.join(sorted(asked))}, not both")
        given["speculate"] = _speculate_by_sglang(asked, given.pop("speculative_model", None))
    return config_from_vllm(**{_SGLANG.get(name, name): value for name, value in given.items()})


def _speculate_by_sglang(asked: dict[str, Any], path: str | None) -> str:
    """SGLang's speculative arguments as NAME[:PATH][:KEY=VALUE]...

    There, num_draft_tokens counts the token the target itself says: a chain of num_steps guesses
    has num_steps + 1. A tree keeps eagle_topk nodes of each level and looks at as many children.
    """
    path = asked.get("speculative_draft_model_path", path)
    algorithm = asked.get("speculative_algorithm")
    if algorithm is None and path is None:
        raise ConfigError(f"{', '.join(sorted(asked))}: also give speculative_algorithm")
    name = "auto" if algorithm is None else method_of(str(algorithm), "speculative_algorithm")
    if name == "eagle" and path is None:
        name = "mtp"  # the target's own layers
    if path is not None and name in WEIGHTLESS:
        raise ConfigError(f"speculative_draft_model_path={path!r}: {name} reads no model")
    steps, width, size = (
        whole(asked, key, least) if key in asked else None
        for key, least in (
            ("speculative_num_steps", 1),
            ("speculative_eagle_topk", 1),
            ("speculative_num_draft_tokens", 2),
        )
    )
    parts = [name] + ([str(path)] if path else [])
    if width is not None and width > 1 and name not in WEIGHTLESS:
        parts += ["tree=dynamic", f"branch={width}", f"width={width}"]
        parts += [f"depth={steps}"] if steps is not None else []
    else:
        if width is not None and width > 1:
            say_once(f"speculative_eagle_topk={width} has no effect: {name} drafts a chain")
        if steps is not None and size is not None and size != steps + 1:
            say_once(
                f"speculative_num_draft_tokens={size} has no effect: a chain of "
                f"speculative_num_steps={steps} guesses is checked with {steps + 1} tokens"
            )
        size = size if steps is None else steps + 1
    return ":".join(parts + ([f"num_nodes={size - 1}"] if size is not None else []))


def _set_log_level(level: Any) -> None:
    levels = ("debug", "info", "warning", "error", "critical")
    if not isinstance(level, str) or level.lower() not in levels:
        raise ConfigError(f"log_level={level!r} must be one of {', '.join(levels)}")
    logging.getLogger("hunch").setLevel(level.upper())


def sampling_from_sglang(given: Mapping[str, Any] | None) -> SamplingParams:
    """SGLang's sampling dict; its defaults (temperature 1, 128 new tokens)."""
    values: dict[str, Any] = {"max_tokens": 128}
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"sampling_params: a {type(given).__name__} given, not a dict")
    given = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in plain_only("sampling_params", given, _SGLANG_ALONE).items():
        if name in _SGLANG_GRAMMARS:
            if value == "":
                continue  # none, as in SGLang
            if "structured_outputs" in values:
                raise RequestError(f"{name}: only one of {', '.join(_SGLANG_GRAMMARS)}")
            values["structured_outputs"] = {_SGLANG_GRAMMARS[name]: value}
            continue
        if name == "spaces_between_special_tokens":
            tell_no_effect(name, value, (True,), "text is what the tokenizer makes of the tokens")
            continue
        ours = _SGLANG_SAMPLING.get(name, name)
        if ours not in SamplingParams.__dataclass_fields__:
            known = {*SamplingParams.__dataclass_fields__, *_SGLANG_SAMPLING, *_SGLANG_GRAMMARS}
            raise RequestError(f"sampling parameter {unknown(name, known)}")
        values[ours] = value
    if wants_no_answer(given):
        values["max_tokens"] = 1
    return SamplingParams(**values)


def wants_no_answer(given: Mapping[str, Any] | None) -> bool:
    """Only the prompt's scores are wanted: the one token that hunch generates all the same goes."""
    return given is not None and given.get("max_new_tokens") == 0


def without_answer(output: RequestOutput) -> RequestOutput:
    """The same with the prompt's scores alone."""
    nothing: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": []}
    empty = [
        replace(one, **nothing, finish_reason=one.finish_reason and "length")
        for one in output.outputs
    ]
    return replace(output, outputs=empty)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Which log-probabilities an answer of SGLang's shows."""

    num_top: int = 0  # likeliest tokens per place
    first: int = -1  # the prompt's first token that has one; -1: none of them has
    has_text: bool = False  # tokens are written out


def answer_of(output: RequestOutput, index: int, scores: Scores | None = None) -> dict[str, Any]:
    """One of a request's answers, or what there is of it, as SGLang's dict."""
    answer = output.outputs[index]
    about: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": None,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "weight_version": "default",
    }
    if scores is not None:
        about |= _scored(output, index, scores)
    if answer.finish_reason is not None:
        reason: dict[str, Any] = {"type": answer.finish_reason}
        if answer.finish_reason == "length":
            reason["length"] = len(answer.token_ids)
        elif answer.finish_reason == "stop":
            last = answer.token_ids[-1] if answer.token_ids else None  # end-of-text
            reason["matched"] = last if answer.stop_reason is None else answer.stop_reason
        about |= {"finish_reason": reason, "hunch": answer.stats, **_speculated(answer.stats)}
    return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": about}


def _speculated(stats: Mapping[str, Any]) -> dict[str, Any]:
    """How drafting went, where anything was drafted."""
    drafted, passes = stats.get("drafted"), stats.get("tokens_per_pass")
    if not drafted or passes is None:
        return {}
    accepted = stats.get("accepted") or 0
    return {
        "spec_accept_rate": accepted / drafted,
        "spec_accept_length": passes,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": drafted,
    }


def _scored(output: RequestOutput, index: int, scores: Scores) -> dict[str, Any]:
    """Log-probability, id and text of each token; the prompt's first one has nothing before it."""
    answer = output.outputs[index]
    first = scores.first if scores.first >= 0 else len(output.prompt_token_ids)
    prompt = zip(
        output.prompt_token_ids[first:], (output.prompt_logprobs or ())[first:], strict=False
    )
    told: dict[str, list[tuple[int, Any]]] = {
        "input": [(token, entry if at else None) for at, (token, entry) in enumerate(prompt)],
        "output": list(zip(answer.token_ids, answer.logprobs or (), strict=False)),
    }
    found: dict[str, Any] = {}
    for name, entries in told.items():
        found[f"{name}_token_logprobs"] = [
            _triple(token, None if entry is None else entry[token], scores)
            for token, entry in entries
        ]
        if scores.num_top:
            found[f"{name}_top_logprobs"] = [
                entry and [_triple(*one, scores) for one in _likeliest(entry.items(), scores)]
                for _, entry in entries
            ]
    return found


def _likeliest(entry: Iterable[tuple[int, Logprob]], scores: Scores) -> list[tuple[int, Logprob]]:
    return sorted(entry, key=lambda one: -one[1].logprob)[: scores.num_top]


def _triple(token: int, score: Logprob | None, scores: Scores) -> list[Any]:
    text = score.decoded_token if score is not None and scores.has_text else None
    return [None if score is None else score.logprob, token, text]

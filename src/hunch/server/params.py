"""Bodies to SamplingParams, within the server's limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hunch.errors import ConfigError
from hunch.server.problems import ProblemError, at_most
from hunch.server.schemas import ChatBody, CompletionBody, SamplingBody, SpeculationBody
from hunch.server.settings import NO_LIMIT, Limits, ServeConfig
from hunch.server.structured import structured_output
from hunch.types import MAX_SEED, USUAL_SAMPLING, SamplingParams, Speculation, recommended

ALL_TOKENS = -1  # as a number of log-probabilities
USUAL_SPECULATION = Speculation()  # of a request that says nothing about it
Defaults = Mapping[str, Any]  # what a model recommends, by our names


def completion_params(
    body: CompletionBody, limits: Limits, max_len: int, defaults: Defaults = USUAL_SAMPLING
) -> SamplingParams:
    """What /v1/completions asks for. With best_of, n is the number of answers to choose from."""
    num_answers = body.best_of or body.n
    if num_answers < body.n:
        message = f"best_of={num_answers} must be at least n={body.n}"
        raise ProblemError(400, message, param="best_of")
    if num_answers > body.n and body.stream:
        message = "the best answers are known at the end: best_of above n cannot be streamed"
        raise ProblemError(400, message, param="best_of")
    return _params(
        body,
        limits,
        max_len,
        defaults,
        n=num_answers,
        # What is best shows in the logprobs.
        logprobs=(body.logprobs or 0) if num_answers > body.n else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(
    body: ChatBody, limits: Limits, max_len: int, defaults: Defaults = USUAL_SAMPLING
) -> SamplingParams:
    """What /v1/chat/completions asks for; without max_tokens, up to the model's context."""
    if body.top_logprobs and not body.logprobs:
        raise ProblemError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    scores = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, limits, max_len, defaults, n=body.n, logprobs=scores)


def _max_tokens(body: SamplingBody) -> int | None:
    most = getattr(body, "max_completion_tokens", None)
    return body.max_tokens if most is None else most


def is_scoring(body: SamplingBody) -> bool:
    """No token is wanted: the prompt's own scores are."""
    return _max_tokens(body) == 0


def sampling_defaults(settings: ServeConfig, own: Mapping[str, Any]) -> Defaults:
    """What a request gets that does not say: by the model's `own` advice, a file's, or none."""
    where = settings.generation_config
    if where in ("vllm", "off"):
        return recommended(settings.sampling)
    if where == "auto":
        return recommended({**own, **settings.sampling})
    path = Path(where)
    try:
        found = json.loads((path / "generation_config.json" if path.is_dir() else path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config={where!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"generation_config={where!r} is not a JSON object")
    return recommended({**found, **settings.sampling})


def _params(
    body: SamplingBody,
    limits: Limits,
    max_len: int,
    defaults: Defaults,
    *,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    check_limits(body, limits, stop, logprobs)
    at_most("n", n, limits.max_n)
    max_tokens = _max_tokens(body)
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")
        most = limits.max_tokens or max_len
        max_tokens = min(max_tokens, most) if max_tokens else limits.max_tokens
    elif max_tokens == -1:
        max_tokens = limits.max_tokens
    elif limits.max_tokens is None:
        max_tokens = min(max_tokens, max_len)  # an answer ends with the context anyway
    else:
        at_most("max_tokens", max_tokens, limits.max_tokens)
    if body.prompt_logprobs is not None:
        counts = (prompt_logprobs or 0, body.prompt_logprobs)
        prompt_logprobs = ALL_TOKENS if ALL_TOKENS in counts else max(counts)
    chosen = {
        name: usual if (value := getattr(body, name)) is None else value
        for name, usual in defaults.items()
        if name in USUAL_SAMPLING
    }
    return SamplingParams(
        **chosen,
        n=n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(k): v for k, v in body.logit_bias.items()} if body.logit_bias else None,
        bad_words=body.bad_words or (),
        allowed_token_ids=body.allowed_token_ids,
        min_tokens=body.min_tokens,
        max_tokens=max_tokens if max_tokens is None else max(max_tokens, 1),  # see is_scoring
        stop=stop,
        stop_token_ids=body.stop_token_ids or (),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        ignore_eos=body.ignore_eos,
        # -1 is no seed, as in llama.cpp and vLLM; other negative ones are as good as any.
        seed=None if body.seed is None or body.seed == -1 else body.seed & MAX_SEED,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_output(body, limits),
        speculation=_speculation(body.speculation),
    )


def check_limits(
    body: SamplingBody, limits: Limits, stop: Sequence[str], logprobs: int | None
) -> None:
    """Refuse what is larger than the operator allows."""
    at_most("stop", len(stop), limits.max_stop, "strings")
    at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop, "ids")
    at_most("stop", max(map(len, stop), default=0), limits.max_stop_chars, "characters")
    at_most("bad_words", len(body.bad_words or ()), limits.max_bad_words, "words")
    longest_word = max(map(len, body.bad_words or ()), default=0)
    at_most("bad_words", longest_word, limits.max_stop_chars, "characters")
    at_most("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias, "entries")
    asked = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for name, count in ((asked, logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        at_most(name, count or 0, limits.max_logprobs)
        if count == ALL_TOKENS and limits.max_logprobs < NO_LIMIT:
            message = f"{name}: -1 is every token, this server allows at most {limits.max_logprobs}"
            message += " (--max-logprobs -1 allows all)"
            raise ProblemError(400, message, code="limit_exceeded", param=name)
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs come with a whole answer, not with a stream"
        raise ProblemError(400, message, param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ProblemError(400, "stream_options needs stream: true", param="stream_options")


def _speculation(body: SpeculationBody | None) -> Speculation:
    if body is None:
        return USUAL_SPECULATION
    return Speculation(mode=body.mode, max_nodes=body.max_nodes, trace=body.origins)

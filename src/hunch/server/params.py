"""Bodies to SamplingParams, within the server's limits."""

from __future__ import annotations

from collections.abc import Sequence

from hunch.server.problems import ProblemError, at_most
from hunch.server.schemas import ChatBody, CompletionBody, SamplingBody, SpeculationBody
from hunch.server.settings import Limits
from hunch.server.structured import structured_output
from hunch.types import SamplingParams, Speculation


def completion_params(body: CompletionBody, limits: Limits, max_len: int) -> SamplingParams:
    """What /v1/completions asks for."""
    if body.best_of is not None and body.best_of != body.n:
        raise ProblemError(400, "best_of must be absent or equal to n", param="best_of")
    return _params(
        body,
        limits,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        max_len=max_len,
    )


def chat_params(body: ChatBody, limits: Limits, max_len: int) -> SamplingParams:
    """What /v1/chat/completions asks for; without max_tokens, up to the model's context."""
    if body.top_logprobs and not body.logprobs:
        raise ProblemError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(
        body,
        limits,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=None,
        max_len=max_len,
    )


def _params(
    body: SamplingBody,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_len: int,
) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    check_limits(body, limits, stop, logprobs)
    most_tokens = limits.max_tokens or max_len
    if max_tokens is None:
        max_tokens = limits.max_tokens
    else:
        at_most("max_tokens", max_tokens, most_tokens)
    return SamplingParams(
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(k): v for k, v in body.logit_bias.items()} if body.logit_bias else None,
        bad_words=body.bad_words or (),
        allowed_token_ids=body.allowed_token_ids,
        min_tokens=body.min_tokens,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=body.stop_token_ids or (),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_output(body, limits),
        speculation=_speculation(body.speculation),
    )


def check_limits(
    body: SamplingBody, limits: Limits, stop: Sequence[str], logprobs: int | None
) -> None:
    """Refuse what is larger than the operator allows."""
    at_most("n", body.n, limits.max_n)
    at_most("stop", len(stop), limits.max_stop, "strings")
    at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop, "ids")
    at_most("stop", max(map(len, stop), default=0), limits.max_stop_chars, "characters")
    at_most("bad_words", len(body.bad_words or ()), limits.max_bad_words, "words")
    longest_word = max(map(len, body.bad_words or ()), default=0)
    at_most("bad_words", longest_word, limits.max_stop_chars, "characters")
    at_most("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias, "entries")
    at_most("logprobs", logprobs or 0, limits.max_logprobs)
    if body.stream_options is not None and not body.stream:
        raise ProblemError(400, "stream_options needs stream: true", param="stream_options")


def _speculation(body: SpeculationBody | None) -> Speculation:
    if body is None:
        return Speculation()
    return Speculation(mode=body.mode, max_nodes=body.max_nodes, trace=body.origins)

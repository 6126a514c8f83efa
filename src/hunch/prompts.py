"""Prompts and parameters as users give them, read and checked; and a bar while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hunch.errors import RequestError
from hunch.types import SamplingParams, TextCodec

Prompt = str | Sequence[int] | Mapping[str, Any]
OneParams = SamplingParams | Mapping[str, Any]  # a dict: its fields
Params = OneParams | Sequence[OneParams] | None  # the same for all prompts, or one for each
_DICT = {"prompt", "prompt_token_ids"}  # what vLLM's prompt dicts hold


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts: a {type(prompts).__name__} given, not texts or token ids")
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def read_prompt(prompt: Prompt, codec: TextCodec) -> tuple[str | None, list[int]]:
    """Its text, where it has one, and its token ids."""
    text: str | None = None
    if isinstance(prompt, Mapping):
        if not prompt or set(prompt) - _DICT:
            given = ", ".join(map(repr, prompt)) or "nothing"
            raise RequestError(
                f"a prompt dict has 'prompt', 'prompt_token_ids' or both; {given} given"
            )
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        return prompt, codec.encode(prompt)
    if not isinstance(prompt, Sequence):
        raise RequestError(
            f"a prompt is a text, a list of token ids or a dict; a {type(prompt).__name__} given"
        )
    return text, list(prompt)  # type: ignore[arg-type]


def params_for(
    num_prompts: int,
    params: Params,
    vllms: Params = None,
) -> list[SamplingParams]:
    """Each prompt's parameters: the same for all, or one for each; `vllms`: by vLLM's name."""
    if params is not None and vllms is not None:
        raise RequestError("give either params or sampling_params, not both")
    params = vllms if params is None else params
    params = SamplingParams() if params is None else params
    if not isinstance(params, Sequence):
        return [_read_params(params)] * num_prompts
    each = [_read_params(one) for one in params]
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(each)} sampling parameters")
    return each


def _read_params(params: OneParams) -> SamplingParams:
    if isinstance(params, Mapping):
        return SamplingParams(**params)
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise RequestError(f"params: a {kind} given, not SamplingParams or a dict of its fields")
    return params


@contextmanager
def progress(
    total: int, wanted: bool | None, what: str = "generating"
) -> Iterator[Callable[[], None]]:
    """A bar on stderr for long work, when a person watches."""
    if not (wanted or (wanted is None and total > 1 and sys.stderr.isatty())):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)

"""Prompts and parameters as users give them, read and checked; and a bar while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict

from hunch.errors import RequestError
from hunch.types import SamplingParams, TextCodec

Prompt = str | Sequence[int] | Mapping[str, Any]
OneParams = SamplingParams | Mapping[str, Any]  # a dict: its fields
Params = OneParams | Sequence[OneParams] | None  # the same for all prompts, or one for each
_DICT = {"prompt", "prompt_token_ids", "cache_salt"}  # what vLLM's prompt dicts hold
_NO_TEXT = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"}


class TextPrompt(TypedDict):
    """vLLM's form of a prompt that is a text."""

    prompt: str
    cache_salt: NotRequired[str]  # cached prefixes are found again only under the same one


class TokensPrompt(TypedDict):
    """vLLM's form of a prompt that is token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def list_prompts(prompts: Prompt | Iterable[Prompt] | None) -> list[Prompt]:
    """One prompt or several, as a list; arrays and tensors of token ids count as lists."""
    prompts = _plain(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts: {_shown(prompts)} given, not texts or token ids")
    each: list[Any] = list(prompts)
    return [each] if each and isinstance(each[0], int) else each


def list_chats(messages: Any) -> list[Any]:
    """One conversation or several, as a list of them."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    chats = (
        [messages] if not is_list or not messages or isinstance(messages[0], Mapping) else messages
    )
    for chat in chats:
        is_chat = isinstance(chat, Sequence) and not isinstance(chat, (str, bytes))
        for message in chat if is_chat else [chat]:
            if not is_chat or not isinstance(message, Mapping) or "role" not in message:
                raise RequestError(
                    f"messages: {_shown(message)} given; a conversation is a list of "
                    "{'role': 'user', 'content': 'TEXT'}"
                )
    return list(chats)


def read_prompt(prompt: Prompt, codec: TextCodec) -> tuple[str | None, list[int]]:
    """Its text, where it has one, and its token ids."""
    text: str | None = None
    if isinstance(prompt, Mapping):
        parts: Any = {n: v for n, v in prompt.items() if v is not None and not _is_empty_dict(v)}
        if parts.keys() & _NO_TEXT:
            raise RequestError("a prompt is a text or token ids: hunch reads text alone")
        if not parts or set(parts) - _DICT:
            given = ", ".join(map(repr, parts)) or "nothing"
            raise RequestError(
                f"a prompt dict has 'prompt', 'prompt_token_ids' or both; {given} given"
            )
        text = parts.get("prompt")
        prompt = parts.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        return prompt, codec.encode(prompt)
    ids = _plain(prompt)
    if isinstance(ids, bytes) or not isinstance(ids, Sequence):
        raise RequestError(
            f"a prompt is a text, a list of token ids or a dict; {_shown(prompt)} given"
        )
    if wrong := [one for one in ids if not isinstance(one, int)]:
        raise RequestError(f"a prompt's token ids are whole numbers; {wrong[0]!r} is among them")
    return text, list(ids)


def _is_empty_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def salt_of(prompt: Prompt) -> str:
    """Under which its prefix is cached; only vLLM's prompt dicts have one."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if not isinstance(salt, str | None):
        raise RequestError(f"cache_salt={salt!r} must be a text")
    return salt or ""


def list_priorities(num_prompts: int, given: Sequence[int] | None) -> Sequence[int]:
    """Each request's; lower ones go first."""
    each = [0] * num_prompts if given is None else given
    if isinstance(each, (str, bytes)) or not isinstance(each, Sequence):
        raise RequestError(f"priority={each!r} must be a list with a number for each prompt")
    if wrong := [one for one in each if not isinstance(one, int)]:
        raise RequestError(f"priority: {wrong[0]!r} must be a whole number; lower ones go first")
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(each)} priorities")
    return each


def _plain(given: Any) -> Any:
    """Lists in place of numpy's arrays and torch's tensors."""
    return given.tolist() if hasattr(given, "tolist") else given


def _shown(given: Any) -> str:
    return f"{type(given).__name__} {given!r}"[:60]


def params_for(
    num_prompts: int,
    params: Params,
    vllms: Params = None,
    usual: SamplingParams | None = None,
) -> list[SamplingParams]:
    """Each prompt's parameters: the same for all, or one for each; `vllms`: by vLLM's name.

    `usual` are taken where none are given.
    """
    if params is not None and vllms is not None:
        raise RequestError("give either params or sampling_params, not both")
    params = vllms if params is None else params
    params = usual or SamplingParams() if params is None else params
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
        raise RequestError(
            f"params: {_shown(params)} given, not SamplingParams or a dict of its fields"
        )
    return params.clone()  # the caller may go on to change its own


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

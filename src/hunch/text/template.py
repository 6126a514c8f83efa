"""Chat templates: messages to the prompt a model was trained on, rendered in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from hunch.errors import RequestError, TemplateError
from hunch.text.sandbox import Sandbox

# What code in a template can raise, besides jinja's own errors.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


def render(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **values: Any,
) -> str:
    """The prompt for a conversation; `values` are further names the template may use."""
    if not template:
        raise TemplateError(
            "this model has no chat template: give one (chat_template=, or --chat-template FILE of "
            "a server), or a plain prompt (LLM.generate, /v1/completions)"
        )
    names = {
        **values,
        "messages": [_plain(message, index) for index, message in enumerate(messages)],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token or "",
        "eos_token": eos_token or "",
    }
    if not names["messages"]:
        raise RequestError("a chat needs at least one message")
    try:
        sandbox, compiled = _compiled(template)
        text = sandbox.render_bounded(compiled, names)
    except _FAILURES as error:
        what = str(error) or type(error).__name__
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TemplateError(f"the chat template fails{line}: {what[:500]}") from error
    return _cut_after(text, names["messages"][-1]["content"]) if continue_final_message else text


def _cut_after(text: str, last: str | None) -> str:
    """The prompt up to where the last message could go on: without what the template ends it by."""
    last = last or ""
    place = text.rfind(last.strip())
    if not last.strip() or place < 0:
        raise RequestError(
            "continue_final_message: the last message is empty, or the chat template changes it"
        )
    whole = last.lstrip()  # with the spaces at its end, where the template left them
    return text[: place + len(whole if text.startswith(whole, place) else last.strip())]


@lru_cache(maxsize=16)
def _compiled(template: str) -> tuple[Sandbox, jinja2.Template]:
    sandbox = Sandbox()
    return sandbox, sandbox.compile_bounded(template)


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates know it: content is a text, not a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise RequestError(f"messages[{index}]: only parts of text can be used")
            texts.append(part["text"])
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content must be a text")
    return {**message, "content": content}

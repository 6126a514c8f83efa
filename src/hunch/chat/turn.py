"""One turn of a chat: its prompt, what its answer is held to, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hunch.chat.format import ChatFormat
from hunch.chat.ids import CallIds
from hunch.chat.pieces import Answer, Reader, read
from hunch.chat.tools import Tool
from hunch.errors import RequestError
from hunch.types import RequestOutput, SamplingParams

PROMPT_END = 24  # tokens that are looked at to see whether the prompt opens reasoning
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What templates are given of a request's other fields and of the tokenizer, not by its values.
OWN_VALUES = frozenset({
    *("messages", "tools", "template", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "max_tokens", "self"),
})  # fmt: skip


class Codec(Protocol):
    """What a turn needs of a tokenizer."""

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    chat_template: str | None
    tool_template: str | None  # for chats with tools, where there is another one for them

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]: ...


class Parsers(Protocol):
    """What a user says of a model's chats; see ModelConfig."""

    @property
    def tool_call_parser(self) -> str: ...

    @property
    def reasoning_parser(self) -> str: ...


def chat_format(parsers: Parsers, codec: Codec, template: str | None) -> ChatFormat:
    """How the model writes calls and reasoning; `template` goes before its own."""
    return ChatFormat(
        template or codec.chat_template,
        codec.special_tokens,
        tool_template=None if template else codec.tool_template,
        tool_parser=parsers.tool_call_parser,
        reasoning_parser=parsers.reasoning_parser,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a chat asks for besides messages and sampling. Names and meanings are OpenAI's."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None  # auto, none, required, or a function
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # tokens after which reasoning must end
    template_values: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    continue_final_message: bool = False  # the answer goes on with the assistant's last message

    def __post_init__(self) -> None:
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}")
        if taken := OWN_VALUES & self.template_values.keys():
            raise RequestError(
                f"chat_template_kwargs: {min(taken)} is none of them: what templates get of it "
                "comes from the request's other fields or the tokenizer"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What to generate from, and how to read what comes."""

    prompt_ids: list[int]
    params: SamplingParams
    new_reader: Callable[[], Reader] | None  # None: the answer is all text
    call_ids: CallIds = field(default_factory=CallIds)


def open_turn(
    chat: ChatFormat,
    codec: Codec,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    wish: Wish,
    **rendering: Any,
) -> Turn:
    """The turn that answers these messages; `rendering` goes to the tokenizer's template."""
    given = [] if wish.tool_choice == "none" else list(wish.tools)
    plain, shown = chat.prepare(messages, given)
    values = {**_effort(wish.reasoning_effort), **wish.template_values, **rendering}
    if shown is not None:
        values["tools"] = shown
    if wish.continue_final_message:
        if plain[-1].get("role") != "assistant":
            raise RequestError("continue_final_message: the last message is not the assistant's")
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    ids = codec.render_chat(plain, **values)
    tools, must_call, many = _choice(given, wish)
    end = codec.decode(ids[-PROMPT_END:], skip_special_tokens=False)
    structured = chat.structured(
        tools,
        end,
        asked=params.structured_outputs,
        must_call=must_call,
        many=many,
        budget=wish.thinking_token_budget,
    )
    asked = replace(params, structured_outputs=structured)
    if not chat.is_read(tools):
        return Turn(prompt_ids=ids, params=asked, new_reader=None)
    is_kept = not params.skip_special_tokens
    return Turn(
        prompt_ids=ids,
        params=replace(asked, skip_special_tokens=False),
        new_reader=lambda: chat.reader(tools, end, keeps_specials=is_kept),
        call_ids=chat.call_ids(messages),
    )


def _effort(effort: str | None) -> dict[str, Any]:
    """As templates know it: by its name, or as thinking that is on or off."""
    if effort is None:
        return {}
    is_on = effort != "none"
    values: dict[str, Any] = {"enable_thinking": is_on, "thinking": is_on}
    return {**values, "reasoning_effort": effort} if is_on else values


def _choice(given: Sequence[Mapping[str, Any]], wish: Wish) -> tuple[list[Tool], bool, bool]:
    """The tools that may be called, whether one must be, and whether several may be."""
    tools = [Tool.read(tool) for tool in given]
    choice, many = wish.tool_choice, wish.parallel_tool_calls
    if choice in (None, "auto", "none"):
        return tools, False, many
    if not tools:
        raise RequestError("tool_choice: a call is asked for, but no tools are given")
    if choice == "required":
        return tools, True, many
    assert isinstance(choice, Mapping)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        names = [_name(tool) for tool in allowed.get("tools", ())]
        return _named(tools, names), allowed.get("mode") == "required", many
    return _named(tools, [_name(choice)]), True, False


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _named(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    for name in names:
        if name not in [tool.name for tool in tools]:
            known = ", ".join(tool.name for tool in tools)
            raise RequestError(f"tool_choice: there is no tool {name[:100]!r}; there are: {known}")
    return [tool for tool in tools if tool.name in names]


def message_of(answer: Answer, new_id: Callable[[str, int], str]) -> dict[str, Any]:
    """An answer as OpenAI's message; `new_id` names a call by its function and number."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            call_of(new_id(call.name, number), call.name, call.arguments)
            for number, call in enumerate(answer.calls)
        ]
    return message


def call_of(call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """A call as OpenAI's messages have it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_message(turn: Turn, text: str, new_id: Callable[[str, int], str]) -> dict[str, Any]:
    """A whole answer's text as a message."""
    if turn.new_reader is None:
        return {"role": "assistant", "content": text}
    return message_of(read(turn.new_reader(), text), new_id)


def add_messages(turns: Sequence[Turn], outputs: Sequence[RequestOutput]) -> None:
    """Put into every finished answer what it says as a message."""
    for turn, output in zip(turns, outputs, strict=True):
        for choice in output.outputs:
            choice.message = read_message(turn, choice.text, lambda _, number: f"call_{number}")

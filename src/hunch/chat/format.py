"""A model's way to write chats: which calls and reasoning it was trained on, and how to hold it
to them. Chosen from the chat template; a name given by the user goes before."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hunch.chat import families, harmony, reasoning
from hunch.chat.families import TOOL_FORMS, nearer, spell, tools_of
from hunch.chat.ids import CallIds
from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import Reader, Tidy
from hunch.chat.reasoning import REASONING_FORMS, ReasoningReader, reasoning_of
from hunch.chat.recipients import RecipientForm
from hunch.chat.tools import MarkedReader, Tool, ToolForm
from hunch.errors import ConfigError, GrammarError
from hunch.types import StructuredOutput

AUTO = "auto"
ASKS_FOR_NONE = re.compile(r"(?<!\w)content(['\"]\])? is none")  # of a message that only calls
ONE_CALL = "only supports single tool-calls"  # Llama 3's template fails on a history with two
NO_SYSTEM = (  # templates that fail on such a message: Gemma's, the first of Mistral's
    "System role not supported",
    "Only user and assistant roles are supported!",
)
IN_MESSAGE = "message['tools']"  # where Phi-4-mini's template looks for tools
PREAMBLE = """You may call functions. They are given as JSON schemas between <tools> marks:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between <tool_call> marks:
<tool_call>
{{"name": "function name", "arguments": {{"key": "value"}}}}
</tool_call>"""


class ChatFormat:
    """What is known of a model's chats. `special_ids` are tokens that are not text, by name."""

    def __init__(
        self,
        template: str | None,
        special_ids: Mapping[str, int],
        *,
        tool_template: str | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self._template = template or ""
        self._special_ids = special_ids
        found = tools_of(tool_template or self._template)
        self.knows_tools = found is not None
        name = found
        if tool_parser != AUTO:
            tool_parser = families.SGLANGS_NAMES.get(tool_parser, tool_parser)
            name = nearer(_known("tool_call_parser", tool_parser, TOOL_FORMS), found)
        self.tool_parser = name or "hermes"  # what is asked of a model whose template knows none
        self._tool_form = TOOL_FORMS[self.tool_parser]
        self.reasoning_parser = reasoning_of(self._template)
        if reasoning_parser != AUTO:
            reasoning_parser = reasoning.SGLANGS_NAMES.get(reasoning_parser, reasoning_parser)
            self.reasoning_parser = _known("reasoning_parser", reasoning_parser, REASONING_FORMS)
        elif found == "openai":
            self.reasoning_parser = "openai_gptoss"
        self._reasoning = REASONING_FORMS[self.reasoning_parser]
        self._is_harmony = self.reasoning_parser == "openai_gptoss"
        if self._is_harmony:
            self._tool_form = TOOL_FORMS["openai"]

    @property
    def has_reasoning(self) -> bool:
        return self._is_harmony or self._reasoning is not None

    def call_ids(self, messages: Sequence[Mapping[str, Any]]) -> CallIds:
        """The names of calls in an answer to these messages."""
        if self.tool_parser == "kimi_k2":
            return CallIds(num_before=sum(len(m.get("tool_calls") or ()) for m in messages))
        return CallIds(length=9 if self.tool_parser.startswith("mistral") else None)

    # --- reading --------------------------------------------------------------------------------

    def is_read(self, tools: Sequence[Tool]) -> bool:
        """Whether an answer may be more than text."""
        return bool(tools) or self.has_reasoning

    def reader(
        self, tools: Sequence[Tool], prompt_end: str, *, keeps_specials: bool = False
    ) -> Reader:
        """For one answer to a prompt that ends so, with special tokens' names in its text."""
        specials = () if keeps_specials else self._dropped(tools)
        form = self._form_after(prompt_end) if tools or self._is_harmony else None
        reader: Reader = form.reader(specials, tools) if form else MarkedReader((), specials)
        if self._reasoning is not None:
            is_open = self._reasoning.is_open(prompt_end)
            reader = ReasoningReader(self._reasoning, is_open=is_open, rest=reader)
        return Tidy(reader)

    def _form_after(self, prompt_end: str) -> ToolForm:
        form = self._tool_form
        return form.after(prompt_end) if isinstance(form, RecipientForm) else form

    def _dropped(self, tools: Sequence[Tool]) -> set[str]:
        """Marks that are no text, and that nothing is read from."""
        kept = [*self._tool_form.marks] if tools or self._is_harmony else []
        dropped: set[str] = set()
        if self._reasoning is not None:
            kept += [*self._reasoning.begin, *self._reasoning.end]
            dropped |= {*self._reasoning.ignored}
        specials = self._special_ids
        return dropped | {name for name in specials if not any(name in mark for mark in kept)}

    # --- holding an answer to it ----------------------------------------------------------------

    def structured(
        self,
        tools: Sequence[Tool],
        prompt_end: str,
        *,
        asked: StructuredOutput | None = None,
        must_call: bool = False,
        many: bool = True,
        budget: int | None = None,
    ) -> StructuredOutput | None:
        """What the whole answer must look like: reasoning, then calls, or what was asked for."""
        if not tools and asked is None and budget is None:
            return None
        rules = Rules(self._special_ids, is_loose=self._is_harmony)
        before = self._before(rules, prompt_end)
        if not tools and not before and budget is None:
            return asked
        if asked is not None and must_call:
            asked = None  # nothing but calls may come
        start = self._start(rules, tools, asked, must_call, many, prompt_end)
        frame = rules.text(f"{before} ({start})" if before else start)
        whole = replace(asked, frame=frame) if asked else StructuredOutput(grammar=frame)
        if budget is None or not before:
            return whole
        return replace(whole, reasoning=(*self._reasoning_marks(prompt_end), budget))

    def _start(
        self,
        rules: Rules,
        tools: Sequence[Tool],
        asked: StructuredOutput | None,
        must_call: bool,
        many: bool,
        prompt_end: str,
    ) -> str:
        text = "TEXT" if asked is None else "@body"
        if self._is_harmony:
            text = f"{harmony.answer_start(rules)} {text}"
        if not tools:
            return text
        must_call = must_call or asked is not None
        many = many and ONE_CALL not in self._template
        form = self._form_after(prompt_end)
        try:
            calls = form.write(rules, tools, must_call=must_call, many=many)
        except RecursionError:
            raise GrammarError("tools: a schema is nested too deeply") from None
        return f"{text} | {calls}" if asked is not None else calls

    def _before(self, rules: Rules, prompt_end: str) -> str:
        """Lark for the reasoning that comes first, or may."""
        if self._is_harmony:
            return harmony.reasoning_rule(rules)
        if self._reasoning is None or prompt_end.rstrip().endswith(self._reasoning.end):
            return ""
        rules.lines.append(r"GAP: /[ \n]{1,2}/")
        begin, end = self._reasoning.begin[0], self._reasoning.end[0]
        if self._reasoning.is_open(prompt_end):
            return f"{rules.after_text(end)} GAP?"
        if rules.has_special(begin):
            return f"({rules.mark(begin)} {rules.after_text(end)} GAP?)?"
        rules.lines.append(f"thought[lazy]: {quote(begin)} TEXT {quote(end)}")
        return "(thought GAP?)?"

    def _reasoning_marks(self, prompt_end: str) -> tuple[str, str]:
        """What reasoning begins with, unless the answer is in it already, and what ends it."""
        if self._is_harmony:
            return harmony.CHANNEL + "analysis", harmony.END
        assert self._reasoning is not None
        is_open = self._reasoning.is_open(prompt_end)
        return "" if is_open else self._reasoning.begin[0], self._reasoning.end[0]

    # --- the prompt -----------------------------------------------------------------------------

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them."""
        plain = [self._plain(message) for message in messages]
        if self.knows_tools and "tool_calls" not in self._template:
            plain = [self._spelled(message) for message in plain]
        if self.knows_tools:
            if tools and IN_MESSAGE in self._template:
                if not plain or plain[0]["role"] != "system":
                    plain.insert(0, {"role": "system", "content": ""})
                plain[0] |= {"tools": json.dumps([tool["function"] for tool in tools])}
            return plain, [dict(tool) for tool in tools] or None
        plain = [_as_text(message) for message in plain]
        if tools:
            lines = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
            note = PREAMBLE.format(tools=lines)
            first = plain[0] if plain else {}
            if first.get("role") == "system":
                plain[0] = {**first, "content": f"{first['content']}\n\n{note}"}
            elif first.get("role") == "user" and any(one in self._template for one in NO_SYSTEM):
                plain[0] = {**first, "content": f"{note}\n\n{first['content']}"}
            else:
                plain.insert(0, {"role": "system", "content": note})
        return plain, None

    def _spelled(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose calls are part of its text."""
        if "tool_calls" not in message:
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        named = [(function["name"], function.get("arguments", {})) for function in functions]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        text = [message.get("content") or "", spell(self._tool_form, named)]
        return {**rest, "content": "\n".join(filter(None, text))}

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain["role"] == "developer" and "developer" not in self._template:
            plain["role"] = "system"
        calls = plain.get("tool_calls")
        if calls and isinstance(self._tool_form, RecipientForm):
            plain["tool_calls"] = [dict(call) for call in calls]  # its template takes JSON as text
        elif calls:
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        else:
            plain.pop("tool_calls", None)
        if "content" not in plain:
            plain["content"] = None if calls and ASKS_FOR_NONE.search(self._template) else ""
        return plain


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    function = dict(call["function"])
    try:
        parsed = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return {**call, "function": function}
    if isinstance(parsed, dict):
        function["arguments"] = parsed
    return {**call, "function": function}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and results as text, for a template that knows neither."""
    content = message.get("content") or ""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        named = {"name": function["name"], "arguments": function.get("arguments", {})}
        content += f"\n<tool_call>\n{json.dumps(named)}\n</tool_call>"
    if message["role"] == "tool":
        content = f"<tool_response>\n{content}\n</tool_response>"
        return {"role": "user", "content": content}
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": content.strip("\n") if "tool_calls" in message else content}


def _known(name: str, given: str, table: Mapping[str, Any]) -> str:
    if given in table:
        return given
    near = difflib.get_close_matches(given, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name}={given!r} must be auto or one of {', '.join(table)}{hint}")

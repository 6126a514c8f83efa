"""Structural tags: free text with parts between marks that are held to a form.

The forms are xgrammar's, which vLLM and SGLang take too: {"format": {...}}, and the older
{"structures": [...], "triggers": [...]}. Those that count tokens are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hunch.chat.lark import Rules, closed
from hunch.checks import json_of
from hunch.errors import GrammarError
from hunch.types import StructuredOutput

_LAYOUT = {"whitespace_flexible": False, "coerce_one_of": True, "item_separator": ", "}
_LAYOUT |= {"key_separator": ": "}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # of fields that ask for more than is done here
    "style": (None, "json"),
    "any_order": (None, False),
    "max_tokens": (None,),
    "max_chars": (None,),
}
MAX_DEPTH = 64


def as_grammar(asked: StructuredOutput, special_ids: Mapping[str, int]) -> StructuredOutput:
    """The same wish, with a structural tag written as a grammar and a schema that is closed.

    `special_ids`: see Rules.
    """
    if asked.structural_tag is None:
        return asked if asked.json is None else replace(asked, json=_closed(asked.json))
    tag: Any = asked.structural_tag
    try:
        tag = json.loads(tag if isinstance(tag, str) else json_of(tag, "structural_tag"))
    except GrammarError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(f"no JSON: {error}") from None
    writer = _Writer(Rules(special_ids))
    text = writer.rules.text(writer.write(_format_of(tag), "", 0))
    return replace(asked, structural_tag=None, grammar=text)


def _closed(schema: Any) -> Any:
    try:
        return closed(json.loads(schema if isinstance(schema, str) else json_of(schema)))
    except (ValueError, TypeError, RecursionError):
        return schema  # whoever compiles it says what is wrong with it


def _format_of(tag: Any) -> Any:
    """The one format that a tag of either form is."""
    if not isinstance(tag, Mapping):
        raise _wrong("an object with a format is needed")
    if "structures" not in tag:
        return tag.get("format")
    tags = [
        {
            "type": "tag",
            "begin": _field(one, "begin", str),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end", ""),
        }
        for one in _field(tag, "structures", Sequence)
    ]
    return {"type": "triggered_tags", "triggers": _field(tag, "triggers", Sequence), "tags": tags}


class _Writer:
    """Formats as Lark: each gives what it matches, and the mark that must follow it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._writers: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "any_text": self._text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, form: Any, end: str, depth: int) -> str:
        """Lark for the format and then `end`; "": whatever comes after it."""
        if depth > MAX_DEPTH:
            raise _wrong("formats are nested too deeply")
        form_type = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(form_type, str) or form_type not in self._writers:
            raise _wrong(f"format {str(form_type)[:40]!r} is none of {', '.join(self._writers)}")
        for name, values in _NEUTRAL.items():
            if form.get(name) not in values:
                raise _wrong(f"{form_type}: {name}={str(form[name])[:40]} is not supported")
        return f"({self._writers[form_type](form, end, depth + 1)})"

    def _then(self, body: str, end: str) -> str:
        return f"{body} {self.rules.mark(end)}" if end else body

    def _const(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        return self._then(self.rules.mark(_field(form, "value", str)), end)

    def _schema(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        schema = form.get("json_schema", True)
        if not isinstance(schema, (Mapping, bool)):
            raise _wrong("json_schema must be an object")
        try:
            if isinstance(schema, Mapping):
                schema = {**closed(schema), "x-guidance": _LAYOUT}
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError):
            raise _wrong("json_schema is no JSON") from None
        return self._then(self.rules.add("value", f"%json {text}"), end)

    def _regex(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        return self._then(self.rules.pattern(_field(form, "pattern", str)), end)

    def _text(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        text = self._without(form)
        return self.rules.after_text(end, text) if end else text

    def _without(self, form: Mapping[str, Any]) -> str:
        """The name of text in which none of these words is."""
        words = _texts(form, "excludes") if form.get("excludes") else []
        if not words:
            return "TEXT"
        some = "|".join(re.escape(word) for word in words)
        return self.rules.pattern(r"(.|\n)*", but=rf"(.|\n)*({some})(.|\n)*")

    def _sequence(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        parts = _some(form, "elements")
        written = [self.write(part, "", depth) for part in parts[:-1]]
        return " ".join([*written, self.write(parts[-1], end, depth)])

    def _or(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        return " | ".join(self.write(part, end, depth) for part in _some(form, "elements"))

    def _repeated(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        times = {"optional": "?", "plus": "+", "star": "*"}.get(form["type"])
        if times is None:
            least, most = (_field(form, name, int) for name in ("min", "max"))
            if least < 0 or most < -1 or -1 < most < least:
                raise _wrong(f"repeat: from {least} to {most} times")
            times = f"{{{least},{'' if most == -1 else most}}}"
        content = self.rules.add("content", self.write(form.get("content"), "", depth))
        return self._then(f"{content}{times}", end)

    def _tag(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        return f"{self.rules.mark(_field(form, 'begin', str))} {self._inside(form, end, depth)}"

    def _inside(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        """A tag's content, one of its ends, and what must follow."""
        ends = form.get("end", "")
        ends = [ends] if isinstance(ends, str) else _texts(form, "end")
        found = [self.write(form.get("content"), one, depth) for one in ends]
        return self._then(f"({' | '.join(found)})", end)

    def _triggered(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        tags, text = _some(form, "tags"), self._without(form)
        after: dict[str, list[str]] = {}
        for tag in tags:
            begin = _field(tag, "begin", str)
            trigger = self._trigger(begin, _texts(form, "triggers"))
            rest = self.rules.mark(begin[len(trigger) :])
            after.setdefault(trigger, []).append(f"{rest} {self._inside(tag, '', depth)}")
        sections = [
            f"{self.rules.after_text(trigger, text)} ({' | '.join(rests)})"
            for trigger, rests in after.items()
        ]
        section = self.rules.add("section", " | ".join(sections))
        last = self.rules.after_text(end, text) if end else text
        is_once = bool(form.get("stop_after_first"))
        if form.get("at_least_one"):
            first = " | ".join(self.write(tag, end if is_once else "", depth) for tag in tags)
            return first if is_once else f"({first}) {section}* {last}"
        return f"{last} | {self._then(section, end)}" if is_once else f"{section}* {last}"

    def _trigger(self, begin: str, triggers: Sequence[str]) -> str:
        """What the tag is known by: a whole token, where the trigger is a part of one."""
        for trigger in triggers:
            if trigger and begin.startswith(trigger):
                first = self.rules.first_special(begin)
                return first if first.startswith(trigger) else trigger
        raise _wrong(f"a tag begins with {begin[:40]!r}, and no trigger does")

    def _separated(self, form: Mapping[str, Any], end: str, depth: int) -> str:
        tags = " | ".join(self.write(tag, "", depth) for tag in _some(form, "tags"))
        one = self.rules.add("tag", tags)
        between = self.rules.mark(_field(form, "separator", str))
        many = one if form.get("stop_after_first") else f"{one} ({between} {one})*"
        return self._then(many if form.get("at_least_one") else f"({many})?", end)


def _field(form: Any, name: str, value_type: Any) -> Any:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, value_type) or isinstance(value, bool):
        raise _wrong(f"{name} is missing, or of the wrong type")
    return value


def _some(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = _field(form, name, Sequence)
    if not found or isinstance(found, str):
        raise _wrong(f"{name} must be a list of formats")
    return list(found)


def _texts(form: Mapping[str, Any], name: str) -> list[str]:
    found = form.get(name)
    if not isinstance(found, Sequence) or not found or not all(isinstance(t, str) for t in found):
        raise _wrong(f"{name} must be a list of texts")
    return list(found)


def _wrong(what: str) -> GrammarError:
    return GrammarError(f"structured_outputs.structural_tag: {what}")

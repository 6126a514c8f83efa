"""Grammars of answers that call tools, in the Lark dialect that the grammar engine reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT = r"TEXT: /(.|\n)*/"
_KEEPS_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf",
               "anyOf", "oneOf", "$ref", "if")  # fmt: skip


def quote(text: str) -> str:
    """A Lark string."""
    return json.dumps(text) if text else '""'


class Rules:
    """A grammar in the making. `special_ids`: marks that are tokens of their own, not text."""

    def __init__(self, special_ids: Mapping[str, int], *, is_loose: bool = False) -> None:
        self.lines: list[str] = [TEXT]
        self._special_ids = special_ids
        self._is_loose = is_loose  # JSON may be laid out freely
        self._num_names = 0

    def add(self, name: str, body: str) -> str:
        """A rule; the name it got."""
        self._num_names += 1
        name = f"{name}_{self._num_names}"
        self.lines.append(f"{name}: {body}")
        return name

    def mark(self, text: str) -> str:
        """A mark as it stands within a call."""
        index = self._special_ids.get(text)
        return quote(text) if index is None else f"<[{index}]>"

    def after_text(self, mark: str) -> str:
        """Text, and the mark that ends it."""
        if mark in self._special_ids:
            return f"TEXT {self.mark(mark)}"
        self._num_names += 1
        name = f"until_{self._num_names}"
        self.lines.append(f"{name}[lazy]: TEXT {quote(mark)}")
        return name

    def sections(
        self, mark: str, calls: str, must_call: bool, many: bool, between: str = ""
    ) -> str:
        """Text with sections that each begin with a mark; or the sections alone."""
        if must_call:
            section = self.add("section", f"{self.mark(mark)} {calls}")
            return f"{section} ({between} {section})*" if many else section
        section = self.add("section", f"{self.after_text(mark)} {calls}")
        return f"{section}* TEXT" if many else f"TEXT | {section}"

    def arguments(self, schema: Mapping[str, Any] | bool) -> str:
        """A rule for JSON of a tool's parameters."""
        layout: dict[str, Any] = {"whitespace_flexible": self._is_loose, "lenient": True}
        if not self._is_loose:  # as most JSON in a model's training was written
            layout |= {"item_separator": ", ", "key_separator": ": "}
        plain = {"type": "object", **closed(schema)} if isinstance(schema, Mapping) else {}
        return self.add("arguments", f"%json {json.dumps({**plain, 'x-guidance': layout})}")

    def value(self, schema: Any) -> str:
        """A rule for one JSON value."""
        plain = closed(schema) if isinstance(schema, Mapping) else {}
        return self.add("value", f"%json {json.dumps(plain)}")

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self.lines, ""])


def closed(schema: Any) -> Any:
    """The schema with objects that take no other properties than those they name.

    A function called with an argument it does not know fails, so a tool's schema that is silent
    about other properties means that there are none.
    """
    if isinstance(schema, Mapping):
        plain = {key: closed(value) for key, value in schema.items() if key != "x-guidance"}
        names = plain.get("properties")
        if isinstance(names, dict) and names and not any(key in plain for key in _KEEPS_OPEN):
            plain["additionalProperties"] = False
        return plain
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [closed(value) for value in schema]
    return schema

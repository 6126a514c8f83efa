"""Grammars of answers that call tools, in the Lark dialect that the grammar engine reads."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

TEXT = r"TEXT: /(.|\n)*/"
DEFINITIONS = ("$defs", "definitions")
_KEEPS_OPEN = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
_BY_NAME = ("properties", "patternProperties", *DEFINITIONS)  # keywords that hold named schemas
_NO_SCHEMAS = ("const", "enum", "default", "examples")
_APART = ("allOf", "anyOf", "oneOf", "$ref")  # keywords that name further properties elsewhere
_NEVER_CLOSED = ("not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
MAX_TRACKED = 5  # keys whose order is free and whose number is not: 2 ** 5 states


def quote(text: str) -> str:
    """A Lark string."""
    return json.dumps(text) if text else '""'


def _slashed(regex: str) -> str:
    """A regex to stand between slashes."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex)


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
        """Text as it stands within a call, with the marks in it that are tokens of their own."""
        parts = self._specials_in(text)
        names = [quote(part) if index is None else f"<[{index}]>" for part, index in parts]
        return " ".join(names) or '""'

    def _specials_in(self, text: str) -> list[tuple[str, int | None]]:
        names = sorted((name for name in self._special_ids if name in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return [(part, self._special_ids.get(part)) for part in parts if part]

    def has_special(self, mark: str) -> bool:
        """Whether a token of its own is in it, which no text holds."""
        return any(index is not None for _, index in self._specials_in(mark))

    def first_special(self, text: str) -> str:
        """The token of its own that the text begins with; "" where it begins with text."""
        part, index = self._specials_in(text)[0]
        return "" if index is None else part

    def pattern(self, regex: str, but: str | None = None) -> str:
        """A name for what matches the one regex, and not the other."""
        self._num_names += 1
        body = " & ~".join(f"/{_slashed(one)}/" for one in (regex, but) if one is not None)
        self.lines.append(f"PATTERN_{self._num_names}: {body}")
        return f"PATTERN_{self._num_names}"

    def after_text(self, mark: str, text: str = "TEXT") -> str:
        """Text, or what else is named so, and the mark that ends it."""
        is_special = self.has_special(mark)
        before, index = self._specials_in(mark)[0]
        if index is not None:
            return f"{text} {self.mark(mark)}"
        self._num_names += 1
        if is_special:
            pattern = re.escape(before).replace("/", r"\/")
            self.lines.append(f"TEXT_{self._num_names}: /(.|\\n)*{pattern}/")
            return f"TEXT_{self._num_names} {self.mark(mark[len(before) :])}"
        name = f"until_{self._num_names}"
        self.lines.append(f"{name}[lazy]: {text} {quote(mark)}")
        return name

    def series(self, one: str, between: str, many: bool) -> str:
        """One of a rule, or any number with something between two."""
        return f"{one} ({between} {one})*" if many else one

    def sections(
        self, mark: str, calls: str, must_call: bool, many: bool, between: str = ""
    ) -> str:
        """Text with sections that each begin with a mark; or the sections alone."""
        if must_call:
            section = self.add("section", f"{self.mark(mark)} {calls}")
            return self.series(section, between, many)
        section = self.add("section", f"{self.after_text(mark)} {calls}")
        return f"{section}* TEXT" if many else f"TEXT | {section}"

    def keys(self, pairs: Mapping[str, str], required: Collection[str], separator: str = "") -> str:
        """Rules of keys with their values in any order: each once, the required ones for certain.

        Where there are too many keys only the required ones are counted, or none.
        """
        needed = pairs.keys() & set(required)
        tracked = next((keys for keys in (set(pairs), needed) if len(keys) <= MAX_TRACKED), set())
        needed &= tracked
        rules = {key: self.add("pair", body) for key, body in pairs.items()}
        names: dict[tuple[frozenset[str], bool], str] = {}

        def state(used: frozenset[str], is_first: bool) -> str:
            """What may come after these keys."""
            if (used, is_first) in names:
                return names[used, is_first]
            self._num_names += 1
            name = names[used, is_first] = f"keys_{self._num_names}"
            before = "" if is_first or not separator else quote(separator)
            options = [
                f"{before} {rule} {state(used | ({key} & tracked), False)}"
                for key, rule in rules.items()
                if key not in used
            ]
            options += ['""'] if used >= needed else []
            self.lines.append(f"{name}: {' | '.join(options)}")
            return name

        return state(frozenset(), True)

    def arguments(self, schema: Mapping[str, Any] | bool) -> str:
        """A rule for JSON of a tool's parameters."""
        layout: dict[str, Any] = {"whitespace_flexible": self._is_loose, "lenient": True}
        if not self._is_loose:  # as most JSON in a model's training was written
            layout |= {"item_separator": ", ", "key_separator": ": "}
        plain: dict[str, Any] = {}
        if isinstance(schema, Mapping):
            names_none = not schema.get("properties", schema)
            plain = {"additionalProperties": False} if names_none else {}
            plain |= {"type": "object", **closed(schema)}
        return self.add("arguments", f"%json {json.dumps({**plain, 'x-guidance': layout})}")

    def value(self, schema: Any, whole: Any = None) -> str:
        """A rule for one JSON value; `whole` is the schema that this one is a part of."""
        plain = closed(schema) if isinstance(schema, Mapping) else {}
        if isinstance(whole, Mapping):
            plain = {**{key: whole[key] for key in DEFINITIONS if key in whole}, **plain}
        return self.add("value", f"%json {json.dumps(plain)}")

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self.lines, ""])


def closed(schema: Any) -> Any:
    """The schema with objects that take no other properties than those they name.

    A function fails if it is called with an argument that it does not know, and a small model
    invents keys where it may. One whose objects are put together from several parts stays as it is.
    """
    return schema if _is_combined(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {
        key: value
        if key in _NO_SCHEMAS
        else {name: _closed(one) for name, one in value.items()}
        if key in _BY_NAME and isinstance(value, Mapping)
        else _closed(value)
        for key, value in schema.items()
        if key != "x-guidance"
    }
    names, needed = plain.get("properties"), plain.get("required")
    is_whole = not isinstance(needed, list) or all(name in (names or ()) for name in needed)
    if names and is_whole and not any(key in plain for key in _KEEPS_OPEN):
        plain["additionalProperties"] = False
    return plain


def _is_combined(schema: Any) -> bool:
    """Whether what one part of it leaves out may be a property that another one names."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return any(map(_is_combined, schema))
    if not isinstance(schema, Mapping):
        return False
    parts = schema.get("allOf")
    if any(key in schema for key in _NEVER_CLOSED) or (isinstance(parts, list) and len(parts) > 1):
        return True
    if "properties" in schema and any(key in schema for key in _APART):
        return True
    return any(
        any(map(_is_combined, value.values()))
        if key in _BY_NAME and isinstance(value, Mapping)
        else _is_combined(value)
        for key, value in schema.items()
        if key not in _NO_SCHEMAS
    )

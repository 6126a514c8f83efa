"""How much a template may make: sizes are known before a value is made, time is looked at often."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_TEMPLATE = 256 * 1024  # characters
MAX_SIZE = 8_000_000  # characters of a text, items of a list, characters written in all
MAX_SECONDS = 2.0
MAX_BITS = 4096  # of an integer
_ITEM = 16  # characters an item of a list counts as, besides its own

_WIDTHS = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")


@dataclass(slots=True)
class Meter:
    """What one rendering has used so far. Its time is the thread's own: others' is not counted."""

    deadline: float  # by the thread's clock
    written: int = 0

    def write(self, num_chars: int) -> None:
        self.written += num_chars
        if self.written > MAX_SIZE:
            raise SecurityError(f"the template writes more than {MAX_SIZE} characters")

    def tick(self, num_chars: int) -> None:
        """Runs in every loop and macro body; `num_chars` is the text that stands in it."""
        self.write(num_chars)
        if time.thread_time() > self.deadline:
            raise SecurityError(f"the template runs longer than {MAX_SECONDS} seconds")


current_meter: ContextVar[Meter] = ContextVar("hunch_template_meter")


def refuse_above(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"the template makes a value of more than {MAX_SIZE} characters")


def weigh(*values: Any) -> int:
    """About how many characters `values` would print as; refuses more than MAX_SIZE."""
    total, todo = 0, list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, Mapping):
            todo.extend(value.keys())
            todo.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo.extend(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3
        elif isinstance(value, Namespace):
            raise SecurityError("the template uses a namespace as a value")
        total += _ITEM
        refuse_above(total + _ITEM * len(todo))
    return total


def draw(values: Iterator[Any]) -> list[Any]:
    """A lazy filter's results, as far as the limit goes."""
    drawn, total = [], 0
    for value in values:
        total += weigh(value)
        refuse_above(total)
        drawn.append(value)
    return drawn


def bounded(function: Callable[..., Any], num_passed: int) -> Callable[..., Any]:
    """A filter whose inputs are weighed first; lazy ones are drawn up to the limit."""

    def guard(*args: Any, **kwargs: Any) -> Any:
        current_meter.get().tick(0)
        passed, given = args[:num_passed], list(args[num_passed:])
        if given and isinstance(given[0], Iterator):
            given[0] = draw(given[0])
        weigh(*given, *kwargs.values())
        return function(*passed, *given, **kwargs)

    for name in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, name):
            setattr(guard, name, getattr(function, name))
    return guard


def joined_size(separator: str, parts: Any) -> int:
    return weigh(parts) + len(separator) * len(parts)


def replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


def replace(value: str, old: str, new: str, count: int = -1) -> str:
    refuse_above(replaced_size(str(value), old, new))
    return str(value).replace(old, new, -1 if count is None else count)


def join(value: Any, d: str = "", attribute: str | None = None) -> str:
    parts = [str(part if attribute is None else part[attribute]) for part in value]
    refuse_above(joined_size(d, parts))
    return d.join(parts)


def indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(width, 1000)
    lines = str(value).splitlines()
    refuse_above(len(value) + len(prefix) * len(lines))
    indented = [prefix + line if line or blank else line for line in lines]
    if lines and not first:
        indented[0] = lines[0]
    return "\n".join(indented)


def tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As chat templates expect it: plain JSON, nothing escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(int(indent), 16),
        separators=separators,
        sort_keys=sort_keys,
    )


def safe(value: Any) -> Any:
    """Nothing is escaped, so nothing has to be marked as safe."""
    return value


def check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, list, tuple)) and isinstance(other, int):
            refuse_above(weigh(one) * max(other, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise SecurityError(f"the template makes an integer of more than {MAX_BITS} bits")


def check_format(pattern: str, values: Any) -> None:
    """'%08d' % x: widths can make a long text out of a short one."""
    if _WIDTHS.search(pattern):
        raise SecurityError("the template formats with a very large width")
    refuse_above(len(pattern) + pattern.count("%") * (1000 + weigh(values)))


def percent(value: Any, *values: Any, **named: Any) -> str:
    """'%s' | format(x)"""
    check_format(str(value), named or values)
    return str(value) % (named or values)


def filled_in(text: str, *values: Any, **named: Any) -> str:
    """'<{}>'.format(x): fields alone, without widths, and nothing that reaches into a value."""
    weigh(text, *values, *named.values())
    parts: list[str] = []
    numbers = count()
    for before, field, spec, conversion in Formatter().parse(text):
        parts.append(before)
        if field is None:
            continue
        if spec or conversion or not re.fullmatch(r"[A-Za-z_]\w*|\d{0,3}", field):
            raise SecurityError("the template formats with more than the name of a value")
        index = field or str(next(numbers))
        parts.append(str(values[int(index)] if index.isdigit() else named[index]))
        refuse_above(sum(map(len, parts)))
    return "".join(parts)


FILTERS = {f.__name__: bounded(f, 0) for f in (replace, join, indent, tojson, safe)}
FILTERS["format"] = bounded(percent, 0)

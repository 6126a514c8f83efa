"""A jinja environment for templates from anywhere: no access, bounded time, bounded memory.

jinja's sandbox keeps a template from reaching Python; this one also keeps it from using up the
machine. Bounded are: the template's own length; seconds per rendering (checked in every loop and
macro body); the length of every string and list an operator, filter or method makes (refused
before it is made); the size of integers; the characters written, captured ones included.
Filters and methods that are not on the lists below do not exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hunch.text.bounds import (
    FILTERS,
    MAX_SECONDS,
    MAX_TEMPLATE,
    Meter,
    bounded,
    check_format,
    check_power,
    check_product,
    current_meter,
    draw,
    filled_in,
    joined_size,
    refuse_above,
    replaced_size,
    weigh,
)

_FILTERS = frozenset(  # as text: a list of one name per line hides what it says
    """abs capitalize count d default dictsort first float groupby int items last length list lower
    map max min reject rejectattr reverse select selectattr sort string title trim truncate unique
    upper wordcount""".split()  # noqa: SIM905
)
_TEXT_METHODS = frozenset(
    """capitalize casefold count endswith find index isalnum isalpha isdigit islower isnumeric
    isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title
    upper""".split()  # noqa: SIM905
)
_LIST_METHODS = frozenset(("count", "index"))
_DICT_METHODS = frozenset(("get", "items", "keys", "values"))


@jinja2.pass_context  # asking for the context also keeps jinja from running it while compiling
def _finalize(context: Context, value: Any) -> Any:
    """Every {{ expression }} passes here before it is written."""
    current_meter.get().tick(weigh(value))
    return value


def raise_exception(message: Any) -> None:
    """What a template calls when it cannot render these messages."""
    raise jinja2.TemplateError(str(message)[:500])


def strftime_now(pattern: str) -> str:
    if len(pattern) > 100 or re.search(r"%[^a-zA-Z%]*\d", pattern):  # widths grow the text
        raise SecurityError("strftime_now takes a short pattern without widths")
    return datetime.now().strftime(pattern)


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, with a meter."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
            optimized=False,  # folding constants would run the template's code without a meter
        )
        known: dict[str, Any] = dict(self.filters)
        self.filters = {
            name: bounded(known[name], int(hasattr(known[name], "jinja_pass_arg")))
            for name in _FILTERS
        }
        self.filters |= FILTERS
        self.globals = {
            "range": self.globals["range"],  # at most 100 000 numbers
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _LIST_METHODS
        if isinstance(obj, Mapping):
            return attr in _DICT_METHODS
        if isinstance(obj, (int, float, bytes, type)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        is_format = isinstance(value, BuiltinMethodType) and value.__name__ == "format"
        return partial(filled_in, owner) if is_format and isinstance(owner, str) else None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        current_meter.get().tick(0)
        if __obj is dict:
            weigh(*args, *kwargs.values())
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType) and isinstance(owner, str):
            if __obj.__name__ == "replace" and len(args) >= 2:
                refuse_above(replaced_size(owner, str(args[0]), str(args[1])))
            elif __obj.__name__ == "join" and args:
                args = (draw(iter(args[0])), *args[1:])
                refuse_above(joined_size(owner, args[0]))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            weigh(left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """The template with a tick in every body that can run more than once."""
        if len(source) > MAX_TEMPLATE:
            raise SecurityError(f"the template is longer than {MAX_TEMPLATE} characters")
        if _TICK in source or _WEIGH in source:
            raise SecurityError("the template uses a name that is not its own")
        tree = self.parse(source)
        _meter_tree(tree)
        tree.set_environment(self)
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render_bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        meter = Meter(deadline=time.thread_time() + MAX_SECONDS)
        token = current_meter.set(meter)
        try:
            return template.render({**values, _TICK: meter.tick, _WEIGH: _weighed})
        finally:
            current_meter.reset(token)


_TICK, _WEIGH = "hunch_tick", "hunch_weigh"


def _weighed(value: Any) -> Any:
    weigh(value)
    return value


def _meter_tree(tree: nodes.Template) -> None:
    """Rewrite what jinja runs without asking its environment: bodies, `~`, literals."""
    for node_class in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
        if tree.find(node_class) is not None:
            raise SecurityError("the template asks for another template")
    bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for node in bodies:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, nodes.Const(text))))
        if isinstance(node, nodes.For) and node.test is not None:  # runs where the body does not
            node.test = nodes.Or(_call(_TICK, nodes.Const(0)), node.test)
    _rewrite(tree)


def _call(name: str, argument: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [argument], [], None, None)


def _rewrite(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            _rewrite(value)
            setattr(node, field, _replacement(value))
        elif isinstance(value, list):
            for child in value:
                if isinstance(child, nodes.Node):
                    _rewrite(child)
            value[:] = [_replacement(child) for child in value]


def _replacement(node: Any) -> Any:
    if isinstance(node, nodes.Concat):  # a ~ b: as +, which the environment sees
        parts: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None) for part in node.nodes
        ]
        joined = parts[0]
        for part in parts[1:]:
            joined = nodes.Add(joined, part)
        return joined
    is_list = isinstance(node, (nodes.List, nodes.Dict))
    is_literal = is_list or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    if is_literal and any(not isinstance(c, nodes.Const) for c in node.iter_child_nodes()):
        # [x, x] in a loop doubles what it would take to print or compare it.
        return _call(_WEIGH, node)
    return node

"""What tests of this folder ask of a file of Python, found when it is parsed, once for all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# What is called so in a call of another package is theirs: numpy's and Ray's.
THEIR_NAMES = {("argsort", "kind"), ("accelerator_config", "kind")}


@dataclass(frozen=True)
class Parsed:
    # Modules, wherever in the file they are imported, and the names that are taken from each.
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    functions: tuple[tuple[str, int], ...]  # their names, and the lines of their bodies
    names: frozenset[str]  # of all that code calls by a name

    @property
    def modules(self) -> list[str]:
        return [module for module, _ in self.imports]


@cache
def parsed(path: Path) -> Parsed:
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> Parsed:
    tree = ast.parse(text)
    every = list(_statements(tree.body))
    functions = [
        node for node in every if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return Parsed(
        tuple(found for node in every for found in _imported(node)),
        tuple((node.name, (node.end_lineno or 0) - node.body[0].lineno) for node in functions),
        frozenset(names_in(tree)),
    )


def _imported(node: ast.stmt) -> list[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        return [(alias.name, ()) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [(node.module, tuple(alias.name for alias in node.names))]
    return []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All of them, those inside others too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            if isinstance(inner, list):
                yield from _statements(inner)


def names_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            if (getattr(node.value, "attr", None), node.attr) not in THEIR_NAMES:
                found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None)
            given = {word.arg for word in node.keywords if word.arg}
            found.update(name for name in given if (called, name) not in THEIR_NAMES)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not node.name.startswith("test_"):  # these are sentences
                found.add(node.name)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
    return found

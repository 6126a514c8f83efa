"""Files and functions stay small enough to be read."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "hunch"
MAX_FILE, MAX_FUNCTION = 400, 60


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_size(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body_start = node.body[0].lineno  # a long signature is not a long function
            assert node.end_lineno - body_start < MAX_FUNCTION, f"{node.name} is too long"

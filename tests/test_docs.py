"""README and docs: every command they print is known with its flags, every Python block is Python.

The slow test runs README's Python on the default model.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from hunch.cli import _dashed, app
from hunch.cli.serve import _parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GROUP = typer.main.get_command(app)


def blocks(page):
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands():
    """Every line of a block that calls hunch, comments cut off, continued lines joined."""
    found = []
    for page in PAGES:
        for kind, text in blocks(page):
            if kind not in ("", "sh", "bash", "console"):
                continue
            for line in text.replace("\\\n", " ").splitlines():
                words = re.sub(r"\s#.*", "", line.strip().removeprefix("$ ")).strip()
                if re.match(r"(\.venv/bin/)?hunch(\s|$)", words) and "|" not in words:
                    found.append(pytest.param(words, id=f"{page.stem}: {words[:60]}"))
    return found


def flags_of(command):
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("line", commands())
def test_a_printed_command_is_known_with_its_flags(line):
    _, *words = [_dashed(word) for word in shlex.split(line)]
    command, known = GROUP, {"--help", "-h"}
    while getattr(command, "commands", None) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        known |= flags_of(command)
    assert command is not GROUP or line.startswith("hunch --"), f"no command in {line!r}"
    if command.name == "serve":  # it reads its own flags
        known |= set(_parser()._option_string_actions)
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
    assert not given - known, f"{line!r}: unknown flags"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_are_python(page):
    for kind, text in blocks(page):
        if kind == "python" and "{...," not in text:
            compile(text, str(page), "exec")


@pytest.mark.slow
def test_readmes_python_runs(capsys):
    for kind, text in blocks(ROOT / "README.md"):
        if kind == "python":
            exec(compile(text, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()

"""README and docs: every command they print is known with its flags, every Python block is Python.

The slow tests run them: commands shortened by flags, Python as it stands.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import typer

from hunch.bench.parts import main_of
from hunch.cli import _dashed, app
from hunch.cli.serve import _parser
from train.train_setup import OPTIONS, write_prompts, write_target

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


def commands_in_text():
    """Those that stand in backticks within sentences and tables, and in indented lines."""
    found = {}
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        indented = re.findall(r"^    ((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", text) + indented:
            words = re.sub(r"\s#.*|\\\n", " ", span)
            words = " ".join(words.removesuffix("&").split())
            if re.match(r"hunch\s+(--)?[a-z]", words) and not re.search(r"[|<\[*]|\.\.\.", words):
                found[words] = pytest.param(words, id=f"{page.stem}: {words[:60]}")
    return list(found.values())


def check_known(line):
    """The command is there, with all its flags."""
    _, *words = [_dashed(word) for word in shlex.split(line)]
    command, known = GROUP, {"--help", "-h"}
    while getattr(command, "commands", None) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        known |= flags_of(command)
    assert command is not GROUP or line.startswith("hunch --"), f"no command in {line!r}"
    if command.name == "serve":  # it reads its own flags
        known |= set(_parser()._option_string_actions)
    if command.name == "part" and words and words[0] != "NAME":
        known |= flags_of_part(words[0])
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
    assert not given - known, f"{line!r}: unknown flags"


def flags_of_part(name):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main_of(name)(["--help"])
    return set(re.findall(r"--[a-z-]+", said.getvalue()))


@pytest.mark.parametrize("line", commands())
def test_a_printed_command_is_known_with_its_flags(line):
    check_known(line)


@pytest.mark.parametrize("line", commands_in_text())
def test_a_command_in_a_sentence_is_known_with_its_flags(line):
    check_known(line)


NUMBER = re.compile(r"[`*~<>±+-]*\d")
MEASURES = re.compile(r"(`|^    )(hunch\s+(bench|plan|train)|pytest|make)\s", re.MULTILINE)
NEAR = 14  # lines before a table's head or after its end, none of them beyond a heading


def tables_of_figures():
    """Tables most of whose cells, the first of a line aside, begin with a number."""
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        place = 0
        while place < len(lines):
            end = place
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            rows = [line.strip("|").split("|")[1:] for line in lines[place + 2 : end]]
            cells = [cell.strip() for row in rows for cell in row if cell.strip()]
            if sum(bool(NUMBER.match(cell)) for cell in cells) > len(cells) / 2:
                name = f"{page.stem}: {lines[place][:60]}"
                yield pytest.param(near_text(lines, place, end), id=name)
            place = max(end, place + 1)


def near_text(lines, start, end):
    before = lines[max(0, start - NEAR) : start]
    after = lines[end : end + NEAR]
    headings = [place for place, line in enumerate(before) if line.startswith("#")]
    before = before[headings[-1] :] if headings else before
    heading = next((place for place, line in enumerate(after) if line.startswith("#")), len(after))
    return "\n".join((*before, *after[:heading]))


@pytest.mark.parametrize("near", list(tables_of_figures()))
def test_a_table_of_figures_names_its_command(near):
    assert MEASURES.search(near), "no command of the project stands near that prints this table"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_are_python(page):
    for kind, text in blocks(page):
        if kind == "python" and "{...," not in text:
            compile(text, str(page), "exec")


# Printed commands that the slow test below runs, by their first words: what is added so that they
# end soon. All others need what is not here: a model named MODEL, a GPU, another host.
SHORT = {
    "hunch generate": ["--max-tokens", "8"],
    "hunch verify": ["--limit", "2", "--max-tokens", "8"],
    "hunch bench --workload": ["--limit", "1", "--repeats", "1", "--max-tokens", "8"],
    "hunch plan": [],
    "hunch models": [],
    "hunch doctor": [],
    "hunch drafters": [],
    "hunch pull": [],
}
ELSEWHERE = re.compile(
    r"MODEL|DIR|PATH|\.\.\.|\[|<|/|prompts\.jsonl|my-|--drafter|-tp|--replicas|\brm\b|--device|eagle|medusa"
)


def runnable():
    for param in commands():
        (line,) = param.values
        for words, added in SHORT.items():
            if re.match(rf"{words}(\s|$)", line) and not ELSEWHERE.search(line):
                yield pytest.param(line, added, id=param.id)


@pytest.mark.timeout(1800)
@pytest.mark.slow  # each loads the default model in a process of its own
@pytest.mark.parametrize(("line", "added"), list(runnable()))
def test_a_printed_command_runs(line, added, tmp_path):
    known = {"--limit", "--repeats", "--max-tokens"} & set(shlex.split(line))
    pairs = zip(added[::2], added[1::2], strict=True)
    added = [word for flag, value in pairs if flag not in known for word in (flag, value)]
    command = [sys.executable, "-m", "hunch", *shlex.split(line)[1:], *added]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow  # on the default model
@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_a_pages_python_runs(name, capsys):
    for kind, text in blocks(ROOT / name):
        if kind == "python":
            exec(compile(text, name, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_page_with_python_is_run_by_a_test():
    """The guide to drafters by tests/conformance/test_documented_drafter.py."""
    pages = {page.stem for page in PAGES if any(kind == "python" for kind, _ in blocks(page))}
    assert pages == {"README", "start", "serving", "adding-a-drafter"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with what printed commands name: a model and prompts."""
    folder = tmp_path_factory.mktemp("printed")
    write_target(folder / "MODEL")
    for name in ("prompts.jsonl", "new-log.jsonl"):
        write_prompts(folder / name)
    return folder


# What makes training on a model of a few thousand weights end soon, and succeed.
SMALL_JOB = [f"{name}={value}" for name, value in OPTIONS.items() if name != "held_out"]


def trainings():
    """Those of any MODEL, in the order of the pages; one may go on from another's folder."""
    lines = [param.values[0] for param in commands()]
    return [
        line
        for line in dict.fromkeys(lines)
        if re.search(r"train (draft|mlp).* MODEL|--resume", line)
    ]


@pytest.mark.timeout(900)
@pytest.mark.slow  # trains
def test_printed_trainings_run(bench):
    found = trainings()
    assert len(found) >= 2
    for line in found:
        words = shlex.split(line)[1:]
        is_first = "--resume" not in words
        command = [
            sys.executable,
            "-m",
            "hunch",
            *words,
            *(SMALL_JOB if is_first else ["steps=40"]),
        ]
        done = subprocess.run(command, cwd=bench, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr[-2000:])
    lines = [param.values[0] for param in commands() if "draft:my-draft" in param.values[0]]
    for line in lines:
        words = shlex.split(line)[1:]
        if words[0] == "generate":
            command = [sys.executable, "-m", "hunch", *words, "--max-tokens", "8"]
            done = subprocess.run(command, cwd=bench, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr[-2000:])


@pytest.mark.slow  # needs a server with the default model
def test_the_guide_to_servings_python_runs(tmp_path, capsys):
    """In the order of the page, against the port it names."""
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "hunch", "serve", "--port", "8000"]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    names = {}
    try:
        for _ in range(600):
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            try:
                urlopen("http://127.0.0.1:8000/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        for kind, text in blocks(ROOT / "docs" / "serving.md"):
            if kind == "python":
                exec(compile(text, "serving.md", "exec"), names)
            elif text.startswith("curl "):
                done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
                assert json.loads(done.stdout)["type"] == "message", done
        assert "city" in capsys.readouterr().out
        names["client"].close()
    finally:
        server.terminate()
        server.wait(30)
        log.close()

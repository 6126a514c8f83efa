"""README and docs: every command they print is known with its flags, every Python block is Python.

The slow tests run them: commands shortened by flags, Python as it stands.
"""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import typer

from hunch.bench.parts import main_of
from hunch.cli import app
from hunch.cli.flags import make_parser
from hunch.compat import dashed
from hunch.models.families import llama
from tiny_models import write_llama
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
    _, *words = [dashed(word) for word in shlex.split(line)]
    command, known = GROUP, {"--help", "-h"}
    while getattr(command, "commands", None) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        known |= flags_of(command)
    assert command is not GROUP or line.startswith("hunch --"), f"no command in {line!r}"
    if command.name == "serve":  # it reads its own flags
        known |= set(make_parser()._option_string_actions)
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
        if kind == "python":
            compile(text, str(page), "exec")


# Printed commands that the slow test below runs, by their first words: what is added so that they
# end soon. Those of a MODEL, of servers and of training are run by the tests after it.
SHORT = {
    "hunch generate": ["--max-tokens", "8"],
    "hunch verify": ["--limit", "2", "--max-tokens", "8"],
    "hunch bench --workload": ["--limit", "1", "--repeats", "1", "--max-tokens", "8"],
    "hunch bench sweep": [
        "--limit",
        "1",
        "--seconds",
        "0.5",
        "--min-requests",
        "1",
        "--max-tokens",
        "8",
    ],
    "hunch chat": ["--max-tokens", "8"],
    "hunch plan": [],
    "hunch models": [],
    "hunch doctor": [],
    "hunch drafters": [],
    "hunch pull": [],
}
ELSEWHERE = re.compile(r"MODEL|DIR|PATH|\[|<|/|prompts\.jsonl|my-")


def runnable():
    for param in commands():
        (line,) = param.values
        for words, added in SHORT.items():
            if re.match(rf"{words}(\s|$)", line) and not ELSEWHERE.search(line):
                yield pytest.param(line, added, id=param.id)


def install_echo(folder):
    """The guide's drafter as a package that a command started in the folder finds."""
    code, _ = [text for kind, text in blocks(ROOT / "docs/adding-a-drafter.md") if kind == "python"]
    (folder / "echo_drafter.py").write_text(code)
    about = folder / "echo-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hunch.drafters]\necho = echo_drafter:EchoDrafter\n")


@pytest.mark.timeout(1800)
@pytest.mark.slow  # each loads the default model in a process of its own
@pytest.mark.parametrize(("line", "added"), list(runnable()))
def test_a_printed_command_runs(line, added, tmp_path):
    install_echo(tmp_path)
    known = {flag for flag in added[::2] if flag in shlex.split(line)}
    pairs = zip(added[::2], added[1::2], strict=True)
    added = [word for flag, value in pairs if flag not in known for word in (flag, value)]
    command = [sys.executable, "-m", "hunch", *shlex.split(line)[1:], *added]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, input="Hello\n")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow  # on the default model
@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_a_pages_python_runs(name, capsys):
    for kind, text in blocks(ROOT / name):
        if kind == "python":
            exec(compile(text, name, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_documented_family_is_the_one_that_ships():
    """The page shows all of it."""
    (text,) = [text for kind, text in blocks(ROOT / "docs/models.md") if kind == "python"]
    scope = {"Llama": llama.Llama, "__name__": "documented"}
    exec(compile(text, "docs/models.md", "exec"), scope)
    assert scope["Helium"].keys == llama.Helium.keys
    assert scope["Helium"].names == llama.Helium.names


def test_every_page_with_python_is_run_by_a_test():
    """The guide to drafters by tests/conformance/test_documented_drafter.py."""
    pages = {page.stem for page in PAGES if any(kind == "python" for kind, _ in blocks(page))}
    assert pages == {"README", "start", "serving", "adding-a-drafter", "models"}


def test_every_printed_command_is_run_by_a_test():
    """Those of blocks; commands within sentences measure for minutes, or on a GPU."""
    ran = {param.values[0] for param in runnable()} | set(trainings()) | set(servings())
    lines = {param.values[0] for param in commands()} - ran
    assert not {line for line in lines if not re.match("hunch (bench --url|generate.*MODEL)", line)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with what printed commands name: a model, one of its family, and prompts."""
    folder = tmp_path_factory.mktemp("printed")
    write_target(folder / "MODEL")
    write_llama(folder / "SMALL", layers=24, width=32, max_len=128)
    for name in ("prompts.jsonl", "new-log.jsonl"):
        write_prompts(folder / name)
    return folder


# What makes training on a model of a few thousand weights end soon, and succeed; later words win.
SMALL_JOB = [f"{name}={value}" for name, value in OPTIONS.items() if name != "held_out"]
SMALL_HEADS = {"eagle3": ["layers=1", "features=0,1,3", "draft_vocab=64"], "medusa": ["layers=1"],
               "mlp": ["stages=2", "inner=32", "draft_vocab=64"]}  # fmt: skip


def trainings():
    """In the order of the pages; one may go on from another's folder."""
    lines = [param.values[0] for param in commands()]
    return [line for line in dict.fromkeys(lines) if line.startswith("hunch train")]


def run_small(line, folder, *added):
    """A printed command in a folder that has MODEL; its exit code, and what it said."""
    words = shlex.split(line.replace("smollm2-135m", "MODEL"))[1:]
    command = [sys.executable, "-m", "hunch", *words, *added]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr[-2000:]


@pytest.mark.timeout(1800)
@pytest.mark.slow  # trains
def test_printed_trainings_run(bench):
    found = trainings()
    assert len(found) >= 5
    for line in found:
        method = shlex.split(line)[2]
        if method.startswith("-"):  # it chooses; where no drafter pays it leaves with 3
            added = ["--minutes", "2", "--max-model-len", "96", "--no-register"]
            added += ["--prompts", "prompts.jsonl", "batch=128", "context=96", "max_tokens=20"]
            code, said = run_small(line, bench, *added)
            assert code in (0, 3), (line, said)
            continue
        added = ["steps=40"] if "--resume" in line else [*SMALL_JOB, *SMALL_HEADS.get(method, [])]
        code, said = run_small(line, bench, *added)
        assert code == 0, (line, said)
    lines = [param.values[0] for param in commands() if "MODEL" in param.values[0]]
    for line in lines:
        if line.startswith("hunch generate"):
            code, said = run_small(line, bench, "--max-tokens", "8")
            assert code == 0, (line, said)


def servings():
    lines = [param.values[0] for param in commands()]
    return [line for line in dict.fromkeys(lines) if line.startswith("hunch serve")]


@contextlib.contextmanager
def served(line, folder, *added):
    """A printed server, until it answers; it leaves by the signal that a service manager sends."""
    words = shlex.split(line)[1:]
    log = (folder / "log").open("w")
    command = [sys.executable, "-m", "hunch", *words, *added]
    server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        for _ in range(3000):
            assert server.poll() is None, (line, (folder / "log").read_text()[-2000:])
            with contextlib.suppress(OSError):
                urlopen("http://127.0.0.1:8000/health", timeout=300).close()
                break
            time.sleep(0.2)
        else:
            raise AssertionError(f"{line}: no answer")
        yield server
    finally:
        server.terminate()
        server.wait(300)
        log.close()


@pytest.mark.timeout(1800)
@pytest.mark.slow  # starts a server for each
def test_printed_servers_start_and_answer(bench):
    """Files that a line names under / lie in the folder here. --adapt: tests/test_adapt.py."""
    from models.test_adapter import write_adapter

    for name in ("sql", "chat"):
        write_adapter(bench / "MODEL", bench / "adapters" / name)
    shutil.copytree(bench / "MODEL", bench / "models" / "coder.gguf", dirs_exist_ok=True)
    if not (bench / "my-draft").exists():
        shutil.copytree(bench / "MODEL", bench / "my-draft")
    for line in servings():
        line = line.replace("/models/", "models/").replace("/adapters/", "adapters/")
        if "adapters/" in line or "--adapt" in line:
            line = line.replace("smollm2-135m", "MODEL").replace("--adapt", "")
        with served(line.replace("$KEY", "key"), bench):
            pass


@pytest.mark.slow  # needs a server with the default model
def test_the_guide_to_servings_python_runs(tmp_path, capsys):
    """In the order of the page, against the port it names."""
    names = {}
    with served("hunch serve", tmp_path):
        for kind, text in blocks(ROOT / "docs" / "serving.md"):
            if kind == "python":
                exec(compile(text, "serving.md", "exec"), names)
            elif text.startswith("curl "):
                done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
                assert json.loads(done.stdout)["type"] == "message", done
        assert "city" in capsys.readouterr().out
        names["client"].close()
        short = ["--limit", "1", "--repeats", "1", "--max-tokens", "8"]
        lines = [param.values[0] for param in commands() if "bench --url" in param.values[0]]
        assert lines
        for line in lines:
            code, said = run_small(line, tmp_path, *short)
            assert code == 0, (line, said)

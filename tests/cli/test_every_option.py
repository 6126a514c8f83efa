"""Every option of every command changes what happens, or is refused: none is silently ignored.

Commands run as from a shell. What they reach for (engines, jobs, servers) is replaced by
stand-ins that write down how they were called, so an effect is a difference in these calls, in
what is printed or in the files written. Flags of `serve` are walked in test_every_flag.py.
"""

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer

import hunch
from hunch import LLM
from hunch.bench.distribution import Agreement
from hunch.bench.loads import nobody
from hunch.bench.records import Report
from hunch.bench.session import Asked, Session
from hunch.bench.soak import Soak
from hunch.cli import app, main
from hunch.config import say_once
from hunch.train import plan as train_plan
from hunch.train.job import Job
from hunch.train.select import Measured
from tiny_models import write_llama

GROUP = typer.main.get_command(app)
PROMPTS = '{"prompt": "fast token fast token"}\n{"turns": ["the model and the model"]}\n'


def every_command() -> dict[str, Any]:
    """By the words that call it; a new one is walked by itself."""
    found: dict[str, Any] = {}
    waiting = [("", GROUP)]
    for name, command in waiting:
        if name == "bench" or not hasattr(command, "commands"):
            found[name] = command
        for word, one in getattr(command, "commands", {}).items():
            waiting.append((f"{name} {word}".strip(), one))
    del found["serve"]
    return found


COMMANDS = every_command()


# --- what stands in for engines, jobs and servers -----------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("walk") / "model")
    with LLM(str(path), speculate="ngram", dtype="float32", threads=1, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def report(tiny: LLM) -> Report:
    """Of a real run, so that tables and pages have something to show."""
    asked = Asked(tiny.config.model.model, ("off", "ngram"), "demo", limit=1, max_tokens=4,
                  rounds=1, engine={"threads": 1, "dtype": "float32"})  # fmt: skip
    session = Session(asked, lambda text: None)
    try:
        return session.run("bench")
    finally:
        session.close()


class Recorder:
    """Stands in for LLM: writes down what it was given and lets a small model answer."""

    def __init__(self, tiny: LLM, calls: list[Any], *words: Any, **named: Any) -> None:
        calls.append(("LLM", words, sorted(named.items())))
        self.tiny, self.calls = tiny, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tiny, name)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def generate(self, prompts: Any, params: Any, **named: Any) -> Any:
        self.calls.append(("generate", prompts, params))
        return self.tiny.generate(prompts, replace(params, max_tokens=2), use_tqdm=False)

    def sibling(self, *words: Any, **named: Any) -> "Recorder":
        return Recorder(self.tiny, self.calls, *words, **named)

    def stream(self, prompt: Any, params: Any) -> Any:
        self.calls.append(("stream", prompt, params))
        return self.tiny.stream(prompt, replace(params, max_tokens=2))


@pytest.fixture
def calls(tiny: LLM, report: Report, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stand-ins were asked for."""
    seen: list[Any] = []

    def instead(where: str, gives: Any = None) -> None:
        module, _, name = where.rpartition(".")

        def call(*words: Any, **named: Any) -> Any:
            seen.append((name, words, sorted(named.items())))
            return gives(*words, **named) if callable(gives) else gives

        monkeypatch.setattr(import_module(module), name, call)  # a command hides its module's name

    monkeypatch.setattr(hunch, "LLM", lambda *a, **k: Recorder(tiny, seen, *a, **k), raising=False)
    stats = tiny.stats()  # a clock decides what is drafted, so they would differ between calls
    monkeypatch.setattr(tiny, "stats", lambda: stats)
    _engines(instead, monkeypatch, seen, report)
    _models(instead)
    _jobs(instead)
    return seen


def _engines(
    instead: Callable[..., None], monkeypatch: pytest.MonkeyPatch, seen: list[Any], report: Report
) -> None:
    class Measuring:
        subjects, num_turns = (), 0

        def __init__(self, asked: Asked, say: Any, pids: Any) -> None:
            seen.append((asked, pids))
            self.asked = asked

        def run(self, command: str, *, save: Any, on_turn: Any, on_answer: Any) -> Report:
            seen.append((command, save, on_answer is nobody))
            return Report(command, self.asked.settings(), report.environment, report.runs)

        def close(self) -> None: ...

    @contextmanager
    def running(found: Any, say: Any = None) -> Iterator[list[Any]]:
        seen.append([(one.name, one.command) for one in found])
        yield [SimpleNamespace(name="server", url="http://127.0.0.1:1", pid=1)]

    async def soak(asked: Any) -> dict[str, Any]:
        seen.append(asked)
        return {"is_clean": True}

    monkeypatch.setattr("hunch.bench.session.Session", Measuring)
    monkeypatch.setattr("hunch.bench.peers.running", running)
    monkeypatch.setattr("hunch.bench.soak.soak", soak)
    peer = SimpleNamespace(name="peer", command=("serve",))
    instead("hunch.bench.peers.peers", [peer])
    cost = {"streams": 1, "offline": 1.0, "served": 1.0, "cost": 0.0, "low": 0.0, "high": 0.0}
    instead("hunch.bench.served.cost", [cost])
    instead("hunch.bench.verifiers.measure_setting", (Agreement(), Agreement()))
    instead("hunch.bench.distribution.fit", Agreement(num_samples=1, degrees=1))
    monkeypatch.setattr(Report, "__repr__", lambda report: report.command)  # it is long
    instead("hunch.bench.html.as_html", "a page")
    instead("hunch.bench.report.as_table", "a table")
    instead("hunch.bench.plots.charts", [])
    instead("hunch.bench.parts.main_of", lambda name: lambda words: seen.append(words))
    instead("hunch.bench.device.fidelity.measure", SimpleNamespace(kl=0.0, top1=1.0))
    instead("hunch.bench.device.fidelity.float32_bytes", 1)


def _models(instead: Callable[..., None]) -> None:
    entry = SimpleNamespace(name="tiny", source="here", num_bytes=1, path=Path("tiny"))
    drafter = SimpleNamespace(path="made")
    instead("hunch.hub.catalogue.entries", [entry])
    instead("hunch.hub.catalogue.remove", entry)
    instead("hunch.hub.drafters.trained_drafters", [])
    instead("hunch.hub.drafters.drop_trained", drafter)
    files = SimpleNamespace(name="tiny", path=Path("tiny.gguf"))
    instead("hunch.hub.resolve", files)


def _jobs(instead: Callable[..., None]) -> None:
    instead("hunch.train.job.run_job", Measured(1.0, 0.5, [0.5], 0.1, 9))
    outcome = SimpleNamespace(pays=True, text="trained", speeds=None, to_json=dict)
    instead("hunch.train.auto.train_best", outcome)
    found = SimpleNamespace(method="draft", trials=[], findings=[], to_json=dict)
    instead("hunch.train.diagnose.Doctor", SimpleNamespace(run=lambda: found))
    instead("hunch.cli.chat.answer_of", ("hello", {}))


# --- one call, and all that a user could notice of it -------------------------------------------


class Seen(NamedTuple):
    code: int
    calls: str
    printed: str
    said: str  # in the log
    files: dict[str, Any]


@pytest.fixture
def call(
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    report: Report,
) -> Callable[[list[str]], tuple[Seen, str]]:
    monkeypatch.chdir(tmp_path)  # and back again in the end
    monkeypatch.setattr("hunch.cli.app", GROUP)  # built once, not for every call
    given = {"prompts.jsonl": PROMPTS}
    report.save(tmp_path / "one.json")
    given["one.json"] = given["two.json"] = (tmp_path / "one.json").read_text()

    def once(words: list[str]) -> tuple[Seen, str]:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for name, text in given.items():
            (tmp_path / name).write_text(text)
        os.chdir(tmp_path)
        calls.clear()
        caplog.clear()
        say_once.cache_clear()
        questions = iter(["hello"])
        monkeypatch.setattr("builtins.input", lambda _="": next(questions, ""))
        monkeypatch.setattr("sys.stdin", StringIO())
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        files = {path.name: path.is_file() and path.read_text() for path in tmp_path.glob("*")}
        printed = out if words[0] == "plan" else re.sub(r"[\d\s.,─━│┃-]+", " ", out)
        addressless = re.sub(r" at 0x\w+", "", repr(calls))
        return Seen(int(left.value.code or 0), addressless, printed, caplog.text, files), err

    return once


# --- the walk -----------------------------------------------------------------------------------

BASE: dict[str, list[str]] = {  # what a command is always called with
    "generate": ["hi"], "bench compare": ["one.json", "two.json"], "bench show": ["one.json"],
    "bench soak": ["http://127.0.0.1:1"], "train": ["--out", "made"],
    "bench part": ["quantised"], "plan": ["--json"], "verify": ["--limit", "2"],
}  # fmt: skip
VALUES: dict[str, str] = {  # 9 where nothing else is said
    "device": "cpu", "verifier": "block", "speculate": "suffix", "prompts": "prompts.jsonl",
    "workload": "code", "goodput": "ttft:200", "logit_bias": "7=1", "draft": "1B", "top_p": "0.5",
    "from_report": "one.json", "gpu": "A100", "target": "70B", "contexts": "2k", "enlarge": "7b",
    "trees": "chain", "url": "http://127.0.0.1:1", "server": "http://127.0.0.1:1", "min_p": "0.1",
    "html": "page.html", "csv": "table.csv", "markdown": "table.md", "skip": "hunch",
    "out": "other", "acceptance": "0.9", "link": "nvlink4", "drafter": ".", "dtype": "bfloat16",
}  # fmt: skip
OWN: dict[str, str] = {  # of one command's option
    "bench gpu targets": "7b", "bench gpu prompts": "code", "bench peers server": "mine=serve",
    "bench compare before": "none.json", "bench compare after": "none.json",
    "bench show report": "none.json", "bench soak url": "http://127.0.0.1:2",
    "train options": "layers=4", "train method": "draft",
    "plan dtype": "fp8", "models action": "rm", "drafters action": "rm", "train resume": "job",
    "models name": "other", "drafters path": "made", "plan kv_bytes": "70000", "plan target": "9B",
    "verify presence_penalty": "1", "verify frequency_penalty": "1", "verify samples": "70",
    "verify limit": "1",
}  # fmt: skip
BESIDE: dict[str, list[str]] = {  # words that an option means something with; given without it too
    "bench burstiness": ["--rate", "3"], "bench seconds": ["--rate", "3"],
    "bench served_model": ["--url", "http://127.0.0.1:1"], "plan price": ["--rps", "5"],
    "bench sweep burstiness": ["--rates", "3"], "bench sweep seconds": ["--rates", "3"],
    "bench sweep min_requests": ["--rates", "3"], "plan pp": ["--link", "nvlink4"],
    "bench sweep served_model": ["--url", "http://127.0.0.1:1"],
    "doctor target": ["--drafter", "."], "verify samples": [
        "--verifier", "block", "--temperature", "1"],
    "models name": ["rm", "tiny", "--yes"], "models yes": ["rm", "tiny"],
    "drafters path": ["rm"], "train options": ["draft"], "train resume": ["draft"],
}  # fmt: skip


def words_of(name: str, param: Any) -> tuple[list[str], list[str]]:
    """A call without the option, and one with it."""
    key = f"{name} {param.name}".strip()
    base = [*name.split(), *BASE.get(name, [])]
    if key in BESIDE:
        base = [*name.split(), *BESIDE[key], *BASE.get(name, [])]
    if param.name == "as_json":
        base = [word for word in base if word != "--json"]
    value = OWN.get(key, VALUES.get(param.name, "9"))
    if param.param_type_name == "argument":
        place = [one for one in COMMANDS[name].params if one.param_type_name == "argument"]
        before = base[: len(name.split()) + place.index(param)]
        return base, [*before, value, *base[len(before) + (param.name in REPLACED) :]]
    if param.is_flag:
        return base, [*base, *((param.secondary_opts if param.default else param.opts)[:1])]
    return base, [*base, param.opts[0], value]


REPLACED = {"prompt", "before", "after", "report", "url", "name"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_an_effect_or_is_refused(
    name: str, call: Callable[[list[str]], tuple[Seen, str]]
) -> None:
    made: dict[tuple[str, ...], Seen] = {}  # calls without an option
    silent = []
    for param in COMMANDS[name].params:
        if param.name in ("help", "install_completion", "show_completion"):
            continue
        base, words = words_of(name, param)
        if tuple(base) not in made:
            made[tuple(base)], _ = call(base)
            assert call(base)[0] == made[tuple(base)], "what is compared changes by itself"
        found, errors = call(words)
        if found == made[tuple(base)]:
            silent.append(param.name)
        elif found.code == 2:
            is_named = param.param_type_name == "argument" or param.opts[0] in errors
            assert is_named, (param.name, errors)
    assert silent == []


@pytest.mark.parametrize(
    "kind", [Asked, Soak, train_plan.Asked, Job], ids=lambda kind: kind.__module__
)
def test_what_the_stand_ins_were_given_is_read_by_those_they_stand_for(kind: Any) -> None:
    """Every field, as an attribute, somewhere in its package."""
    read = attributes_read_in(kind.__module__.split(".")[1])
    assert {field.name for field in fields(kind)} <= read


@cache
def attributes_read_in(package: str) -> set[str]:
    files = (Path(hunch.__file__).parent / package).rglob("*.py")
    return {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }

"""`hunch bench` as a shell sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hunch.bench.records import FORMAT
from tiny_models import write_llama

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("bench") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "x", "turns": ["fast token fast token"]}\n{"prompt": "the model"}\n')
    return str(path)


@pytest.fixture
def run(shell: Call) -> Call:
    return partial(shell, "bench")


def test_methods_side_by_side(run: Call, model: str, prompts: str, tmp_path: Path) -> None:
    table, page = tmp_path / "table.md", tmp_path / "figures.csv"
    code, out, _ = run(
        "-m", model, "--prompts", prompts, "--speculate", "ngram", "--max-tokens", "8",
        "--repeats", "2", "--json", "--markdown", str(table), "--csv", str(page), "--threads", "1",
        "--goodput", "ttft:60000",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    off, ngram = report["figures"]
    assert (off["method"], ngram["method"]) == ("off", "ngram")
    assert ngram["identical"]
    assert ngram["num_answers"] == 4
    assert ngram["goodput_share"] == 1.0
    assert ngram["time_saved"].keys() == {"plain", "by_clock", "by_engine"}
    where = report["environment"]
    assert where["model"] == model
    assert {"commit", "cpu", "command", "date", "hunch", "kernels", "threads"} <= where.keys()
    assert "| ngram |" in table.read_text()
    assert page.read_text().startswith("method,")


def test_a_sweep_goes_on_where_it_stopped(
    run: Call, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hunch.bench.offline import EngineSubject

    out = tmp_path / "sweep.json"
    words = (
        "sweep", "-m", model, "--prompts", prompts, "--speculate", "ngram,auto",
        "--draft-lengths", "2", "--rates", "50,200", "--seconds", "0.1", "--min-requests", "3",
        "--max-tokens", "6", "--out", str(out), "--threads", "1",
    )  # fmt: skip
    drive, calls = EngineSubject.drive, []

    def stop_after_four(self, *rest):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(self.name)
        return drive(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(EngineSubject, "drive", stop_after_four)
        calls += 4 * [""]
        code, _, err = run(*words)
        assert code == 130
        assert "goes on" not in err, "nothing was measured"
        calls.clear()
        code, _, err = run(*words)
    assert code == 130
    assert "goes on" in err
    assert calls == ["off", "ngram:num_nodes=2:adaptive=false", "auto", "off"]
    calls.clear()

    def count(self, *rest):
        calls.append(self.name)
        return drive(self, *rest)

    monkeypatch.setattr(EngineSubject, "drive", count)
    code, text, _ = run(*words)
    assert code == 0
    assert len(calls) == 3  # of the second rate alone
    assert "in one round" in text
    assert "ngram, fixed 2" in text
    assert len(json.loads(out.read_text())["runs"]) == 6
    code, _, err = run(*words, "--seed", "5")
    assert code == 2
    assert "seed" in err
    calls.clear()
    assert run(*words, "--repeats", "2")[0] == 0  # a round more of everything
    assert len(calls) == 6
    code, _, err = run(*words)
    assert code == 2
    assert "rounds" in err


def test_every_turn_of_a_question_is_asked_unless_told_otherwise(
    run: Call, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "mt_bench.jsonl"
    path.write_text('{"question_id": 7, "category": "x", "turns": ["fast token", "the model"]}\n')
    words = (
        "-m", model, "--prompts", str(path), "--speculate", "ngram", "--max-tokens", "4",
        "--repeats", "1", "--json", "--threads", "1",
    )  # fmt: skip
    for more, expected in (((), ["7", "7, turn 2"]), (("--first-turns",), ["7"])):
        code, out, _ = run(*words, *more)
        assert code == 0
        for method in json.loads(out)["runs"]:
            assert [answer["id"] for answer in method["rounds"][0]["answers"]] == expected


def test_compare_two_reports(run: Call, model: str, prompts: str, tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        code, out, _ = run(
            "-m", model, "--prompts", prompts, "--speculate", "ngram", "--max-tokens", "4",
            "--repeats", "1", "--json", "--threads", "1",
        )  # fmt: skip
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(out)
    code, out, _ = run("compare", str(paths[0]), str(paths[1]), "--json")
    changes = json.loads(out)
    assert run("show", str(paths[0]), "--csv", str(tmp_path / "again.csv"))[0] == 0
    assert "speedup" in (tmp_path / "again.csv").read_text()
    assert code in (0, 1)  # a busy machine may be slower the second time
    assert [change["num_same_text"] for change in changes] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "chta"), "chat"),
        (("--goodput", "speed:1"), "ttft"),
        (("--goodput", "itl:30"), "give --url"),
        (("--url", "nowhere"), "http://"),
        (("--url", "http://host:port"), "say http://host:8000"),
        (("--url", "http://[::1"), "say http://host:8000"),
        (("sweep", "--rates", "1,x"), "numbers"),
        (("sweep", "--rates", "1", "--concurrency", "2"), "not both"),
        (("sweep", "--until-decided", "--repeats", "4"), "more than 4"),
        (("sweep", "--until-decided", "--speculate", "ngram"), "about auto"),
        (("compare", "none.json", "none.json"), "no such file"),
        (("--html", "no/such/dir/x.html"), "no directory"),
        (("sweep", "--out", "no/such/dir/x.json"), "no directory"),
        (("sweep", "--out", "."), "is a directory"),
        (("--csv", "/"), "is a directory"),
    ],
)
def test_mistakes_get_one_line(run: Call, words: tuple[str, ...], message: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err


def test_plots_where_a_file_is(run: Call, tmp_path: Path) -> None:
    """What the system refuses is one line that names the file, not a stack trace."""
    report, taken = tmp_path / "report.json", tmp_path / "taken"
    kept = {"settings": {}, "environment": {}, "runs": []}
    report.write_text(json.dumps({"format": FORMAT, "kind": "bench", **kept}))
    taken.touch()
    code, _, err = run("show", str(report), "--plots", str(taken))
    assert (code, err) == (2, f"error: {taken}: File exists\n")


def test_a_model_in_place_of_a_command(run: Call) -> None:
    code, _, err = run("some/model.gguf")
    assert code == 2
    assert "hunch bench --model some/model.gguf" in err

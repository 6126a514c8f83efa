"""benchmarks/cpu_peers.py: its options, its prompts and its tables; no peer is needed."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import cpu_peers
import peer_report


class FakeEngine:
    """Answers with the tokens it was given, at a second per answer."""

    def __init__(self, answer: list[int], seconds: float = 1.0) -> None:
        self.answer, self.seconds = answer, seconds
        self.calls: list[dict[str, Any]] = []

    def decode(self, prompt: list[int], max_tokens: int, **wishes: Any) -> Any:
        self.calls.append(wishes)
        return SimpleNamespace(tokens=self.answer[:max_tokens], seconds=self.seconds)

    def run(self, tokens: list[int], num_new: int, *, wants_all: bool = True) -> Any:
        return num_new / 1000 * self.seconds, None


def fake_peers(*arguments: str, wrong: str | None = None) -> Any:
    args = cpu_peers.parse(["--max-tokens", "11", *arguments])
    hunch = {name: FakeEngine([7] * 11) for name in cpu_peers.METHODS}
    if wrong is not None:
        hunch[wrong].answer = [7] * 10 + [8]
    llama = FakeEngine([9] * 11, seconds=2.0)
    return SimpleNamespace(
        args=args, hunch=hunch, llama=llama, sets={"one": [[1, 2], [3, 4]]}, texts=[]
    )


def test_quick_is_small_and_single_options_override_it() -> None:
    assert (full := cpu_peers.parse([])).limit == 16
    assert full.repeats >= 5
    quick = cpu_peers.parse(["--quick", "--max-tokens", "99"])
    assert (quick.limit, quick.repeats, quick.max_tokens) == (4, 1, 99)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_peers.parse(["--skip", "decod"])
    assert "decode" in capsys.readouterr().err


def test_decoding_counts_tokens_after_the_first() -> None:
    found = cpu_peers.measure_decode(fake_peers())
    assert found["decode"]["hunch/off"] == {"one": 10.0}
    assert found["decode"]["llama.cpp/off"] == {"one": 5.0}
    assert found["equal"]
    assert found["num_different"]["llama.cpp/off"] == 2  # counted, though not an error


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_another_token_of_hunch_is_reported(method: str) -> None:
    assert not cpu_peers.measure_decode(fake_peers(wrong=method))["equal"]


def test_hunch_alone_is_measured_on_request() -> None:
    peers = fake_peers("--ours", "--repeats", "1")
    found = cpu_peers.measure_decode(peers)
    assert not peers.llama.calls
    assert all(name.startswith("hunch/") for name in found["decode"])


def test_a_run_in_pieces_adds_up() -> None:
    report: dict[str, Any] = {"decode": {}}
    for name, wrong in (("one", None), ("two", "suffix"), ("three", None)):
        peers = fake_peers("--repeats", "1", "--ours", wrong=wrong)
        peers.sets = {name: peers.sets["one"]}
        cpu_peers.merge(report, cpu_peers.measure_decode(peers))
    assert report["decode"]["hunch/off"] == {"one": 10.0, "two": 10.0, "three": 10.0}
    assert not report["equal"]
    assert report["num_different"]["hunch/suffix"] == 2
    cpu_peers.merge(report, {"decode": {"llama.cpp/off": {"two": 5.0}}})
    console = Console(width=160, record=True, file=StringIO())
    for table in peer_report.tables(report):
        console.print(table)
    assert "2.00" in console.export_text()  # the ratio of the one set both have


def test_only_the_warm_figure_keeps_what_was_cached() -> None:
    peers = fake_peers("--repeats", "1")
    found = cpu_peers.measure_decode(peers)
    assert "warm" in cpu_peers.WARM
    assert cpu_peers.WARM in found["decode"]
    warm = {name: [c for c in one.calls if c.get("is_warm")] for name, one in peers.hunch.items()}
    assert {name: len(calls) for name, calls in warm.items()} == {
        "off": 0, "ngram": 0, "suffix": 2, "auto": 0,
    }  # fmt: skip


def test_random_words_are_the_same_every_time() -> None:
    vocab = {"Ġtree": 5, "Ġriver": 6, "Ġthe": 7, "<eos>": 0, "Ġ42": 1, "x": 2}
    prompts = cpu_peers.random_words(vocab, 3)
    assert len(prompts) == 3
    assert {token for prompt in prompts for token in prompt} <= {5, 6, 7}
    assert prompts == cpu_peers.random_words(vocab, 3)


def test_curve_is_keyed_by_rows_and_shown_against_one_row_of_llama() -> None:
    report = cpu_peers.measure_curve(fake_peers())
    assert json.loads(json.dumps(report))["curve"]["hunch"]["8"] == pytest.approx(8.0)
    console = Console(width=120, record=True, file=StringIO())
    for table in peer_report.tables(report):
        console.print(table)
    assert "8.0 (4.00)" in console.export_text()  # llama.cpp's one row takes 2 ms

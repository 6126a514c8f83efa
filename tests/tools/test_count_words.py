"""The tool that counts common words: where it cuts, what it counts, what it leaves out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hunch.drafting.word_table import NO_WORD, WordTable, read_words

TOOL = Path(__file__).parents[2] / "tools" / "count_words.py"
TEXTS = ["one two three", "one two three", "one two four", "six two four"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_words", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def follows(table: WordTable) -> dict[tuple[str, ...], list[tuple[str, int]]]:
    found: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for context, word, chance in zip(
        table.context_E.tolist(), table.next_E.tolist(), table.chance_E.tolist(), strict=True
    ):
        numbers = (table.first_C[context], table.last_C[context])
        words = tuple(table.words[number] for number in numbers if number != NO_WORD)
        found.setdefault(words, []).append((table.words[word], chance))
    return found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's so, really.", ["It", "'s", " so", ",", " really", "."]),
        ("a = f(x)\n", ["a", " =", " f", "(x", ")\n"]),
        ("if x:\n    return 1234", ["if", " x", ":\n   ", " return", " ", "123", "4"]),
        ("one.\n\nTwo", ["one", ".\n\n", "Two"]),
    ],
)
def test_where_texts_are_cut(tool: ModuleType, text: str, words: list[str]) -> None:
    assert tool.WORD.findall(text) == words


def test_counts(tool: ModuleType) -> None:
    table = tool.make_table(TEXTS, tool.Limits(min_count=1, min_next=1, min_chance=1))
    assert table.words[0] == " two"
    assert dict(zip(table.words, table.total_W.tolist(), strict=True)) == {
        " two": 4, "one": 3, " three": 2, " four": 2, "six": 1,
    }  # fmt: skip
    found = follows(table)
    assert found[("one",)] == [(" two", 255 * 3 // (3 + 3))]
    assert found[("six",)] == [(" two", 255 * 1 // (1 + 3))]
    assert found[(" two",)] == [(" three", 255 * 2 // (4 + 3)), (" four", 255 * 2 // (4 + 3))]
    assert (" four", "one") not in found  # texts end
    assert (" three",) not in found


def test_pairs_that_tell_no_more_than_their_last_word_are_left_out(tool: ModuleType) -> None:
    texts = ["one two three"] * 6 + ["six two four"] * 4 + ["ten two three"] * 3
    found = follows(tool.make_table(texts, tool.Limits()))
    assert found[("six", " two")] == [(" four", 255 * 4 // (4 + 3))]
    assert found[(" two",)] == [(" three", 255 * 9 // (13 + 3)), (" four", 255 * 4 // (13 + 3))]
    assert ("one", " two") not in found
    assert ("ten", " two") not in found


def test_the_best_pairs_are_kept(tool: ModuleType) -> None:
    texts = ["one two three"] * 9 + ["six two four"] * 8 + ["ten two five"] * 4
    every = follows(tool.make_table(texts, tool.Limits()))
    assert {("six", " two"), ("ten", " two")} < set(every)
    best = follows(tool.make_table(texts, tool.Limits(max_pairs=1)))
    assert [context for context in best if len(context) == 2] == [("six", " two")]


def test_rare_words_are_left_out(tool: ModuleType) -> None:
    table = tool.make_table([*TEXTS, "one strange three"], tool.Limits(min_count=2, min_next=1))
    assert sorted(table.words) == [" four", " three", " two", "one"]
    assert follows(table)[("one",)] == [(" two", 255 * 3 // (4 + 3))]  # of all that followed


def test_files(tmp_path: Path) -> None:
    lines, text, out = (tmp_path / name for name in ("a.jsonl", "b.txt", "words.xz"))
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    text.write_text("one two three\n")
    command = [sys.executable, TOOL, lines, text, "--out", out, "--min-count", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{out}: 4 words" in ran.stdout
    read = read_words(out)
    assert read.words[:2] == [" two", "one"]
    assert follows(read)[("one",)][0][0] == " two"

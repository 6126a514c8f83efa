"""Prompts in files of every kind, packed or not, whole or damaged."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hunch.cli import options
from hunch.errors import ConfigError, RequestError
from hunch.train.prompts import Prompts, check_prompts, read_prompts, split_prompts

RECORDS: list[dict[str, Any]] = [
    {"turns": ['What is "ice",\nand why?'], "category": "science"},
    {"prompt": "Once upon a time, "},
]
TABLE = 'turns,prompt,category\n"What is ""ice"",\nand why?",,science\n,"Once upon a time, ",\n'


def write(path: Path, text: str) -> Path:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    data = text.encode()
    path.write_bytes(packers[path.suffix](data) if path.suffix in packers else data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (".jsonl", "".join(json.dumps(one) + "\n" for one in RECORDS)),
        (".json", json.dumps(RECORDS, indent=1)),
        (".csv", "\ufeff" + TABLE.replace("\n,", "\r\n,")),  # as spreadsheets write it
    ],
)
def test_the_same_prompts_in_every_form(kind: str, text: str, packed: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"prompts{kind}{packed}", text)
    assert read_prompts(path).records == RECORDS
    ours = options.read_prompts(path, None)
    assert [{key: one[key] for key in one if key != "id"} for one in ours] == RECORDS


def test_a_line_of_json_may_hold_other_line_ends(tmp_path: Path) -> None:
    record = {"turns": ["one\u2028two\x85three"]}
    path = write(tmp_path / "prompts.jsonl", json.dumps(record, ensure_ascii=False) + "\r\n")
    assert read_prompts(path).records == [record]


def test_questions_in_a_packed_text_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.txt.gz", "What is ice?\n\nList three fruits.\n")
    asked = [{"turns": ["What is ice?"]}, {"turns": ["List three fruits."]}]
    assert read_prompts(path).records == asked
    assert options.read_prompts(path, None)[1] == {"id": "3", **asked[1]}


# Without the time of day, or workers that share the tests would know this one by several names.
CUT_OFF = gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("p.jsonl.gz", b"not packed", "cannot be read .*gzip"),
        ("p.jsonl.gz", CUT_OFF, "damaged, or no .gz file"),
        ("p.txt.xz", b"not packed", "damaged, or no .xz file"),
        ("p.csv", b"question,answer\na,b\n", "column 'turns' .*it has 'question', 'answer'"),
        ("p.csv", b"", "column 'turns' .*it has none"),
        ("p.csv", b'prompt\n"a\n', "after line 1: not CSV"),
        ("p.csv", b"prompt\n\xff\n", "not UTF-8"),
        ("p.csv", b"prompt,category\na,b,c\n", "line 2: more fields than columns"),
        ("p.csv", b"prompt,category\n,b\n", "line 2: needs 'turns' or 'prompt'"),
        ("p.json", b'[{"prompt": "a"}, 3]', "1 of 2 lines are broken .record 2: not an object"),
    ],
)
def test_files_that_cannot_be_read(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RequestError, match=words):
        read_prompts(tmp_path / name)


def test_broken_rows_of_a_table_count_like_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([f"text {i}"] for i in range(60)), ["a", "b"]])
    found = read_prompts(path)
    assert len(found.records) == 60
    assert found.bad == ["line 62: more fields than columns"]


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(tmp_path / "p.parquet", "PAR1")
    with pytest.raises(RequestError, match=r"needs pyarrow \(pip install pyarrow\)"):
        read_prompts(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {key: [one.get(key) for one in RECORDS] for key in ("turns", "prompt", "category")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.parquet").records == RECORDS
    write(tmp_path / "bad.parquet", "no table")
    with pytest.raises(RequestError, match="not a parquet file"):
        read_prompts(tmp_path / "bad.parquet")


def test_too_few_prompts_are_said_before_anything_is_made(tmp_path: Path) -> None:
    path = write(tmp_path / "few.txt", "one\n\ntwo\nthree\n")
    with pytest.raises(ConfigError, match=r"few.txt: 3 prompts are too few.*give 4 or more"):
        check_prompts(str(path))
    long = Prompts([{"prompt": "word " * 50} for _ in range(9)] + [{"prompt": "a"}] * 2, [])
    tokenizer = SimpleNamespace(encode=str.split)
    llm: Any = SimpleNamespace(has_chat_template=False, get_tokenizer=lambda: tokenizer)
    with pytest.raises(ConfigError, match=r"my.txt, of up to 8 tokens: 2 prompts are too few"):
        split_prompts(llm, "my.txt", long, 8, 4, 0)

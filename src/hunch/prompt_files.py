"""Files of prompts: JSON lines, a JSON list, CSV, parquet, or a question in every line of a .txt
file; all but parquet also as .gz or .xz."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from hunch.errors import RequestError, readable

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}

Found = tuple[str, str, Any]  # "line 3", what is wrong with it, and what it holds
Check = Callable[[Iterable[str]], None]  # raises for a table that lacks a column


def unpacked(path: Path) -> Path:
    """Its name without .gz or .xz."""
    return path.with_suffix("") if path.suffix in _OPENERS else path


def read_text(path: Path) -> str:
    """What a file holds, unpacked."""
    try:
        with readable(path), _OPENERS.get(path.suffix, open)(path, "rb") as file:
            text: str = file.read().decode("utf-8-sig")
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise RequestError(f"{path}: damaged, or no {path.suffix} file ({error})") from None
    return text


def records_in(path: Path, check: Check = lambda names: None) -> Iterator[Found]:
    """The records of a file, each with where it is; what is wrong with it is told, not raised."""
    if path.suffix == ".parquet":
        yield from ((f"row {n}", "", row) for n, row in enumerate(_read_parquet(path, check), 1))
        return
    text, suffix = read_text(path), unpacked(path).suffix
    if suffix == ".csv":
        yield from _csv_rows(path, text, check)
        return
    first, whole = text.lstrip()[:1], None
    is_text = suffix == ".txt" and first not in ("[", "{")
    if first == "[":
        _, whole = _json(text)
    if isinstance(whole, list):
        yield from ((f"record {n}", "", record) for n, record in enumerate(whole, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # a text in JSON may hold other line ends
        if line.strip():
            yield f"line {number}", *(("", {"turns": [line.strip()]}) if is_text else _json(line))


def _json(text: str) -> tuple[str, Any]:
    """What is wrong, and what it holds."""
    try:
        return "", json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg}); a file of questions is called NAME.txt", None


def _csv_rows(path: Path, text: str, check: Check) -> Iterator[Found]:
    rows = csv.DictReader(StringIO(text, newline=""), strict=True)
    try:
        check(rows.fieldnames or ())
        for row in rows:
            why = "more fields than columns" if None in row else ""
            yield f"line {rows.line_num}", why, _filled(row)
    except csv.Error as error:
        raise RequestError(f"{path}, after line {rows.line_num}: not CSV ({error})") from None


def _read_parquet(path: Path, check: Check) -> list[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise RequestError(
            f"{path}: parquet needs pyarrow (pip install pyarrow); or give JSON lines or CSV"
        ) from None
    try:
        with readable(path):
            table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise RequestError(f"{path}: not a parquet file ({error})") from None
    check(table.column_names)
    return [_filled(row) for row in table.to_pylist()]


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of a table has; its turn is a text of its own, or a list of them."""
    found = {key: value for key, value in row.items() if value not in (None, "")}
    if isinstance(turns := found.get("turns"), str):
        found["turns"] = [turns]
    return found

"""Folders that hold SentencePiece's own file and no tokenizer.json."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hunch.errors import ModelFormatError
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from tiny_text import sentence_piece, sentence_piece_metadata

TEXTS = ["hello world", "  hello ", "wörld 🙂", "", "hello\n\tworld", "<s>hello</s> world"]
BPE, UNIGRAM = 2, 1
CHANGES, HAS_PREFIX, JOINS_SPACES = 2, 3, 4


def number(value: int) -> bytes:
    value %= 1 << 64
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def field(at: int, value: int | bytes | float) -> bytes:
    if isinstance(value, bytes):
        return number(at << 3 | 2) + number(len(value)) + value
    if isinstance(value, float):
        return number(at << 3 | 5) + struct.pack("<f", value)
    return number(at << 3) + number(value)


def write(folder: Path, *, model_type: int = BPE, changes: bytes = b"", bos: int = 1) -> Path:
    """The small vocabulary of `tiny_text`, as SentencePiece writes it."""
    given = sentence_piece_metadata()
    columns = [given[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    data = b"".join(
        field(1, field(1, token.encode()) + field(2, score) + (field(3, kind) if kind > 1 else b""))
        for token, score, kind in zip(*columns, strict=True)
    )
    data += field(2, field(3, model_type) + field(41, bos))
    data += field(3, field(CHANGES, changes) + field(HAS_PREFIX, 1) + field(JOINS_SPACES, 0))
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(data)
    return folder


def load(folder: Path, **settings: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def test_it_is_read_without_another_library(tmp_path: Path) -> None:
    made, expected = (
        load(write(tmp_path / "m"), bos_token="<s>", eos_token="</s>"),
        sentence_piece(),
    )
    for text in TEXTS:
        ids = made.encode(text)
        assert ids == expected.encode(text)
        assert made.decode(ids) == expected.decode(ids)
    assert (made.bos_id, made.eos_ids, made.encode("")) == (1, (2,), [1])


def test_settings_say_what_is_added(tmp_path: Path) -> None:
    folder, plain = (
        write(tmp_path / "m"),
        sentence_piece().encode("hello", add_special_tokens=False),
    )
    assert load(folder, add_bos_token=False).encode("hello") == plain
    assert load(folder, add_eos_token=True).encode("hello") == [1, *plain, 2]
    assert load(write(tmp_path / "none", bos=-1)).encode("hello") == plain


def test_after_a_special_token_a_space_is_added_by_older_models_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    older, newer = (load(folder, legacy=legacy) for legacy in (True, False))
    assert older.decode(older.encode("hello</s>hello")) == "hello hello"
    assert newer.decode(newer.encode("hello</s>hello")) == "hellohello"
    assert newer.encode("hello") == older.encode("hello")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_says_so(share: float, tmp_path: Path) -> None:
    file = write(tmp_path / "m") / "tokenizer.model"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(ModelFormatError, match=r"tokenizer\.model is damaged|no tokenizer"):
        load(tmp_path / "m")


@pytest.mark.parametrize("other", [{"model_type": UNIGRAM}, {"changes": b"nfkc"}])
def test_other_kinds_are_left_to_transformers(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m", **other)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    with pytest.raises(ModelFormatError, match=r"No module.*pip install sentencepiece"):
        load(folder)


def test_files_of_tiktoken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"aGVsbG8= 0\nIQ== 1\n")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    with pytest.raises(ModelFormatError, match=r"Copy tokenizer\.json .*protobuf tiktoken"):
        load(tmp_path)


def _fail(*_: Any, **__: Any) -> None:
    raise ImportError("No module named that")

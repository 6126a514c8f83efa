"""SentencePiece's own file (tokenizer.model), read as the metadata of a GGUF file would be.

The file is a protocol buffer: pieces with their scores and kinds, how it was trained, and how text
is normalised. Both formats number the kinds alike.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from hunch.errors import ModelFormatError
from hunch.text.gguf_tokenizer import build_tokenizer

_PIECES, _TRAINING, _NORMALISING = 1, 2, 3  # fields of the file
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE, _BOS, _EOS = 3, 41, 42  # of how it was trained
_BPE = 2
_CHANGES, _HAS_PREFIX, _JOINS_SPACES = 2, 3, 4  # of how text is normalised
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # how a value is written
_KEY = "tokenizer.ggml."

Value = int | bytes


def sentence_piece_tokenizer(file: Path, settings: Mapping[str, Any]) -> Tokenizer | None:
    """The file's tokenizer; None where it takes more than is known here. `settings`: those of
    tokenizer_config.json."""
    metadata = _metadata(file, settings)
    if metadata is None:
        return None
    tokenizer = build_tokenizer(metadata, str(file))
    if settings.get("legacy") is False and metadata[_KEY + "add_space_prefix"]:
        # Special tokens cut a text into parts; only the first part begins with a space.
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return tokenizer


def _metadata(file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where it is of another kind than BPE, or changes texts before it cuts them."""
    data = file.read_bytes()
    if data[:1] != b"\n":  # the first piece; files of tiktoken begin otherwise
        return None
    try:
        tokens, scores, types = [], [], []
        parts: dict[int, dict[int, Value]] = {_TRAINING: {}, _NORMALISING: {}}
        for number, value in _fields(data):
            if number == _PIECES:
                piece = dict(_fields(_as_bytes(value)))
                tokens.append(_as_bytes(piece[_TEXT]).decode())
                scores.append(struct.unpack("<f", _as_bytes(piece.get(_SCORE, bytes(4))))[0])
                types.append(piece.get(_TYPE, 1))
            elif number in parts:
                parts[number] = dict(_fields(_as_bytes(value)))
    except (KeyError, IndexError, TypeError, ValueError, struct.error):
        message = f"{file} is damaged or cut short. Delete it and download it again"
        raise ModelFormatError(message) from None
    training, normalising = parts[_TRAINING], parts[_NORMALISING]
    is_changed = bool(normalising.get(_CHANGES)) or bool(normalising.get(_JOINS_SPACES, 1))
    if training.get(_MODEL_TYPE, 1) != _BPE or is_changed:
        return None
    found: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": bool(normalising.get(_HAS_PREFIX, 1)),
        "add_bos_token": settings.get("add_bos_token") is not False,
        "add_eos_token": settings.get("add_eos_token") is True,
    }
    for name, number, usual in (("bos", _BOS, 1), ("eos", _EOS, 2)):
        index = training.get(number, usual)
        if isinstance(index, int) and index < len(tokens):  # -1, as 64 bits: there is none
            found[f"{name}_token_id"] = index
    return {_KEY + name: value for name, value in found.items()}


def _as_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(value)
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a protocol buffer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        how = key & 7
        if how == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if how == _BYTES:
            size, at = _varint(data, at)
        elif how in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if how == _EIGHT_BYTES else 4
        else:
            raise ValueError(how)
        if at + size > len(data):
            raise IndexError(size)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, the lowest first, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError(value)

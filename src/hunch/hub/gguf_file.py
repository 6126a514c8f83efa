"""The header of a GGUF file: metadata and the places of its tensors. No torch.

A file may come from anywhere, so every count and length is checked against the bytes that are
there before it is believed.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError

# ggml's number of a type -> (name, weights per block, bytes per block)
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MIN_ENTRY_BYTES = 13  # the shortest metadata entry: key length, type, one byte
_LONG = 4096  # items of an array that is not kept in memory
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # how a file in parts is named


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies, and what it is."""

    format: str
    shape: tuple[int, ...]  # outermost first, as torch has it (the file has it the other way)
    start: int  # byte in the file
    row_bytes: int
    nbytes: int
    part: int = 0  # which of the header's files


class Metadata(Mapping[str, Any]):
    """A file's metadata. Long arrays are read when they are asked for and not kept: as Python's
    objects, a vocabulary of 262,144 tokens takes more memory than some models' layers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._places: dict[str, int] = {}  # of the long arrays

    def read(self, key: str, cursor: _Cursor) -> None:
        """One entry, which begins at the cursor."""
        place = cursor.position
        if cursor.skip_long_array():
            self._places[key] = place
        else:
            self._values[key] = cursor.value(cursor.number("I"))

    def __getitem__(self, key: str) -> Any:
        if key not in self._places:
            return self._values[key]
        with _mapped(self._path) as data:
            cursor = _Cursor(self._path, data)
            cursor.position = self._places[key]
            return cursor.value(cursor.number("I"))

    def __contains__(self, key: object) -> bool:
        return key in self._values or key in self._places

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._places

    def __len__(self) -> int:
        return len(self._values) + len(self._places)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorPlace]  # under the names of the file
    parts: tuple[Path, ...]  # the file, or all parts of a model that was split into several


def first_part(path: Path) -> Path:
    """The first part of a model in parts, which has the metadata, whichever part is named."""
    named = _PART.fullmatch(path.name)
    first = path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf") if named else path
    return first if first.is_file() else path


def parts_of(path: Path) -> list[Path]:
    """The file, and those beside it that are named as further parts of it."""
    named = _PART.fullmatch(path.name)
    if not named or int(named[2]) != 1:
        return [path]
    return [
        path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf")
        for number in range(1, int(named[3]) + 1)
    ]


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensor places of `path`, all of them inside the file."""
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    return first if count in (0, 1) else _with_parts(first, count)


def _with_parts(first: GgufHeader, count: Any) -> GgufHeader:
    """The header of a model of which this file is the first part."""
    path, parts = first.path, parts_of(first.path)
    number = first.metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int):
        raise _damaged(path, f"it claims to be part {number!r} of {count!r}")
    if number != 0:
        raise ModelFormatError(f"{path} is part {number + 1} of {count}: give the first part")
    if len(parts) != count:
        raise UnsupportedModelError(
            f"{path} is one of {count} parts, and its name does not say so: call them "
            f"NAME-00001-of-{count:05}.gguf and so on, or merge them "
            "(llama-gguf-split --merge FIRST_PART OUTPUT)"
        )
    tensors = dict(first.tensors)
    for index, file in enumerate(parts[1:], start=1):
        if not file.is_file():
            raise ModelFormatError(
                f"{file} is missing: {path.name} is the first of {count} parts. Download all"
            )
        header = _read_file(file)
        if header.metadata.get("split.no") != index:
            raise _damaged(file, f"it does not say that it is part {index + 1} of {count}")
        for name, place in header.tensors.items():
            if name in tensors:
                raise _damaged(file, f"tensor {name!r} stands in an earlier part, too")
            tensors[name] = replace(place, part=index)
    return GgufHeader(path, first.metadata, tensors, tuple(parts))


def _read_file(path: Path) -> GgufHeader:
    status = path.stat()
    return _read_header(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)  # weights and tokenizer both ask; a vocabulary takes a while to read
def _read_header(path: Path, size: int, changed: int) -> GgufHeader:
    if size < 24:
        raise _damaged(path, f"it has only {size} bytes")
    with _mapped(path) as data:
        cursor = _Cursor(path, data)
        num_tensors, num_entries = _read_start(cursor)
        metadata = Metadata(path)
        for _ in range(num_entries):
            key = cursor.string()
            if key in metadata:
                raise _damaged(path, f"{key!r} stands twice in its metadata")
            metadata.read(key, cursor)
        infos = [_read_info(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _damaged(path, f"general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorPlace] = {}
    for name, shape, type_number, offset in infos:
        if name in tensors:
            raise _damaged(path, f"tensor {name!r} stands twice in it")
        tensors[name] = _place(path, name, shape, type_number, data_start + offset, size)
    return GgufHeader(path, metadata, tensors, (path,))


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    path = cursor.path
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise ModelFormatError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.number("I")
    if version not in (2, 3):
        what = "big-endian" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
        raise UnsupportedModelError(f"{path} is {what}; little-endian versions 2 and 3 can be read")
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    most = len(cursor.data) // _MIN_ENTRY_BYTES
    if num_tensors > most or num_entries > most:
        raise _damaged(path, f"it claims {num_tensors} tensors and {num_entries} metadata entries")
    return num_tensors, num_entries


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _damaged(cursor.path, f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _place(
    path: Path, name: str, shape: tuple[int, ...], type_number: int, start: int, size: int
) -> TensorPlace:
    if type_number not in TYPES:
        known = ", ".join(known for known, _, _ in TYPES.values())
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has ggml type {type_number}, which is not one of {known}; "
            "take another quantisation of the model"
        )
    title, block, block_bytes = TYPES[type_number]
    if min(shape) < 1 or shape[-1] % block:
        raise _damaged(path, f"tensor {name!r} of type {title} has shape {list(shape)}")
    row_bytes = shape[-1] // block * block_bytes
    nbytes = prod(shape[:-1]) * row_bytes
    if start + nbytes > size:
        raise _damaged(
            path,
            f"tensor {name!r} should end at byte {start + nbytes} but the file has {size} bytes",
        )
    return TensorPlace(title, shape, start, row_bytes, nbytes)


class _Cursor:
    """Reads values one after another and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def _advance(self, num_bytes: int) -> int:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.data):
            raise _damaged(self.path, "its header ends in the middle")
        return start

    def number(self, code: str) -> Any:
        start = self._advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self._advance(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type in _SCALARS:
            return self.number(_SCALARS[value_type])
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY or depth > 2:
            raise _damaged(self.path, f"its metadata has a value of type {value_type}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            start = self._advance(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if item == _STRING:
            return self._strings(count)
        if count * 8 > len(self.data) - self.position:  # an array in it begins with 12 bytes
            raise _damaged(self.path, f"its metadata claims an array of {count} items")
        return [self.value(item, depth + 1) for _ in range(count)]

    def skip_long_array(self) -> bool:
        """Whether a long array of strings or numbers begins here; if so, go to its end."""
        value_type, start = self.number("I"), self.position
        if value_type == _ARRAY:
            item, count = self.number("I"), self.number("Q")
            if count >= _LONG and item in _SCALARS:
                self._advance(count * struct.calcsize("<" + _SCALARS[item]))
                return True
            if count >= _LONG and item == _STRING:
                self._ends(count)
                return True
        self.position = start - 4
        return False

    def _ends(self, count: int) -> list[int]:
        """Where each of `count` strings ends.

        A vocabulary has 50 to 250 thousand: this loop takes most of the time to open a file.
        """
        if count * 8 > len(self.data) - self.position:  # each begins with an 8-byte length
            raise _damaged(self.path, f"its metadata claims an array of {count} items")
        data, position = self.data, self.position
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        ends = []
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
                ends.append(position)
        except (struct.error, OverflowError):
            raise _damaged(self.path, "its header ends in the middle") from None
        if position > len(data):
            raise _damaged(self.path, "its header ends in the middle")
        self.position = position
        return ends

    def _strings(self, count: int) -> list[str]:
        start, data = self.position, self.data
        strings = []
        for end in self._ends(count):
            strings.append(data[start + 8 : end].decode("utf-8", "replace"))
            start = end
        return strings


def _damaged(path: Path, what: str) -> ModelFormatError:
    return ModelFormatError(
        f"{path} is damaged or cut short: {what}. Delete it and download it again"
    )

"""Damaged and hostile weight files: a clear error, never a crash of another kind."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from hunch.errors import ModelError, ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import read_header
from hunch.models.weights import open_weights
from hunch.text.tokenizer import load_tokenizer
from tiny_gguf import random_tensors, write_gguf, write_parts


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    tokens = [f"t{i}" for i in range(300)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 300,
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_gguf(path, random_tensors(), metadata=metadata).read_bytes()


def touch_all(path: Path) -> None:
    weights = open_weights(path)
    for name in weights.names():
        weights.tensor(name)
        weights.packed(name)
    load_tokenizer(path)


def test_the_good_file_is_good(good, tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    touch_all(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_cut_short_says_so(good, tmp_path, share) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(good[: int(len(good) * share)])
    with pytest.raises(ModelFormatError, match=r"cut\.gguf.*download it again"):
        open_weights(path)


def test_another_kind_of_file(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFormatError, match="not a GGUF file"):
        open_weights(path)


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1"), (99, "version 99"), (3 << 24, "big-endian")]
)
def test_other_versions(good, tmp_path, version, message) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:4] + struct.pack("<I", version) + good[8:])
    with pytest.raises(UnsupportedModelError, match=message):
        open_weights(path)


def check_refused(path: Path, good: bytes, place: int, number: int) -> None:
    """Another number in the header is told, however absurd it is."""
    path.write_bytes(good[:place] + struct.pack("<Q", number) + good[place + 8 :])
    with pytest.raises(ModelFormatError):
        read_header(path)


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("count", [2**63, 2**40, 10**6])
def test_absurd_counts(good, tmp_path, place, count) -> None:
    check_refused(tmp_path / "m.gguf", good, place, count)


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 2**31, 10**7])
def test_absurd_string_and_array_lengths(good, tmp_path, length) -> None:
    key = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for place in (24, key + 8, key + 16):  # first key; the array's count; its first string
        check_refused(tmp_path / f"{place}.gguf", good, place, length)


def test_a_large_vocabulary_is_read_when_asked_for_and_not_kept(tmp_path) -> None:
    tokens, merges = [f"t{i}é" for i in range(5000)], ["a b"] * 5000
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.5] * 5000,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.model": "gpt2",
    }
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
    found = read_header(path).metadata
    assert {key: found[key] for key in metadata} == metadata
    assert set(metadata) <= set(found)
    assert "tokenizer.ggml.tokens" in found
    assert len(found) == len(list(found))
    assert found["tokenizer.ggml.tokens"] is not found["tokenizer.ggml.tokens"]
    assert found.get("tokenizer.ggml.bos_token_id") is None


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 2**31, 10**7])
def test_absurd_lengths_in_a_large_vocabulary(tmp_path, length) -> None:
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(5000)]}
    good = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata).read_bytes()
    key = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for place in (key + 8, key + 16, good.index(b"t4998") - 8, good.index(b"t4999") - 8):
        check_refused(tmp_path / f"{place}.gguf", good, place, length)


@pytest.mark.parametrize("field", ["dims", "shape", "kind", "offset"])
def test_tensors_that_cannot_be(good, tmp_path, field) -> None:
    after = good.index(b"token_embd.weight") + len(b"token_embd.weight")
    place = {"dims": after, "shape": after + 4, "kind": after + 20, "offset": after + 24}[field]
    value = struct.pack("<I", 77) if field in ("dims", "kind") else struct.pack("<Q", 2**60)
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:place] + value + good[place + len(value) :])
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        open_weights(path)


def test_random_damage_to_the_header(good, tmp_path) -> None:
    """Any few bytes changed: the file still opens, or a ModelError says why not."""
    rng = np.random.default_rng(11)
    header = good.index(b"ffn_down.weight") + 2000
    path = tmp_path / "m.gguf"
    num_refused = 0
    for _ in range(150):
        data = bytearray(good)
        for place in rng.integers(0, header, rng.integers(1, 5)):
            data[place] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            touch_all(path)
        except ModelError:  # any other kind of exception fails the test
            num_refused += 1
    assert num_refused > 30


def test_a_part_whose_name_does_not_say_so(tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts.*-00001-of-00003.*merge"):
        open_weights(path)
    path = write_gguf(tmp_path / "n.gguf", random_tensors(), metadata={"split.count": "many"})
    with pytest.raises(ModelFormatError, match="'many'"):
        open_weights(path)


def test_parts_that_are_missing_or_in_each_others_place(tmp_path) -> None:
    first, second, third = write_parts(tmp_path, random_tensors(), 3)
    with pytest.raises(ModelFormatError, match="part 2 of 3: give the first"):
        open_weights(second)
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelFormatError, match=r"-00002-of-.*does not say that it is part 2"):
        open_weights(first)
    second.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFormatError, match=r"-00002-of-.*cut short"):
        open_weights(first)
    second.unlink()
    with pytest.raises(ModelFormatError, match=r"-00002-of-00003.gguf is missing.*Download all"):
        open_weights(first)

"""Every block format against the gguf package's own reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hunch.hub.gguf_file import TYPES
from hunch.models.weights import lookups
from hunch.models.weights.dequant import FORMATS, dequantise


def random_rows(block_format: str, num_rows: int, num_blocks: int) -> np.ndarray:
    """Random blocks whose fp16 scales are ordinary numbers."""
    rng = np.random.default_rng(7)
    block_bytes = FORMATS[block_format][1]
    blocks = rng.integers(0, 256, (num_rows * num_blocks, block_bytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}.get(
        block_format, (0,)
    )
    if block_format in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        halves = (0, 2)
    for first in halves:
        scales = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, first : first + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, num_blocks * block_bytes)


@pytest.mark.parametrize("block_format", sorted(FORMATS))
def test_numbers_are_those_of_the_reference(block_format: str) -> None:
    rows = random_rows(block_format, 7, 3)
    with np.errstate(invalid="ignore"):  # scales in pieces may be no numbers here
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[block_format])
    got = dequantise(block_format, torch.from_numpy(rows), 3 * FORMATS[block_format][0])
    assert np.array_equal(got.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("block_format", sorted(lookups.FUNCTIONS))
def test_levels_in_tables_are_gathered(block_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gguf package's own functions took two minutes for a model of 1.1 billion weights."""
    monkeypatch.setattr(gguf.quants, "dequantize", None)
    rows = torch.from_numpy(random_rows(block_format, 1, 1))
    assert dequantise(block_format, rows, FORMATS[block_format][0]).isfinite().all()


@pytest.mark.parametrize("block_format", ["Q4_1", "Q6_K"])
def test_a_matrix_larger_than_one_chunk(block_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hunch.models.weights.dequant._CHUNK", 1024)
    rows = random_rows(block_format, 37, 2)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[block_format])
    assert np.array_equal(
        dequantise(block_format, torch.from_numpy(rows), 2 * FORMATS[block_format][0]).numpy(),
        expected,
    )


def test_other_dtypes_are_rounded_from_float32() -> None:
    rows = torch.from_numpy(random_rows("Q4_K", 4, 2))
    exact = dequantise("Q4_K", rows, 512)
    assert torch.equal(dequantise("Q4_K", rows, 512, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_numbers_keep_their_value(dtype: torch.dtype) -> None:
    values = torch.randn(3, 8).to(dtype)
    block_format = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert torch.equal(dequantise(block_format, values.view(torch.uint8), 8), values.float())


def test_block_sizes_are_those_of_the_reference() -> None:
    for number, (name, block, block_bytes) in TYPES.items():
        assert gguf.GGMLQuantizationType[name].value == number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (block, block_bytes)

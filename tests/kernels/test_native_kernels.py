"""The C++ products and choices against plain arithmetic, and their independence of company."""

import gc
import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hunch.kernels import native_library, native_matrix, native_sampling
from hunch.kernels.noise import TARGET, gumbel
from hunch.models.weights.coded import CODED, coded, coded_levels
from hunch.models.weights.dequant import dequantise
from hunch.sampling.filters import filter_ref

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")

SHAPES = [(64, 64), (7, 32), (100, 96), (33, 160), (130, 576)]
FORMATS = {"int4": native_matrix.INT4, "int8": native_matrix.INT8, "float": native_matrix.FLOAT}
# A block's inputs and bytes, and where its half floats are.
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "IQ4_NL": (32, 18, (0,)),
    "MXFP4": (32, 17, ()),
    "Q2_K": (256, 84, (80, 82)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "Q3_K": (256, 110, (108,)),
    "IQ1_M": (256, 56, ()),
    "IQ1_S": (256, 50, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_XXS": (256, 66, (0,)),
    "IQ3_S": (256, 110, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ4_XS": (256, 136, (0,)),
}
BLOCK_SHAPES = [
    (weight_format, (num_out, num_in if size == 32 else (num_in + 255) // 256 * 256))
    for weight_format, (size, _, _) in BLOCKS.items()
    for num_out, num_in in (SHAPES if size == 32 else SHAPES[1:])
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_finite_scales(weight_format, data):
    if weight_format == "IQ1_M":  # its half float is in pieces; here its sign and exponent
        data[..., 55] = data[..., 55] & 15 | 32
    if weight_format == "MXFP4":  # powers of two, not of thousands
        data[..., 0] = data[..., 0] % 16 + 112


def blocks(weight_format, num_out, num_in, seed=0):
    """Random GGUF blocks with sane scales: uint8 [out, bytes of a row]."""
    generator = torch.Generator().manual_seed(seed)
    size, num_bytes, halves = BLOCKS[weight_format]
    shape = (num_out, num_in // size, num_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for first in halves:
        scales = torch.randn(*shape[:2], 1, generator=generator) * 0.01
        data[..., first : first + 2] = scales.half().view(torch.uint8)
    with_finite_scales(weight_format, data)
    return data.reshape(num_out, -1)


def rounded(x_MK, top):
    """What the kernels multiply with: whole numbers up to `top`, a scale per row and 32 inputs."""
    x = torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % 32)).double()
    groups = x.reshape(len(x), -1, 32)
    d = groups.abs().amax(-1, keepdim=True) / top
    return ((groups / d.clamp(min=1e-30)).round() * d).reshape(len(x), -1)[:, : x_MK.shape[1]]


def of_blocks(weight_format, shape, data, num_threads=None):
    if weight_format in CODED:
        matrix = native_matrix.NativeMatrix(native_matrix.TABLE, *shape, num_threads)
        matrix.set_levels(*coded_levels(weight_format))
        matrix.put_coded(0, coded(weight_format, data))
        return matrix
    matrix = native_matrix.NativeMatrix(
        native_matrix.EXACT_FORMAT[weight_format], *shape, num_threads
    )
    matrix.put_blocks(weight_format, 0, data)
    return matrix


@pytest.mark.parametrize(("weight_format", "shape"), BLOCK_SHAPES)
def test_blocks_are_kept_bit_for_bit(weight_format, shape):
    data = blocks(weight_format, *shape)
    matrix = of_blocks(weight_format, shape, data)
    got = matrix.rows(torch.arange(shape[0]))
    assert got.equal(dequantise(weight_format, data, shape[1]))


@pytest.mark.parametrize("weight_format", ["Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "TQ1_0", "TQ2_0"])
def test_blocks_of_any_bits_are_kept_in_as_little_memory_as_the_file(weight_format):
    """The smallest and the largest scales among them, and no numbers."""
    generator = torch.Generator().manual_seed(0)
    size, num_bytes, _ = BLOCKS[weight_format]
    shape = (256, 1024 // size * num_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    matrix = of_blocks(weight_format, (256, 1024), data)
    with np.errstate(invalid="ignore", over="ignore"):
        kind = gguf.GGMLQuantizationType[weight_format]
        expected = torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind))
    got = matrix.rows(torch.arange(256))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    wider = (
        66 / 54 if weight_format == "TQ1_0" else 1
    )  # held as TQ2_0: five digits in a byte are not
    assert matrix.nbytes == wider * data.numel()


@pytest.mark.parametrize(("weight_format", "shape"), BLOCK_SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 40, 70])
@pytest.mark.parametrize("is_fine", [False, True])
def test_products_of_blocks(weight_format, shape, num_rows, is_fine):
    data, x = blocks(weight_format, *shape), random(num_rows, shape[1])
    weight = dequantise(weight_format, data, shape[1]).double()
    expected = rounded(x, 8127 if is_fine else 127) @ weight.T
    got = of_blocks(weight_format, shape, data)(x, is_fine=is_fine)
    size = (x.double().abs() @ weight.abs().T).max()
    # One float32 product decides how x is rounded: of many fine steps, some fall the other way.
    assert (got - expected).abs().max() < (3e-5 if is_fine else 1e-6) * size


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 100, 231])
@pytest.mark.parametrize("is_fine", [False, True])
def test_products_of_the_smallest_and_largest_powers(exponent, is_fine):
    data = blocks("MXFP4", 32, 64)
    data.view(32, 2, 17)[..., 0] = exponent
    weight = dequantise("MXFP4", data, 64).double()
    x = random(3, 64) * (2.0**60 if exponent < 100 else 1.0)
    got = of_blocks("MXFP4", (32, 64), data)(x, is_fine=is_fine)
    size = (x.double().abs() @ weight.abs().T).max()
    assert (got - rounded(x, 8127 if is_fine else 127) @ weight.T).abs().max() < 3e-5 * size


@pytest.mark.parametrize("shape", [(64, 64), (7, 33), (101, 70)])
@pytest.mark.parametrize("num_rows", [1, 3, 9, 70])
def test_float_products(shape, num_rows):
    weight, x = random(*shape), random(num_rows, shape[1], seed=1)
    got = native_matrix.NativeMatrix.from_floats(weight, native_matrix.FLOAT)(x)
    torch.testing.assert_close(got, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("weight_format", "levels"), [("int8", 127), ("int4", 7.5)])
@pytest.mark.parametrize("num_in", [64, 70])
def test_floats_are_rounded_to_the_nearest_level(weight_format, levels, num_in):
    weight = random(10, num_in)
    matrix = native_matrix.NativeMatrix.from_floats(weight, FORMATS[weight_format])
    error = (matrix.rows(torch.arange(10)) - weight).abs().max()
    assert error < 1.05 * weight.abs().max() / levels / 2 + 2e-3  # the scales are half floats


def matrix_of(weight_format, num_threads):
    """A matrix [72, 256] of floats rounded to a kind, or of a format's blocks."""
    if weight_format in FORMATS:
        return native_matrix.NativeMatrix.from_floats(
            random(72, 256), FORMATS[weight_format], num_threads
        )
    return of_blocks(weight_format, (72, 256), blocks(weight_format, 72, 256), num_threads)


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("weight_format", [*FORMATS, *BLOCKS])
def test_a_row_is_the_same_bits_in_any_company_and_with_any_threads(weight_format, is_fine):
    one, x = matrix_of(weight_format, 1), random(64, 256, seed=1)
    alone = torch.cat([one(row, is_fine=is_fine) for row in x.split(1)])
    for num_rows in [*range(2, 20), 31, 32, 33, 48, 64]:
        assert one(x[:num_rows], is_fine=is_fine).equal(alone[:num_rows]), num_rows
        assert one(x[-num_rows:], is_fine=is_fine).equal(alone[-num_rows:]), num_rows
    for num_threads in (2, 3):
        team = matrix_of(weight_format, num_threads)
        assert team(x, is_fine=is_fine).equal(alone)
        assert team(x.flip(0), is_fine=is_fine).equal(alone.flip(0))


@pytest.mark.parametrize("data", [0, 0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("weight_format", BLOCKS)
def test_the_largest_sums_of_a_group_do_not_overflow(weight_format, data):
    """All weights and all activations at their limits, of one sign."""
    size, num_bytes, halves = BLOCKS[weight_format]
    packed = torch.full((8, 512 // size, num_bytes), data, dtype=torch.uint8)
    for first in halves:
        packed[..., first : first + 2] = torch.ones(1).half().view(torch.uint8)
    with_finite_scales(weight_format, packed)
    packed = packed.view(8, -1)
    weight = dequantise(weight_format, packed, 512)
    matrix = of_blocks(weight_format, (8, 512), packed)
    for is_fine in (False, True):
        for x in (torch.ones(9, 512), -torch.ones(9, 512)):
            got = matrix(x, is_fine=is_fine)
            torch.testing.assert_close(got, x @ weight.T, rtol=2e-6, atol=1e-3)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
def test_small_matrices_lie_in_huge_pages_and_give_them_back():
    def resident():
        """Kilobytes of mappings that may have huge pages."""
        text = Path("/proc/self/smaps").read_text()
        parts = re.findall(r"^Rss: *(\d+) kB.*?^VmFlags:([^\n]*)", text, re.M | re.S)
        return sum(int(size) for size, flags in parts if "hg" in flags.split())

    gc.collect()  # matrices that other tests left
    kept, x_MK = (
        native_matrix.NativeMatrix.from_floats(random(256, 512), native_matrix.INT8),
        random(2, 512),
    )
    product_MN, before = kept(x_MK), resident()
    # Many, as some lie in room that other tests' matrices left.
    others = [
        native_matrix.NativeMatrix.from_floats(random(512, 512), native_matrix.INT8)
        for _ in range(256)
    ]
    size = sum(matrix.nbytes for matrix in others) / 1024
    assert resident() - before > 0.8 * size
    others.clear()
    assert resident() - before < 0.2 * size
    assert kept(x_MK).equal(product_MN)


def test_zeros_and_large_numbers():
    weight = random(8, 64)
    matrix = native_matrix.NativeMatrix.from_floats(weight, native_matrix.INT8)
    assert matrix(torch.zeros(2, 64)).equal(torch.zeros(2, 8))
    assert matrix(random(2, 64) * 1e30).isfinite().all()


# --- choices ------------------------------------------------------------------------------------

FILTERS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
]


def columns(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def full(value, dtype):
        return torch.full((num_rows,), value, dtype=dtype)

    return (
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float64),
        full(math.log(min_p) if min_p else -math.inf, torch.float32),
    )


def expected_choice(logits, temperature, top_k, top_p, log_min_p, seed, index, pos):
    z = filter_ref(logits / temperature[:, None], top_k, top_p, log_min_p)
    return (z + gumbel(seed, index, pos, TARGET, logits.shape[1])).argmax(1)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("size", [5, 1000, 49152])
def test_choices_follow_the_definition(filters, size):
    num_rows = 24
    logits = random(num_rows, size) * 3
    seed = torch.arange(num_rows) * 0x123456789AB
    index, pos = torch.arange(num_rows) % 3, torch.arange(num_rows) + 100
    asked = columns(num_rows, temperature=0.8, **filters)
    got = native_sampling.choose(logits, *asked, seed, index, pos)
    assert got.equal(expected_choice(logits, *asked, seed, index, pos))
    one_by_one = [
        native_sampling.choose_row(
            row_V.numpy(), *(column[row].item() for column in (*asked, seed, index, pos))
        )
        for row, row_V in enumerate(logits)
    ]
    assert one_by_one == got.tolist()


def test_temperature_zero_is_the_argmax_and_ties_go_to_the_lowest_id():
    logits = random(3, 1001)
    logits[0, [7, 400]] = 50.0
    zero = torch.zeros(3, dtype=torch.int64)
    got = native_sampling.choose(logits, *columns(3, temperature=0.0), zero, zero, zero)
    assert got.equal(logits.argmax(1))
    assert got[0] == 7


def test_forbidden_tokens_are_never_chosen():
    logits = torch.full((64, 300), -torch.inf)
    logits[:, 20:24] = 0.0
    many = torch.arange(64)
    for filters in FILTERS:
        got = native_sampling.choose(logits, *columns(64, **filters), many, many, many)
        assert ((got >= 20) & (got < 24)).all()


def test_rows_with_different_wishes_share_a_call():
    logits = random(4, 500) * 2
    parts = [columns(1, temperature=0.0), columns(1), columns(1, top_k=3), columns(1, top_p=0.5)]
    asked = [torch.cat(column) for column in zip(*parts, strict=True)]
    ids = torch.arange(4)
    together = native_sampling.choose(logits, *asked, ids, ids, ids)
    for row in range(4):
        alone = native_sampling.choose(
            logits[row : row + 1], *parts[row], ids[row : row + 1], ids[row : row + 1],
            ids[row : row + 1],
        )  # fmt: skip
        assert alone == together[row]

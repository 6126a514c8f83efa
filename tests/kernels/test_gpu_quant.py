"""Products with weights in few bits: those of `gpu_gemm` with the numbers they stand for.

On a GPU the bits are the same; Triton's interpreter adds in numpy's order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_gemm, gpu_quant
from hunch.kernels.gpu_codes import can_move
from hunch.kernels.quant import Codes, Quantised, join, pack, slices_of
from hunch.kernels.quantise import quantise
from hunch.kernels.slices import SPAN, split_of
from hunch.kernels.words import num_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
N, K = 48, 320


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def codes(code_format: str, form: str = "", group: int = 32, n: int = N, k: int = K) -> Codes:
    """Random codes of a kind; `form` names what stands beside the scales."""
    gen = torch.Generator().manual_seed(n + k)
    high = 16 if num_parts(code_format) == 4 else 256
    code = torch.randint(0, high, (n, k), generator=gen, dtype=torch.uint8)
    if code_format == "fp8":
        code[(code & 127) == 127] = 0  # NaN
    made = Codes(
        format=code_format, code_NK=code, group=group, scale_NG=0.1 + rand(n, k // group).abs()
    )
    if form == "zero":
        made.zero_NG = torch.randint(0, 16, (n, k // group), generator=gen, dtype=torch.uint8)
    elif form == "minimum":
        # Of 16 bits, as in files: a code times a scale is exact in float32.
        made.scale_NG = made.scale_NG.half()
        made.minimum_NG = rand(n, k // group, seed=3).half()
    elif form == "small":  # as `quantise` makes them for bfloat16
        made.offset = 8 if code_format == "int4" else 0
        made.scale_NG = (made.scale_NG * 0.01).to(torch.bfloat16)
    elif form == "units":
        made = replace(
            made,
            scale_NG=torch.randint(1, 64, (n, k // group), generator=gen, dtype=torch.uint8),
            minimum_NG=torch.randint(0, 64, (n, k // group), generator=gen, dtype=torch.uint8),
            unit_NU=rand(n, -(-k // 256)).half(),
            min_unit_NU=rand(n, -(-k // 256), seed=1).half(),
        )
    elif form != "float":
        made.offset = 8 if code_format == "int4" else 0
        made.scale_NG = made.scale_NG.to(torch.float16)
    return made


FORMS = [
    ("int4", "", 64), ("int4", "zero", 64), ("int4", "minimum", 32), ("int4", "units", 32),
    ("fp4", "", 32), ("int8", "", K), ("int8", "units", 16), ("fp8", "", 64),
    ("nf4", "float", 64), ("fp4_bnb", "float", 32),
]  # fmt: skip


def weight(code_format: str, form: str, group: int) -> tuple[Quantised, torch.Tensor]:
    made = codes(code_format, form, group)
    return pack(made, torch.float16, DEVICE), made.numbers(torch.float16).to(DEVICE)


@pytest.mark.parametrize(("code_format", "form", "group"), FORMS)
def test_what_is_packed_comes_out_again(code_format: str, form: str, group: int) -> None:
    made = codes(code_format, form, group)
    packed = pack(made, torch.float32, "cpu")
    assert torch.equal(packed.codes().code_NK, made.code_NK)
    assert torch.equal(packed.dense(), made.numbers())
    assert torch.equal(packed.rows(torch.tensor([5, 2])).dense(), made.numbers()[[5, 2]])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    if DEVICE == "cuda":
        assert torch.equal(got, want)
    else:
        assert (got.double() - want.double()).norm() / want.double().norm() < 2e-3


@pytest.mark.parametrize(("code_format", "form", "group"), FORMS)
def test_a_product_is_that_of_the_numbers(code_format: str, form: str, group: int) -> None:
    held, numbers = weight(code_format, form, group)
    x = rand(3, K).half().to(DEVICE)
    got, want = (torch.empty(3, N, device=DEVICE) for _ in range(2))
    gpu_gemm.gemm(x, held, got)
    gpu_gemm.gemm(x, numbers, want)
    same(got, want)


@pytest.mark.parametrize(("code_format", "form", "group"), FORMS)
def test_a_weight_is_expanded_for_many_rows(code_format: str, form: str, group: int) -> None:
    held, numbers = weight(code_format, form, group)
    assert torch.equal(gpu_quant.expand(held), numbers)


def test_slices_bias_and_odd_sizes() -> None:
    made = quantise(rand(24, 400), "int4", 16)
    held, numbers = pack(made, torch.float16, DEVICE), made.numbers(torch.float16).to(DEVICE)
    x, bias = rand(5, 400).half().to(DEVICE), rand(24).half().to(DEVICE)
    split = slices_of(held)
    assert split > 1
    for count in (split, 1):
        got, want = (torch.empty(count, 5, 24, device=DEVICE) for _ in range(2))
        gpu_gemm.gemm_parts(x, held, got, bias)
        gpu_gemm.gemm_parts(x, numbers, want, bias, split=split)
        same(got, want)


@pytest.mark.parametrize("k", [4096, 8960, 11008, 14336])
@pytest.mark.parametrize("bits", [4, 8])
def test_models_are_cut_into_slices_of_whole_spans(k: int, bits: int) -> None:
    split = split_of(4096, k, bits)
    assert split > 1
    assert k % (split * SPAN) == 0


def test_endings() -> None:
    held, numbers = weight("int4", "", 64)
    x = rand(2, K).half().to(DEVICE)
    got, want = (torch.empty(2, N // 2, dtype=torch.float16, device=DEVICE) for _ in range(2))
    gpu_gemm.gemm_gated(x, held, got)
    gpu_gemm.gemm_gated(x, numbers, want)
    same(got, want)
    pos, slot = (torch.tensor(some, device=DEVICE) for some in ([3, 1], [2, 0]))
    table = rand(8, 16).to(DEVICE)
    results = []
    for some in (held, numbers):
        q = torch.empty(2, 16, dtype=torch.float16, device=DEVICE)
        cache = [torch.zeros(4, 1, 16, dtype=torch.float16, device=DEVICE) for _ in "kv"]
        gpu_gemm.gemm_rope(x, some, q, *cache, pos, slot, table)
        results.append((q, *cache))
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs)


def test_inputs_in_another_order() -> None:
    made = codes("int4", "", 32)
    made.order_K = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    held, numbers = pack(made, torch.float16, DEVICE), made.numbers(torch.float16).to(DEVICE)
    x = rand(3, K).half().to(DEVICE)
    got = torch.empty(3, N, dtype=torch.float32, device=DEVICE)
    gpu_gemm.gemm(x, held, got)
    want = gpu_gemm.gemm_ref(x, numbers)
    assert (got.double() - want).norm() / want.norm() < 2e-3  # summed in its own order


def test_matrices_of_different_forms_are_joined_exactly() -> None:
    parts = [codes("int4", "units", 32), codes("int8", "units", 16), codes("int4", "", 64)]
    joined = join(parts)
    assert joined is not None
    want = torch.cat([part.numbers() for part in parts])
    assert torch.equal(joined.numbers(), want)
    assert joined.format == "int8"
    assert join([parts[0], codes("fp8")]) is None
    ends = joined.rows(4, 9).columns(32, 128)
    assert torch.equal(ends.numbers(), want[4:9, 32:128])


@pytest.mark.parametrize(("code_format", "limit"), [("int4", 0.11), ("int8", 0.008), ("fp8", 0.03)])
def test_rounding_a_matrix(code_format: str, limit: float) -> None:
    w = rand(32, 256)
    w[3] = 0
    made = quantise(w, code_format)
    assert (made.numbers() - w).norm() / w.norm() < limit
    assert torch.equal(made.numbers()[3], torch.zeros(256))


@pytest.mark.parametrize("code_format", ["int4", "int8", "fp8"])
def test_zeros_do_not_make_a_matrix_slower(code_format: str) -> None:
    numbers = torch.cat((rand(4, 256), torch.zeros(4, 256))).to(torch.bfloat16) * 0.1
    held = pack(quantise(numbers, code_format), torch.bfloat16, DEVICE)
    assert held.is_small
    assert not held.codes().numbers()[4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("code_format", "form", "group"), FORMS)
def test_bits_do_not_depend_on_the_batch(
    code_format: str, form: str, group: int, dtype: torch.dtype
) -> None:
    made = codes(code_format, form, min(group, 128), n=1024, k=4096)
    held, numbers = pack(made, dtype, DEVICE), made.numbers(dtype).to(DEVICE)
    x = rand(600, 4096).to(DEVICE, dtype)
    whole = torch.empty(600, 1024, dtype=dtype, device=DEVICE)
    gpu_gemm.gemm(x, numbers, whole)
    for num_rows in (1, 7, 16, 33, 64, 100, 256, 600):
        some = torch.empty(num_rows, 1024, dtype=dtype, device=DEVICE)
        gpu_gemm.gemm(x[:num_rows], held, some)
        assert torch.equal(some, whole[:num_rows]), num_rows


SMALL = [("int4", "small", 32), ("int4", "small", 128), ("int8", "small", 4096),
         ("fp8", "small", 4096)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("code_format", "form", "group"), [*FORMS, *SMALL])
def test_few_rows_have_the_endings_of_many(code_format: str, form: str, group: int) -> None:
    made = codes(code_format, form, group if form == "small" else min(group, 128), n=1024, k=4096)
    held = pack(made, torch.bfloat16, DEVICE)
    assert can_move(held) == (form == "small")
    numbers = made.numbers(torch.bfloat16).to(DEVICE)
    x, bias = (rand(*size).to(DEVICE, torch.bfloat16) for size in ((16, 4096), (1024,)))
    residual = rand(16, 1024, seed=9).to(DEVICE, torch.bfloat16)
    for m in (1, 8, 13):
        got, want = (torch.empty(m, 1024, dtype=x.dtype, device=DEVICE) for _ in "ab")
        gpu_gemm.gemm(x[:m], held, got, bias, residual[:m])
        gpu_gemm.gemm(x[:m], numbers, want, bias, residual[:m])
        assert torch.equal(got, want)
        got, want = (torch.empty(m, 512, dtype=x.dtype, device=DEVICE) for _ in "ab")
        gpu_gemm.gemm_gated(x[:m], held, got, bias)
        gpu_gemm.gemm_gated(x[:m], numbers, want, bias)
        assert torch.equal(got, want)
        got, want = (torch.empty(4, m, 1024, device=DEVICE) for _ in "ab")
        gpu_gemm.gemm_parts(x[:m], held, got, bias, split=4)
        gpu_gemm.gemm_parts(x[:m], numbers, want, bias, split=4)
        assert torch.equal(got, want)

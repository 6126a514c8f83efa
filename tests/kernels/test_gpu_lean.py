"""A draft's lean pass against its references: products by the stream, and whole passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gpu_inputs import DEVICE, build, rand, step
from gpu_inputs import close as near
from hunch.kernels import gpu_attention, gpu_fused, gpu_gemm, gpu_lean
from hunch.kernels.gpu_lean import Rows, ToHeads, ToUnits
from hunch.kernels.gpu_tiling import Tiling
from hunch.models.cuda import CudaDecoder
from hunch.models.heads.draft_model import Columns, Renumbered
from hunch.models.heads.lean import LeanDraft

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
EPS = 1e-5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want.double()).norm() / want.double().norm() < 5e-3


def some_rows(num_rows: int, width: int, *, is_normed: bool) -> Rows:
    squares = None if is_normed else rand(3, num_rows, seed=3).square()
    return Rows(rand(num_rows, width), squares)


@pytest.mark.parametrize(("has_heads", "has_units"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_and_units_of_one_launch(has_heads: bool, has_units: bool, is_normed: bool) -> None:
    heads, kv, head, width, units = 3, 1, 24, 64, 40
    rows = some_rows(4, width, is_normed=is_normed)
    qkv, bias = rand((heads + 2 * kv) * head, width, scale=0.1), rand((heads + 2 * kv) * head)
    up, angle = rand(2 * units, width, scale=0.1, seed=5), rand(16, head // 2)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    q, y = (torch.full((4, n), float("nan"), device=DEVICE) for n in (heads * head, units))
    pos, slot = (torch.tensor(some, device=DEVICE) for some in ([7, 0, 3, 9], [5, 2, -1, 0]))
    to_heads, other = (
        ToHeads(qkv, bias, q, *(rand(8, kv, head, seed=s) for s in (1, 2)), pos, slot, table)
        for _ in range(2)
    )
    to_units = ToUnits(up, y) if has_units else None
    gpu_lean.read_stream(rows, EPS, to_heads if has_heads else None, to_units)
    want = gpu_lean.read_stream_ref(rows, EPS, other if has_heads else None, to_units)
    for got, wanted, is_there in ((q, want[0], has_heads), (y, want[1], has_units)):
        assert (wanted is not None) == is_there
        if wanted is not None:
            near(got, wanted)
    near(to_heads.k_CMH, other.k_CMH)
    near(to_heads.v_CMH, other.v_CMH)


@pytest.mark.parametrize("has_more", [False, True])
def test_the_stream_is_written_with_what_the_next_product_reads(has_more: bool) -> None:
    rows = 20 if has_more else 5
    x, norm = rand(rows, 40), rand(40, seed=4)
    first, more = ((rand(rows, k), rand(40, k, scale=0.1)) for k in (72, 300))
    got, rows = gpu_lean.write_stream(x, first, more if has_more else None, norm)
    given = (*first, *(more if has_more else (None, None)))
    want, wanted = gpu_lean.write_stream_ref(x, *given, norm, gpu_lean.write_tile(40))
    near(got, want)
    near(rows.scaled_TD, wanted.scaled_TD)
    near(rows.squares_IT, wanted.squares_IT)
    normed = gpu_lean.normed_ref(rows, EPS)
    mean = want.square().mean(1, keepdim=True)
    near(normed.float(), want * (mean + EPS).rsqrt() * norm.double())


def test_scores_of_every_other_row() -> None:
    rows, head = some_rows(6, 64, is_normed=False), rand(90, 64, scale=0.1)
    every = Rows(rows.scaled_TD[1::2], rows.squares_IT[:, 1::2])
    want = gpu_gemm.gemm_ref(gpu_lean.normed_ref(rows, EPS), head)[1::2]
    near(gpu_lean.read_logits(every, EPS, head), want)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_qkv_bias": True, "num_layers": 1},
        pytest.param(
            {"is_parallel": True, "has_mlp_norm": False, "num_layers": 2}, marks=pytest.mark.slow
        ),
        {"is_parallel": True, "has_mlp_norm": False, "num_layers": 1},
    ],
)
def test_a_lean_pass_is_the_fused_pass(changes: dict[str, object]) -> None:
    architecture = "Qwen2ForCausalLM" if "has_qkv_bias" in changes else "LlamaForCausalLM"
    model = CudaDecoder(build(architecture, torch.float16, **changes))
    caches = model.new_kv(64), model.new_kv(64)
    lean = LeanDraft.of(model, caches[0])
    assert lean is not None
    ids = torch.randint(0, 50, (3,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for first, last, every in ((0, 2, 2), (2, 3, 1)):
        attn = step(first, last)
        attn.memo["tiling"] = Tiling(None)
        got = lean.scores(ids[first:last], attn, caches[0], every)
        hidden = model.forward(ids[first:last], attn, caches[1]).last_TD
        close(got, model.logits(hidden[every - 1 :: every]))
    for name in ("k_LCMH", "v_LCMH"):
        close(getattr(caches[0], name), getattr(caches[1], name))


class Noted:
    """Stands for a kernel, and counts its launches."""

    def __init__(self, launched: list[str], name: str) -> None:
        self.launched, self.name = launched, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values, **known: self.launched.append(self.name)


@pytest.mark.parametrize(("is_parallel", "per_layer"), [(False, 5), (True, 3)])
def test_launches_of_a_pass(is_parallel: bool, per_layer: int, monkeypatch) -> None:
    changes = {"is_parallel": is_parallel, "has_mlp_norm": not is_parallel}
    model = CudaDecoder(build("LlamaForCausalLM", torch.float16, num_layers=2, **changes))
    kv, launched, ids = model.new_kv(64), [], torch.zeros(4, dtype=torch.int64, device=DEVICE)
    lean = LeanDraft.of(model, kv)
    for module in (gpu_attention, gpu_fused, gpu_gemm, gpu_lean):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted(launched, name))
    lean.scores(ids, step(0, 4), kv)
    assert len(launched) == 1 + 2 * per_layer + 1  # with the embedding, and the scores
    launched.clear()
    model.logits(model.forward(ids, step(0, 4), kv).last_TD)
    assert len(launched) == 1 + 2 * 7 + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"has_qk_norm": True},
        {"norm": "layer"},
        {"is_parallel": True},
        {"is_gated": False, "activation": "relu2"},
        {"residual_scale": 0.5},
    ],
)
def test_what_it_does_not_know_is_left_to_the_fused_pass(changes: dict[str, object]) -> None:
    architecture = "Qwen3ForCausalLM" if "has_qk_norm" in changes else "LlamaForCausalLM"
    model = CudaDecoder(build(architecture, torch.float16, num_layers=2, **changes))
    assert LeanDraft.of(model, model.new_kv(16)) is None


def test_a_model_of_another_vocabulary_is_left_to_the_fused_pass() -> None:
    model = CudaDecoder(build("LlamaForCausalLM", torch.float16, num_layers=2))
    assert LeanDraft.of(Renumbered(model, Columns(40)), model.new_kv(16)) is None


def test_codes_of_eight_bits_are_left_to_the_fused_pass() -> None:
    model = CudaDecoder(build("LlamaForCausalLM", torch.float16, num_layers=2))
    kv = model.new_kv(16)
    assert LeanDraft.of(model, kv) is not None
    assert LeanDraft.of(model, replace(kv, scales=kv)) is None

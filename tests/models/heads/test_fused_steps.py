"""Heads on a GPU's fused kernels compute what their torch code computes, in few launches."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import head_files
from builders import BLOCK_SIZE, Seq, pack, tables
from drafting.test_device_draft import Launches
from drafting.test_device_feature import drafter, rows
from hunch.drafting.step_shapes import DraftSource
from hunch.kernels import gpu_attention, gpu_fused, gpu_gemm, gpu_join
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.models.cuda import CudaDecoder
from hunch.models.heads import fused as fused_heads
from hunch.models.heads.eagle import load_eagle3
from hunch.models.heads.step import StepNet
from hunch.models.load import load_decoder
from hunch.models.target import Hidden
from hunch.models.weights import open_weights
from models.heads.test_native_steps import FORMS
from tiny_models import write_llama

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS, NUM_BLOCKS = 2, 8
DAILY = {"eagle", "eagle3 normed", "mtp deepseek"}  # the three sources to join token and state
# A prompt of many tokens, chunks of few, a chain's level, and a tree.
STEPS = [
    [Seq(range(21)), Seq(range(2))],
    [Seq(range(3), start=21), Seq(range(4), start=2)],
    [Seq([1], start=24), Seq([1], start=6)],
    [Seq([1], start=25, draft=range(4), parents=(-1, 0, 0, 2))],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("fused") / "target")


@pytest.fixture(scope="module")
def study(model: Path) -> head_files.Study:
    """Nothing is trained here, so any text will do."""
    target = load_decoder(open_weights(model), dtype="float32")
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.spec.vocab_size, (1, 8), generator=noise)
    hidden, features = head_files.states_of(target, tokens[0].tolist())
    return head_files.Study(target, tokens, hidden[None], [x[None] for x in features])


def fast_target(model: Path) -> CudaDecoder:
    return CudaDecoder(load_decoder(open_weights(model), dtype="float16", device=DEVICE))


def inputs(seqs: list[Seq]) -> AttnInputs:
    _, attn = pack(seqs, tables(NUM_ROWS, NUM_BLOCKS))
    for item in fields(attn):
        value = getattr(attn, item.name)
        setattr(attn, item.name, value.to(DEVICE) if isinstance(value, Tensor) else value)
    return attn


def new_kv(net: StepNet, dtype: torch.dtype) -> KVCache:
    spec, num_slots = net.spec, NUM_ROWS * NUM_BLOCKS * BLOCK_SIZE
    size = (net.num_kv_layers, num_slots, spec.num_kv_heads, spec.head_dim)
    return KVCache(*(torch.zeros(size, dtype=dtype, device=DEVICE) for _ in range(2)))


def close(got: Tensor, want: Tensor) -> None:
    assert (got.double() - want.double()).norm() / want.double().norm() < 5e-3


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[] if form in DAILY else [pytest.mark.slow]) for form in FORMS],
)
def test_fused_steps_are_the_steps_by_torch(
    form: str, model: Path, study: head_files.Study, tmp_path: Path
) -> None:
    make, load, more = FORMS[form]
    make(study, tmp_path, num_steps=0, **more)
    net = load(tmp_path, fast_target(model))
    plain = load(tmp_path, load_decoder(open_weights(model), dtype="float32", device=DEVICE))
    assert net.fused is not None
    assert plain.fused is None
    kv, kv_ref = new_kv(net, torch.float16), new_kv(net, torch.float32)
    noise = torch.Generator().manual_seed(1)
    for seqs in STEPS:
        attn = inputs(seqs)
        count = len(attn.pos_T)
        token_T = torch.randint(0, study.vocab_size, (count,), generator=noise).to(DEVICE)
        state_TD = torch.randn(count, study.width, generator=noise).half().to(DEVICE)
        before_TD = state_TD.clone()
        got_TD = net.step(token_T, state_TD, attn, kv)
        want_TD = plain.step(token_T, state_TD.float(), inputs(seqs), kv_ref)
        close(got_TD, want_TD)
        assert torch.equal(state_TD, before_TD)  # it is the caller's
    close(net.logits(got_TD), plain.logits(want_TD))
    close(kv.k_LCMH, kv_ref.k_LCMH)
    close(kv.v_LCMH, kv_ref.v_LCMH)


@pytest.mark.slow
def test_whole_drafts(model: Path, study: head_files.Study, tmp_path: Path) -> None:
    """Committed tokens and then a chain, as a captured step drafts them."""
    head_files.make_eagle3(study, tmp_path, num_steps=0, layers=(0, 1))
    net = load_eagle3(tmp_path, fast_target(model))
    fused, found = net.fused, []
    for net.fused in (fused, None):
        state, step, hidden = rows()
        noise = torch.Generator().manual_seed(3)
        size = (len(hidden.last_TD), study.width)
        states = [torch.randn(size, generator=noise).half().to(DEVICE) for _ in range(3)]
        head = drafter(net, 0)
        num_slots = state.table_XB.numel() * state.block_size
        head.kv = KVCache(*torch.zeros(2, 1, num_slots, 2, 32, device=DEVICE).half())
        head.draft(state, step, Hidden(states[0], tuple(states[1:])), DraftSource.CHAIN)
        drafts = [
            state.draft_XG[row, :count].tolist() for row, count in enumerate(state.num_nodes_X)
        ]
        found.append((drafts, head.kv))
    (drafts, kv), (want, kv_ref) = found
    assert list(map(len, want)) == [3, 2, 0]
    assert drafts == want
    close(kv.k_LCMH, kv_ref.k_LCMH)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_seven_launches_per_layer(
    num_layers: int,
    model: Path,
    study: head_files.Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head_files.make_eagle3(study, tmp_path, num_layers=num_layers, num_steps=0)
    net = load_eagle3(tmp_path, fast_target(model))
    attn, kv = inputs(STEPS[2]), new_kv(net, torch.float16)
    token_T = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    state_TD = torch.zeros(2, study.width, dtype=torch.float16, device=DEVICE)
    net.tiler(attn)
    with Launches(monkeypatch, (gpu_attention, gpu_fused, gpu_gemm, gpu_join)) as seen:
        net.logits(net.step(token_T, state_TD, attn, kv))
    layer = ["_gemm_kernel", "_attention_kernel", "_gemm_kernel", "_add_norm_kernel"]
    layer += ["_gemm_kernel", "_gemm_kernel", "_add_norm_kernel"]
    output = ["_add_norm_kernel", "_gemm_kernel"]
    assert seen.names == ["_join_kernel", *layer * num_layers, *output]


def test_what_the_kernels_do_not_know_is_left_to_torch(
    model: Path, study: head_files.Study, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    head_files.make_eagle(study, tmp_path, num_steps=0)
    problems = {"shapes of tomorrow": True, "of today": False}
    monkeypatch.setattr(fused_heads, "unknown_to_kernels", lambda *_: problems)
    net = FORMS["eagle"][1](tmp_path, fast_target(model))
    assert net.fused is None
    assert "do not know shapes of tomorrow\n" in caplog.text
    attn, kv = inputs(STEPS[0]), new_kv(net, torch.float16)
    token_T = torch.arange(len(attn.pos_T), device=DEVICE)
    state_TD = torch.ones(len(token_T), study.width, dtype=torch.float16, device=DEVICE)
    assert net.step(token_T, state_TD, attn, kv).isfinite().all()
    assert kv.k_LCMH.any()

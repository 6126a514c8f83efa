"""Networks of drafters on the CPU's own kernels compute what their torch code computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import head_files
from builders import BLOCK_SIZE, Seq, pack, tables
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.eagle import load_eagle, load_eagle3
from hunch.models.heads.mtp import load_mtp
from hunch.models.heads.step import StepNet
from hunch.models.native import NativeDecoder, load_native
from hunch.models.weights import open_weights
from tiny_models import write_llama

LENGTH = 21
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., StepNet], dict[str, Any]]] = {
    "eagle": (head_files.make_eagle, load_eagle, {}),
    "eagle3": (head_files.make_eagle3, load_eagle3, {}),
    "eagle3 reduced": (head_files.make_eagle3, load_eagle3, {"draft_vocab": 64}),
    "eagle3 two layers": (head_files.make_eagle3, load_eagle3, {"num_layers": 2}),
    "eagle3 normed": (
        head_files.make_eagle3,
        load_eagle3,
        {"is_speculators": True, "norm_before_residual": True, "norm_output": True},
    ),
    "mtp mimo": (head_files.make_mtp, load_mtp, {"form": "mimo"}),
    "mtp qwen": (head_files.make_mtp, load_mtp, {"form": "qwen"}),
    "mtp deepseek": (head_files.make_mtp, load_mtp, {"form": "deepseek"}),
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeDecoder, head_files.Study]:
    path = write_llama(tmp_path_factory.mktemp("native") / "target")
    native = load_native(open_weights(path), dtype="float32")
    if native is None:
        pytest.skip("no C++ compiler")
    return native, head_files.study(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_on_kernels_is_the_step_by_torch(
    form: str, study: tuple[NativeDecoder, head_files.Study], tmp_path: Path
) -> None:
    target, s = study
    make, load, more = FORMS[form]
    make(s, tmp_path, num_steps=0, **more)
    net = load(tmp_path, target)
    assert net.network is not None
    tokens = s.tokens[0, 1 : LENGTH + 1]
    features = tuple(s.features[layer][0] for layer in net.feature_layers)
    state_TD = net.fuse(s.hidden[0], features)[:LENGTH]
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    size = (net.num_kv_layers, num_blocks * BLOCK_SIZE, net.spec.num_kv_heads, net.spec.head_dim)
    found: list[tuple[torch.Tensor, ...]] = []
    for step in (net.step_ref, net.step):
        kv = KVCache(torch.zeros(size), torch.zeros(size))
        _, attn = pack([Seq(tokens.tolist())], tables(1, num_blocks))
        states_TD = step(tokens, state_TD, attn, kv)
        found.append((states_TD, kv.k_LCMH, kv.v_LCMH))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    states_TD = found[0][0]
    torch.testing.assert_close(
        net.logits(states_TD), net.logits_ref(states_TD), rtol=1e-4, atol=1e-3
    )

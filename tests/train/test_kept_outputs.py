"""The target's outputs from the second visit on: as a new pass over the texts would give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from plain_losses import dense, slope

import hunch.train.kept
from builders import tiny_model
from hunch.kernels.gpu_slope import log_sums, weighted_softmax
from hunch.train.kept import Kept
from hunch.train.loss import teach
from hunch.train.packs import Laid
from hunch.train.states import TopOpinions, opinions_of, read_pack
from hunch.train.texts import Texts, put
from hunch.train.vocab import count_columns

TOKENS = np.random.default_rng(0).integers(0, 96, 400)
TEXTS = Texts(TOKENS, np.array([0, 60, 100, 250, 400]), np.array([10, 1, 40, 130]))


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_kept_outputs_are_those_of_a_pass(
    is_on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_on_disk:
        monkeypatch.setattr(hunch.train.kept, "HOST_BYTES", 0)
    target, layers = tiny_model(), (1, 3)
    columns = count_columns(TEXTS.count(96), 50)
    laid = Laid(TEXTS, columns.column_V, 120)
    kept = Kept(
        laid, columns, target.device, target.dtype, feature_widths=(32, 32), hidden_width=32,
        folder=tmp_path,
    )  # fmt: skip
    assert any(tmp_path.iterdir()) is is_on_disk
    for pack in laid.packs(laid.shape(200), 0, 0):
        assert not kept.has(pack)
        inputs = pack.inputs(target.device)
        states = read_pack(target, inputs, layers)
        kept.add(pack, inputs, states, opinions_of(target, columns, inputs, states))
    for pack in laid.packs(laid.shape(300), 1, 5):  # the texts in other company
        assert kept.has(pack)
        inputs = pack.inputs(target.device)
        new, ours = read_pack(target, inputs, layers), kept.states(inputs)
        p_MC = opinions_of(target, columns, inputs, new)
        assert torch.allclose(dense(kept.opinions(inputs)), p_MC, atol=1e-5)
        pairs = [(ours.hidden_TD, new.hidden_TD), *zip(ours.features, new.features, strict=True)]
        for kept_TD, new_TD in pairs:
            assert torch.allclose(kept_TD, new_TD, atol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "blend", "l1"])
def test_few_columns_teach_as_all_do(kind: str) -> None:
    torch.manual_seed(0)
    h_MD, head_CD = torch.randn(9, 16, requires_grad=True), torch.randn(40, 16)
    z_MC = (h_MD @ head_CD.T).detach()
    top = TopOpinions.of((3 * torch.randn(9, 40)).softmax(-1), 8)
    weight_M = torch.rand(9)
    loss_M, slope_MC = slope(z_MC, dense(top), kind, 0.6)
    for late in (0.6, torch.tensor(0.6)):
        loss, best_M = teach(h_MD, head_CD, top, weight_M, kind, late)
        (found,) = torch.autograd.grad(loss, h_MD)
        assert torch.equal(best_M, z_MC.argmax(-1))
        assert torch.allclose(loss, (loss_M * weight_M).sum(), rtol=1e-5)
        assert torch.allclose(found, (slope_MC * weight_M[:, None]) @ head_CD, atol=1e-6)


def test_the_kernels_give_torchs_softmax() -> None:
    """Two blocks of columns, the last not full."""
    torch.manual_seed(1)
    z_MC, weight_M = 3 * torch.randn(3, 5000), torch.rand(3)
    log_sum_M, best_M = log_sums(z_MC)
    assert torch.allclose(log_sum_M, z_MC.logsumexp(-1))
    assert torch.equal(best_M, z_MC.argmax(-1))
    expected_MC = z_MC.softmax(-1) * weight_M[:, None]
    assert torch.allclose(weighted_softmax(z_MC, log_sum_M, weight_M), expected_MC, atol=1e-7)


class OnHost:
    """A tensor some of whose numbers share memory: pinning refuses it until it is whole."""

    is_cuda, is_whole = False, False

    def contiguous(self) -> OnHost:
        self.is_whole = True
        return self

    def pin_memory(self) -> OnHost:
        assert self.is_whole
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        return f"on {device.type}" if non_blocking else "waited for"


def test_what_shares_memory_is_made_whole_before_it_goes_to_a_gpu() -> None:
    moved: Any = put(cast("Any", OnHost()), torch.device("cuda"))
    assert moved == "on cuda"

"""Texts in a row teach what padded ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train_setup import new_job

from hunch.models.decoder import Decoder
from hunch.step.capture import rehearsed
from hunch.train.attend import Dense, Packed, can_pack
from hunch.train.batches import Texts, collate
from hunch.train.job import build_student, read_settings
from hunch.train.kept import Kept
from hunch.train.optimiser import Optimiser
from hunch.train.packed_step import PackedSteps
from hunch.train.packs import Laid, PackInputs, PackShape
from hunch.train.states import read_pack, run_target
from hunch.train.student import Student

CONTEXT = 40
LENGTHS = np.array([12, 40, 7, 61, 25, 33, 3, 18])
PROMPTS = np.array([5, 10, 1, 30, 24, 0, 2, 4])
TEXTS = Texts(
    np.random.default_rng(0).integers(3, 90, LENGTHS.sum()),
    np.concatenate([[0], np.cumsum(LENGTHS)]),
    PROMPTS,
)
ROOM = PackShape(256, 16, 160, CONTEXT)  # more than all texts need


def student_for(target: Path, tmp_path: Path, **options: str) -> tuple[Student, Decoder]:
    job = new_job(target, tmp_path, tmp_path, layers="0,1,3", draft_vocab="60", **options)
    return build_student(job, read_settings(job.method, job.options), TEXTS)


def kept_for(student: Student, target: Decoder) -> Kept:
    words = {"dtype": target.dtype, "context": CONTEXT}
    kept = Kept(TEXTS, student.columns, target.device, **words)
    pack = kept.laid.pack(np.arange(len(TEXTS)))
    kept.add_pack(pack, read_pack(target, pack, student.columns))
    return kept


def test_each_text_that_teaches_comes_once_and_packs_keep_to_their_shape() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 90, 400)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    texts = Texts(rng.integers(0, 50, offset[-1]), offset, rng.integers(0, lengths))
    column_V = torch.arange(50) - 5
    laid = Laid(texts, column_V.clamp(min=-1), 64)
    shape = laid.shape(512)
    epochs = [list(laid.packs(shape, 0, epoch)) for epoch in (0, 1, 0)]
    for packs in epochs:
        found = np.concatenate([pack.index_B for pack in packs])
        assert sorted(found) == np.flatnonzero(laid.num_taught).tolist()
        for pack in packs:
            assert pack.num_tokens <= shape.num_tokens
            assert len(pack.row_M) <= shape.num_rows
            assert len(pack.flat(shape)) == sum(shape.sizes)
        share = sum(pack.num_tokens for pack in packs[:-16]) / (len(packs) - 16) / 512
        assert share > 0.93  # what is left is filled up
    orders = [[pack.index_B.tolist() for pack in packs] for packs in epochs]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("is_filled_up", [False, True])
@pytest.mark.parametrize("loss", ["ce", "blend"])
def test_a_pack_has_the_loss_and_the_gradients_of_padded_texts(
    loss: str, is_filled_up: bool, target: Path, tmp_path: Path
) -> None:
    student, decoder = student_for(target, tmp_path, loss=loss)
    kept, texts = kept_for(student, decoder), np.array([0, 1, 3, 4, 7])
    pack = kept.laid.pack(texts)
    shape = ROOM if is_filled_up else pack.shape
    inputs = PackInputs(torch.from_numpy(pack.flat(shape)), shape)
    opinions = kept.opinions(inputs.at_M).toward(inputs.label_M, 0.3)
    outputs = kept.outputs(collate(TEXTS, texts, 8, CONTEXT), greedy_share=0.3, late=0.4)
    losses = student.loss_on_pack(inputs, opinions, 0.4), student.loss_on(outputs).loss
    leaves = list(student.tensors.values())
    ours, padded = (torch.autograd.grad(one, leaves) for one in losses)
    assert torch.allclose(*(one.detach() for one in losses), rtol=1e-5)
    for name, a, b in zip(student.tensors, ours, padded, strict=True):
        assert float(b.abs().max()) > 0, name
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max())), name


def test_a_pack_is_read_as_padded_texts_are(target: Path, tmp_path: Path) -> None:
    student, decoder = student_for(target, tmp_path)
    texts, layers = np.array([1, 3, 5, 6]), (1, 3)
    batch = collate(TEXTS, texts, 8, CONTEXT)
    padded = run_target(decoder, batch, student.columns, layers)
    pack = Laid(TEXTS, student.columns.column_V, CONTEXT).pack(texts)
    ours = read_pack(decoder, pack, student.columns, layers)
    assert torch.allclose(ours.p_MC, padded.p_MC, atol=1e-5)
    inside = (torch.arange(batch.ids_BL.shape[1]) < batch.length_B[:, None]).flatten()
    states = [(ours.hidden_TD, padded.hidden_TD)]
    for a_TD, b_TD in states + list(zip(ours.features, padded.features, strict=True)):
        assert torch.allclose(a_TD, b_TD[inside], atol=1e-4)


def test_a_window_is_each_texts_own(target: Path, tmp_path: Path) -> None:
    _, decoder = student_for(target, tmp_path)
    heads = replace(decoder.layers[0].attn.heads, window=9)  # type: ignore[union-attr]
    texts = np.array([1, 3])  # both as long as the context
    pack = Laid(TEXTS, torch.arange(96), CONTEXT).pack(texts)
    inputs = PackInputs(torch.from_numpy(pack.flat(pack.shape)), pack.shape)
    size = heads.num_heads + 2 * heads.num_kv_heads
    qkv_TAH = torch.randn(2 * CONTEXT, size, heads.head_dim)
    padded = Dense(inputs.ids_T.view(2, CONTEXT), decoder.ropes)(qkv_TAH, heads, 0)
    assert torch.allclose(Packed(inputs, decoder.ropes)(qkv_TAH, heads, 0), padded, atol=1e-5)
    assert can_pack(decoder.spec, decoder.device, decoder.dtype)
    spec = replace(decoder.spec, windows=(-16,) * len(decoder.layers))
    assert not can_pack(spec, decoder.device, decoder.dtype)  # chunks are not windows


@pytest.mark.gpu
def test_captured_steps_over_packs_are_those_that_are_launched(
    target: Path, tmp_path: Path
) -> None:
    found = []
    for run in (lambda body: body(), None):
        job = new_job(target, tmp_path, tmp_path, layers="0,1,3", draft_vocab="60")
        job.engine = {}
        student, decoder = build_student(job, read_settings(job.method, job.options), TEXTS)
        steps = PackedSteps(
            student, Optimiser(student.tensors), kept_for(student, decoder), 128, 0.3
        )
        losses = []
        for epoch in range(6):
            for pack in steps.packs(0, epoch):
                steps.optimiser.set_rates(1e-3)
                if run is None:
                    losses.append(float(steps.learn(pack, 0.0)))
                else:
                    with rehearsed(run):
                        steps._graph = None
                        losses.append(float(steps.learn(pack, 0.0)))
        found.append(torch.tensor(losses))
    assert torch.allclose(*found, rtol=1e-2)  # sums of atomic additions differ
    assert found[0][-1] < found[0][0]

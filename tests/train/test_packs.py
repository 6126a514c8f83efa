"""Texts in a row teach what each of them does by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_losses import OneText, dense, plain_loss
from torch import Tensor
from train_setup import new_job, read_texts

import hunch.train.attend
import hunch.train.blocks
import hunch.train.unroll
from builders import tiny_model
from hunch.errors import TrainingError
from hunch.layers.attention import Heads
from hunch.models.decoder import Decoder
from hunch.step.capture import rehearsed
from hunch.train.attend import Packed, Where
from hunch.train.job import build_student
from hunch.train.kept import Kept, keep_for
from hunch.train.loop import Loop, LoopOptions
from hunch.train.optimiser import Optimiser
from hunch.train.packed_step import PackedSteps
from hunch.train.packs import Laid, PackInputs, Spans
from hunch.train.progress import Progress
from hunch.train.states import TopOpinions
from hunch.train.student import StepInputs, Student
from hunch.train.texts import Texts

CONTEXT = 40
LENGTHS = np.array([12, 40, 7, 61, 25, 33, 3, 18])
PROMPTS = np.array([7, 10, 1, 30, 24, 0, 2, 4])
TEXTS = Texts(
    np.random.default_rng(0).integers(3, 7, LENGTHS.sum()),  # so few that some guesses are right
    np.concatenate([[0], np.cumsum(LENGTHS)]),
    PROMPTS,
)
SOME = np.array([1, 0, 3, 4, 7, 2])  # of the first, the first guess is right
CASES: list[tuple[str, dict[str, Any]]] = [
    ("draft", {"layers": "0,1,3", "loss": "blend"}),
    ("eagle3", {"unroll": 3}),
    ("eagle3", {"unroll": 2, "layers": 2, "loss": "tv"}),
    ("medusa", {"heads": 3, "layers": 2}),
    ("medusa", {"heads": 2, "share_tables": True, "loss": "kl"}),
    ("mlp", {"stages": 3, "inner": 32}),
    ("block", {"layers": 2, "block": 3, "rank": 16, "anchors": 14}),
]


def student_for(
    target: Path, tmp_path: Path, method: str = "draft", **options: Any
) -> tuple[Student, Decoder]:
    job = new_job(target, tmp_path, tmp_path, method, **{"draft_vocab": "3", **options})
    return build_student(job, TEXTS)


def kept_for(student: Student, target: Decoder) -> Kept:
    kept = keep_for(student, Laid(TEXTS, student.columns.column_V, CONTEXT), room=1, folder=Path())
    pack = kept.laid.pack(np.arange(len(TEXTS)))
    kept.add(pack, *read_texts(student, target, pack))
    return kept


def plain_flash(
    q: Tensor, k: Tensor, v: Tensor, where: Where, heads: Heads, *, is_causal: bool = True
) -> tuple[Tensor, ...]:
    """What torch's kernel computes, with whatever it leaves where no text is."""
    starts_q, starts_k, longest_q, longest_k = where
    out, sums = torch.full_like(q, torch.nan), q.new_full(q.shape[:2], torch.nan)
    for (a, b), (c, d) in zip(
        pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True
    ):
        assert b - a <= longest_q
        assert d - c <= longest_k
        scores = plain_scores(q[a:b], k[c:d], heads, is_causal)
        sums = sums.index_put((torch.arange(a, b),), scores.logsumexp(-1).t())
        read = (scores.softmax(-1) @ by_head(v[c:d], heads)).transpose(0, 1)
        out = out.index_put((torch.arange(a, b),), read)
    used = int(starts_k[-1])
    for x in (k, v):
        if x.requires_grad:
            x.register_hook(lambda grad: torch.cat((grad[:used], grad[used:] * torch.nan)))
    return out, sums.t(), torch.empty(2), torch.empty(0)


def plain_flash_back(
    by_out: Tensor, saved: Sequence[Tensor], where: Where, heads: Heads
) -> tuple[Tensor, ...]:
    q, k, v, out, sums = saved[:5]
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for a, b in pairwise(where[0].tolist()):
        scores = plain_scores(q[a:b], k[a:b], heads, True)
        share = (scores - sums[:, a:b, None]).exp()
        by, read = (x[a:b].transpose(0, 1) for x in (by_out, out))
        slope = share * (by @ by_head(v[a:b], heads).mT - (by * read).sum(-1, keepdim=True))
        slope = slope * heads.scale
        found[0][a:b] = (slope @ by_head(k[a:b], heads)).transpose(0, 1)
        for into, part in ((1, slope.mT @ q[a:b].transpose(0, 1)), (2, share.mT @ by)):
            grouped = part.unflatten(0, (heads.num_kv_heads, -1)).sum(1)
            found[into][a:b] = grouped.transpose(0, 1)
    return tuple(found)


def by_head(x: Tensor, heads: Heads) -> Tensor:
    return x.repeat_interleave(heads.num_heads // x.shape[1], dim=1).transpose(0, 1)


def plain_scores(q: Tensor, k: Tensor, heads: Heads, is_causal: bool) -> Tensor:
    scores = (q.transpose(0, 1) @ by_head(k, heads).mT) * heads.scale
    if is_causal:
        is_later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    return scores


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by torch's kernel, of which there is a plain form here."""
    modules = hunch.train.attend, hunch.train.unroll, hunch.train.blocks
    names = {"can_flash": lambda *_: True, "flash": plain_flash, "flash_back": plain_flash_back}
    for module in modules:
        for name, form in names.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, form)


def test_each_text_that_teaches_comes_once_and_packs_keep_to_their_shape() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 90, 400)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    texts = Texts(rng.integers(0, 50, offset[-1]), offset, rng.integers(0, lengths))
    column_V = torch.arange(50) - 5
    laid = Laid(texts, column_V.clamp(min=-1), 64)
    shape = laid.shape(512, anchors=6)
    epochs = [list(laid.packs(shape, 0, epoch)) for epoch in (0, 1, 0)]
    for packs in epochs:
        found = np.concatenate([pack.index_B for pack in packs])
        assert sorted(found) == np.flatnonzero(laid.num_taught).tolist()
        for pack in packs:
            assert pack.num_tokens <= shape.num_tokens
            assert len(pack.row_M) <= shape.num_rows
            assert len(pack.anchor_A) <= shape.num_blocks
            assert len(pack.flat(shape)) == sum(shape.sizes)
            of_text = np.searchsorted(pack.start_S, pack.anchor_A, side="right") - 1
            count = np.bincount(of_text, minlength=len(pack.index_B))
            assert count.tolist() == laid.num_anchors[pack.index_B].clip(max=6).tolist()
            assert laid.is_anchor_N[pack.at_T[pack.anchor_A]].all()
        share = sum(pack.num_tokens for pack in packs[:-16]) / (len(packs) - 16) / 512
        assert share > 0.9  # what is left is filled up
    orders = [[pack.anchor_A.tolist() for pack in packs] for packs in epochs]
    assert orders[0] == orders[2] != orders[1]


def check_case(case: tuple[str, dict[str, Any]], target: Path, tmp_path: Path, size: int) -> None:
    """The loss and the gradients of a pack, filled up to a size, and of its texts one by one."""
    (method, options), late = case, 0.4
    student, decoder = student_for(target, tmp_path, method, **options)
    generator = torch.Generator().manual_seed(3)
    for tensor in student.tensors.values():  # not what it begins with: much of that is nothing
        tensor.data += 0.02 * torch.randn(tensor.shape, generator=generator)
    kept = kept_for(student, decoder)
    pack = kept.laid.pack(SOME, np.random.default_rng(2), student.anchors)
    shape = pack.shape
    if size:
        more = {"num_texts": 20, "num_rows": 160, "num_blocks": 64 * (student.anchors > 0)}
        shape = replace(shape, num_tokens=size, anchors=student.anchors, **more)
    inputs = PackInputs(torch.from_numpy(pack.flat(shape)), shape)
    opinions = kept.opinions(inputs).toward(inputs.label_M, 0.3 * inputs.is_own_M)
    given = StepInputs(inputs, kept.states(inputs), opinions, torch.tensor(late))
    loss = student.loss_on(given).loss
    inputs = pack.inputs(decoder.device)
    p_MC = dense(kept.opinions(inputs).toward(inputs.label_M, 0.3 * inputs.is_own_M))
    texts = [OneText(pack, i, kept.states(inputs), p_MC) for i in range(len(SOME))]
    plain = plain_loss(student, method, texts, late)
    leaves = list(student.tensors.values())
    ours, theirs = (torch.autograd.grad(one, leaves, allow_unused=True) for one in (loss, plain))
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for name, a, b in zip(student.tensors, ours, theirs, strict=True):
        assert a is not None, name
        assert b is not None, name
        most = float(b.abs().max())
        assert most > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5 * most)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[1])}")
def test_a_pack_has_the_loss_and_the_gradients_of_its_texts(
    case: tuple[str, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    check_case(case, target, tmp_path, 0)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[1])}")
def test_filled_up_and_by_a_kernel_for_packs_too(
    case: tuple[str, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    check_case(case, target, tmp_path, 256)


def test_a_pack_is_read_as_its_texts_are(target: Path, tmp_path: Path) -> None:
    student, decoder = student_for(target, tmp_path, "eagle3")
    laid, texts = Laid(TEXTS, student.columns.column_V, CONTEXT), np.array([1, 3, 5, 6])
    _, together, p_MC = read_texts(student, decoder, laid.pack(texts))
    alone = [read_texts(student, decoder, laid.pack(texts[i : i + 1]))[1:] for i in range(4)]
    assert torch.allclose(p_MC, torch.cat([p for _, p in alone]), atol=1e-5)
    for number, feature_TD in enumerate(together.features):
        parts = [states.features[number] for states, _ in alone]
        assert torch.allclose(feature_TD, torch.cat(parts), atol=1e-4)


@pytest.mark.parametrize("window", [None, 9, -16])
def test_texts_attend_to_themselves_alone(window: int | None) -> None:
    """Of very different lengths; a window, and chunks."""
    decoder = tiny_model()
    heads = replace(decoder.layers[0].attn.heads, window=window)  # type: ignore[union-attr]
    lengths = [3, 40, 1, 30, 12]
    size = heads.num_heads + 2 * heads.num_kv_heads
    qkv_TAH = torch.randn(sum(lengths), size, heads.head_dim)

    def attended(qkv_TAH: Tensor, lengths: list[int]) -> Tensor:
        return Packed(Spans.of(lengths, decoder.device), decoder.ropes)(qkv_TAH, heads, 0)

    alone = [attended(part, [len(part)]) for part in qkv_TAH.split(lengths)]
    assert torch.allclose(attended(qkv_TAH, lengths), torch.cat(alone), atol=1e-5)


def test_without_room_for_all_texts_it_learns_the_same(target: Path, tmp_path: Path) -> None:
    """The target reads each pack anew, and what it says is kept until the next."""
    found = []
    for room in (0, 64):
        student, decoder = student_for(target, tmp_path, "medusa", heads=2)
        laid = Laid(TEXTS, student.columns.column_V, CONTEXT)
        words: Any = {"room": room, "hidden_width": decoder.spec.width}
        kept = Kept(laid, student.columns, decoder.device, decoder.dtype, **words)
        steps = PackedSteps(student, Optimiser(student.tensors), kept, 64, 0.3)
        losses, num_read = [], 0
        for epoch in (0, 1):
            for pack in steps.packs(0, epoch):
                if not kept.has(pack):
                    kept.add(pack, *read_texts(student, decoder, pack))
                    num_read += 1
                steps.optimiser.set_rates(1e-3)
                losses.append(float(steps.learn(pack, 0.0)))
        assert (num_read == len(losses)) == bool(room)
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_texts_without_answers_are_an_error(target: Path, tmp_path: Path) -> None:
    student, decoder = student_for(target, tmp_path)
    options = LoopOptions(context=CONTEXT)
    empty = Texts(TEXTS.tokens, TEXTS.offset, LENGTHS)
    with pytest.raises(TrainingError, match="8 texts, and no answer"):
        Loop(student, decoder, tmp_path, options, 1.0).run(empty, empty, Progress(is_quiet=True))


def test_prompts_teach_in_a_share_of_the_texts() -> None:
    texts = Texts(np.arange(3, 43), np.array([0, 10, 20, 30, 40]), np.full(4, 6))
    found = [Laid(texts, torch.arange(50), 64, whole=whole, seed=1) for whole in (0.0, 0.5, 1.0)]
    counts = [int(laid.num_taught.sum()) for laid in found]
    assert counts[0] == 4 * 4
    assert counts[0] < counts[1] < counts[2] == 4 * 9
    # Only what the target wrote is taught as its choice: a prompt's next token is nobody's.
    inputs = found[2].pack(np.arange(4)).inputs(torch.device("cpu"))
    top = TopOpinions(torch.zeros(36, 1).int(), torch.ones(36, 1), 50)
    p_MC = dense(top.toward(inputs.label_M, 1.0 * inputs.is_own_M))
    is_sure = p_MC.gather(1, inputs.label_M[:, None]).squeeze(1) > 0.99
    assert torch.equal(is_sure, inputs.is_own_M)
    assert int(is_sure.sum()) == counts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[1])}")
def test_captured_steps_are_those_that_are_launched(
    case: tuple[str, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    found = []
    for run in (lambda body: body(), None):
        job = new_job(target, tmp_path, tmp_path, case[0], **{"draft_vocab": "3", **case[1]})
        job.engine = {}
        student, decoder = build_student(job, TEXTS)
        optimiser = Optimiser(student.tensors, student.plain)
        steps = PackedSteps(student, optimiser, kept_for(student, decoder), 128, 0.3)
        before = {name: value.detach().clone() for name, value in student.tensors.items()}
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
    assert torch.allclose(*found, rtol=2e-2)  # sums of atomic additions differ
    moved = [student.tensors[name] for name in before]
    assert not all(map(torch.equal, moved, before.values()))

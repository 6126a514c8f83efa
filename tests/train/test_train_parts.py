"""The parts of training by themselves: prompts, losses, optimiser, files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_losses import slope
from safetensors.torch import save_file
from train_setup import ENGINE, write_prompts, write_target

from hunch import LLM
from hunch.cli import options
from hunch.errors import RequestError
from hunch.models.weights import open_weights
from hunch.train.export import pack
from hunch.train.loss import LOSSES, teach
from hunch.train.optimiser import Optimiser, orthogonal
from hunch.train.progress import Progress
from hunch.train.prompts import read_prompts
from hunch.train.regenerate import AnswerOptions, read_answers, regenerate
from hunch.train.states import TopOpinions
from hunch.train.student import Student


def lines(path: Path, good: int, bad: list[str]) -> Path:
    rows = [json.dumps({"prompt": f"text {i}"}) for i in range(good)]
    path.write_text("\n".join([*rows[:1], *bad, *rows[1:]]) + "\n")
    return path


def test_broken_lines_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "p.jsonl", 60, ['{"turns": []}', "{oops"])
    with caplog.at_level(logging.WARNING, "hunch"):
        found = read_prompts(path)
    assert len(found.records) == 60
    assert [text.split(":")[0] for text in found.bad] == ["line 2", "line 3"]
    assert "2 broken lines" in caplog.text


def test_a_question_in_every_line_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("What is ice?\n\n  List three fruits.\n")
    asked = [{"turns": ["What is ice?"]}, {"turns": ["List three fruits."]}]
    assert read_prompts(path).records == asked
    assert options.read_prompts(path, 1) == [{"id": "1", **asked[0]}]
    path.write_text('{"prompt": "a"}\n')
    assert read_prompts(path).records == [{"prompt": "a"}]
    other = path.with_suffix(".md")
    other.write_text("What is ice?\n")
    with pytest.raises(RequestError, match=r"not JSON .*is called NAME\.txt"):
        read_prompts(other)


def test_too_many_broken_lines_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"3 of 13 lines are broken.*line 2"):
        read_prompts(lines(tmp_path / "p.jsonl", 10, ["{", "[]", "1"]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")


def plain_loss(z: torch.Tensor, p: torch.Tensor, kind: str, late: float = 1.0) -> torch.Tensor:
    log_q = z.log_softmax(-1)
    kl = (torch.xlogy(p, p) - p * log_q).sum(-1)
    tv = 0.5 * (log_q.exp() - p).abs().sum(-1)
    blend = (1 - 0.7 * late) * kl + 2 * late * tv
    l1 = 0.1 * kl + 0.9 * (log_q.exp() - p).abs().sum(-1)
    known = {"ce": -(p * log_q).sum(-1), "kl": kl, "tv": tv, "blend": blend, "l1": l1}
    return known[kind]


@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_slopes_are_the_derivatives(kind: str, late: float) -> None:
    torch.manual_seed(0)
    z = torch.randn(5, 11, requires_grad=True)
    p = torch.randn(5, 11).softmax(-1)
    wanted = plain_loss(z, p, kind, late)
    (gradient,) = torch.autograd.grad(wanted.sum(), z)
    loss, found = slope(z.detach(), p, kind, late)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(found, gradient)


def test_teaching_reaches_states_and_output_matrix() -> None:
    torch.manual_seed(0)
    h, w = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    p, weight = torch.randn(7, 9).softmax(-1), torch.rand(7)
    loss, best = teach(h, w, TopOpinions.of(p), weight, "ce")
    loss.backward()
    h2, w2 = h.detach().requires_grad_(), w.detach().requires_grad_()
    (plain_loss(h2 @ w2.T, p, "ce") * weight).sum().backward()
    torch.testing.assert_close(h.grad, h2.grad)
    torch.testing.assert_close(w.grad, w2.grad)
    assert best.tolist() == (h @ w.T).argmax(-1).tolist()


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 4, 9)])
def test_orthogonal_steps_move_every_direction_alike(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    sizes = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert sizes.min() > 0.3
    assert sizes.max() < 1.4


def move(optimiser: Optimiser, rate: float) -> None:
    """One step along the gradients, which are dropped."""
    optimiser.set_rates(rate)
    optimiser.move({name: tensor.grad for name, tensor in optimiser.tensors.items()})
    for tensor in optimiser.tensors.values():
        tensor.grad = None


def test_a_tall_matrix_moves_as_it_would_on_its_side() -> None:
    torch.manual_seed(4)
    start, slope = torch.randn(4, 9), torch.randn(4, 9)
    moved = []
    for tensors in ({"w": start}, {"w": start.mT.clone()}, {"w": start, "v": start.mT.clone()}):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        optimiser = Optimiser(leaves)
        for leaf in leaves.values():
            leaf.grad = (slope if leaf.shape == slope.shape else slope.mT).clone()
        move(optimiser, 1e-2)
        moved += [x.detach() if x.shape == start.shape else x.detach().mT for x in leaves.values()]
    assert not torch.equal(moved[0], start)
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0])


def test_the_optimiser_finds_a_matrix_and_its_norm() -> None:
    torch.manual_seed(2)
    wanted = torch.randn(6, 5)
    tensors = {"w": torch.zeros(6, 5, requires_grad=True), "n": torch.zeros(5, requires_grad=True)}
    optimiser = Optimiser(tensors)
    for step in range(300):
        loss = (tensors["w"] - wanted).square().sum() + (tensors["n"] - 2).square().sum()
        loss.backward()
        move(optimiser, 0.1 * (1 - step / 300))
    assert float(loss.detach()) < 0.05


def test_a_step_is_a_share_of_the_matrix_it_changes() -> None:
    torch.manual_seed(3)
    start = torch.randn(8, 8)
    shares = []
    for size in (0.19, 0.015):
        matrix = (size * start).requires_grad_()
        optimiser = Optimiser({"w": matrix})
        (matrix * start).sum().backward()
        move(optimiser, 1e-3)
        shares.append(float((matrix.detach() - size * start).norm() / (size * start).norm()))
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)


def test_a_padded_matrix_learns_like_the_one_it_was_made_from() -> None:
    torch.manual_seed(4)
    small = torch.randn(6, 8)
    padded = torch.zeros(12, 16)
    padded[:6, :8] = small
    scales = [Optimiser({"w": m.requires_grad_()}).scale["w"] for m in (small, padded)]
    assert scales[0] == pytest.approx(scales[1])


@pytest.mark.parametrize(
    ("layers", "width", "units", "tokens"),
    [(2, 1536, 2240, 4096), (2, 3584, 4736, 4096), (1, 576, 1536, 32768)],
)
def test_a_step_of_a_large_student_has_fewer_tokens(
    layers: int, width: int, units: int, tokens: int
) -> None:
    """Drafts of targets of about 2, 7 and a tenth of a billion parameters."""
    target: Any = SimpleNamespace(device=torch.device("cuda"), spec=SimpleNamespace(width=width))
    columns: Any = range(32768 if width > 576 else 16384)
    student = Student(target, columns)
    shapes = {"q": (width, width), "kv": (width // 3, width), "o": (width, width)}
    shapes |= {"gate": (units, width), "up": (units, width), "down": (width, units)}
    student.tensors = {
        f"{layer}.{name}": torch.empty(1).expand(shape)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    assert student.usual_batch == tokens


def test_int8_rows_come_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    matrix = torch.randn(8, 32) * torch.logspace(-3, 2, 8)[:, None]
    stored = pack({"a.weight": matrix, "b": torch.ones(3), "ids": torch.arange(3)}, "int8")
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = open_weights(tmp_path)
    assert sorted(weights.names()) == ["a.weight", "b", "ids"]
    error = (weights.tensor("a.weight") - matrix).abs().amax(1) / matrix.abs().amax(1)
    assert error.max() < 0.005


def test_answers_that_go_on_past_the_end(tmp_path: Path) -> None:
    target, prompts = write_target(tmp_path / "t"), write_prompts(tmp_path / "p.jsonl", 8)
    with LLM(str(target), speculate="off", **ENGINE) as llm:
        ids = read_prompts(prompts).encode(llm, 60)
        for name, ignore_eos in (("to the end", False), ("past it", True)):
            (tmp_path / name).mkdir()
            options = AnswerOptions(max_tokens=30, temperatures="1", ignore_eos=ignore_eos)
            regenerate(llm, ids, tmp_path / name, options, Progress(is_quiet=True))
    past = read_answers(tmp_path / "past it")
    assert (past.lengths - past.prompt_len).tolist() == [30] * len(ids)
    assert (read_answers(tmp_path / "to the end").lengths <= past.lengths).all()


def test_what_runs_past_its_time_is_told_seldom_and_never_above_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress().stage("regenerate", 10.0) as tell:
        for done in range(30):
            tell(float(done), f"{done} answers")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["regenerate 100%: 10 answers"]

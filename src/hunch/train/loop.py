"""Stage 2: teach a student until its time is up; killed at any moment, it can be continued."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hunch.errors import ConfigError, TrainingError
from hunch.models.decoder import Decoder
from hunch.train.clock import Rates, in_words
from hunch.train.files import write_whole
from hunch.train.kept import Kept, keep_for
from hunch.train.optimiser import Optimiser
from hunch.train.packed_step import PackedSteps
from hunch.train.packs import Laid, Pack
from hunch.train.progress import Progress
from hunch.train.replay import Curve, Replay
from hunch.train.states import States, opinions_of, read_pack
from hunch.train.student import StepInputs, Student
from hunch.train.texts import Texts

CONTEXT = 1280  # tokens of a prompt and its answer by default; prompts have up to 1,024
LAST = "last.pt"
CANDIDATE = "candidate-{}.pt"
_MARKS = (0.7, 0.85, 1.0)  # shares of the time after which a candidate is saved for selection
_WARM_UP = 0.02
_FIRST = 3  # first steps of a trial, which are not timed
_SIZED = (1, 3)  # steps after which a CPU chooses the size of the others
_ENOUGH, _LEAST_BATCH = 160, 256  # steps there should be; tokens that each has at the least
_SETTLE = 0.8  # share of the time that is gone when the curve is flat: the rate falls over the rest
MIN_STEPS = 40  # fewer teach a student nothing measurable
_PLAIN_SHARE = 0.28  # Adam's rate over Muon's
_LATE = (0.15, 0.65)  # shares of the time between which loss=blend goes from kl to tv


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOptions:
    """How long to train, and how fast."""

    minutes: float = 10.0
    steps: int | None = None  # instead of minutes: the same result on any machine
    lr: float | None = None  # None: the recipe's
    batch: int | None = None  # tokens of a step; None: by how much the student computes
    context: int = CONTEXT  # longest text it learns from
    greedy_share: float = 0.3  # of the loss that goes to the answer's own token
    whole: float = 0.0  # share of the texts whose prompts teach too
    save_every: float = 60.0  # seconds between checkpoints
    test_every: float | None = None  # seconds between looks at held-out answers; None: save_every
    stops_flat: bool = False  # end when held-out answers show no more progress
    depth: int = 5  # of the drafts whose accepted length is shown
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "batch", "context", "depth"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")
        for name in ("greedy_share", "whole"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be from 0 to 1")


@dataclass(slots=True)
class Place:
    """How far the loop is."""

    step: int = 0
    epoch: int = 0
    at: int = 0  # packs of this epoch that are done
    seconds: float = 0.0  # spent so far, over all starts
    num_candidates: int = 0
    num_tokens: int = 0  # learned from so far
    total: float = 0.0  # seconds it shall take in all; 0: those of its options
    batch: int = 0  # tokens of a step; 0: those of its options


class Loop:
    """Trains a student, and keeps it, its optimiser and the place in a checkpoint."""

    marks: tuple[float, ...] = _MARKS
    is_trial = False  # one of several, which share the target's passes: these are not its time
    waits = False  # for the device after each step, so that nothing is under way when it is stopped

    def __init__(
        self,
        student: Student,
        target: Decoder,
        folder: Path,
        options: LoopOptions,
        lr: float,
        *,
        remark: Callable[[Replay], str] | None = None,
    ) -> None:
        """`remark` adds to the progress line what else held-out answers show."""
        self.student, self.target, self.folder, self.options = student, target, folder, options
        self.lr = options.lr or lr * student.rate
        self.batch = options.batch or student.usual_batch
        self.optimiser = Optimiser(student.tensors, student.plain)
        self.place, self.curve, self.rates = Place(), Curve(), Rates()
        self.kept: Kept | None = None
        self._held: tuple[Texts, list[tuple[Pack, StepInputs]]] | None = None
        self.remark, self.flops = remark, 0.0
        if (folder / LAST).is_file():
            state = restore(student, folder / LAST)
            self.optimiser.load(state["optimiser"])
            self.place = Place(**state["place"])
        self.batch = self.place.batch or self.batch
        # Speeds count what this process adds.
        self._began, self._num_before = self.place.seconds, self.place.num_tokens

    def _save(self, name: str) -> None:
        began = perf_counter()
        state: dict[str, Any] = {"tensors": self.student.values(), "place": asdict(self.place)}
        if name == LAST:
            state["optimiser"] = self.optimiser.state()
        write_whole(self.folder / name, lambda part: torch.save(state, part))
        self.rates.saving += perf_counter() - began

    @property
    def share(self) -> float:
        """The share of the whole time that is gone."""
        options = self.options
        if options.steps is not None:
            return min(self.place.step / max(options.steps, 1), 1.0)
        return min(self.place.seconds / (self.place.total or 60 * options.minutes), 1.0)

    def rate(self) -> float:
        """The learning rate now: a warm-up, then half a cosine down to 0."""
        warm = min(self.share / _WARM_UP + 0.01, 1.0)
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * self.share))

    def run(self, texts: Texts, held_out: Texts, show: Progress) -> None:
        """Train until the share is 1. A loss that is no number ends it at the last checkpoint."""
        if self.kept is None or not self.kept.is_whole:
            self.kept = self._new_kept(texts)
        self.is_trial &= self.kept.is_whole  # else the target reads each pack anew
        share = self.options.greedy_share
        steps = PackedSteps(self.student, self.optimiser, self.kept, self.batch, share)
        before = saved = tested = perf_counter()
        read = 0.0
        every = self.options.test_every or self.options.save_every
        words = ""
        with show.stage("train", 1.0) as bar:
            for pack in self._packs(steps):
                loss = self._learn(pack, steps)
                now = self._now() if self.waits else perf_counter()
                self.place.seconds += now - before
                if self.is_trial:  # nor is compiling in the first steps
                    is_first = self.place.step < _FIRST
                    self.place.seconds -= now - before if is_first else self.rates.seconds - read
                    read = self.rates.seconds
                before = now
                self.place.step += 1
                self.place.at += 1
                self.place.num_tokens += pack.num_tokens
                self._put_aside(loss)
                if self.place.step in _SIZED and self.target.device.type == "cpu":
                    self._fit(steps)
                if now - saved > self.options.save_every:
                    self._check(loss)
                    self._save(LAST)
                    saved = now
                if now - tested > every:
                    words = self._look(held_out)
                    tested = before = perf_counter()
                    self.place.seconds += tested - now
                    self.rates.looking += tested - now
                if self.place.step % 10 == 0 or tested > now:
                    self._check_loss(loss)
                    bar(self.share, f"{words}loss {float(loss):.3f}, {self.rate_text(show.peak)}")
        self._save(LAST)
        self._check_length()
        # Started again with no time left, it made no step after which it could have saved one.
        self._put_aside(torch.zeros(()))

    def _fit(self, steps: PackedSteps) -> None:
        """Take smaller steps if the first ones show that there would be few."""
        options, expected = self.options, self.place.step / max(self.share, 1e-9)
        if options.steps is None and options.batch is None and expected < _ENOUGH:
            batch = max(int(self.batch * expected / _ENOUGH), _LEAST_BATCH)
            self.place.batch = self.batch = min(self.batch, batch)
            steps.fit(self.batch)

    def _look(self, held_out: Texts) -> str:
        """See how good the student is; end the time if it no longer improves."""
        replay, place = self.test(held_out), self.place
        self.curve.add(place.seconds, replay.tokens_per_pass)
        is_early = self.options.steps is None and not place.total
        if self.options.stops_flat and is_early and self.curve.is_flat:
            place.total = min(place.seconds / _SETTLE, 60 * self.options.minutes)
        more = "" if self.remark is None else f"{self.remark(replay)}, "
        return f"{replay.tokens_per_pass:.2f} tokens per pass, {more}"

    def rate_text(self, peak: float | None = None) -> str:
        """Tokens per second of the student's steps and of the target's passes before them, and how
        much of the device's peak the student's products reach."""
        student, used = self._speed(peak)
        share = "" if used is None else f", {used:.0%} of the device's peak"
        return f"{student:,.0f} tok/s{share} (target {self.rates.per_second:,.0f})"

    def _speed(self, peak: float | None) -> tuple[float, float | None]:
        """Tokens per second of the student's steps, and the share of the peak, if that is known."""
        others = self._began + self.rates.looking
        others += 0.0 if self.is_trial else self.rates.reading
        seconds = max(self.place.seconds - others, 1e-9)
        used = None if peak is None else self.flops / seconds / peak
        return (self.place.num_tokens - self._num_before) / seconds, used

    def to_json(self, peak: float | None = None) -> dict[str, Any]:
        """What the time was spent on, to compare jobs."""
        student, used = self._speed(peak)
        return {
            "steps": self.place.step,
            "tokens_a_step": self.batch,
            "tokens_per_second": round(student),
            "share_of_peak": None if used is None else round(used, 3),
            "read_per_second": round(self.rates.per_second),
            "curve": [[round(at, 1), round(value, 3)] for at, value in self.curve.points],
        }

    def _check_length(self) -> None:
        """Raise if there were too few steps for the student to be a drafter."""
        options, step = self.options, self.place.step
        if options.steps is not None or step >= MIN_STEPS:
            return
        once = min(self.rates.reading + self.rates.looking, self.place.seconds)
        each = (self.place.seconds - once) / max(step, 1)
        needed = math.ceil(5 * (once + MIN_STEPS * each) / 60)
        raise TrainingError(
            f"only {step} of {MIN_STEPS} steps in {in_words(options.minutes)}: nothing was learnt, "
            f"and no drafter was written. On this machine give --minutes {max(needed, 5)} or more; "
            "what is there goes on from here"
        )

    def _learn(self, pack: Pack, steps: PackedSteps) -> torch.Tensor:
        rate = self.rate()
        self._read(pack)
        self.flops += self.student.flops(pack.shape)
        self.optimiser.set_rates(rate, rate * _PLAIN_SHARE)
        return steps.learn(pack, self.late)

    @property
    def _is_timed(self) -> bool:
        """Whether the target's passes are timed: on a GPU the host must wait for them. The first
        one is not, as it also chooses kernels."""
        if self.target.device.type != "cuda" or self.is_trial:
            return True
        return self.rates.num_read > 0 and not self.rates.is_known

    def _now(self) -> float:
        """The time, once the device is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return perf_counter()

    @property
    def late(self) -> float:
        """How far a loss that changes has changed, from 0 to 1."""
        return min(max((self.share - _LATE[0]) / (_LATE[1] - _LATE[0]), 0.0), 1.0)

    def _read(self, pack: Pack) -> None:
        """Let the target read texts that it has not read yet."""
        assert self.kept is not None
        if self.kept.has(pack):
            return
        is_timed, student = self._is_timed, self.student
        began = self._now() if is_timed else 0.0
        inputs = pack.inputs(self.target.device)
        states = read_pack(self.target, inputs, student.feature_layers)
        p_MC = opinions_of(self.target, student.columns, inputs, states)
        self.kept.add(pack, inputs, states, p_MC)
        self.rates.target(pack.num_tokens, self._now() - began if is_timed else None)

    def _laid(self, texts: Texts) -> Laid:
        """The texts, laid out to teach; raises if none does."""
        options, student = self.options, self.student
        column_V, whole, seed = student.columns.column_V, options.whole, options.seed
        laid = Laid(texts, column_V, options.context, whole=whole, seed=seed)
        if not laid.num_taught.any() or (student.anchors and not laid.num_anchors.any()):
            raise TrainingError(
                f"{len(texts)} texts, and no answer in them to learn from: answers are empty, or "
                f"begin after the first {options.context} tokens (context=)"
            )
        return laid

    def _new_kept(self, texts: Texts) -> Kept:
        """Room for the target's outputs on the texts."""
        laid = self._laid(texts)
        room = laid.shape(self.batch, self.student.anchors).num_tokens
        return keep_for(self.student, laid, room=room, folder=self.folder / "states")

    def _check(self, loss: torch.Tensor) -> None:
        """Raise for options that do not fit, before anything is written."""
        tensors = [tensor.detach() for tensor in self.student.tensors.values()]
        norms = torch.stack(torch._foreach_norm(tensors))
        self._check_loss(torch.where(torch.isfinite(norms).all(), loss.to(norms), math.nan))

    def _check_loss(self, loss: torch.Tensor) -> None:
        if not math.isfinite(float(loss)):
            raise TrainingError(
                f"the loss is no number any more at step {self.place.step}; the same command with "
                f"lr={self.lr / 3:.1e} goes on from the last good checkpoint at a lower rate"
            )

    def _put_aside(self, loss: torch.Tensor) -> None:
        """Save candidates for the selection, which goes by the engine and not by the loss."""
        while self.place.num_candidates < len(self.marks):
            if self.share < self.marks[self.place.num_candidates]:
                return
            self._check(loss)
            self.place.num_candidates += 1
            self._save(CANDIDATE.format(self.place.num_candidates - 1))

    def _packs(self, steps: PackedSteps) -> Iterator[Pack]:
        while self.share < 1:
            done, batch = self.place.at, self.batch
            for number, pack in enumerate(steps.packs(self.options.seed, self.place.epoch)):
                if number < done:
                    continue
                if self.share >= 1:
                    return
                yield pack
                if self.batch != batch:
                    break  # the others are laid out anew
            self.place.epoch, self.place.at = self.place.epoch + 1, 0

    @torch.no_grad()
    def test(self, texts: Texts) -> Replay:
        """Measure accepted length on held-out answers, without an engine."""
        if self._held is None or self._held[0] is not texts:
            self._held = texts, list(self._held_out(texts))
        replay = Replay()
        for pack, given in self._held[1]:
            replay.add(pack, self.student.loss_on(given).agreed, self.options.depth)
        return replay

    def _held_out(self, texts: Texts) -> Iterator[tuple[Pack, StepInputs]]:
        """The held-out answers, laid out so that positions whose token has no column count too."""
        student, column_V = self.student, self.student.columns.column_V
        laid = Laid(texts, column_V, self.options.context, is_complete=True)
        shape = laid.shape(self.batch, self.options.context if student.anchors else 0)
        for pack in laid.packs(shape, 0, 0):
            inputs, states = pack.inputs(self.target.device), States(torch.empty(0), ())
            if student.needs_hidden or student.feature_layers:
                states = read_pack(self.target, inputs, student.feature_layers)
            yield pack, StepInputs(inputs, states, None)


def restore(student: Student, path: Path) -> dict[str, Any]:
    """Give the student the tensors of a checkpoint; returns what else it holds."""
    state: dict[str, Any] = torch.load(path, map_location=student.target.device, weights_only=True)
    with torch.no_grad():
        for name, tensor in student.tensors.items():
            tensor.copy_(state["tensors"][name])
    return state

"""Synthetic drafts: a chosen number of tokens per pass, for benchmarks of the engine alone.

How fast is the engine with a drafter that gets 3.5 tokens per pass? That can be measured without
such a drafter: when a request runs a second time, its first answer is the draft, with mistakes put
in so that the chosen number is accepted on average. The first time it is decoded plainly. Every
token is the target's own, as with any drafter. The figures say nothing about any real drafter:
stats, logs and reports call them synthetic.

Guesses are right with the same chance each, as long as those before them are: the chance p for
which p + p^2 + ... + p^num_nodes = tokens_per_pass - 1.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil

import numpy as np

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext, Options
from hunch.errors import ConfigError
from hunch.kernels.draft import STRIDE, Remembered
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden
from hunch.types import Request

log = logging.getLogger("hunch")

MAX_TOKENS = 20_000_000  # remembered in all; the answers used longest ago are dropped first
NUM_RUNS = 4096  # lengths of right guesses, used in turn; their mean is the chosen one
MAX_ROW = 16384  # tokens of an answer that captured steps draft from


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """Options of `synthetic`."""

    tokens_per_pass: float = 3.0  # accepted guesses and the target's own token, on average
    num_nodes: int | None = None  # guesses per draft; None: twice those to be accepted

    def __post_init__(self) -> None:
        if not 1 < self.tokens_per_pass <= 65:
            raise ConfigError(
                f"synthetic: tokens_per_pass={self.tokens_per_pass} must be above 1, at most 65"
            )
        if self.size < self.tokens_per_pass - 1:
            raise ConfigError(
                f"synthetic: num_nodes={self.num_nodes} guesses cannot bring "
                f"{self.tokens_per_pass} tokens per pass; give {ceil(self.tokens_per_pass - 1)} "
                "or more"
            )

    @property
    def size(self) -> int:
        return ceil(2 * (self.tokens_per_pass - 1)) if self.num_nodes is None else self.num_nodes


def chance_for(num_right: float, num_nodes: int) -> float:
    """The chance of a guess with which this many of a chain are right on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**n for n in range(1, num_nodes + 1)) < num_right:
            low = middle
        else:
            high = middle
    return high


def right_runs(num_right: float, num_nodes: int) -> list[int]:
    """How many guesses of each draft are right, for NUM_RUNS drafts with the right shares."""
    chance = chance_for(num_right, num_nodes)
    share_U = (np.arange(NUM_RUNS) + 0.5) / NUM_RUNS
    reached_N = chance ** np.arange(1, num_nodes + 1)  # chance that the first n are right
    run_U = (share_U[:, None] < reached_N[None, :]).sum(1)
    runs: list[int] = np.random.default_rng(0).permutation(run_U).tolist()
    return runs


def key_of(request: Request) -> Hashable:
    """What decides a request's text, except rules: a difference by those shows in the answer."""
    is_sampled = request.params.temperature > 0
    return tuple(request.prompt_ids), is_sampled and (request.seed, request.sample_index)


@dataclass(slots=True)
class Followed:
    """One row: how much of its answer was seen, and the remembered one while both agree."""

    request: Request
    key: Hashable
    num_prompt: int
    num_seen: int = 0
    remembered: list[int] | None = None

    @property
    def turn(self) -> int:
        """Where among the runs its drafts begin."""
        return hash(self.key) % NUM_RUNS


class SyntheticDrafter:
    """A chain per row, from the earlier answer to the same request."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        if path is not None:
            raise ConfigError(f"synthetic reads no files; {path!r} given")
        self.config = read_options(SyntheticConfig, options, "synthetic")
        self.context, size = context, self.config.size
        self.runs = right_runs(self.config.tokens_per_pass - 1, size)
        self.vocab_size = context.vocab_size
        self.needs = Needs(max_nodes=size)
        self._rows: dict[int, Followed] = {}
        self._tokens: Rows | None = None  # of all rows, as they are now
        self._answers: dict[Hashable, list[int]] = {}  # the last one was used last
        self._num_tokens = 0
        self._has_told = False
        self._device: Remembered | None = None  # the same for captured steps

    def on_device(self) -> DeviceDrafter | None:
        """Drafts within captured steps; the host gives them the answers, and remembers new ones."""
        context, size = self.context, self.config.size
        if not context.is_fused:
            return None
        room = min(context.max_len, MAX_ROW)
        answers = Remembered.create(context.max_rows, room, self.runs, context.device)
        self._device = answers
        return DeviceSynthetic(
            name="synthetic",
            num_nodes=size,
            is_adaptive=False,
            answers=answers,
            vocab_size=self.vocab_size,
        )

    def observe(self, step: TargetStep) -> None:
        rows = self._tokens = step.rows
        known_X, prompt_X = rows.known_X.tolist(), rows.prompt_X.tolist()
        for row in rows.ids_R.tolist():
            request = rows.request(row)
            state = self._rows.get(row)
            if state is None:
                if request is None:
                    continue
                state = self._rows[row] = self._start(row, request, prompt_X[row])
            have, num_seen = state.num_prompt + state.num_seen, known_X[row] - state.num_prompt
            if state.remembered is not None:
                new_tokens = rows.tokens_XL[row, have : known_X[row]].tolist()
                if state.remembered[state.num_seen : num_seen] != new_tokens:
                    state.remembered = None  # other rules, or longer than before
            state.num_seen = num_seen

    def _start(self, row: int, request: Request, num_prompt: int) -> Followed:
        key = key_of(request)
        remembered = self._answers.pop(key, None)
        if remembered is not None:
            self._answers[key] = remembered
        elif not self._has_told:
            self._has_told = True
            log.warning(
                "synthetic: a request that comes for the first time is decoded plainly and its "
                "answer remembered; run the same requests again to measure"
            )
        state = Followed(request, key, num_prompt, remembered=remembered)
        if self._device is not None:
            self._device.put(row, remembered or [], num_prompt, state.turn)
        return state

    def propose(self, rows: Rows) -> Draft:
        known_X, max_draft_X = rows.known_X.tolist(), rows.max_draft_X.tolist()
        chains: list[list[int]] = []
        for row in rows.ids_R.tolist():
            state = self._rows.get(row)
            limit = min(self.needs.max_nodes, max_draft_X[row])
            chains.append([] if state is None else self._chain(state, known_X[row], limit))
        return Draft.chains(chains)

    def _chain(self, state: Followed, known: int, limit: int) -> list[int]:
        if state.remembered is None:
            return []
        at = state.num_seen
        right = state.remembered[at : at + limit]
        run = self.runs[(known * STRIDE + state.turn) % NUM_RUNS]
        wrong = [(token + 1) % self.vocab_size for token in right[run:]]
        return right[:run] + wrong

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            state, now = self._rows.get(row), self._tokens
            if state is None or now is None:
                continue
            if now.requests and now.requests[row] is state.request:
                continue  # captured steps take the row over: its answer goes on
            del self._rows[row]
            answer: list[int] = now.tokens_XL[row, state.num_prompt : now.known_X[row]].tolist()
            self._remember(state.key, answer)

    def _remember(self, key: Hashable, answer: list[int]) -> None:
        before = self._answers.pop(key, [])
        is_same = before[: len(answer)] == answer
        kept = before if is_same else answer  # a part is not kept in place of all
        self._answers[key] = kept
        self._num_tokens += len(kept) - len(before)
        while self._num_tokens > MAX_TOKENS and len(self._answers) > 1:
            oldest = next(iter(self._answers))
            self._num_tokens -= len(self._answers.pop(oldest))


@dataclass(kw_only=True)
class DeviceSynthetic(DeviceDrafter):
    """The same chains, drafted within the step; every step checks the whole draft."""

    answers: Remembered
    vocab_size: int

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_synthetic import remembered

        remembered(state, step, self.num_nodes, self.answers, self.vocab_size)

    @property
    def host_observes(self) -> bool:
        """It sees requests begin and end."""
        return True

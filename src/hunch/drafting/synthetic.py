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
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DrafterContext
from hunch.errors import ConfigError
from hunch.types import Request

log = logging.getLogger("hunch")

MAX_TOKENS = 20_000_000  # remembered in all; the answers used longest ago are dropped first
NUM_RUNS = 4096  # lengths of right guesses, used in turn; their mean is the chosen one
STRIDE = 2654435761  # of positions, to spread them over these


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
    """One row: its answer so far, and the remembered answer while both agree."""

    key: Hashable
    num_prompt: int
    answer: list[int] = field(default_factory=list)
    remembered: list[int] | None = None


class SyntheticDrafter:
    """A chain per row, from the earlier answer to the same request."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        if path is not None:
            raise ConfigError(f"synthetic reads no files; {path!r} given")
        self.config = read_options(SyntheticConfig, options, "synthetic")
        size = self.config.size
        self.runs = right_runs(self.config.tokens_per_pass - 1, size)
        self.vocab_size = context.vocab_size
        self.needs = Needs(max_nodes=size)
        self._rows: dict[int, Followed] = {}
        self._answers: dict[Hashable, list[int]] = {}  # the last one was used last
        self._num_tokens = 0
        self._has_told = False

    def observe(self, step: TargetStep) -> None:
        rows = step.rows
        known_X, prompt_X = rows.known_X.tolist(), rows.prompt_X.tolist()
        for row in rows.ids_R.tolist():
            request = rows.requests[row] if rows.requests else None
            state = self._rows.get(row)
            if state is None:
                if request is None:
                    continue
                state = self._rows[row] = self._start(request, prompt_X[row])
            have = state.num_prompt + len(state.answer)
            new_tokens = rows.tokens_XL[row, have : known_X[row]].tolist()
            if state.remembered is not None:
                at = len(state.answer)
                if state.remembered[at : at + len(new_tokens)] != new_tokens:
                    state.remembered = None  # other rules, or longer than before
            state.answer += new_tokens

    def _start(self, request: Request, num_prompt: int) -> Followed:
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
        return Followed(key, num_prompt, remembered=remembered)

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
        at = len(state.answer)
        right = state.remembered[at : at + limit]
        run = self.runs[(known * STRIDE + hash(state.key)) % NUM_RUNS]
        wrong = [(token + 1) % self.vocab_size for token in right[run:]]
        return right[:run] + wrong

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            state = self._rows.pop(row, None)
            if state is not None:
                self._remember(state)

    def _remember(self, state: Followed) -> None:
        before = self._answers.pop(state.key, [])
        is_same = before[: len(state.answer)] == state.answer
        kept = before if is_same else state.answer  # a part is not kept in place of all
        self._answers[state.key] = kept
        self._num_tokens += len(kept) - len(before)
        while self._num_tokens > MAX_TOKENS and len(self._answers) > 1:
            oldest = next(iter(self._answers))
            self._num_tokens -= len(self._answers.pop(oldest))

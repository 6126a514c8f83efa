"""One rank's part of a model, and what every rank does with its own.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, C tokens, K tensors that
travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.config import ModelConfig
from hunch.draft import KVShape
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.models.load import spec_of
from hunch.models.load_target import load_target
from hunch.models.spec import ModelSpec
from hunch.models.stage import Stage
from hunch.models.target import Hidden, SaysExchanges, Target
from hunch.models.weights import open_weights, with_overrides
from hunch.parallel.group import Exchange, Group, Line, span
from hunch.parallel.link import Link
from hunch.parallel.whole import NoMemory, Withdrawals, run_whole, withdrawals_of
from hunch.step.kv_cache import allocate, allocate_states


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank holds what: stages of layers, each split over `num_ranks`.

    Rank 0, which chooses tokens, is in the last stage, so that logits need not be sent.
    """

    num_ranks: int
    num_stages: int = 1

    @property
    def size(self) -> int:
        return self.num_ranks * self.num_stages

    def stage_of(self, rank: int) -> Stage:
        return Stage((rank // self.num_ranks - 1) % self.num_stages, self.num_stages)

    def first_rank(self, stage: int) -> int:
        """The first rank of a stage; rank 0 is in the last stage."""
        return (stage + 1) % self.num_stages * self.num_ranks


@dataclass(slots=True)
class Part:
    """One rank's part of a model."""

    model: Target
    spec: ModelSpec  # of the whole model
    group: Group  # the ranks that split this part's stage
    stage: Stage
    line: Line | None  # to the ranks with the same part of other stages; None: there is one stage
    before: int = 0  # the rank of the stage before
    after: int = 0

    @staticmethod
    def load(link: Link, path: Path, config: ModelConfig, layout: Layout) -> Part:
        """Load this rank's part; nothing else of the model's files is read."""
        stage = layout.stage_of(link.rank)
        group = link.group(layout.num_ranks, layout.first_rank(stage.index))
        line = link.line(layout.size) if layout.num_stages > 1 else None
        weights = with_overrides(open_weights(path), config.hf_overrides)
        model = load_target(config, weights, link.device, group, stage)
        before, after = (layout.first_rank(stage.index + step) + group.rank for step in (-1, 1))
        spec = spec_of(weights)
        return Part(model, spec, group, stage, line, before, after)

    def new_kv(
        self, num_slots: int, device: torch.device, num_rows: int = 0, num_places: int = 0
    ) -> KVCache:
        """A new KV cache, with as many rows of recurrent states as rank 0's, and rings as long."""
        is_shared = self.spec.latent is not None
        shape = KVShape.of(self.model.kv_shapes(), self.model.kv_dtype, is_shared)
        kv = allocate(shape, num_slots, 1, device)
        if num_rows and self.spec.recurrence is not None:
            states = self.model.states_of(num_rows, num_places - self.spec.recurrence.num_taps)
            kv.states = allocate_states(states, self.model.dtype, device)
        return kv

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """Run this part's share of a pass. Only the last stage's states are the pass's result."""
        return self.run(len(ids_T), feature_layers, lambda: (ids_T, attn, kv))

    def run(
        self,
        num_tokens: int,
        feature_layers: tuple[int, ...],
        inputs: Callable[[], tuple[Tensor, AttnInputs, KVCache]],
    ) -> Hidden:
        """`forward`, with inputs that take memory too. If memory is short, others do not wait."""
        withdrawals = partial(self.withdrawals, num_tokens)
        if self.line is None:

            def whole_pass() -> Hidden:
                return self.model.forward(*inputs(), feature_layers)

            return run_whole(self.group, whole_pass, withdrawals)
        layers, wanted = self.stage.layers(self.spec), sorted({*feature_layers})
        got_KTD: Tensor | None = None
        if not self.stage.is_first:
            num_earlier = sum(layer <= layers.start for layer in wanted)
            size = (1 + num_earlier, num_tokens, self.spec.width)
            got_KTD = self.line.receive(size, self.model.dtype, self.before)
        stage = partial(self._run_stage, got_KTD, inputs, feature_layers)
        if self.stage.is_last:
            return run_whole(self.group, stage, withdrawals)

        def stage_and_stack() -> tuple[Hidden, Tensor]:
            hidden = stage()
            return hidden, torch.stack([hidden.last_TD, *hidden.features])

        try:
            hidden, sent_KTD = run_whole(self.group, stage_and_stack, withdrawals)
        except NoMemory:
            num_sent = 1 + sum(layer <= layers.stop for layer in wanted)
            size, like = (num_sent, num_tokens, self.spec.width), self.model
            sent_KTD = torch.full(size, torch.nan, dtype=like.dtype, device=like.device)
            self.line.send(sent_KTD, self.after)
            raise
        self.line.send(sent_KTD, self.after)
        return hidden

    def _run_stage(
        self,
        got_KTD: Tensor | None,
        inputs: Callable[[], tuple[Tensor, AttnInputs, KVCache]],
        feature_layers: tuple[int, ...],
    ) -> Hidden:
        """Run a stage's layers. States that features need are sent on to the last stage."""
        layers, wanted = self.stage.layers(self.spec), sorted({*feature_layers})
        ids_T, attn, kv = inputs()
        found: dict[int, Tensor] = {}
        if got_KTD is None:
            own = [layer for layer in wanted if layer <= layers.stop]
            hidden = self.model.forward(ids_T, attn, kv, tuple(own))
        else:
            earlier = [layer for layer in wanted if layer <= layers.start]
            own = [layer for layer in wanted if layers.start < layer <= layers.stop]
            found = dict(zip(earlier, got_KTD[1:], strict=True))
            numbers = tuple(layer - layers.start for layer in own)
            hidden = self.model.forward_stream(got_KTD[0], attn, kv, numbers)
        found |= dict(zip(own, hidden.features, strict=True))
        order = feature_layers if self.stage.is_last else sorted(found)
        return Hidden(hidden.last_TD, tuple(found[layer] for layer in order))

    def withdrawals(self, num_tokens: int) -> Withdrawals:
        """Withdrawals from all exchanges of a pass over so many tokens."""
        model = self.model
        assert isinstance(model, SaysExchanges)
        return withdrawals_of(self.group, model.exchanges(num_tokens))

    def probe(self, count: int) -> None:
        """Add up a row of states over the ranks, as each layer does twice."""
        row_D = torch.zeros(self.spec.width, device=self.model.device)
        for _ in range(count):
            row_D = self.group.all_reduce(row_D)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Scores after the states that rank 0 has; only rank 0 gets all of them."""
        return self._logits(len(hidden_MD), lambda: hidden_MD)

    def follow_logits(self, num_rows: int) -> Tensor:
        """`logits` on other ranks, after so many states."""
        size, like = (num_rows, self.spec.width), self.model
        return self._logits(
            num_rows, lambda: torch.empty(size, dtype=like.dtype, device=like.device)
        )

    def _logits(self, num_rows: int, states: Callable[[], Tensor]) -> Tensor:
        model = self.model

        def scores() -> Tensor:
            return model.logits(self.group.broadcast(states()))

        def withdrawals() -> Withdrawals:
            assert isinstance(model, SaysExchanges)
            shared = Exchange(num_rows * self.spec.width, model.dtype, is_broadcast=True)
            return withdrawals_of(self.group, [shared, model.logit_exchange(num_rows)])

        return run_whole(self.group, scores, withdrawals)

    def output_rows(self, ids_C: Tensor) -> Tensor:
        """Rows of the output matrix, each from the rank that has it."""
        group = self.group
        first, last = span(self.spec.vocab_size, group)
        is_here_C = (ids_C >= first) & (ids_C < last)
        rows_CD = self.model.output_rows(torch.where(is_here_C, ids_C - first, 0))
        return group.all_reduce(torch.where(is_here_C.to(rows_CD.device)[:, None], rows_CD, 0))


def dump_model(config: ModelConfig) -> dict[str, Any]:
    return asdict(config)

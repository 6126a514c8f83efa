"""A target that several ranks compute together, as rank 0 sees it: a target like any other.

Rank 0 alone plans, drafts, samples and decides. What it decides reaches the other ranks as the
inputs of the next pass, so ranks never have to agree on anything.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary, C tokens,
P slots that move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import accumulate
from math import isnan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hunch.config import Config, ModelConfig
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Weight
from hunch.models.spec import ModelSpec
from hunch.models.stage import stage_spec
from hunch.models.target import BegunPass, Hidden
from hunch.parallel.caches import Cache, states_size
from hunch.parallel.executor import (
    Ranks,
    follow_torchrun,
    model_of_rank,
    start_ranks,
    threads_of_rank,
)
from hunch.parallel.group import spans
from hunch.parallel.orders import Op, Pass, order
from hunch.parallel.part import Layout
from hunch.parallel.split_backend import SplitBackend
from hunch.parallel.whole import NoMemory

if TYPE_CHECKING:
    from hunch.parallel.step_lead import LedPasses, StepLead  # these need Triton
    from hunch.parallel.step_parts import StepSize

OUTPUT_ROWS = 8192  # rows of the output matrix that are sent at once
PROBES = 5  # sums over ranks of which a time is measured


class SplitTarget:
    """A target over ranks."""

    def __init__(
        self,
        ranks: Ranks,
        path: Path,
        config: ModelConfig,
        num_ranks: int,
        num_stages: int = 1,
        *,
        is_draft: bool = False,  # drafts beside a target on the same ranks
    ) -> None:
        self.ranks, self.is_draft = ranks, is_draft
        self.config = model_of_rank(config, ranks.size)
        self.layout = Layout(num_ranks, num_stages)
        self._number, self._part = ranks.load(path, self.config, self.layout)
        ranks.link.is_ahead |= num_stages > 1
        model = self._part.model
        self.spec: ModelSpec = self._part.spec
        self.device, self.dtype, self.kv_dtype = model.device, model.dtype, model.kv_dtype
        self.weight_bytes, self.is_quantised = model.weight_bytes, model.is_quantised
        self.kv_shapes, self.new_kv, self.embed = model.kv_shapes, model.new_kv, model.embed
        self.states_of = model.states_of
        self.activation_bits = model.activation_bits
        self.backend = SplitBackend(model.backend, self.layout)
        self.backend.captures_steps = self._can_capture()
        ranks.link.is_ahead |= self.backend.captures_steps
        self._caches: dict[int, Cache] = {}  # by the id of the keys' tensor
        self._freed: list[int] = []
        self._head_sizes = spans(self.spec.vocab_size, num_ranks)
        # Passes for which ranks may have had no memory, and a number of each result.
        self._unchecked: list[BegunPass] = []
        self._numbers: list[Tensor] = []
        self._output_VD: Tensor | None = None  # of all ranks, once a drafter asked for it

    def _can_capture(self) -> bool:
        """Whether passes need nothing of the host, so that captured steps can contain them."""
        if self.layout.num_stages > 1 or self.spec.recurrence is not None or self.is_draft:
            return False
        return self._part.model.backend.captures_steps and self._part.group.is_captured

    def step_lead(self, kv: KVCache) -> StepLead:
        """The target that rank 0's captured steps are given."""
        from hunch.parallel.step_lead import StepLead  # needs Triton

        return StepLead(self, self._part, kv)

    def new_passes(
        self,
        kv: KVCache,
        layers: tuple[int, ...],
        size_XB: tuple[int, int],
        block_size: int,
        pool: Any,
    ) -> LedPasses | None:
        """Captured passes of all ranks; None: ranks would choose different paddings."""
        from hunch.parallel.step_lead import LedPasses  # these need Triton
        from hunch.parallel.step_parts import passes_of

        spec, count = self.spec, self.layout.num_ranks
        sharing = max(count // spec.num_kv_heads, 1)
        is_even = spec.num_heads // spec.num_kv_heads % sharing == 0
        if spec.other_heads is not None or spec.latent is not None or not is_even:
            return None
        sizes = self._cache(kv).number, kv.k_LCMH.shape[1], *size_XB, block_size
        with self.ranks.in_step():
            self.ranks.send(order(Op.PASSES, self._number, *sizes))
        own = passes_of(self._part, kv, *size_XB, block_size, layers, pool)
        return LedPasses(self, self._part, own)

    def tell_prepare(self, kv: KVCache, size: int, depth: int) -> None:
        """Let the other ranks capture a pass of this size."""
        with self.ranks.in_step():
            self.ranks.send(order(Op.PREPARE, self._number, self._cache(kv).number, size, depth))

    def tell_step(self, asked: Callable[..., StepSize], kv: KVCache, is_new: bool) -> None:
        """Let the other ranks launch their part of a captured step, or capture it."""
        cache = self._cache(kv)
        with self.ranks.in_step():
            self._free()
            moves_2M = cache.take_moves()
            if moves_2M.shape[1]:
                numbers = order(Op.MOVES, cache.number)
                self.ranks.send(np.concatenate([numbers, moves_2M.numpy().reshape(-1)]))
            size = asked(model=self._number, kv=cache.number, num_slots=kv.k_LCMH.shape[1])
            self.ranks.send(order(Op.STEP, *size, int(is_new)))

    @property
    def tables(self) -> tuple[Tensor, Weight] | None:
        """Embedding and output matrix, both whole: drafters on rank 0 share them."""
        own = self._part.model.tables
        if self.layout.num_ranks == 1 or own is None:
            return own
        if self._output_VD is None:
            self._output_VD = own[0] if self.spec.is_tied else self._joined_output()
        return own[0], self._output_VD

    @property
    def embedding_VD(self) -> Tensor:
        return self._part.model.embedding_VD  # type: ignore[attr-defined, no-any-return]

    def _joined_output(self) -> Tensor:
        """The output matrix with the parts of all ranks, in the precision of states."""
        size = self.spec.vocab_size
        ids = [
            torch.arange(first, min(first + OUTPUT_ROWS, size))
            for first in range(0, size, OUTPUT_ROWS)
        ]
        return torch.cat([self.output_rows(ids_C).to(self.dtype) for ids_C in ids])

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """One pass of all ranks: each writes the KV of its layers and heads."""
        return self.finish(self.begin(ids_T, attn, kv, feature_layers))

    @property
    def max_under_way(self) -> int:
        """Passes that may be under way at once; they must be of different rows."""
        return self.layout.num_stages

    @property
    def most_kv_layers(self) -> int:
        """Layers whose KV one stage keeps, at most."""
        stages = [self.layout.stage_of(rank) for rank in range(self.layout.size)]
        parts = [stage_spec(self.spec, stage).kv_shapes(1) for stage in stages]
        return max(num_layers for (num_layers, *_), *_ in parts)

    def begin(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> BegunPass:
        """Let the other ranks begin a pass; `finish` finishes passes in the same order."""
        cache = self._cache(kv)
        with self.ranks.in_step():
            self._free()
            asked = Pass(
                model=self._number,
                kv=cache.number,
                num_slots=kv.k_LCMH.shape[1],
                rows=states_size(kv),
                ids_T=ids_T,
                attn=attn,
                feature_layers=feature_layers,
                moves_2M=cache.take_moves(),
            )
            self.ranks.send(asked.pack())
        return BegunPass(ids_T, attn, kv, feature_layers)

    def finish(self, begun: BegunPass) -> Hidden:
        """The states after a pass, the same on all ranks of the last stage."""
        with self.checked(begun):
            if self.layout.num_stages > 1 and self.layout.num_ranks > 1:
                self.ranks.send(order(Op.FINISH, self._number))
            hidden = self._part.forward(begun.ids_T, begun.attn, begun.kv, begun.feature_layers)
            self.note(hidden)
        return hidden

    @contextmanager
    def checked(self, begun: BegunPass) -> Iterator[None]:
        """A pass of all ranks; if this one is short of memory, it is undone."""
        self._unchecked.append(begun)
        try:
            with self.ranks.in_step():
                yield
        except NoMemory:
            self.undo()
            raise

    def note(self, hidden: Hidden) -> None:
        """States of a pass, by which `check_memory` sees whether all ranks had memory for it."""
        if hidden.last_TD.numel():
            self._numbers.append(hidden.last_TD[0, 0])

    def undo(self) -> None:
        """On all ranks, undo what passes have written since the last check.

        No KV that is not a number may stay; rows' recurrent states are lost.
        """
        passes, self._unchecked, self._numbers = self._unchecked, [], []
        for begun in passes:
            if begun.kv.states is not None and begun.attn.row_S is not None:
                begun.kv.states.lose(begun.attn.row_S.tolist())
            slot_P = begun.attn.slot_T[begun.attn.slot_T >= 0]
            with self.ranks.in_step():
                numbers = order(Op.CLEAR, self._cache(begun.kv).number)
                self.ranks.send(np.concatenate([numbers, slot_P.cpu().numpy()]))
            begun.kv.clear(slot_P.to(self.device))

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        raise NotImplementedError("a target over ranks begins with tokens")

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token; each rank computes a part of the vocabulary."""
        hidden_MD = hidden_MD.to(self.dtype).contiguous()
        if self.layout.num_ranks == 1:
            self.check_memory()
            return self._part.model.logits(hidden_MD)
        with self.ranks.in_step():
            self.ranks.send(order(Op.LOGITS, self._number, len(hidden_MD)))
            logits_MV = self._part.logits(hidden_MD)
        if len(logits_MV):
            # One of each other rank.
            self._numbers += [logits_MV[0, first] for first in accumulate(self._head_sizes[:-1])]
        self.check_memory()  # no token may be chosen by logits that are no numbers
        return logits_MV

    def check_memory(self) -> None:
        """Raise where a rank ran out of memory in what was computed since the last call.

        Its parts are not numbers then. As a model may compute such by itself, ranks are asked.
        """
        numbers = self._numbers
        if numbers and self.device.type != "cpu":  # one number is read, not several
            numbers = [torch.stack([number.float() for number in numbers]).sum()]
        if any(map(isnan, numbers)) and (reason := self.ranks.without_memory()):
            self.undo()
            raise NoMemory(reason)
        self._numbers, self._unchecked = [], []

    def check_step(self) -> None:
        """Raise where a rank is gone or ran out of memory: a step's result must not be used."""
        self.check_alive()
        self.check_memory()

    def output_rows(self, ids_C: Tensor) -> Tensor:
        """Rows of the output matrix, [C, D]."""
        if self.spec.is_tied:
            return self.embed(ids_C.to(self.device))
        if self.layout.num_ranks == 1:
            return self._part.model.output_rows(ids_C)
        ids_C = ids_C.cpu()
        with self.ranks.in_step():
            numbers = np.concatenate([order(Op.ROWS, self._number), ids_C.numpy().reshape(-1)])
            self.ranks.send(numbers)
            return self._part.output_rows(ids_C)

    @property
    def embedding(self) -> Any:
        """The embedding in the native kernels' form, for networks that share it."""
        return self._part.model.embedding  # type: ignore[attr-defined]

    @property
    def head(self) -> Any:
        """The whole output matrix in that form."""
        return self._part.model.whole_head  # type: ignore[attr-defined]

    def load_draft(self, path: Path, config: ModelConfig, num_ranks: int) -> SplitTarget:
        """Another model over the first of the same ranks."""
        return SplitTarget(self.ranks, path, config, num_ranks, is_draft=True)

    def sum_seconds(self) -> float:
        """What it takes to add up a row of states over the ranks."""
        with self.ranks.in_step():
            self.ranks.send(order(Op.PROBE, self._number, 1 + PROBES))
            self._part.probe(1)
            began = perf_counter()
            self._part.probe(PROBES)
            return (perf_counter() - began) / PROBES

    def drop(self) -> None:
        """Let all ranks forget the model."""
        with self.ranks.in_step():
            self.ranks.send(order(Op.DROP, self._number))

    def with_draft_size(self, size: int | None) -> SplitTarget:
        """The same target, beside which draft models are split over this many ranks.

        None: over as many as take the least time.
        """
        other = copy(self)
        other.backend = SplitBackend(self._part.model.backend, self.layout, size)
        other.backend.captures_steps = self.backend.captures_steps
        return other

    def close(self) -> None:
        self.ranks.close()

    def check_alive(self) -> None:
        """Raise where a rank is gone."""
        self.ranks.check()

    def _cache(self, kv: KVCache) -> Cache:
        key = id(kv.k_LCMH)
        if key not in self._caches:
            cache = self._caches[key] = Cache(self.ranks.new_number())
            kv.on_move.append(cache.moves.append_pair)
            if kv.states is not None:
                kv.states.on_copy.append(partial(self._copy_state, cache.number))
            weakref.finalize(kv.k_LCMH, self._forget, key)
        return self._caches[key]

    def _copy_state(self, kv: int, source: int, target: int) -> None:
        """Let the other ranks copy a row's recurrent state."""
        with self.ranks.in_step():
            self.ranks.send(order(Op.STATES, kv, source, target))

    def _forget(self, key: int) -> None:
        self._freed.append(self._caches.pop(key).number)

    def _free(self) -> None:
        while self._freed:
            self.ranks.send(order(Op.FREE, self._freed.pop()))


def load_split(config: Config, path: Path, device: torch.device) -> SplitTarget:
    """The target over several ranks, of which this process is the first.

    A process that torchrun started as another rank stays here until the first is done, and leaves.
    """
    parallel, threads = config.parallel, config.model.threads
    size = parallel.num_ranks
    ended = follow_torchrun(size, device.type, threads)
    if ended is not None:
        raise SystemExit(ended)
    ranks = start_ranks(size, device.type, threads)
    if device.type == "cpu":
        torch.set_num_threads(threads or threads_of_rank(size))
    try:
        layout = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        return SplitTarget(ranks, path, config.model, *layout)
    except BaseException:
        ranks.close()
        raise

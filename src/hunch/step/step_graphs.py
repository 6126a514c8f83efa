"""Whole steps as captured graphs, by their kind: forward, then everything that follows it.

Shape letters: R rows of the step, N nodes of a step's draft, K tokens one step can commit (N + 1),
T packed tokens, M rows of logits (as many), P longest path, V vocabulary, C columns of a result, W
words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hunch.drafting.base import DeviceDrafter
from hunch.kernels.attention import AttnInputs, row_spans
from hunch.kernels.gpu_expect import expect
from hunch.kernels.gpu_process import count_committed, draft_paths, process
from hunch.kernels.gpu_recurrence import SEQUENCES, step_sequences
from hunch.kernels.gpu_sampling import choose
from hunch.kernels.gpu_scores import filtered
from hunch.kernels.gpu_step import commit, compact, pack
from hunch.kernels.gpu_transfer import deliver
from hunch.kernels.step import FIRST, TOKENS, Draws, StepRows
from hunch.models.target import FusedTarget, Hidden
from hunch.sampling.dense import DeviceProcessors
from hunch.step.capture import Graph, seconds_of
from hunch.step.parts import GraphSize, Lead, LeadsSteps, Piece, RunnerParts
from hunch.step.results import (
    NO_SCORES,
    Columns,
    Download,
    room_of,
    write_drafts,
    write_scores,
)
from hunch.step.step_kinds import (
    DRAFTS,
    MASKS,
    NAMED,
    RULES,
    USUAL_SCORES,
    StepGraph,
    StepKind,
    bucket,
)
from hunch.step.upload import DeviceRows, NamedMethods, StepMasks

MAX_LOGITS = 1024  # rows of logits whose masks are kept at least


@dataclass(slots=True)
class StepBuffers:
    """Inputs and outputs of all captured steps with the same numbers of rows and nodes."""

    ids_T: Tensor
    rows: StepRows
    attn: AttnInputs


class StepGraphs:
    """Captured steps by their kind; kinds of one size share the `forward` graph."""

    def __init__(
        self,
        parts: RunnerParts,
        drafter: DeviceDrafter | None,
        rows: DeviceRows,
        drafts_at: Callable[[int], bool],  # whether steps of this many rows draft
        pool: Any,
    ) -> None:
        target, kv, sampling = parts.target, parts.kv[0], parts.sampling
        # Of a target over ranks: tells the others about each step.
        self.lead: Lead | None = None
        if isinstance(target, LeadsSteps):
            self.target: FusedTarget = (lead := target.step_lead(kv))
            self.lead = lead
        else:
            assert isinstance(target, FusedTarget)
            self.target = target
        self.kv, self.sampling, self.drafter = kv, sampling, drafter
        assert isinstance(sampling.processors, DeviceProcessors)
        self.rules = sampling.processors
        self.drafts_at, self.scores_processed = drafts_at, parts.scores_processed
        self.state, self.inputs_3R = rows.state, rows.inputs_3R
        self.block_size, self.pool = parts.capacity.block_size, pool
        self.device = target.device
        self.num_guesses = 0 if drafter is None else drafter.num_nodes
        self.layers = () if drafter is None else drafter.feature_layers
        # Results of all kinds share memory.
        most = StepKind(
            self.inputs_3R.shape[1], self.num_guesses, 0, Draws.GREEDY, DRAFTS, USUAL_SCORES
        )
        self._usual_room = most.num_rows * self.columns(most).end
        self._results: dict[int, Tensor] = {}  # by their size
        self.download = Download(self._usual_room, self.device)
        self.masks: StepMasks | None = None  # made with the first grammar
        self.named: NamedMethods | None = None  # made with the first request that names one
        self._buffers: dict[GraphSize, StepBuffers] = {}
        self._forwards: dict[GraphSize, tuple[Graph, float]] = {}
        self._packs: dict[int, Graph] = {}  # by rows
        self._draft_seconds: dict[StepKind, float] = {}  # seconds
        self._steps: dict[tuple[StepKind, int], StepGraph] = {}

    def blank(self) -> StepGraphs:
        """A copy with nothing captured, for rehearsals; its extras take no memory of the GPU."""
        other = copy(self)
        other._results, other._buffers, other._forwards = {}, {}, {}
        other._packs, other._draft_seconds, other._steps = {}, {}, {}
        other.masks = self._new_masks(torch.device("cpu"))
        other.named = self._new_named_methods(torch.device("meta"))
        return other

    def rehearse(self, kind: StepKind) -> None:
        """Run what capturing a step would run, to see which kernels it launches."""
        with self.rules.without_memory():
            self.step(kind)

    def step(self, kind: StepKind) -> StepGraph:
        """The step of this kind, captured now if it is the first."""
        kind = kind._replace(num_rows=bucket(kind.num_rows))
        # A captured step reads the tables of rules: if they were replaced, it is captured again.
        key = kind, self._generation(kind)
        if key not in self._steps:
            saved_3R = self.inputs_3R.clone()
            try:
                self._steps[key] = self._capture(kind)
            finally:
                self.inputs_3R.copy_(saved_3R)
        return self._steps[key]

    def recount(self) -> None:
        """A launch has failed, perhaps in its middle: let the device count steps as the host does.

        By that count both find the buffer of a step's result.
        """
        self.state.clock_2[0] = self.download.num_steps

    def _generation(self, kind: StepKind) -> int:
        """A number that changes when the tables of rules are replaced, if this kind reads them."""
        if not kind.extras & (RULES | MASKS):
            return 0
        assert self.rules.tables is not None  # made on first use
        return self.rules.generation

    def columns(self, kind: StepKind) -> Columns:
        """The columns of a line of the step's result."""
        return Columns.of(
            kind.num_nodes + 1,
            self.num_guesses,
            num_read=0 if self.drafter is None else self.drafter.num_read,
            has_draft=bool(kind.extras & DRAFTS),
            num_best=kind.num_best,
        )

    def _depth_of(self, kind: StepKind, drafter: DeviceDrafter | None) -> int:
        """The depth of the trees that a step of this kind checks; 0: it checks chains."""
        depth = 0 if drafter is None else drafter.depth(kind.source)
        if depth and kind.extras & NAMED:  # a prediction's chain may be deeper than the trees
            return kind.num_nodes
        return min(depth, kind.num_nodes)

    def _capture(self, kind: StepKind) -> StepGraph:
        self.inputs_3R.fill_(-1)  # no rows: running a body to compile it changes nothing
        drafter = self.drafter
        if drafter is None or not (self.drafts_at(kind.num_rows) and drafter.runs_in(kind.source)):
            drafter = None
        size = GraphSize(kind.num_rows, kind.num_nodes, self._depth_of(kind, drafter))
        buffers = self._buffers_of(size)
        forward, forward_seconds = self._forward_of(size, buffers)
        # As `forward`, which may not run here, leaves it without rows.
        buffers.rows.num_checked_R.fill_(-1)
        columns, state = self.columns(kind), self.state
        result_RC = self._result_of(kind.num_rows, columns.end)
        rows = replace(buffers.rows, result_RC=result_RC)
        buffers_QW = self.download.buffers(result_RC.numel())
        rows.draws, rows.has_rules = kind.draws, bool(kind.extras & RULES)
        has_named = bool(kind.extras & NAMED) and self.drafts_at(kind.num_rows)
        rows.methods = self.named_methods().tables if has_named else None

        def draft(hidden: Hidden) -> None:
            if drafter is not None:
                drafter.draft(state, rows, hidden, kind.source)
            if has_named:
                expect(state, rows, self.num_guesses)

        def finish() -> None:
            hidden: Hidden = forward.outputs
            logits_MV = self.target.logits(hidden.last_TD)
            if drafter is not None and drafter.sees_in(kind.source):
                drafter.see(buffers.ids_T, buffers.attn.slot_T, logits_MV)
            ruled_MV = self._ruled(logits_MV, rows, buffers.attn, kind)
            choice_M = self._choose(ruled_MV, buffers.attn, kind)
            commit(state, rows, choice_M)
            if kind.extras & RULES:
                num_R = torch.where(rows.num_checked_R >= 0, result_RC[:, TOKENS], 0)
                tokens_RK = result_RC[:, FIRST : FIRST + kind.num_nodes + 1]
                count_committed(self.rules.tables, rows.ids_R.clamp(min=0), tokens_RK, num_R)
            if buffers.attn.tree_TP is not None:
                compact(self.kv, rows, buffers.attn.slot_T)
                if self.lead is not None:
                    self.lead.share_path(rows)
            if kind.num_best != NO_SCORES:
                scored_MV = ruled_MV if self.scores_processed else logits_MV
                if self.scores_processed and kind.draws != Draws.GREEDY:
                    # Of what tokens are drawn from.
                    asked = buffers.attn.seq_T, *self.sampling.filters_X
                    scored_MV = filtered(ruled_MV.float(), *asked)
                write_scores(scored_MV, rows, kind.num_best, columns)
            draft(hidden)
            if kind.extras & DRAFTS:
                write_drafts(state, rows, columns)
            deliver(state, rows, buffers_QW)

        graph = self._captured(Piece.FINISH, size, finish)
        seconds, draft_seconds = forward_seconds + seconds_of(graph, self.device), 0.0
        if drafter is not None and (has_named or drafter.drafts_in(kind.source)):
            draft_seconds = self._seconds_of_drafting(kind, draft, len(buffers.ids_T))
        packing = self._pack_of(size, buffers, forward) if not kind.num_nodes else None
        return StepGraph(kind, columns, forward, graph, seconds, draft_seconds, packing)

    def _seconds_of_drafting(
        self, kind: StepKind, draft: Callable[[Hidden], None], num_tokens: int
    ) -> float:
        """Seconds of drafting alone, timed once for all kinds that draft alike."""
        kind = kind._replace(extras=kind.extras & (RULES | NAMED), num_best=NO_SCORES)
        if kind not in self._draft_seconds:
            alone = Graph(partial(draft, self._states(num_tokens)), self.device, self.pool)
            self._draft_seconds[kind] = seconds_of(alone, self.device)
        return self._draft_seconds[kind]

    def _captured(self, piece: Piece, size: GraphSize, body: Callable[[], Any]) -> Graph:
        """One of a step's graphs, on all ranks if there are several."""
        made = partial(Graph, body, self.device, self.pool)
        if self.lead is None:
            return made()
        return self.lead.captured(piece, size, self.state.table_XB, self.block_size, made)

    def _forward_of(self, size: GraphSize, buffers: StepBuffers) -> tuple[Graph, float]:
        """The `forward` graph of this size and its seconds: pack, and run the target."""
        if size not in self._forwards:
            ids_T, rows, attn = buffers.ids_T, buffers.rows, buffers.attn

            def forward() -> Hidden:
                pack(self.state, rows, ids_T, attn)
                return self.target.forward(ids_T, attn, self.kv, self.layers)

            graph = self._captured(Piece.FORWARD, size, forward)
            with self.target.timing:
                self._forwards[size] = graph, seconds_of(graph, self.device)
        return self._forwards[size]

    def _pack_of(self, size: GraphSize, buffers: StepBuffers, forward: Graph) -> Graph:
        """The graph that packs rows without nodes, for a step that follows prompts.

        Before it, the states of the prompts' last tokens are copied to the outputs of `forward`.
        """
        if size.num_rows not in self._packs:

            def body() -> None:
                pack(self.state, buffers.rows, buffers.ids_T, buffers.attn)
                if self.lead is not None:
                    self.lead.share_states(forward.outputs.last_TD)

            self._packs[size.num_rows] = self._captured(Piece.STATES, size, body)
        return self._packs[size.num_rows]

    def _states(self, num_tokens: int) -> Hidden:
        """States to time drafting with, whatever their values."""
        size = num_tokens, self.target.spec.width
        state_TD = torch.zeros(size, dtype=self.target.dtype, device=self.device)
        return Hidden(state_TD, (state_TD,) * len(self.layers))

    def _ruled(self, logits_MV: Tensor, rows: StepRows, attn: AttnInputs, kind: StepKind) -> Tensor:
        """The target's logits after the rows' rules and masks."""
        if not kind.extras & (RULES | MASKS):
            return logits_MV
        # The drafted tokens that lead to each root and node; -1 after the last.
        path_MP = rows.ids_R.new_empty(len(logits_MV), kind.num_nodes)
        drafts = self.state.draft_XG, self.state.parents_XG
        draft_paths(rows.ids_R, rows.num_checked_R, *drafts, -1, path_MP)
        has_masks = bool(kind.extras & MASKS)
        masks = self.step_masks().of(len(logits_MV)) if has_masks else (None, None)
        place = attn.seq_T, attn.pos_T + 1, path_MP
        return process(logits_MV, *place, self.rules.tables, *masks)

    def _choose(self, logits_MV: Tensor, attn: AttnInputs, kind: StepKind) -> Tensor:
        is_sampled = kind.draws != Draws.GREEDY
        pos_M = attn.pos_T + 1 if is_sampled else attn.pos_T  # read for its noise alone
        return choose(
            logits_MV, attn.seq_T, pos_M, *self.sampling.columns_X, is_sampled=is_sampled,
            is_filtered=kind.draws == Draws.FILTERED,
        )  # fmt: skip

    def _result_of(self, num_rows: int, num_columns: int) -> Tensor:
        """Lines for a step's result, in memory that all steps share."""
        size = num_rows * num_columns
        room = room_of(size, self._usual_room)
        if room not in self._results:
            self._results[room] = torch.zeros(room, dtype=torch.int64, device=self.device)
        return self._results[room][:size].view(num_rows, num_columns)

    def step_masks(self) -> StepMasks:
        """The masks of grammars, made on first use."""
        if self.masks is None:
            self.masks = self._new_masks(self.device)
        return self.masks

    def _new_masks(self, device: torch.device) -> StepMasks:
        # A drafter that is not adaptive checks as many nodes of many rows as of one.
        nodes = 0 if self.drafter is None else min(self.drafter.shapes).num_nodes
        most = max(self.inputs_3R.shape[1] * (1 + nodes), MAX_LOGITS)
        return StepMasks(most, self.target.spec.vocab_size, device)

    def named_methods(self) -> NamedMethods:
        """The methods that requests name, made on first use."""
        if self.named is None:
            self.named = self._new_named_methods(self.device)
        return self.named

    def _new_named_methods(self, device: torch.device) -> NamedMethods:
        num_rows, room = self.state.tokens_XL.shape
        return NamedMethods(num_rows, room, device)

    def _buffers_of(self, size: GraphSize) -> StepBuffers:
        """A step's packed tokens, its rows and what attention needs."""
        if size in self._buffers:
            return self._buffers[size]
        num_rows, num_nodes, depth = size
        num_k = num_nodes + 1
        packed_5T = torch.zeros(5, num_rows * num_k, dtype=torch.int64, device=self.device)
        rows = StepRows(
            ids_R=self.inputs_3R[0, :num_rows],
            max_checked_R=self.inputs_3R[1, :num_rows],
            max_draft_R=self.inputs_3R[2, :num_rows],
            num_checked_R=packed_5T.new_zeros(num_rows),
            path_RK=packed_5T.new_zeros(num_rows, num_k),
            result_RC=self._result_of(num_rows, FIRST + num_k),
        )
        attn = AttnInputs.over(packed_5T, self.state.table_XB, self.block_size, depth)
        attn.memo["tiling"] = self.target.tiling(row_spans(num_rows, num_k), num_rows * num_k)
        attn.memo["num_rows"] = num_rows
        if self.kv.states is not None:
            assert num_k <= self.kv.states.inputs_LXGI.shape[2], "a draft past the ring"
            attn.memo[SEQUENCES] = step_sequences(num_rows, num_k, self.device)
        self._buffers[size] = StepBuffers(packed_5T[0], rows, attn)
        return self._buffers[size]

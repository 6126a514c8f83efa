"""Captured steps of rows that decode: each is launched before the previous result is read.

A step is two graphs, `forward` and `finish`. Without grammars both are launched at once. If rows
have grammars, the host receives the previous step while `forward` runs, fills in the masks (tokens
that may follow each node), launches `finish`, and then applies the rest of that result.

Shape letters: R rows of the step, C columns of a result, X rows of the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from hunch.drafting.base import DeviceDrafter, form_on_device
from hunch.drafting.captured_policy import CapturedPolicy
from hunch.drafting.step_shapes import StepShape
from hunch.kernels.step import FIRST, Draws
from hunch.models.target import FusedTarget
from hunch.step import step_kinds
from hunch.step.parts import RunnerParts, passes_to_capture
from hunch.step.passes import CatchUp, max_prompt
from hunch.step.pending import PendingStep, Received
from hunch.step.results import NO_SCORES, apply_rows, take_back
from hunch.step.row_extras import RowExtras, StepGroup, with_extras
from hunch.step.step_graphs import StepGraphs
from hunch.step.step_kinds import SCORE_SIZES, StepGraph, StepKind, best_size, bucket
from hunch.step.upload import DeviceRows
from hunch.types import Request, RowStart, RowWork, StepResult

log = logging.getLogger("hunch")

MAX_PREPARED = 256  # rows up to which steps are captured at the start
Receive = Callable[[], set[int]]


class CapturedSteps:
    """Decides which rows take captured steps, launches them and applies their results."""

    def __init__(self, parts: RunnerParts, pool: Any) -> None:
        self.rows, self.grammars, self.sampling = parts.rows, parts.grammars, parts.sampling
        self.host_drafter = host_drafter = parts.drafter
        capacity = parts.capacity
        device: torch.device = parts.target.device
        width = bucket(capacity.max_rows)
        self.device_rows = DeviceRows(self.rows, width, device)
        drafter = form_on_device(host_drafter)
        self.drafter: DeviceDrafter | None = drafter
        self.policy = CapturedPolicy(drafter, self.rows, is_measured=parts.cost.is_measured)
        self.plain_shape = step_kinds.plain_shape(shapes := self.policy.shapes)
        self.steps = StepGraphs(parts, drafter, self.device_rows, self.policy.drafts_at, pool)
        self.catch_up: CatchUp | None = None
        if drafter is not None and drafter.draft_model is not None:
            assert isinstance(drafter.draft_model.model, FusedTarget)
            model, kv = drafter.draft_model.model, drafter.draft_model.kv
            self.catch_up = CatchUp(model, kv, self.rows, self.device_rows.state.tokens_XL, pool)
        # By row: captured steps can do all it asks for; the choice of its first token was launched.
        self.can_be_captured, self.is_decoding = np.zeros((2, capacity.max_rows), dtype=np.bool_)
        self.row_extras = RowExtras(
            self.rows,
            parts.grammars,
            self.sampling,
            self.device_rows.mark_stale,
            None if drafter is None else drafter.methods,
            self.steps.named_methods,
            can_take_back=not parts.scores_processed and not capacity.has_recurrent_states,
        )
        # All work of the last step, and the part of it that was captured.
        self._last_group: tuple[list[RowWork], StepGroup] | None = None
        self._received_at: float | None = None  # the last result; None: the device was idle since
        self._host_seconds = self._prompt_seconds = 0.0  # since then: steps by the host, prompts
        self._num_unreceived = self.num_with_masks = 0  # steps not received; those that read masks
        most = None if drafter is None else step_kinds.max_draft_rows(shapes, capacity.max_rows)
        self.capacity = replace(
            capacity,
            max_draft_rows=most,
            max_prompt=max_prompt(parts.target.weight_bytes),
            writes_bonus_kv=drafter is not None and len(capacity.groups) > 1,
            past_end=0 if drafter is None else drafter.past_end,
        )

    def preparations(
        self, *, is_greedy: bool = False, is_rehearsal: bool = False
    ) -> list[Callable[[], Any]]:
        """Calls that capture the usual steps, for every power of two of rows.

        Other kinds are captured when they are first needed; a rehearsal includes the common ones.
        """
        step = self.steps.blank().rehearse if is_rehearsal else self._step
        todo: list[Callable[[], Any]] = []
        if self.catch_up is not None:
            todo += passes_to_capture(self.catch_up.passes, is_rehearsal=is_rehearsal)
        kinds = self.usual_kinds(is_greedy=is_greedy)
        kinds += with_extras(kinds) if is_rehearsal else []
        return todo + [partial(step, kind) for kind in kinds]

    def usual_kinds(self, *, is_greedy: bool = False) -> list[StepKind]:
        """The kinds of steps that are captured at the start."""
        all_draws = (Draws.GREEDY,) if is_greedy else tuple(Draws)
        kinds, num_rows = list[StepKind](), 1
        first = [self.plain_shape] if self.policy.network_rows.can_catch_up else []
        while num_rows <= bucket(min(self.capacity.max_rows, MAX_PREPARED)):
            for shape in dict.fromkeys((*self.policy.shapes.to_capture(num_rows), *first)):
                kinds += [StepKind(num_rows, *shape, draws) for draws in all_draws]
            num_rows *= 2
        return kinds

    def _step(self, kind: StepKind) -> StepGraph:
        graph = self.steps.step(kind)
        if self.policy.costs.capture(graph.key, graph.seconds, graph.draft_seconds):
            self._received_at = None  # else capturing would count as time of the pending step
        return graph

    # --- who takes part ---------------------------------------------------------------------------

    def start(self, starts: list[RowStart]) -> None:
        """New requests have rows."""
        self._last_group = None
        self.policy.start([start.row for start in starts])
        for start in starts:
            self.device_rows.mark_stale(start.row)
            self.is_decoding[start.row] = False
            self.can_be_captured[start.row] = self._can_be_captured(start.request)
            self.row_extras.start(
                start.row, start.request, bool(self.policy.network_rows.fits_network[start.row])
            )
            self.policy.network_rows.by_network[start.row] = self.row_extras.by_network(start.row)

    def _can_be_captured(self, request: Request) -> bool:
        """Whether captured steps can do all that the request asks for."""
        params = request.params
        if params.logprobs is not None and params.logprobs > SCORE_SIZES[-1]:
            return False
        mode, drafter = params.speculation.mode, self.drafter
        if mode == "off" or not self.capacity.max_nodes or params.speculation.max_nodes == 0:
            return True
        if drafter is None:  # the host drafts
            return False
        return mode in ("default", "auto", drafter.name) or mode in drafter.methods

    def observes(self, rows: list[int]) -> bool:
        """Whether the host's drafter must observe what the host computes of these rows.

        Most device forms have all they need on the device. A head that was dropped needs nothing.
        """
        if self.drafter is None or not self.can_be_captured[rows].all():
            return True
        network_rows = self.policy.network_rows
        if network_rows.can_drop and network_rows.is_dropped(rows).all():
            return False
        return self.drafter.host_observes

    def drafts_for(self, rows: list[int]) -> np.ndarray:
        """Which of the rows get their drafts in captured steps."""
        if self.drafter is None:
            return self.can_be_captured[rows]
        is_ready_R = self._are_ready(rows, self.drafter)
        return self.can_be_captured[rows] & (True if is_ready_R is None else is_ready_R)

    def _are_ready(self, rows: list[int], drafter: DeviceDrafter) -> np.ndarray | None:
        """For each row, whether the drafter is ready or was dropped; None: ready for all."""
        if (group := drafter.needed_group) is None:
            return None
        is_ready_R = self.rows.computed[group, rows] >= self.rows.known[rows] - 1
        return np.asarray(is_ready_R | self.policy.network_rows.is_dropped(rows))

    def begin_decoding(self, rows: list[int]) -> None:
        """The choice of these rows' first tokens was launched; captured steps come next."""
        self._last_group = None
        self.is_decoding[rows] = True

    def running(self) -> set[int]:
        """The rows that take captured steps."""
        rows = np.flatnonzero(self.is_decoding & self.can_be_captured).tolist()
        return {row for row in rows if self.rows.requests[row] is not None}

    def after_host_step(self, result: StepResult) -> None:
        """The host ran a step: note its rows, and let a draft model read their new tokens."""
        self._last_group = None
        self._host_seconds += result.target_seconds + result.draft_seconds
        for row in result.rows:
            self.device_rows.mark_stale(row.row)
            self.is_decoding[row.row] |= bool(row.tokens)
            self.row_extras.forget_draft(row.row)
        began = perf_counter()
        self._read_missed([row.row for row in result.rows])
        seconds = perf_counter() - began
        result.draft_seconds += seconds
        self._host_seconds += seconds

    def _read_missed(self, ids: list[int]) -> list[int]:
        """Let a draft model read what it missed, if it will draft; returns rows that still run."""
        running = self.running()
        rows = [row for row in ids if row in running]
        if self.catch_up is not None:
            with torch.inference_mode():
                self.policy.catch_up(rows, self.catch_up.run, running)
        return rows

    # --- before a step ----------------------------------------------------------------------------

    def launch(
        self, work: list[RowWork], receive_pending: Receive, apply_pending: Callable[[], None]
    ) -> PendingStep | None:
        """Launch a step of the rows that can take one; None: the host must run all of them.

        `receive_pending` receives the results of earlier steps, and returns the rows whose last
        token their grammar refused. `apply_pending` applies these results.
        """
        group = self._group(work)
        if group is not None and self.drafter is not None:
            group = self._ready_rows(group, self.drafter)
        if group is None:
            return None
        shape = self._shape(group, apply_pending)
        shape = self.policy.shape_to_launch(
            shape if group.has_waiting else StepShape(0, shape.source), group.row_R
        )
        graph = group.graphs.get(shape) or self.graph(group, shape)
        if graph is None:
            return None
        self.upload(group, graph)
        graph.forward.replay()
        num_masked, refused_rows = dict[int, int](), set[int]()
        if group.has_masks:
            refused_rows = receive_pending()
            masks = self.steps.step_masks()
            num_masked = self.row_extras.fill_masks(group, graph, masks, refused_rows)
        graph.finish.replay()
        return self.pending_step(group, graph, num_masked, refused_rows)

    def pending_step(
        self, group: StepGroup, graph: StepGraph, num_masked: dict[int, int], refused_rows: set[int]
    ) -> PendingStep:
        """Note that a step was launched; returns what is kept until its result is applied."""
        self._num_unreceived += 1
        self.num_with_masks += group.has_masks
        buffer = self.steps.download.next_buffer()
        return PendingStep(group, graph, buffer, num_masked, refused_rows)

    def _group(self, work: list[RowWork]) -> StepGroup | None:
        """The rows that take part. In most steps they are those of the step before."""
        if self._last_group is not None and self._last_group[0] == work:
            return self._last_group[1]
        row_R = np.array([item.row for item in work])
        takes_part_R = (self.is_decoding[row_R] & self.can_be_captured[row_R]).tolist()
        part = [item for item, takes_part in zip(work, takes_part_R, strict=True) if takes_part]
        if not part:
            return None
        self._last_group = work, StepGroup(part, self.row_extras)
        return self._last_group[1]

    def _ready_rows(self, group: StepGroup, drafter: DeviceDrafter) -> StepGroup | None:
        """The rows that the drafter is ready for; None: no row, or others have pending results."""
        is_ready_R = self._are_ready(group.ids, drafter)
        if is_ready_R is None or is_ready_R.all():
            return group
        if not all(map(self.device_rows.is_known, group.row_R[~is_ready_R].tolist())):
            return None
        pairs = zip(group.work, is_ready_R.tolist(), strict=True)
        ready = [work for work, is_ready in pairs if is_ready]
        return StepGroup(ready, self.row_extras) if ready else None

    def _shape(self, group: StepGroup, apply_pending: Callable[[], None]) -> StepShape:
        """The shape of the next step.

        If a draft model will draft in it, and missed tokens, its passes over these are launched.
        """
        if not group.is_drafting:
            return StepShape(0)
        shape = self.policy.choose(group.row_R, extras=group.extras)
        if self.policy.is_ready(shape, group.row_R):
            return shape
        apply_pending()  # the host packs the missed tokens, so it must know them
        rows = self._read_missed(group.ids)
        is_ready = bool(rows) and self.policy.network_rows.is_ready(shape, np.array(rows))
        return shape if is_ready else self.plain_shape

    def graph(self, group: StepGroup, shape: StepShape) -> StepGraph | None:
        """The captured step of this shape; None: there is no memory to capture it."""
        num_best = NO_SCORES if group.num_best == NO_SCORES else best_size(group.num_best)
        kind = StepKind(len(group.ids), *shape, group.draws, group.extras, num_best)
        try:
            graph = group.graphs[shape] = self._step(kind)
        except torch.OutOfMemoryError:
            num_rows = len(group.ids)
            log.warning("no GPU memory to capture a step of %d rows: the host runs it", num_rows)
            return None
        return graph

    def upload(self, group: StepGroup, graph: StepGraph) -> None:
        """Bring the rows of a step up to date on the device, before it is launched."""
        if not self._num_unreceived:  # the device was idle: time since the last result is no cost
            self._received_at, self._host_seconds, self._prompt_seconds = None, 0.0, 0.0
        inputs_3R, max_checked = group.inputs_3R, self.row_extras.max_checked(group)
        if max_checked is not group.max_checked:
            inputs_3R = np.array((group.ids, max_checked, inputs_3R[2]))
        renewed = self.device_rows.update(inputs_3R, graph.kind.num_rows)
        if renewed:  # from now on the device drafts: the host's waiting drafts are out of date
            self.host_drafter.forget(renewed)
            for row in renewed:
                self.rows.drafts[row] = None

    # --- after a step -----------------------------------------------------------------------------

    def receive(self, pending: PendingStep) -> set[int]:
        """Wait for a step's result and let grammars consume its tokens, for the next masks.

        Returns the rows that chose a token without a mask and whose grammar refused it.
        """
        if pending.received is not None:
            return pending.received.adjusted.refused_rows
        group, columns = pending.group, pending.graph.columns
        result_RC, seconds = self.steps.download.receive(
            pending.buffer, len(group.ids), columns.end, pending.graph.num_numbers
        )
        seconds = seconds if pending.timer is None else pending.timer.seconds()
        if self.steps.lead is not None:
            self.steps.lead.check_alive()
        self._num_unreceived -= 1
        self.num_with_masks -= group.has_masks
        requests = self.rows.requests
        here = [
            request if requests[row] is request else None
            for row, request in zip(group.ids, group.requests, strict=True)
        ]
        since, other_seconds = self._times(pending, seconds)
        lines = result_RC[:, : columns.host_end].tolist()
        for row, line in zip(group.ids if pending.began_after_refusal else (), lines, strict=False):
            if row in pending.began_after_refusal:
                take_back(line, 0)
        adjusted = self.row_extras.adjust_result(group, here, lines, columns, pending.num_masked)
        if pending.began_after_refusal or adjusted.is_cut:
            result_RC[:, :FIRST] = [line[:FIRST] for line in lines]
        times = seconds, since if any(here) else None, other_seconds
        pending.received = Received(result_RC, lines, *times, adjusted)
        return adjusted.refused_rows

    def _times(self, pending: PendingStep, seconds: float) -> tuple[float | None, float]:
        """Seconds since the last result; how many of them prompts and the host's steps took."""
        if pending.follows_prompts:
            self._prompt_seconds += seconds if self._received_at is not None else 0.0
            return None, 0.0
        before, self._received_at = self._received_at, perf_counter()
        # The host's steps waited for this one.
        other_seconds = max(self._host_seconds - seconds, 0.0) + self._prompt_seconds
        self._host_seconds = self._prompt_seconds = 0.0
        return None if before is None else self._received_at - before, other_seconds

    def apply(self, pending: PendingStep) -> StepResult:
        """Wait for a step and apply its result to the host's rows."""
        self.receive(pending)
        assert pending.received is not None
        result_RC, lines, seconds, since, other_seconds, adjusted = pending.received
        graph, group, drafter = pending.graph, pending.group, self.drafter
        named, methods = self.row_extras.methods_of_step(group, lines), None
        if drafter is not None:
            methods = self.policy.learn(group.row_R, lines, graph)
        if methods is not None and named:
            methods = [named.get(place, name) for place, name in enumerate(methods)]
        writes_kv = drafter is not None and drafter.writes_kv(graph.kind.source)
        network_rows = self.policy.network_rows
        is_dropped_R = network_rows.is_dropped(group.ids) if network_rows.can_drop else None
        decoded, results = apply_rows(
            self.rows,
            group.ids,
            group.row_R,
            result_RC,
            lines,
            group.requests,
            methods,
            num_k=graph.kind.num_nodes + 1,
            writes_kv=writes_kv,
            is_dropped_R=is_dropped_R,
            wants_whole_result=group.wants_whole_result,
        )
        for row in adjusted.refused_rows:
            if self.rows.requests[row] is group.requests[group.ids.index(row)]:
                self.device_rows.mark_cut(row)  # else another request may be there now
        is_scored = group.num_best != NO_SCORES
        scores = graph.columns.scores(result_RC, group.num_best_R) if is_scored else None
        results = self.row_extras.complete(group, adjusted, scores, decoded, results)
        target_seconds = plain_seconds = seconds
        if not pending.follows_prompts:
            target_seconds, plain_seconds = self.policy.timed(graph, seconds, since, other_seconds)
        return StepResult(
            id=pending.plan_id,
            rows=results,
            decoded=decoded,
            target_seconds=target_seconds,
            draft_seconds=min(graph.draft_seconds, seconds),
            plain_seconds=plain_seconds,
        )

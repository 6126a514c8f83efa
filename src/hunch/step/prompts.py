"""Prompts of rows that take captured steps afterwards: the host does not wait for the device.

The host packs the prompts' tokens, as in steps that it runs itself, and launches the target's pass.
It copies the states of each prompt's last token to where the `forward` graph of a captured step
leaves them. Then it launches the `finish` graph of that step, which chooses the first tokens. So
the next step can be launched before these are known, and they come back like other tokens.

When a preempted request continues, all of its text counts as its prompt.

Shape letters: R rows of the step, T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
import torch

from hunch.draft import TargetStep
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.models.target import Hidden
from hunch.step.batch import Batch, RowPart, pack
from hunch.step.capture import StepTimer
from hunch.step.captured_step import CapturedSteps
from hunch.step.host_scores import PromptScores
from hunch.step.host_step import HostStep
from hunch.step.pending import PendingPrompts
from hunch.step.row_extras import StepGroup
from hunch.step.step_kinds import StepGraph
from hunch.types import RowResult, RowWork, StepPlan, StepResult


class PromptSteps:
    """Launches passes over prompts, and applies their results."""

    def __init__(self, captured: CapturedSteps, host: HostStep) -> None:
        self.captured, self.host, self.rows = captured, host, host.rows
        # Ranks without captured passes: a pass may run out of memory on one of them.
        self._can_fail = captured.steps.lead is not None and host.passes is None
        self._is_host_drafting = captured.capacity.max_nodes > 0 and captured.drafter is None
        drafter, needs = captured.drafter, captured.host_drafter.needs
        # The drafter is a head: it reads the target's states and keeps KV of its own.
        self._has_head = (
            drafter is not None and drafter.draft_model is None and needs.kv is not None
        )

    def takes(self, work: list[RowWork]) -> bool:
        """Whether all of these rows can be launched here; else the host runs all of them."""
        captured = self.captured
        if self._can_fail:
            return False
        rows = [item.row for item in work]
        if any(item.runs_alone for item in work) or captured.is_decoding[rows].any():
            return False
        if not captured.can_be_captured[rows].all():
            return False
        if captured.drafter is None:
            return not self._is_host_drafting
        return not captured.observes(rows) or self._can_run_head(rows)

    def _can_run_head(self, rows: list[int]) -> bool:
        """Whether a head can compute its KV of these rows before their first tokens are known.

        If a row has a hole in the head's KV, the host drafts.
        """
        computed = self.rows.computed
        return self._has_head and bool((computed[1:, rows] >= computed[0, rows]).all())

    def launch(self, plan: StepPlan, receive: Callable[[], object]) -> PendingPrompts | StepResult:
        """Launch a pass over prompts and, while it runs, everything that follows it.

        `receive` receives the results of earlier steps. If the pass runs out of memory, nothing has
        changed on the host. If no prompt ends in this pass, and none is scored, the result is
        returned at once.
        """
        began, rows = perf_counter(), self.rows
        batch = pack(rows, plan.work)
        ending = {part.row: part for part in batch.parts if part.is_caught_up}
        timer = StepTimer(self.host.device)
        scores = PromptScores()
        with torch.inference_mode():
            hidden = self.host.forward(batch) if batch.parts else None
            if hidden is not None:
                scores = self.host.scores.of_prompts(hidden.last_TD, batch.parts)
                if self._has_head:
                    self._run_head(batch, hidden)
        if hidden is not None and ending:
            group, graph = self._first_step([work for work in plan.work if work.row in ending])
            self.captured.upload(group, graph)
            copy_last_states(hidden, [ending[row] for row in group.ids], graph)
            assert graph.pack is not None
            graph.pack.replay()
        partial_parts = [part for part in batch.parts if part.row not in ending]
        results = {part.row: self._partial(part) for part in partial_parts}
        pending = PendingPrompts(plan.id, plan.work, list(ending.values()), results, scores)
        if ending:
            num_masked = self._fill_masks(group, graph, receive)
            graph.finish.replay()
            pending.step = self.captured.pending_step(group, graph, num_masked, set())
            timer.end()
            pending.step.timer = timer
            self.captured.begin_decoding(group.ids)
            pending.draft_seconds = self._catch_up(group.ids)
        else:
            pending.target_seconds = perf_counter() - began
        return pending if ending or scores else self.apply(pending)

    def _run_head(self, batch: Batch, hidden: Hidden) -> None:
        """Let a head compute its KV of the prompts' tokens, except the last of each.

        For each token it reads the target's state and the next token. After the last one, that is
        the first new token, so the `finish` graph does it.
        """
        rows = [part.row for part in batch.parts]
        if not self.captured.observes(rows):
            return  # the head was dropped
        start_R = np.array([part.start for part in batch.parts])
        offset_R = np.array([part.first for part in batch.parts])
        num_R = np.array([part.num_known for part in batch.parts])
        num_tokens = int(num_R.sum())
        self.captured.host_drafter.observe(
            TargetStep(
                rows=self.rows.view(rows),
                start_R=torch.from_numpy(start_R),
                stop_R=torch.from_numpy(start_R + num_R),
                offset_R=torch.from_numpy(offset_R),
                hidden_TD=hidden.last_TD[:num_tokens],
                features=tuple(feature_TD[:num_tokens] for feature_TD in hidden.features),
                is_caught_up_R=torch.tensor([part.is_caught_up for part in batch.parts]),
            )
        )

    def _first_step(self, work: list[RowWork]) -> tuple[StepGroup, StepGraph]:
        """The rows that get their first token, and the step that chooses it."""
        captured = self.captured
        group = StepGroup(work, captured.row_extras)
        group.wants_whole_result = [True] * len(work)  # each row gets a whole result
        shape = captured.policy.shape_to_launch(self._first_shape(group), group.row_R)
        graph = captured.graph(group, shape)
        if graph is None:
            raise torch.OutOfMemoryError("no GPU memory to capture what follows prompts")
        return group, graph

    def _first_shape(self, group: StepGroup) -> StepShape:
        """The shape of the step that chooses first tokens.

        A head drafts in it if it will draft in the next step, in which other rows may take part. A
        draft model does not, as it has not read the prompts yet.
        """
        captured, policy = self.captured, self.captured.policy
        network_rows, shapes, plain = policy.network_rows, policy.shapes, captured.plain_shape
        if network_rows.can_drop and network_rows.is_dropped(group.ids).all():
            return StepShape(0, DraftSource.HEAD_DROPPED)
        is_drafting = group.is_drafting or plain not in shapes.all
        if network_rows.can_catch_up or not shapes.network_sources or not is_drafting:
            return plain
        row_R = np.array(sorted({*group.ids, *captured.running()}))
        extras = int(np.bitwise_or.reduce(captured.row_extras.extras_X[row_R]))
        return StepShape(0, policy.choose(row_R, extras=extras).source)

    def _partial(self, part: RowPart) -> RowResult:
        """The result of a row whose prompt does not end in this pass; the next one continues it."""
        known = part.start + part.num_known
        self.rows.computed[0, part.row] = max(known, self.rows.computed[0, part.row])
        computed = tuple(self.rows.computed[:, part.row].tolist())
        return RowResult(row=part.row, num_processed=part.num_known, computed=computed)

    def _fill_masks(
        self, group: StepGroup, graph: StepGraph, receive: Callable[[], object]
    ) -> dict[int, int]:
        """While the pass runs, fill in the tokens that grammars allow as first ones.

        All steps share the memory of masks. If a pending step may still read it, the host waits for
        that step's result first.
        """
        if not group.has_masks:
            return {}
        if self.captured.num_with_masks:
            receive()
        masks, extras = self.captured.steps.step_masks(), self.captured.row_extras
        return extras.fill_masks(group, graph, masks, set(), is_first=True)

    def _catch_up(self, rows: list[int]) -> float:
        """Let a draft model read the prompts and the first tokens, if it will draft for the rows.

        The host does not know the first tokens yet: the device copies them from its rows. Returns
        the seconds that launching the model's passes took.
        """
        captured, known, end = self.captured, self.rows.known, self.rows.end
        ids = [row for row in rows if end[row] > known[row] + 1]  # others end with the first token
        if captured.catch_up is None or not ids:
            return 0.0
        began = perf_counter()
        with torch.inference_mode():
            run = partial(captured.catch_up.run, num_more=1)
            captured.policy.catch_up(ids, run, captured.running())
        captured.policy.network_rows.is_current[ids] &= self.rows.computed[-1, ids] > known[ids]
        return perf_counter() - began

    def apply(self, pending: PendingPrompts) -> StepResult:
        """Wait for the first tokens and apply them to the host's rows."""
        by_row, seconds = pending.results, pending.target_seconds
        if pending.step is not None:
            result = self.captured.apply(pending.step)
            by_row = {row.row: row for row in result.rows} | by_row
            seconds = result.target_seconds
        for part in pending.parts:
            found = by_row[part.row]
            found.num_processed = part.num_known
        pending.scores.add_to(by_row)
        return StepResult(
            id=pending.plan_id,
            rows=[by_row.get(work.row) or RowResult(row=work.row) for work in pending.work],
            target_seconds=seconds,
            draft_seconds=pending.draft_seconds,
            plain_seconds=seconds,
        )


def copy_last_states(hidden: Hidden, parts: list[RowPart], graph: StepGraph) -> None:
    """Copy the states of each prompt's last token to where a step's `finish` reads them."""
    left: Hidden = graph.forward.outputs
    pairs = zip((hidden.last_TD, *hidden.features), (left.last_TD, *left.features), strict=False)
    with torch.inference_mode():
        for all_TD, last_RD in pairs:
            lines = [all_TD[part.root : part.root + 1] for part in parts]
            last_RD[: len(parts)].copy_(lines[0] if len(lines) == 1 else torch.cat(lines))

"""The runner: takes the engine's plans, runs their steps, and returns the results.

On a CPU the host runs every step. On a GPU it launches captured steps for rows that decode, and
passes over most prompts, and reads the results of both after it has launched the next step. It runs
all other steps itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hunch.config import say_once
from hunch.drafting.base import Clears
from hunch.models.target import FusedTarget, OverProcesses
from hunch.step.host_step import HostStep
from hunch.step.parts import BegunStep, LeadsSteps, RunnerParts, passes_to_capture
from hunch.step.pending import PendingPrompts, PendingStep, merge_results
from hunch.types import RowResult, RowWork, StepPlan, StepResult
from hunch.verify.exact import exact

if TYPE_CHECKING:  # needs Triton
    from hunch.step.captured_step import CapturedSteps
    from hunch.step.prompts import PromptSteps

log = logging.getLogger("hunch")

Submitted = StepResult | PendingStep | PendingPrompts | BegunStep  # a plan in the queue
NO_MEMORY = (
    "the GPU is out of memory for this request alone: give a smaller gpu_memory_utilization or "
    "max_num_batched_tokens"
)


class Runner:
    """Runs steps in this process.

    depth: plans that may be uncollected when another is submitted.
    """

    def __init__(self, parts: RunnerParts, *, depth: int = 0, captures: bool = False) -> None:
        """`captures`: passes of the target can be captured."""
        self.capacity, self.depth, self.cost = parts.capacity, depth, parts.cost
        self.target, self.drafter, self.sampling = parts.target, parts.drafter, parts.sampling
        self.rows, self.grammars = parts.rows, parts.grammars
        self.host = HostStep(parts)
        self.captured: CapturedSteps | None = None
        self.prompts: PromptSteps | None = None
        if captures:
            self._capture(parts, is_exact=parts.verify is exact)
        self._queue: deque[Submitted] = deque()
        self.on_close: Callable[[], None] | None = None  # ends the target's other processes
        self.load_seconds = 0.0  # that reading the target's weights took

    def _capture(self, parts: RunnerParts, *, is_exact: bool) -> None:
        """Capture passes that the host packs, and whole steps too with the `exact` verifier."""
        from hunch.step.capture import new_pool
        from hunch.step.captured_step import CapturedSteps
        from hunch.step.passes import PassGraphs
        from hunch.step.prompts import PromptSteps

        pool = new_pool(self.host.device)
        target, layers = self.target, self.drafter.needs.feature_layers
        sizes = layers, self.rows.table.shape, self.capacity.block_size
        if isinstance(target, LeadsSteps):
            self.host.passes = target.new_passes(parts.kv[0], *sizes, pool)
        else:
            assert isinstance(target, FusedTarget)
            self.host.passes = PassGraphs(target, parts.kv[0], *sizes, pool)
        if is_exact:
            self.captured = self.host.captured = CapturedSteps(parts, pool)
            self.prompts = PromptSteps(self.captured, self.host)
            self.capacity = self.captured.capacity
            if self.is_host_drafting:
                say_once(
                    f"{next(iter(self.capacity.methods))}: the host drafts, as there is no device "
                    "form of it with these options: steps with its drafts are not captured"
                )

    @property
    def is_host_drafting(self) -> bool:
        """Whether the host decides how much to draft, and must know what passes cost."""
        is_captured = self.captured is not None and self.captured.drafter is not None
        return self.capacity.max_nodes > 0 and not is_captured

    def preparations(
        self, *, is_greedy: bool = False, is_rehearsal: bool = False
    ) -> list[Callable[[], Any]]:
        """Calls to make before the first request: they capture passes and steps.

        For a rehearsal, the calls run what capturing would run and keep nothing, so that `ahead`
        sees which kernels are needed. Its last calls are for steps that only some requests need.
        """
        todo: list[Callable[[], Any]] = []
        if (passes := self.host.passes) is not None:
            todo += passes_to_capture(passes, is_rehearsal=is_rehearsal)
        if self.captured is not None:
            todo += self.captured.preparations(is_greedy=is_greedy, is_rehearsal=is_rehearsal)
        return todo

    def wait_for_compilers(self) -> None:
        """Wait until no kernel is compiled in the background any more, which takes cores."""
        if self.captured is not None:
            from hunch.kernels.gpu_compile import wait_for_background

            wait_for_background()

    # --- the engine's side ------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Launch a plan's captured step and its prompts; the host runs rows that neither takes."""
        if self.host.has_stages:
            self._begin(plan)
            return
        self._update_rows(plan)
        pending = None
        if self.captured is not None:
            try:
                pending = self.captured.launch(
                    plan.work, self._receive_pending, self._apply_pending
                )
            except torch.OutOfMemoryError:  # in an upload, say
                log.warning("no GPU memory to launch a step: the host runs it, row by row")
                self.captured.steps.recount()
                plan = _row_by_row(plan)
        if pending is None and (prompts := self._launch_prompts(plan)) is not None:
            self._queue.append(prompts)
            return
        if pending is None:
            # The host may run rows that took captured steps, so it must know their tokens.
            self._apply_pending()
            self._queue.append(self._run_on_host(plan))
            return
        pending.plan_id = plan.id
        if len(pending.group.work) < len(plan.work):
            taken = set(pending.group.ids)
            rest = replace(plan, work=[work for work in plan.work if work.row not in taken])
            pending.order, pending.others = plan.work, self._launch_prompts(rest, pending)
            if pending.others is None:
                self._apply_pending()  # while the captured step runs, so that the device is busy
                pending.others = self._run_on_host(rest)
        self._queue.append(pending)

    def _launch_prompts(
        self, plan: StepPlan, beside: PendingStep | None = None
    ) -> PendingPrompts | StepResult | None:
        """Launch a pass over prompts, and what follows it; None: the host must run these rows.

        It returns a result if there is nothing to wait for, or if memory was short and the host ran
        the rows. `beside`: the captured step of the same plan, which is not in the queue yet.
        """
        if self.captured is None or self.prompts is None or not self.prompts.takes(plan.work):
            return None
        try:
            launched = self.prompts.launch(plan, partial(self._receive_pending, beside))
        except torch.OutOfMemoryError:  # of the pass, or to capture what follows it
            log.warning("no GPU memory to read prompts: the host reads them, one by one")
            self.captured.steps.recount()
            self._apply_pending()
            return self._run_on_host(_row_by_row(plan))
        self._keep_states(plan)
        return launched

    def _begin(self, plan: StepPlan) -> None:
        """Start the pass of a target with pipeline stages; `collect` does the rest of the step."""
        changed = {*plan.freed_rows, *(start.row for start in plan.starts)}
        if any(isinstance(item, BegunStep) and item.rows & changed for item in self._queue):
            self._apply_pending()  # a request in it was aborted or preempted
        some_alone = any(work.runs_alone for work in plan.work)
        if some_alone:
            self._apply_pending()
        self._update_rows(plan)
        if not some_alone:
            try:
                self._queue.append(self.host.begin(plan))
                return
            except torch.OutOfMemoryError:  # before anything of it was begun
                self._apply_pending()
        self._queue.append(self._run_on_host(plan))

    def _update_rows(self, plan: StepPlan) -> None:
        """What a plan asks for before its step: free rows, start requests in rows, add blocks."""
        freed = plan.freed_rows
        if self.captured is not None and self.captured.row_extras.watches(freed):
            self._receive_pending()  # a preempted row's grammar and trace must have all its tokens
        for row in freed:
            self.rows.leave(row)
            self.sampling.leave(row)
            self.grammars.leave(row)
        if freed:
            self.drafter.forget(freed)
        for start in plan.starts:
            self.rows.start(start)
            self.sampling.start(start.row, start.request, start.tokens)
            self.grammars.start(start)
            if start.snapshot >= 0:
                self._copy_state(self.capacity.max_rows + start.snapshot, start.row)
        for row, blocks in plan.blocks.items():
            self.rows.add_blocks(row, blocks)
        if self.captured is not None and plan.starts:
            self.captured.start(plan.starts)

    # --- steps run by the host --------------------------------------------------------------------

    def _run_on_host(self, plan: StepPlan) -> StepResult:
        """Run a plan as a step of the host."""
        result = self._run_rows(plan)
        self._keep_states(plan)
        if self.captured is not None:
            self.captured.after_host_step(result)
        return result

    def _keep_states(self, plan: StepPlan) -> None:
        """Copy recurrent states into snapshots, for later prompts that begin alike."""
        for work in plan.work:
            if work.snapshot >= 0:
                self._copy_state(work.row, self.capacity.max_rows + work.snapshot)

    @torch.inference_mode()
    def _copy_state(self, source: int, target: int) -> None:
        """Copy a recurrent state. Rows are numbered first, then snapshots."""
        states = self.host.kv[0].states
        assert states is not None
        states.copy(source, target)

    def _run_rows(self, plan: StepPlan) -> StepResult:
        """Run a plan's rows together, or one by one if there is not enough memory for that.

        A step that failed can be repeated: nothing is committed until all that takes memory is
        done, and KV is written to the same slots again. Only recurrent states cannot be restored.
        """
        together = [work for work in plan.work if not work.runs_alone]
        if len(together) == len(plan.work):
            try:
                return self.host.run(plan)
            except torch.OutOfMemoryError:
                num_rows, together = len(plan.work), []
                log.warning("out of GPU memory in a step of %d rows: they go one by one", num_rows)
        parts = [self._run_rows(replace(plan, work=together))] if together else []
        parts += [self._run_alone(plan, work) for work in plan.work if work not in together]
        by_row = {result.row: result for part in parts for result in part.rows}
        return StepResult(
            id=plan.id,
            rows=[by_row[work.row] for work in plan.work],
            target_seconds=sum(part.target_seconds for part in parts),
            draft_seconds=sum(part.draft_seconds for part in parts),
            plain_seconds=sum(part.plain_seconds for part in parts),
        )

    def _run_alone(self, plan: StepPlan, work: RowWork) -> StepResult:
        """Run one of a plan's rows; if it does not fit alone either, it ends with an error."""
        if self._is_lost(work.row):
            self.rows.leave(work.row)
            return StepResult(id=plan.id, rows=[RowResult(row=work.row, is_lost=True)])
        torch.cuda.empty_cache()
        try:
            return self.host.run(replace(plan, work=[work]))
        except torch.OutOfMemoryError:
            return StepResult(id=plan.id, rows=[self._end_without_memory(work)])

    def _is_lost(self, row: int) -> bool:
        """Whether a failed step has changed the row's recurrent state."""
        states = self.host.kv[0].states
        if states is None or self.rows.requests[row] is None:
            return False
        return states.is_ahead(row, int(self.rows.computed[0, row]))

    def _end_without_memory(self, work: RowWork) -> RowResult:
        computed = tuple(self.rows.computed[:, work.row].tolist())
        self.rows.leave(work.row)
        return RowResult(row=work.row, finish="abort", problem=NO_MEMORY, computed=computed)

    # --- results ----------------------------------------------------------------------------------

    def collect(self) -> StepResult:
        """The result of the oldest plan in the queue, applied to the host's rows.

        Waits for the device if the result is not there yet.
        """
        oldest = self._queue.popleft()
        if isinstance(oldest, StepResult):
            return oldest
        if isinstance(oldest, BegunStep):
            try:
                return self.host.finish(oldest)
            except torch.OutOfMemoryError:
                return self._repeat(oldest)
        assert self.captured is not None
        assert self.prompts is not None
        if isinstance(oldest, PendingPrompts):
            return self.prompts.apply(oldest)
        result, others = self.captured.apply(oldest), oldest.others
        if others is None:
            return result
        assert oldest.order is not None
        others = others if isinstance(others, StepResult) else self.prompts.apply(others)
        return merge_results(oldest.group.ids, oldest.order, result, others)

    def has_result(self) -> bool:
        """Whether the oldest plan was run by the host, or its first tokens are already there."""
        oldest = self._queue[0]
        if isinstance(oldest, PendingPrompts) and self.captured is not None:
            step = oldest.step
            return step is not None and self.captured.steps.download.is_there(step.buffer)
        return isinstance(oldest, StepResult)

    def _repeat(self, failed: BegunStep) -> StepResult:
        """Run the rows of a step that ran out of memory one by one, then repeat later steps.

        Those may have read what the failed step has written.
        """
        num_rows, later = len(failed.plan.work), list(self._queue)
        log.warning("out of GPU memory in a step of %d rows: they go one by one", num_rows)
        self.host.undo()
        for item in later:
            if isinstance(item, BegunStep) and item.under_way is not None:
                self.host.drop(item)
        for item in (*later[::-1], failed):
            if isinstance(item, BegunStep):
                self.host.go_back(item)
        result = self._run_on_host(_row_by_row(failed.plan))
        # Where a row may have lost its state, later steps run row by row, too.
        one_by_one = self.capacity.has_recurrent_states
        self._queue = deque(
            self._run_on_host(_row_by_row(item.plan) if one_by_one else item.plan)
            if isinstance(item, BegunStep)
            else item
            for item in later
        )
        return result

    def _receive_pending(self, last: PendingStep | None = None) -> set[int]:
        """Receive the result of every pending captured step, without applying it.

        `last`: one that is not in the queue yet. Returns the rows whose tokens were taken back.
        """
        rows: set[int] = set()
        if self.captured is None:
            return rows
        for item in (*self._queue, last):
            prompts = item.others if isinstance(item, PendingStep) else item
            if isinstance(item, PendingStep):
                rows |= self.captured.receive(item)
            step = prompts.step if isinstance(prompts, PendingPrompts) else None
            if step is not None and step.group.has_masks:
                rows |= self.captured.receive(step)
        return rows

    def _apply_pending(self) -> None:
        """Apply the result of every pending step; the results wait to be collected."""
        results: deque[Submitted] = deque()
        while self._queue:
            results.append(self.collect())
        self._queue = results

    def reset(self) -> None:
        if isinstance(self.drafter, Clears):
            self.drafter.clear()

    def check_alive(self) -> None:
        """Raise if a process of the target has ended."""
        if isinstance(self.target, OverProcesses):
            self.target.check_alive()

    def close(self) -> None:
        self._queue.clear()
        if self.on_close is not None:
            self.on_close()


def _row_by_row(plan: StepPlan) -> StepPlan:
    """The same plan, in which the host runs each row by itself."""
    return replace(plan, work=[replace(work, runs_alone=True) for work in plan.work])

"""A step run by the host: pack, target forward, verify, commit, observe, propose.

Shape letters: T packed tokens, M rows of logits, R rows of the step, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hunch.draft import TargetStep
from hunch.models.target import BegunPass, Hidden, OverProcesses
from hunch.sampling.stop import cut_at_end
from hunch.step.batch import Batch, RowPart, drafts_of, pack
from hunch.step.host_scores import HostScores
from hunch.step.parts import BegunStep, Outcome, Passes, RunnerParts
from hunch.step.step_logits import StepLogits
from hunch.types import DraftTrace, RowResult, StepPlan, StepResult
from hunch.verify.base import RowDraft, TargetChoices, Verify

if TYPE_CHECKING:  # needs Triton
    from hunch.step.captured_step import CapturedSteps

log = logging.getLogger("hunch")


class HostStep:
    """Steps run by the host: on a CPU all; on a GPU those that cannot be launched ahead."""

    def __init__(self, parts: RunnerParts) -> None:
        self.capacity, self.target, self.kv = parts.capacity, parts.target, parts.kv
        self.drafter, self.verify, self.sampling = parts.drafter, parts.verify, parts.sampling
        self.rows, self.grammars, self.cost = parts.rows, parts.grammars, parts.cost
        self.scores = HostScores(parts)
        self.logits = StepLogits(parts.target)
        self.device: torch.device = parts.target.device
        self._is_host = self.device.type == "cpu"
        self.has_stages = parts.capacity.max_under_way > 1  # of a pipeline: passes overlap
        self._prepares = None if self.has_stages else parts.prepares
        self._last_end = 0.0  # when the last step's tokens were committed
        self.passes: Passes | None = None  # captured passes, on a GPU
        self._over_processes = parts.target if isinstance(parts.target, OverProcesses) else None
        self.captured: CapturedSteps | None = None  # on a GPU

    def run(self, plan: StepPlan) -> StepResult:
        """Do all of a plan's work, in one pass over its rows' tokens.

        If it runs out of memory, nothing is committed. Only the rows' drafts are gone.
        """
        begun = self.begin(plan)
        try:
            return self.finish(begun)
        except torch.OutOfMemoryError:
            self.undo()
            self.go_back(begun)
            raise

    @torch.inference_mode()
    def drop(self, begun: BegunStep) -> None:
        """Let go of a step that was begun and cannot be used."""
        assert begun.under_way is not None
        assert self._over_processes is not None
        with suppress(torch.OutOfMemoryError):  # it is dropped in any case
            self._over_processes.finish(begun.under_way)
        self.undo()

    @torch.inference_mode()
    def undo(self) -> None:
        """Nothing that a failed step has begun or written stays."""
        if self._prepares is not None:
            self._prepares.settle()
        if self._over_processes is not None:
            self._over_processes.undo()

    def go_back(self, begun: BegunStep) -> None:
        """Leave rows as they were before a step that was begun."""
        for part in begun.batch.parts:
            self.rows.computed[0, part.row] = part.start

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> BegunStep:
        """Pack a plan's rows; with pipeline stages, start the pass too.

        A row that is catching up may be in several begun steps, one chunk in each.
        """
        started = perf_counter()
        for work in plan.work:
            self.rows.max_draft[work.row] = work.max_draft
        batch = pack(self.rows, plan.work)
        if not self.has_stages or not batch.parts or self._over_processes is None:
            return BegunStep(plan, batch, started)
        batch = batch.copy()
        moved, layers = batch.to(self.device), self.drafter.needs.feature_layers
        under_way = self._over_processes.begin(moved.ids_T, moved.attn, self.kv[0], layers)
        for part in batch.parts:
            self.rows.computed[0, part.row] = part.start + part.num_known
        return BegunStep(plan, batch, started, under_way)

    @torch.inference_mode()
    def finish(self, begun: BegunStep) -> StepResult:
        """Do the rest of a step. Its seconds count from the end of the step before."""
        plan, batch = begun.plan, begun.batch
        started = max(begun.started, self._last_end)
        outcomes = [Outcome(part, RowResult(row=part.row)) for part in batch.parts]
        hidden: Hidden | None = None
        if batch.parts:
            self._prepare(batch.parts)
            hidden = self._forward(batch, begun.under_way)
            scores = self.scores.of_prompts(hidden.last_TD, batch.parts)
            scores.add_to({outcome.part.row: outcome.result for outcome in outcomes})
        checked = [outcome for outcome in outcomes if outcome.part.is_caught_up]
        logits_MV = self._decide(hidden, checked) if hidden and checked else None
        if self._over_processes is not None:
            self._over_processes.check_step()  # without all ranks the result is wrong
        if self._prepares is not None:
            self._prepares.settle()
        self._before_commit(checked)
        self._commit(outcomes)
        committed = perf_counter()
        drafting = 0.0 if hidden is None else self._draft(batch, hidden, outcomes, logits_MV)
        self._last_end = perf_counter()
        return self._result(plan, batch, outcomes, committed - started, drafting)

    def _prepare(self, parts: list[RowPart]) -> None:
        """Let the drafter, if it can, guess ahead while the target checks these rows' drafts."""
        deciding = [part for part in parts if part.is_caught_up]
        if self._prepares is not None and deciding:
            rows = self.rows.view([part.row for part in deciding])
            self._prepares.prepare(rows, [part.num_nodes for part in deciding])

    def _draft(
        self, batch: Batch, hidden: Hidden, outcomes: list[Outcome], logits_MV: Tensor | None
    ) -> float:
        """Let the drafter observe what was committed, and propose; without memory, no drafts.

        Returns the seconds that it took.
        """
        rows = [outcome.part.row for outcome in outcomes]
        if self.captured is not None and not self.captured.observes(rows):
            return 0.0
        began = perf_counter()
        try:
            self.drafter.observe(self._target_step(batch, hidden, outcomes, logits_MV))
            seconds = perf_counter() - began
            return seconds + self._propose([outcome for outcome in outcomes if outcome.is_running])
        except torch.OutOfMemoryError:
            log.warning("no GPU memory to draft in: %d rows go on without a draft", len(rows))
            self.drafter.forget(rows)
            return perf_counter() - began

    def _forward(self, batch: Batch, under_way: BegunPass | None) -> Hidden:
        """The target's pass, or the rest of it if it was begun."""
        if under_way is not None and self._over_processes is not None:
            return self._over_processes.finish(under_way)
        return self.forward(batch)

    def forward(self, batch: Batch) -> Hidden:
        """The target's pass over a packed batch."""
        if self.passes is not None:
            return self.passes.forward(batch)
        if not self._is_host:
            batch = batch.to(self.device)
        layers = self.drafter.needs.feature_layers
        return self.target.forward(batch.ids_T, batch.attn, self.kv[0], layers)

    def _decide(self, hidden: Hidden, checked: list[Outcome]) -> Tensor:
        """Compute the logits of every root and node, and let the verifier decide."""
        parts = [outcome.part for outcome in checked]
        num_checked = sum(1 + part.num_nodes for part in parts)
        hidden_MD = hidden.last_TD
        if num_checked < hidden_MD.shape[0]:
            index = np.concatenate([np.arange(p.root, p.root + 1 + p.num_nodes) for p in parts])
            # Does not wait for the device.
            hidden_MD = hidden_MD[torch.from_numpy(index).to(self.device, non_blocking=True)]
        logits_MV = self.logits(hidden_MD)
        mask_MV = None
        if self.grammars.matchers:
            mask_MV = self.grammars.masks(parts, logits_MV.shape[1])
            mask_MV = None if mask_MV is None else mask_MV.to(logits_MV.device)
        if self.verify.in_tensors is not None and self.sampling.is_dense:
            decided = self._verify(self.verify.in_tensors, parts, logits_MV, mask_MV)
        else:
            decided = self._walk_rows(parts, logits_MV, mask_MV)
        for outcome, (tokens, path) in zip(checked, decided, strict=True):
            outcome.accepted = path[:-1]
            outcome.result.tokens = tokens
            outcome.result.num_accepted = len(tokens) - 1
        self.scores.of_decided(checked, logits_MV, mask_MV)
        return logits_MV

    def _verify(
        self, verify: Verify, parts: list[RowPart], logits_MV: Tensor, mask_MV: Tensor | None
    ) -> list[tuple[list[int], list[int]]]:
        """Per part: the tokens to commit, and the node behind each (-1: the bonus)."""
        draft = drafts_of(parts, self.device)
        rows = self.rows.view([part.row for part in parts]).to(self.device)
        verdict = verify(draft, logits_MV, rows, self.sampling, mask_MV)
        num_k = verdict.tokens_RK.shape[1]
        columns = verdict.tokens_RK, verdict.path_RK, verdict.num_tokens_R[:, None]
        lines: list[list[int]] = torch.cat(columns, dim=1).tolist()  # one wait for the device
        return [(line[: line[-1]], line[num_k : num_k + line[-1]]) for line in lines]

    def _walk_rows(
        self, parts: list[RowPart], logits_MV: Tensor, mask_MV: Tensor | None
    ) -> list[tuple[list[int], list[int]]]:
        """`_verify` row by row, on the host."""
        array_MV = None if self.sampling.is_dense else self.logits.array(logits_MV)
        target = TargetChoices(logits_MV, self.sampling, mask_MV, array_MV)
        decided, first = [], 0
        for part in parts:
            draft = RowDraft(
                part.row,
                part.start + part.num_known,
                first,
                part.tokens_N.tolist(),
                part.parents_N.tolist(),
                part.nodes.q_NV,
                part.nodes.is_sampled_N,
            )
            decided.append(self.verify.walk(draft, target))
            first += 1 + part.num_nodes
        return decided

    def _before_commit(self, checked: list[Outcome]) -> None:
        """Do what may run out of memory: move the accepted nodes' KV, count the tokens decided.

        Tokens that `_commit` drops are counted too: they are the last of their rows.
        """
        for outcome in checked:
            part = outcome.part
            if part.num_levels is not None and outcome.accepted:  # a chain's KV is in place
                known, nodes = part.start + part.num_known, np.asarray(outcome.accepted)
                slots = self.rows.slots(part.row, known, known + part.num_nodes)
                self.kv[0].compact(slots[nodes], slots[: len(nodes)])
        rows = [outcome.part.row for outcome in checked]
        self.sampling.commit(rows, [outcome.result.tokens for outcome in checked])

    def _commit(self, outcomes: list[Outcome]) -> None:
        """Write the decided tokens, and find out which rows end. This takes no memory."""
        for outcome in outcomes:
            part, result = outcome.part, outcome.result
            request = self.rows.requests[part.row]
            assert request is not None
            known, result.num_processed = part.start + part.num_known, part.num_known
            if not part.is_caught_up:
                self.rows.computed[0, part.row] = max(known, self.rows.computed[0, part.row])
                continue
            self.rows.computed[0, part.row] = known
            result.num_levels = part.num_levels
            result.num_checked = min(part.num_nodes, max(int(self.rows.end[part.row]) - known, 0))
            result.method = part.nodes.method
            if request.params.speculation.trace:
                result.trace = DraftTrace(
                    tokens=part.tokens_N.tolist(),
                    parents=part.parents_N.tolist(),
                    accepted=outcome.accepted,
                    method=part.nodes.method,
                )
            num_kept, result.finish = cut_at_end(
                result.tokens, request, known - len(request.prompt_ids)
            )
            num_kept, problem = self.grammars.commit(part.row, result.tokens[:num_kept])
            if problem is not None:
                result.finish, result.problem = "abort", problem
            result.tokens = result.tokens[:num_kept]
            if result.logprobs is not None:
                result.logprobs = result.logprobs[:num_kept]
            self.rows.commit(part.row, result.tokens)
            self.rows.computed[0, part.row] += min(len(outcome.accepted), num_kept)
            outcome.is_running = result.finish is None
            if not outcome.is_running:
                self.rows.leave(part.row)

    def _target_step(
        self, batch: Batch, hidden: Hidden, outcomes: list[Outcome], logits_MV: Tensor | None
    ) -> TargetStep:
        needs, rows = self.drafter.needs, self.rows.view([o.part.row for o in outcomes])
        if needs.hidden or needs.feature_layers:
            counts = np.array([o.part.num_known + len(o.accepted) for o in outcomes])
            start_R = np.array([outcome.part.start for outcome in outcomes])
            index_T = torch.tensor([i for o in outcomes for i in _kept(o)], device=self.device)
            step = TargetStep(
                rows=rows,
                start_R=torch.from_numpy(start_R),
                stop_R=torch.from_numpy(start_R + counts),
                offset_R=torch.from_numpy(counts.cumsum() - counts),
                hidden_TD=hidden.last_TD[index_T],
                features=tuple(feature_TD[index_T] for feature_TD in hidden.features),
                is_caught_up_R=torch.tensor([outcome.part.is_caught_up for outcome in outcomes]),
            )
        else:
            step = TargetStep.without_states(rows)
        if needs.top and logits_MV is not None:
            parts = [outcome.part for outcome in outcomes if outcome.part.is_caught_up]
            index = [i for p in parts for i in range(p.root, p.root + 1 + p.num_nodes)]
            step.checked_M = batch.ids_T[torch.tensor(index)].to(self.device)
            step.top_MC = logits_MV.topk(needs.top, dim=-1).indices
        return step

    def _propose(self, running: list[Outcome]) -> float:
        """Ask for drafts where the plan allows them and a row can use one; returns seconds."""
        if self.captured is not None and running:
            is_captured_R = self.captured.drafts_for([outcome.part.row for outcome in running])
            pairs = zip(running, is_captured_R.tolist(), strict=True)
            running = [outcome for outcome, is_captured in pairs if not is_captured]
        drafting: list[Outcome] = []
        for outcome in running:
            row = outcome.part.row
            remaining = int(self.rows.end[row] - self.rows.known[row]) - 1
            self.rows.max_draft[row] = min(int(self.rows.max_draft[row]), max(remaining, 0))
            if self.rows.max_draft[row] > 0:
                drafting.append(outcome)
        if not drafting:
            return 0.0
        began = perf_counter()
        rows = [outcome.part.row for outcome in drafting]
        counts = self.rows.put_drafts(rows, self.drafter.propose(self.rows.view(rows)))
        for outcome, row, count in zip(drafting, rows, counts, strict=True):
            outcome.result.num_waiting = count
            if row in self.grammars.matchers:
                fit = self.grammars.fit(row, self.rows.drafts[row], int(self.rows.max_draft[row]))
                self.rows.drafts[row] = fit
                outcome.result.num_waiting = 0 if fit is None else len(fit.tokens_N)
        return perf_counter() - began

    def _result(
        self,
        plan: StepPlan,
        batch: Batch,
        outcomes: list[Outcome],
        target_seconds: float,
        draft_seconds: float,
    ) -> StepResult:
        by_row = {outcome.part.row: outcome.result for outcome in outcomes}
        for outcome in outcomes:
            part, computed = outcome.part, self.rows.computed[:, outcome.part.row].tolist()
            if not part.is_caught_up:  # later steps may have begun with more of the row
                computed[0] = part.start + part.num_known
            outcome.result.computed = tuple(computed)
        num_tokens = sum(part.num_tokens for part in batch.parts)
        num_known = sum(part.num_known for part in batch.parts)
        plain_seconds = target_seconds
        if num_tokens:
            self.cost.record(num_tokens, target_seconds)
            plain_seconds = self.cost.without_nodes(num_known, num_tokens, target_seconds)
        return StepResult(
            id=plan.id,
            rows=[by_row.get(work.row) or RowResult(row=work.row) for work in plan.work],
            target_seconds=target_seconds,
            draft_seconds=draft_seconds,
            plain_seconds=plain_seconds,
        )


def _kept(outcome: Outcome) -> list[int]:
    """Packed indices of a row's known tokens and accepted nodes."""
    part = outcome.part
    known = list(range(part.first, part.first + part.num_known))
    return known + [part.root + 1 + node for node in outcome.accepted]

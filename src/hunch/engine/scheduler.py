"""Which sequences take part in the next step, with how many tokens, and in which blocks.

There is no prefill and no decode: a sequence has known tokens, some of them computed, and catches
up. Running rows come first, in order of arrival, then waiting ones, by priority and arrival, as far
as rows, blocks and the step's token budget allow. If tokens are short, every row gets one before
any gets more; if blocks are short, drafts are shortened first, then the least urgent of the rows
that are not planned yet is preempted.

A step may be planned while earlier ones are *pending*: submitted, not collected. What they commit
is known only as a range: at least one token each, at most one more than the nodes they check.
With pipeline stages, pending steps are of different rows, each step with its share of the budget.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque

from hunch.config import ScheduleConfig
from hunch.engine.blocks import BlockPool
from hunch.engine.kv_events import KVEventLog
from hunch.engine.sequence import Member, Sequence, State
from hunch.engine.snapshots import NO_SNAPSHOT, Snapshots
from hunch.types import Capacity, RowResult, RowStart, RowWork, StepPlan

NO_LIMIT = 1 << 62
SPARE_BLOCKS = 8  # spare blocks that a row with pending steps takes, while there are plenty


class Scheduler:
    """Plans steps; holds the queue, the rows and the blocks."""

    def __init__(
        self,
        config: ScheduleConfig,
        capacity: Capacity,
        *,
        is_caching: bool = True,
        max_draft_batch: int | None = None,
        events: KVEventLog | None = None,  # receives changes of which blocks can be found
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.max_rows = min(config.num_rows, capacity.max_rows)
        self.num_preemptions = 0
        states = Snapshots(capacity.num_snapshots) if capacity.has_recurrent_states else None
        is_caching = is_caching and (states is None or capacity.num_snapshots > 0)
        self.pool = BlockPool(
            capacity.num_blocks, capacity.block_size, capacity.groups, is_caching=is_caching,
            window=capacity.window, snapshots=states, events=events,
        )  # fmt: skip
        self._max_tokens, self._max_under_way = config.num_tokens, capacity.max_under_way
        self._max_prompt = capacity.max_prompt or config.num_tokens
        self._prompt_budget = self._max_prompt  # tokens of prompts that the next step may read
        self._writes_bonus_kv, self._past_end = capacity.writes_bonus_kv, capacity.past_end
        limits = (max_draft_batch, capacity.max_draft_rows)
        self._max_draft_rows: int | None = min((n for n in limits if n is not None), default=None)
        self._is_drafting, self._max_members = True, self.max_rows  # in the next step
        self._free_rows = list(range(self.max_rows))[::-1]
        self._freed_rows: list[int] = []  # rows to report in the next plan that has work
        self._new_blocks: dict[int, tuple[int, ...]] = {}  # blocks that rows take in it
        self._leaving: list[Sequence] = []  # their blocks are freed after pending steps
        self._next_id = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: one that is new, or one that was preempted."""
        if not self.waiting or self.waiting[-1].place < sequence.place:
            self.waiting.append(sequence)
        else:
            at = bisect(self.waiting, sequence.place, key=lambda s: s.place)
            self.waiting.insert(at, sequence)

    def plan(self) -> tuple[StepPlan, list[Member]]:
        """The next step. Without work there is nothing to submit."""
        plan = StepPlan(id=self._next_id)
        members: list[Member] = []
        self._set_limits()
        self._prompt_budget = self._max_prompt
        budget = self._plan_running(members, self._max_tokens)
        is_preempting = any(not sequence.is_over for sequence in self._leaving)
        if self.waiting and not is_preempting:  # else: a preempted one is first in the queue
            self._plan_waiting(plan, members, budget)
        if members:
            plan.work = [member.work for member in members]
            plan.freed_rows, self._freed_rows = self._freed_rows, []
            plan.blocks, self._new_blocks = self._new_blocks, {}
            self._next_id += 1
        return plan, members

    def _set_limits(self) -> None:
        """Set how many rows this step may have, and whether they may draft and check drafts."""
        limit = self._max_draft_rows
        num_rows = len(self.running) + min(len(self.waiting), len(self._free_rows))
        self._max_members = -(-num_rows // self._max_under_way)
        was_drafting, self._is_drafting = self._is_drafting, limit is None or num_rows <= limit
        if self._is_drafting is not was_drafting:
            for sequence in self.running:
                sequence.steady_until = 0

    def _plan_running(self, members: list[Member], budget: int) -> int:
        num_later = len(self.running)
        for sequence in tuple(self.running):
            num_later -= 1
            if budget <= 0 or len(members) >= self._max_members:
                break
            if self._max_under_way > 1 and sequence.pending_least:
                continue  # its next input is what the pending step decides
            least_known = len(sequence.tokens) + sequence.num_pending
            is_steady = least_known <= sequence.steady_until  # the same work as in the last step
            if is_steady and least_known + sequence.pending_nodes <= sequence.steady_slots:
                member = sequence.member
                assert member is not None
                num_nodes = member.work.num_nodes
                if budget - num_later > num_nodes:
                    sequence.num_pending += 1
                    sequence.pending_nodes += num_nodes
                    members.append(member)
                    budget -= 1 + num_nodes
                    continue
            if sequence.state is not State.RUNNING:
                continue  # preempted by a row before it
            if len(sequence.tokens) + sequence.pending_least >= sequence.end:
                continue  # pending steps will finish it
            share = budget - num_later if budget > num_later else 1
            is_reading = sequence.num_lacking > 1
            share = min(share, self._prompt_budget) if is_reading else share
            if share <= 0:
                continue  # other prompts go first
            member = self._fit(sequence, share, num_later)
            if member is None and self._make_room(sequence):
                member = self._fit(sequence, share, num_later)
            if member is not None:
                members.append(member)
                budget -= member.work.num_tokens + member.work.num_nodes
                self._prompt_budget -= member.work.num_tokens if is_reading else 0
        return budget

    def _plan_waiting(self, plan: StepPlan, members: list[Member], budget: int) -> None:
        pool = self.pool
        while self.waiting and self._free_rows and len(members) < self._max_members:
            room = min(budget, self._prompt_budget)
            if room <= 0:
                return
            sequence = self.waiting[0]
            if self._can_share_soon(sequence):
                return
            num_known = len(sequence.tokens)
            # The last known token is always computed, as its logits decide the next one. So are
            # tokens that are needed for a prompt's missing scores, or whose states are wanted.
            most = sequence.output.max_cached
            max_hit = num_known - 1 if most is None else min(num_known - 1, most)
            hit = pool.find(sequence.table, sequence.tokens, max_hit)
            num_missing = pool.num_held(self._least_slots(sequence), hit)
            # One block per running row stays free: otherwise the next steps would preempt.
            if num_missing + hit.num_idle + len(self.running) > pool.num_free:
                return
            pool.open(sequence.table, hit, 0 if pool.is_sliding else num_known)
            pool.num_queried += num_known
            pool.num_hit += hit.num_computed[0]
            self.waiting.popleft()
            sequence.state, sequence.row = State.RUNNING, self._free_rows.pop()
            sequence.num_computed = hit.num_computed[0]
            if sequence.num_cached is None:
                sequence.num_cached = hit.num_computed[0]
            sequence.snapshot_lengths = pool.snapshot_lengths(hit, num_known)
            self.running.append(sequence)
            plan.starts.append(
                RowStart(
                    row=sequence.row,
                    request=sequence.request,
                    tokens=sequence.tokens.copy(),
                    num_computed=hit.num_computed,
                    blocks=sequence.table.blocks.copy(),
                    snapshot=hit.snapshot,
                )
            )
            member = self._fit(sequence, room, 0)
            assert member is not None  # there are blocks for all it needs
            members.append(member)
            budget -= member.work.num_tokens + member.work.num_nodes
            self._prompt_budget -= member.work.num_tokens

    def _can_share_soon(self, sequence: Sequence) -> bool:
        """Whether to wait because the request's first sample is computing the same prompt."""
        leader, size = sequence.leader, self.pool.block_size
        if leader is None or not self.pool.is_caching or leader.state is not State.RUNNING:
            return False
        num_shared = (len(sequence.request.prompt_ids) - 1) // size * size
        return self.pool.is_worth_keeping(num_shared) and leader.num_computed < num_shared

    def _fit(self, sequence: Sequence, budget: int, num_later: int) -> Member | None:
        """The sequence's part in this step, with its blocks taken; None if blocks are short."""
        pool, num_known = self.pool, len(sequence.tokens)
        num_lacking, lengths = sequence.num_lacking, sequence.snapshot_lengths
        while lengths and lengths[0] <= num_known - num_lacking:
            del lengths[0]  # passed without keeping a state, as there was no snapshot free
        if lengths:
            num_tokens = num_lacking - num_known + lengths[0]
            snapshot = NO_SNAPSHOT
            if num_tokens <= budget:
                assert pool.snapshots is not None
                del lengths[0]
                snapshot = pool.snapshots.reserve()
            if snapshot != NO_SNAPSHOT:
                return self._add_work(
                    sequence, num_tokens, 0, 0, is_deciding=False, snapshot=snapshot
                )
        if pool.is_sliding and num_lacking > 1:
            position = num_known - num_lacking
            budget = min(budget, self._room_to_read(sequence, position, num_lacking, num_later))
            if budget <= 0:
                return None
            if num_lacking > budget:
                num_new = pool.num_missing(sequence.table, position + budget)
                self._new_blocks[sequence.row] = pool.take(sequence.table, num_new)
        if num_lacking > budget:
            return self._add_work(sequence, budget, 0, 0, is_deciding=False)
        # At 0, a pending step decides the token that this one processes.
        return self._fit_draft(sequence, max(num_lacking, 1), budget, num_later)

    def _fit_draft(
        self, sequence: Sequence, num_tokens: int, budget: int, num_later: int
    ) -> Member | None:
        """`_fit` for a step that catches up on all known tokens, and so may check nodes and draft.

        Slots are needed for the known tokens and the nodes checked now. The bonus token and the
        next draft need some too, as a drafter may write KV while it drafts.
        """
        pool = self.pool
        # What pending steps commit is not known yet: the runner cuts drafts at the row's end.
        num_wanted = NO_LIMIT if sequence.num_pending else sequence.end - len(sequence.tokens)
        num_nodes = sequence.num_nodes if self._is_drafting else 0
        max_draft = sequence.max_nodes if self._is_drafting else 0
        if num_nodes:
            num_nodes = min(num_nodes, budget - num_tokens, num_wanted - 1)
        if max_draft and (num_wanted <= 2 or not self._past_end):
            max_draft = max(min(max_draft, num_wanted - 2), 0)

        table = sequence.table
        most_known, least = sequence.most_known, self._least_slots(sequence)
        slots = min(most_known + num_nodes + 1 + max_draft, sequence.end + self._past_end)
        if slots <= len(table.blocks) * pool.block_size:
            return self._add_work(sequence, num_tokens, num_nodes, max_draft)
        num_new, num_needed = pool.num_missing(table, slots), pool.num_missing(table, least)
        if num_needed > pool.num_free:
            return None
        # Drafts must leave a block for each row that comes after.
        num_new = max(num_needed, min(num_new, pool.num_free - num_later))
        spare = (len(table.blocks) + num_new) * pool.block_size - most_known
        if slots - most_known > spare:
            num_nodes = min(num_nodes, spare - (least - most_known))
            max_draft = max(min(max_draft, spare - num_nodes - 1), 0)
        if num_new:
            num_new += self._num_spare(sequence, num_new)
            self._new_blocks[sequence.row] = pool.take(table, num_new)
        return self._add_work(sequence, num_tokens, num_nodes, max_draft)

    def _room_to_read(
        self, sequence: Sequence, position: int, num_lacking: int, num_later: int
    ) -> int:
        """Tokens it can catch up on, if sequences take blocks as they go."""
        num_free = self.pool.num_free
        num_blocks = len(sequence.table.blocks) + max(num_free - num_later, min(num_free, 1))
        room = num_blocks * self.pool.block_size - position
        # After the last of them a token is decided, and perhaps its KV is written.
        return room if num_lacking + self._writes_bonus_kv <= room else min(room, num_lacking - 1)

    def _least_slots(self, sequence: Sequence) -> int:
        """The least slots that the sequence needs for its next step.

        A drafter that writes KV within the step always processes the new token too.
        """
        return min(sequence.most_known + self._writes_bonus_kv, sequence.end)

    def _num_spare(self, sequence: Sequence, num_new: int) -> int:
        """Spare blocks to take with new ones, so that the host has to do it less often."""
        if not sequence.num_pending:
            return 0
        num_spare = self.pool.num_free - num_new - self.pool.num_blocks // 2
        num_left = self.pool.num_missing(sequence.table, sequence.end) - num_new
        return max(min(SPARE_BLOCKS, num_spare, num_left), 0)

    def _add_work(
        self,
        sequence: Sequence,
        num_tokens: int,
        num_nodes: int,
        max_draft: int,
        *,
        is_deciding: bool = True,
        snapshot: int = NO_SNAPSHOT,
    ) -> Member:
        member = sequence.member
        work = RowWork(
            row=sequence.row, num_tokens=num_tokens, num_nodes=num_nodes, max_draft=max_draft,
            snapshot=snapshot, runs_alone=sequence.runs_alone,
        )  # fmt: skip
        sequence.count_pending(work, 1, is_deciding=is_deciding)
        sequence.num_nodes = max_draft
        if member is None or member.work != work or member.is_deciding is not is_deciding:
            member = sequence.member = Member(sequence, work, is_deciding)
        sequence.steady_until = 0
        if num_nodes == max_draft and not sequence.num_partial and not sequence.pending_more:
            # All steps up to its end are alike, as long as its blocks suffice.
            slots, last = len(sequence.table.blocks) * self.pool.block_size, sequence.end
            sequence.steady_until = last - 1
            last += self._past_end
            sequence.steady_slots = slots - num_nodes - 1 - max_draft if slots < last else NO_LIMIT
        return member

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the least urgent rows until there are blocks for `sequence`; True: there are."""
        pool, least = self.pool, self._least_slots(sequence)
        if pool.is_sliding:
            if sequence.num_pending:
                return False  # its blocks are freed when they are collected
            if sequence.num_computed + 1 < len(sequence.tokens):
                least = sequence.num_computed + 1
        num_needed = pool.num_missing(sequence.table, least)
        while pool.num_free + sum(pool.num_owned(s.table) for s in self._leaving) < num_needed:
            # The rows before it are already part of this step.
            rest = self.running[self.running.index(sequence) :]
            victim = max(reversed(rest), key=lambda one: one.request.priority)
            self.num_preemptions += 1
            self._leave(victim)
            if victim is sequence:
                return False
        return pool.num_free >= num_needed  # else: once the pending steps are collected

    def apply(self, member: Member, result: RowResult) -> None:
        """Apply what a collected step did for one sequence."""
        sequence, work = member.sequence, member.work
        sequence.count_pending(work, -1, is_deciding=member.is_deciding)
        if not result.computed:  # its state was lost, or it had ended before this step
            self.pool.keep_state(sequence.table, 0, work.snapshot)
            sequence.runs_alone |= result.is_lost
            if result.is_lost and sequence.state is State.RUNNING:
                self.num_preemptions += 1
                self._leave(sequence)
            return
        sequence.tokens += result.tokens
        before, sequence.num_computed = sequence.num_computed, result.computed[0]
        if not sequence.num_pending:
            sequence.num_nodes, sequence.steady_until = result.num_waiting, 0
        pool, size = self.pool, self.pool.block_size
        may_publish = len(result.computed) > 1 or before // size < result.computed[0] // size
        if pool.tracks_progress and may_publish:
            pool.advance(sequence.table, sequence.tokens, result.computed)
        if work.snapshot != NO_SNAPSHOT:
            is_complete = result.num_processed == work.num_tokens  # else memory was short
            pool.keep_state(sequence.table, is_complete * result.computed[0], work.snapshot)

    def apply_tokens(
        self, member: Member, tokens: list[int], num_waiting: int, computed: list[int] | None
    ) -> None:
        """`apply` for a row that decodes and goes on; see `DecodedRows`."""
        sequence, pool, known = member.sequence, self.pool, member.sequence.tokens
        known += tokens
        sequence.num_computed = num_computed = len(known) - 1
        sequence.pending_nodes -= member.work.num_nodes
        sequence.num_pending -= 1
        if not sequence.num_pending:
            sequence.num_nodes, sequence.steady_until = num_waiting, 0
        if (computed or num_computed % pool.block_size < len(tokens)) and pool.tracks_progress:
            pool.advance(sequence.table, known, computed or (num_computed,))

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, or was aborted."""
        sequence.is_over = True
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            sequence.state = State.GONE

    def free_blocks(self, sequence: Sequence) -> None:
        """Free the blocks that no pending step names; after `apply` and, if it ended, `finish`."""
        if sequence.state is State.LEAVING and not sequence.num_pending:
            self._leaving.remove(sequence)
            self._release(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._freed_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.member = None  # it refers to the sequence: a cycle would outlive the request
        sequence.steady_until = 0
        if sequence.num_pending:
            sequence.state = State.LEAVING
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.num_computed = sequence.num_nodes = 0
        sequence.state = State.GONE if sequence.is_over else State.WAITING
        if not sequence.is_over:
            self.add(sequence)

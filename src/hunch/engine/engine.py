"""The engine: takes requests, plans steps for the runner, and returns the text they produce."""

from __future__ import annotations

import time
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, Protocol

from hunch.config import Config
from hunch.engine.blocks import BlockTable
from hunch.engine.intake import Asked, Intake
from hunch.engine.kv_events import log_of
from hunch.engine.output import SequenceOutput
from hunch.engine.scheduler import Scheduler
from hunch.engine.sequence import Member, Sequence, State
from hunch.engine.stats import EngineStats, Share, Tally, together
from hunch.errors import QueueFullError, RequestError
from hunch.types import (
    Capacity,
    Request,
    RequestOutput,
    RowResult,
    Runner,
    SamplingParams,
    StepResult,
    StructuredOutput,
    TextCodec,
)


@dataclass(slots=True, eq=False)
class Job:
    """A user's request and the sequences that answer it."""

    asked: Asked
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0  # sequences that are not over
    is_begun: bool = False  # one of them has a token


class Adapter(Protocol):
    """Learns from finished answers. It changes how drafts are made, never the text."""

    def add(self, prompt_ids: abc.Sequence[int], answer_ids: abc.Sequence[int]) -> None: ...

    def apply(self) -> None:
        """Use what was learned since; called between two steps."""

    def close(self) -> None: ...


class Engine:
    """Not thread-safe, except `check` and `stats`."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        codec: TextCodec,
        *,
        compile_grammar: Callable[[StructuredOutput], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        adapter: Adapter | None = None,
    ) -> None:
        self.config = config
        self.adapter = adapter
        self.runner = runner
        self._codec, self._token_texts = codec, dict[int, str]()
        self._clock = clock
        self._intake = Intake(config, runner.capacity, codec, compile_grammar)
        self._events = log_of(config.cache.kv_events, runner.capacity.block_size)
        self._scheduler = Scheduler(
            config.schedule,
            runner.capacity,
            is_caching=config.cache.enable_prefix_caching,
            max_draft_batch=config.spec.max_batch,
            events=self._events,
        )
        self._jobs: dict[str, Job] = {}
        self._pending: deque[list[Member]] = deque()
        self._changed: dict[str, Job] = {}  # an ordered set: jobs to report
        self._new_tokens: list[Any] = []  # handles and lists of tokens, in turn
        self._stats = EngineStats(config.spec.method)
        marks = {"lossy": config.spec.is_lossy, "synthetic": config.spec.is_synthetic}
        self._marks = {mark: True for mark, is_so in marks.items() if is_so}
        self._arrivals = count()
        self._last_step_end: float | None = None  # None: the engine was idle

    def add(
        self,
        request_id: str,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        **options: Any,
    ) -> None:
        """Queue a request. With stream=False only its finished output is returned."""
        asked = self.check(request_id, prompt_ids, params, **options)
        self.check_queue(0)
        self.admit(asked)

    def check(
        self,
        request_id: str,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        **options: Any,
    ) -> Asked:
        """Prepare a request for `admit`, or raise what is wrong with it. Any thread may call it."""
        return self._intake.check(request_id, prompt_ids, params, **options)

    def admit(self, asked: Asked) -> None:
        if asked.id in self._jobs or asked.id in self._changed:  # its last output is not told yet
            raise RequestError(f"request id {asked.id!r} is in use")
        now, capacity = self._clock(), self.runner.capacity
        if not self._jobs:
            self._stats.replay.come(now, self._stats.busy_seconds)
        job = Job(asked, num_open=len(asked.requests))
        self._jobs[asked.id] = job
        self._stats.prompt_tokens += len(asked.prompt_ids)
        sizes = capacity.drafter_bytes, capacity.drafter_share
        for request in asked.requests:
            wish, allowed = request.params.speculation, self._most_nodes(request)
            sequence = Sequence(
                request=request,
                job_id=asked.id,
                arrival=next(self._arrivals),
                output=SequenceOutput(request, self._codec, Tally(now, *sizes), self._token_texts),
                max_nodes=allowed if wish.max_nodes is None else min(allowed, wish.max_nodes),
                tokens=asked.prompt_ids.copy(),
                table=BlockTable(salt=request.cache_salt.encode("utf-8", "surrogatepass")),
                end=len(asked.prompt_ids) + request.max_tokens,
                leader=job.sequences[0] if job.sequences else None,
                is_streaming=asked.is_streaming,
                handle=asked.handle,
            )
            job.sequences.append(sequence)
            self._scheduler.add(sequence)

    def _most_nodes(self, request: Request) -> int:
        """The most nodes of the request's drafts; that many slots are reserved."""
        capacity, mode = self.runner.capacity, request.params.speculation.mode
        if mode == "off":
            return 0
        if request.prediction_ids or not capacity.methods:
            return capacity.max_nodes
        default = next(iter(capacity.methods.values()))
        return capacity.methods.get(mode, default)

    def check_queue(self, num_coming: int) -> None:
        """Raise QueueFullError if the queue would be too long after `num_coming` more requests."""
        limit = self.config.schedule.max_queue
        if limit is None:
            return
        num_free_rows = self._scheduler.max_rows - len(self._scheduler.running)
        if len(self._scheduler.waiting) + num_coming >= limit + num_free_rows:
            raise QueueFullError(f"{limit} requests wait already; try again later")

    def abort(self, request_id: str, *, is_told: bool = True) -> None:
        """End a request now. Its last output, with finish reason "abort", comes with the next step.
        If it is not to be told, none comes, and the id may be used again at once.

        An unknown id is not an error: the request may just have finished.
        """
        if (job := self._jobs.get(request_id)) is not None:
            now = self._clock()
            for sequence in job.sequences:
                if not sequence.is_over:
                    sequence.output.abort()
                    self._end(job, sequence, now)
        if not is_told:
            self._changed.pop(request_id, None)

    @property
    def capacity(self) -> Capacity:
        return self.runner.capacity

    def has_work(self) -> bool:
        return bool(self._jobs or self._pending or self._changed)

    def step(self) -> list[RequestOutput]:
        """Plan and submit one step, collect what is due; returns the requests that changed."""
        started = self._clock()
        if self.adapter is not None:
            self.adapter.apply()
        members: list[Member] = []
        if not self._is_first_there():
            plan, members = self._scheduler.plan()
            for member in members[len(members) - len(plan.starts) :]:
                member.sequence.output.tally.start(started)
            if members:
                self.runner.submit(plan)
                self._pending.append(members)
        if self._pending and (len(self._pending) > self.runner.depth or not members):
            self._apply(self.runner.collect(), self._pending.popleft())
        outputs = [self._output(job) for job in self._changed.values()]
        self._changed.clear()
        if self._events is not None:
            self._events.flush()
        self._count_time(started)
        return outputs

    def _is_first_there(self) -> bool:
        """Whether the first token of the only request is there: it goes out before the next step is
        planned. Other rows would have to wait for that; theirs go out after it."""
        running, pending = self._scheduler.running, self._pending
        if len(running) != 1 or len(pending) != 1 or self._scheduler.waiting:
            return False
        is_first = pending[0][0].is_deciding and not running[0].output.token_ids
        return is_first and self.runner.has_result()

    def take_tokens(self) -> list[Any]:
        """New tokens of requests with a handle, since the last call: handle, tokens, and so on.

        Such a request has one answer and asks for nothing but tokens; `step` returns its output
        when it is over. The caller turns the tokens into text.
        """
        tokens, self._new_tokens = self._new_tokens, []
        return tokens

    def _apply(self, result: StepResult, members: list[Member]) -> None:
        """Apply a collected step: give sequences their tokens, and free what ended ones held."""
        now, share, decoded = self._clock(), self._stats.share(result), result.decoded
        if decoded is None:
            for member, row in zip(members, result.rows, strict=True):
                self._take(member, row, share, now)
            return
        assert len(decoded.tokens) == len(members)
        apply_tokens, free_blocks = self._scheduler.apply_tokens, self._scheduler.free_blocks
        rows, gaps, new_tokens = iter(result.rows), dict[float, int](), self._new_tokens
        leaving = State.LEAVING
        for member, tokens, num_checked, method, num_waiting, computed, scores in zip(
            members,
            decoded.tokens,
            decoded.num_checked or repeat(0),
            decoded.methods or repeat(""),
            decoded.num_waiting or repeat(0),
            decoded.computed or repeat(None),
            decoded.logprobs or repeat(None),
            strict=False,
        ):
            if not tokens:
                self._take(member, next(rows), share, now)
                continue
            sequence = member.sequence
            apply_tokens(member, tokens, num_waiting, computed)
            if not sequence.is_over:
                output = sequence.output
                is_ended, num_tokens = output.push_tokens(tokens, scores), len(tokens)
                check = method, num_checked, num_checked, num_tokens - 1
                gap = output.tally.add_tokens(num_tokens, check, share, now)
                gaps[gap] = gaps.get(gap, 0) + num_tokens
                if is_ended:
                    self._end(self._jobs[sequence.job_id], sequence, now)
                elif (handle := sequence.handle) >= 0:
                    new_tokens += (handle, tokens)
                elif sequence.is_streaming:
                    self._changed[sequence.job_id] = self._jobs[sequence.job_id]
            if sequence.state is leaving:
                free_blocks(sequence)
        self._stats.add_gaps(gaps)

    def _take(self, member: Member, row: RowResult, share: Share, now: float) -> None:
        """Apply what a collected step did for one sequence."""
        sequence = member.sequence
        assert row.row == member.work.row
        first_processed = sequence.num_computed
        self._scheduler.apply(member, row)
        if not sequence.is_over:
            output = sequence.output
            is_ended = output.push(row, first_processed)
            if self._stats.add(output.tally, row, share, now):
                self._begin(self._jobs[sequence.job_id], output.tally)
            if is_ended:
                self._end(self._jobs[sequence.job_id], sequence, now)
            elif row.tokens and sequence.handle >= 0:
                self._new_tokens += (sequence.handle, row.tokens)
            elif row.tokens and sequence.is_streaming:
                self._changed[sequence.job_id] = self._jobs[sequence.job_id]
        if sequence.state is State.LEAVING:
            self._scheduler.free_blocks(sequence)

    def _begin(self, job: Job, tally: Tally) -> None:
        if not job.is_begun:
            job.is_begun = True
            self._stats.begin(tally)

    def _end(self, job: Job, sequence: Sequence, now: float) -> None:
        output = sequence.output
        assert output.finish_reason is not None
        self._scheduler.finish(sequence)
        self._stats.end(output.tally, output.finish_reason)
        if self.adapter is not None:
            prompt_ids = job.asked.prompt_ids
            self.adapter.add(prompt_ids, sequence.tokens[len(prompt_ids) :])
        job.num_open -= 1
        if not job.num_open:
            del self._jobs[job.asked.id]
            tallies = [one.output.tally for one in job.sequences]
            self._stats.end_request(together(tallies), now)
        if job.asked.is_streaming or not job.num_open:
            self._changed[job.asked.id] = job

    def _output(self, job: Job) -> RequestOutput:
        asked, outputs = job.asked, [sequence.output for sequence in job.sequences]
        scores = outputs[0].prompt_logprobs
        if scores is not None and len(scores) < len(asked.prompt_ids):
            scores = None  # not complete yet
        answers = [output.completion() for output in outputs]
        stats, metrics = {}, None
        if not job.num_open:
            tally = together([output.tally for output in outputs])
            one = len(answers) == 1 and answers[0].stats
            stats = one.copy() if one else tally.stats()
            metrics = tally.metrics(self._clock())
        for figures in (stats, *[answer.stats for answer in answers]):  # beside every figure
            figures.update(self._marks)
        return RequestOutput(
            request_id=asked.id,
            prompt=asked.prompt,
            prompt_token_ids=asked.prompt_ids,
            outputs=answers,
            finished=not job.num_open,
            num_cached_tokens=job.sequences[0].num_cached or 0,
            prompt_logprobs=scores,
            embedding=None if job.num_open else outputs[0].embedding,
            stats=stats,
            metrics=metrics,
        )

    def _count_time(self, started: float) -> None:
        now = self._clock()
        since = started if self._last_step_end is None else self._last_step_end
        stats = self._stats
        stats.busy_seconds += now - since
        # A step that is pending after all requests have ended does not count.
        self._last_step_end = now if self._jobs else None
        if stats.replay.is_long:
            stats.replay.begin(now, self._running_tallies(), stats.busy_seconds)

    def end_period(self) -> None:
        """Tell the engine, if it is idle, that the next requests waited for all answers before.

        Else the estimate of the time saved takes them for requests that came by the clock.
        """
        if not self._jobs:
            self._stats.replay.begin(self._clock(), [], self._stats.busy_seconds)

    def _running_tallies(self) -> list[Tally]:
        sequences = [s for job in list(self._jobs.values()) for s in job.sequences]
        return [s.output.tally for s in sequences if not s.is_over]

    def stats(self) -> dict[str, Any]:
        """Totals since the start. Any thread may call it."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        report = self._stats.report(self._running_tallies(), self.runner.capacity)
        return report | {
            "is_lossy": self.config.spec.is_lossy,
            "is_synthetic": self.config.spec.is_synthetic,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "kv_usage": 1 - pool.num_free / pool.num_blocks,
            "num_blocks": pool.num_blocks,
            "prefix_queries": pool.num_queried,
            "prefix_hits": pool.num_hit,
            "num_preemptions": scheduler.num_preemptions,
        }

    def reset_cache(self, *, is_held_too: bool = False) -> bool:
        """Forget cached prefixes, and what the runner keeps of finished requests.

        Prefixes that running requests hold can still be found, unless `is_held_too`; the requests
        go on either way. Says whether none can be found any more.
        """
        is_empty = self._scheduler.pool.reset(is_held_too=is_held_too)
        if self._events is not None:
            self._events.flush()
        self.runner.reset()
        return is_empty

    def check_alive(self) -> None:
        """Raise EngineError if a process of the runner has ended."""
        self.runner.check_alive()

    def close(self) -> None:
        if self.adapter is not None:
            self.adapter.close()
        if self._events is not None:
            self._events.close()
        self.runner.close()

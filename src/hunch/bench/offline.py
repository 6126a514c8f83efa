"""Runs a load on an engine in this process, and notes when each request's tokens come."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from hunch import LLM, RequestOutput
from hunch.bench.energy import EnergyMeter
from hunch.bench.loads import Job, Load, next_turn, nobody
from hunch.bench.records import Answer, Round, difference
from hunch.garbage import without_collector

WARM_TOKENS = 8
OnAnswer = Callable[[str, RequestOutput], None]


def digest_of(tokens: Iterable[int]) -> str:
    """A digest, equal for equal token ids."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(data).hexdigest()[:16]


class EngineSubject:
    """A method of hunch, with an engine of its own, over weights that it may share."""

    def __init__(self, name: str, llm: LLM, meter: EnergyMeter | None = None) -> None:
        self.name, self.llm = name, llm
        self.meter = meter
        self._conversation = ""

    def warm(self, jobs: Sequence[Job], load: Load) -> None:
        """Answers that are not counted, while kernels are built and costs are learned.

        For an open load on a GPU, costs are learned under the load itself: else the policy would
        try shapes in the first round.
        """
        if self.llm.config.spec.is_synthetic:  # it drafts what it has decoded once
            self.drive(jobs, Load(concurrency=self.llm.engine.capacity.max_rows))
            self._conversation = ""
        for job in (min(jobs, key=lambda j: len(j.token_ids)),) * 2:
            params = replace(job.params, max_tokens=WARM_TOKENS)
            self.llm.generate([job.token_ids], params, use_tqdm=False)
        capacity = self.llm.engine.capacity
        if capacity.kernels == "triton":  # kernels of many rows are compiled when first used
            self.llm.engine.runner.wait_for_compilers()  # type: ignore[attr-defined]
            many = [job.token_ids for job in jobs[: capacity.max_rows]]
            self.llm.generate(many, params, use_tqdm=False)
            if load.rate is not None:
                self.drive(jobs, load)

    def drive(self, jobs: Sequence[Job], load: Load, on_answer: OnAnswer = nobody) -> Round:
        """Run all jobs under the load, without prefixes cached before, but for a conversation's
        own.

        A later turn of a conversation is asked as soon as the one before it is answered.

        While there is nothing to do in an open load, the clock is moved to the next arrival: that
        changes no answer's time, and a low rate takes no longer to measure.
        """
        if not jobs[0].conversation or jobs[0].conversation != self._conversation:
            self.llm.reset_cache()
        self._conversation = jobs[-1].conversation
        before = self._counts()
        if self.meter is not None:
            self.meter.start()
        with without_collector():  # it would delay a step by a tenth of a second now and then
            found = _Turn(self.llm, jobs, load, on_answer).run()
        if self.meter is not None:
            found.joules = self.meter.stop()
        found.counts = difference(before, self._counts())
        return found

    def _counts(self) -> dict[str, Any]:
        """The engine's counts, and those of its captured steps, if it has such steps."""
        captured = getattr(self.llm.engine.runner, "captured", None)
        did = {} if captured is None else {"captured": captured.policy.counts.report()}
        return self.llm.stats() | did

    def close(self) -> None:
        self.llm.close()


class _Turn:
    """One pass over the jobs: those that wait, those under way, and the clock."""

    def __init__(self, llm: LLM, jobs: Sequence[Job], load: Load, on_answer: OnAnswer) -> None:
        self.engine, self.load, self.on_answer = llm.engine, load, on_answer
        self.encode = llm.encode_messages
        self.waiting = deque(zip(enumerate(jobs), load.arrivals(len(jobs)), strict=True))
        self.open: dict[str, tuple[int, Job, float, float]] = {}  # id -> place, job, due, added
        self.answers: dict[tuple[int, int], Answer] = {}  # by place and turn
        self.began, self.skipped = perf_counter(), 0.0

    def now(self) -> float:
        return perf_counter() - self.began + self.skipped

    def run(self) -> Round:
        try:
            while self.waiting or self.open:
                self._send()
                for output in self.engine.step():
                    if output.finished and output.request_id in self.open:
                        self._take(output)
        finally:
            for request_id in self.open:
                self.engine.abort(request_id)
            self.engine.end_period()
        seconds = self.now()
        return Round(seconds, [self.answers[place] for place in sorted(self.answers)])

    def _send(self) -> None:
        """Add the jobs that are due: by the clock or, in a closed load, as places become free."""
        if self.waiting and not self.open:
            self.skipped += max(0.0, self.waiting[0][1] - self.now())
        while self.waiting:
            (place, job), due = self.waiting[0]
            is_full = self.load.concurrency is not None and len(self.open) >= self.load.concurrency
            if is_full or due > self.now():
                return
            self.waiting.popleft()
            self._ask(place, job, due if self.load.rate is not None else self.now())

    def _ask(self, place: int, job: Job, due: float) -> None:
        added, request_id = self.now(), f"bench-{id(self)}-{place}-{job.turn}"
        # A prompt that comes again must be read again: only a conversation finds its own prefix.
        asked = self.engine.check(
            request_id, job.token_ids, job.params, stream=False,
            cache_salt=job.conversation or job.id,
        )  # fmt: skip
        self.engine.admit(asked)
        self.open[request_id] = (place, job, due, added)

    def _take(self, output: RequestOutput) -> None:
        place, job, due, added = self.open.pop(output.request_id)
        answer, stats = output.outputs[0], output.stats
        first, now = stats["first_token_seconds"], self.now()
        self.answers[place, job.turn] = Answer(
            id=job.answer_id,
            category=job.category,
            num_prompt_tokens=len(job.token_ids),
            num_tokens=len(answer.token_ids),
            start=due,
            first_token=None if first is None else added - due + first,
            end_to_end=now - due,
            digest=digest_of(answer.token_ids),
            num_passes=stats["steps"],
            drafted=stats["drafted"],
            accepted=stats["accepted"],
            is_warmup=place < self.load.num_warmup,
        )
        self.on_answer(job.answer_id, output)
        following = next_turn(job, answer.text, self.encode)
        if following is not None:
            self._go_on(place, following, now)

    def _go_on(self, place: int, job: Job, now: float) -> None:
        """Add the next turn of a conversation, if the answers before it leave room."""
        room = self.engine.capacity.max_len
        if len(job.token_ids) + (job.params.max_tokens or 0) <= room:
            self._ask(place, job, now)
            return
        self.answers[place, job.turn] = Answer(
            job.answer_id, job.category, len(job.token_ids), 0, now, None, 0.0,
            error=f"{job.answer_id} does not fit the context of {room} tokens",
        )  # fmt: skip

"""A GPU's runner: while rows only decode, steps are graphs and the host reads them one step late.

Rows that read their prompts, or need the host (a grammar, penalties, scores), are run as on a CPU,
beside the others' flight; their pass is a graph too.

Shape letters: R rows of the step, N nodes of a step's draft, K tokens one step can commit, C
columns of a result, X rows of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from hunch.drafting.base import DeviceDrafter, WorksOnDevice
from hunch.drafting.pace import StepShape
from hunch.errors import CapacityError
from hunch.sampling.processors import needs_history
from hunch.step.batch import Batch
from hunch.step.device_rows import MAX_STOPS, DeviceRows
from hunch.step.graphs import PassGraphs, StepGraph, StepGraphs, bucket, new_pool
from hunch.step.landing import land_rows
from hunch.step.reading import Reader
from hunch.step.runner import LocalRunner, Outcome
from hunch.step.step_shapes import StepShapes
from hunch.types import Request, RowWork, StepPlan, StepResult
from hunch.verify.exact import exact

PASSES = (16, 32, 64, 128, 256, 512, 768, 1024)  # tokens of passes captured at the start
MAX_WARM = 256  # rows up to which steps are captured at the start


class Crew:
    """Who flies in a step."""

    def __init__(self, work: list[RowWork]) -> None:
        self.work = work
        self.ids = [item.row for item in work]
        self.row_R = np.array(self.ids)
        self.allowed = [item.num_nodes for item in work]  # nodes that may be checked
        self.room = [item.max_draft for item in work]  # and drafted
        self.has_waiting = any(self.allowed)
        self.is_drafting = self.has_waiting or any(self.room)


@dataclass(slots=True)
class Flight:
    """A step on the device whose result nobody has read."""

    plan: StepPlan
    crew: Crew
    requests: list[Request | None]
    graph: StepGraph
    slot: int  # where its result will be
    others: StepResult | None = None  # what the host did for the plan's other rows


class GraphRunner(LocalRunner):
    """`LocalRunner` with steps that fly."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        drafter, capacity = self.drafter, self.capacity
        width = bucket(capacity.max_rows)
        self.device_rows = DeviceRows(capacity, self.rows, width, self.device)
        found = drafter.on_device() if isinstance(drafter, WorksOnDevice) else None
        self.device_drafter: DeviceDrafter | None = found
        self.can_fly = self.verify is exact and (found is not None or not capacity.max_nodes)
        pool = new_pool(self.device)
        self.passes = PassGraphs(
            self.target,
            self.kv[0],
            drafter.needs.feature_layers,
            self.rows.table.shape,
            capacity.block_size,
            pool,
        )
        self.shapes = StepShapes(found, self.rows)
        self.steps = StepGraphs(
            self.target,
            self.kv[0],
            self.sampling,
            found,
            self.device_rows.state,
            self.device_rows.inputs_3R,
            capacity.block_size,
            self.shapes.drafts_at,
            pool,
        )
        self.reader: Reader | None = None
        if self.can_fly and found is not None and found.network is not None:
            self.reader = Reader(found.network.model, found.network.kv, self.rows, pool)
        self._is_simple = np.zeros(capacity.max_rows, dtype=np.bool_)
        self._is_decoding = np.zeros(capacity.max_rows, dtype=np.bool_)  # caught up once
        self._queue: deque[StepResult | Flight] = deque()
        self._last: tuple[list[RowWork], Crew] | None = None  # all work, and who of it flew
        # When the last flight landed, if the host did nothing but flights since.
        self._landed_at: float | None = None
        self.capacity = replace(
            capacity,
            max_draft_rows=self._max_draft_rows(),
            drafts_in_step=self.can_fly and len(capacity.groups) > 1,
        )

    def _max_draft_rows(self) -> int | None:
        """Rows with which a step still drafts; None: with any number."""
        num_rows = bucket(self.capacity.max_rows)
        if not self.can_fly or self.shapes.checks_at(num_rows):
            return None
        while num_rows and not self.shapes.checks_at(num_rows):
            num_rows //= 2
        return num_rows

    def preparations(self) -> list[Callable[[], None]]:
        """Capture passes, and steps of every power of two; rare sizes are captured as they come."""
        todo: list[Callable[[], None]] = [partial(self.passes.prepare, n) for n in PASSES]
        if self.reader is not None:
            todo += self.reader.preparations()
        num_rows = 1
        while self.can_fly and num_rows <= bucket(min(self.capacity.max_rows, MAX_WARM)):
            todo += [partial(self._prepare, num_rows, g) for g in self.shapes.to_prepare(num_rows)]
            num_rows *= 2
        return todo

    def _prepare(self, num_rows: int, shape: StepShape) -> None:
        graph = self.steps.step(num_rows, shape.num_nodes, 0, shape.source)
        self.shapes.captured(graph)

    # --- the engine's side ------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        try:
            self._submit(plan)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                "the GPU is out of memory in a step: give a smaller gpu_memory_utilization or "
                "max_num_batched_tokens"
            ) from error

    def _submit(self, plan: StepPlan) -> None:
        self._enter(plan)
        crew = self._crew(plan.work)
        if crew is not None and self.device_drafter is not None:
            crew = self._ready(crew, self.device_drafter)
        shape = None if crew is None else self._gait(crew)
        if crew is None or shape is None:
            # Rows that flew until now go on by the host, which must know all.
            self._land_all()
            self._queue.append(self._run(plan))
            return
        flight = self._launch(plan, crew, shape)
        self._queue.append(flight)
        if len(crew.work) < len(plan.work):
            aloft = set(crew.ids)
            grounded = [work for work in plan.work if work.row not in aloft]
            flight.others = self._run(replace(plan, work=grounded))

    def _crew(self, work: list[RowWork]) -> Crew | None:
        """Those who may fly; mostly the same, with the same work, as in the step before."""
        if self._last is not None and self._last[0] == work:
            return self._last[1]
        rows = [item.row for item in work]
        can_fly_R = (self.can_fly & self._is_decoding[rows] & self._is_simple[rows]).tolist()
        flying = [item for item, can_fly in zip(work, can_fly_R, strict=True) if can_fly]
        if not flying:
            return None
        self._last = work, Crew(flying)
        return self._last[1]

    def _run(self, plan: StepPlan) -> StepResult:
        """A step by the host."""
        result = self._step(plan)
        self._last = self._landed_at = None
        for row in result.rows:
            self.device_rows.touch(row.row)
            self._is_decoding[row.row] |= bool(row.tokens)
        self._read(result)
        return result

    @torch.inference_mode()
    def _read(self, result: StepResult) -> None:
        """Let a network that will draft for the rows see them, while the host is at it."""
        if self.reader is None:
            return
        began = perf_counter()
        rows = [row.row for row in result.rows if self.rows.requests[row.row] is not None]
        rows = [row for row in rows if self._is_decoding[row] and self._is_simple[row]]
        self.shapes.read(rows, self.reader)
        result.draft_seconds += perf_counter() - began

    def collect(self) -> StepResult:
        result = self._queue.popleft()
        return self._land(result) if isinstance(result, Flight) else result

    def close(self) -> None:
        self._queue.clear()

    def _enter(self, plan: StepPlan) -> None:
        super()._enter(plan)
        if plan.starts:
            self._last = None
            self.shapes.start([start.row for start in plan.starts])
        for start in plan.starts:
            params = start.request.params
            self._is_decoding[start.row] = False
            self._is_simple[start.row] = not (
                needs_history(start.request)
                or start.request.grammar is not None
                or start.request.prediction_ids
                or params.logprobs is not None
                or params.prompt_logprobs is not None
                or params.speculation.trace
                or len(start.request.stop_ids) > MAX_STOPS
                or params.speculation.mode not in ("default", "auto", "off", *self._own_names())
            )

    def _own_names(self) -> tuple[str, ...]:
        return () if self.device_drafter is None else (self.device_drafter.name,)

    def forward(self, batch: Batch) -> Any:
        return self.passes.forward(batch)

    def _drafts_here(self, outcomes: list[Outcome]) -> bool:
        """What drafts on the device finds all it needs there: the host need not see the prompts."""
        drafter, rows = self.device_drafter, [outcome.part.row for outcome in outcomes]
        if drafter is None or not self.can_fly or not self._is_simple[rows].all():
            return True
        return drafter.needs_host(self.rows.view(rows))

    def _propose(self, running: list[Outcome]) -> None:
        """Rows that will fly get their drafts there."""
        drafter, rows = self.device_drafter, [outcome.part.row for outcome in running]
        if drafter is not None and self.can_fly and rows:
            is_ready_R = drafter.is_ready(self.rows.view(rows))
            will_fly_R = self._is_simple[rows] & (True if is_ready_R is None else is_ready_R)
            pairs = zip(running, will_fly_R.tolist(), strict=True)
            running = [outcome for outcome, will_fly in pairs if not will_fly]
        super()._propose(running)

    # --- steps that fly ---------------------------------------------------------------------------

    def _ready(self, crew: Crew, drafter: DeviceDrafter) -> Crew | None:
        """Those whom the drafter is ready for; nobody, where one that flies would have to land."""
        is_ready_R = drafter.is_ready(self.rows.view(crew.ids))
        if is_ready_R is None or is_ready_R.all():
            return crew
        if not all(map(self.device_rows.is_stale, crew.row_R[~is_ready_R].tolist())):
            return None
        pairs = zip(crew.work, is_ready_R.tolist(), strict=True)
        ready = [work for work, is_ready in pairs if is_ready]
        return Crew(ready) if ready else None

    def _gait(self, crew: Crew) -> StepShape | None:
        """How the step goes, if the rows' network has seen enough for it."""
        shape = self.shapes.choose(crew.row_R) if crew.is_drafting else StepShape(0)
        return shape if self.shapes.is_ready(shape, crew.row_R) else None

    def _launch(self, plan: StepPlan, crew: Crew, shape: StepShape) -> Flight:
        ids = crew.ids
        asks = int(np.bitwise_or.reduce(self.sampling.asks_X[crew.row_R]))
        shape = self.shapes.launch(
            shape if crew.has_waiting else StepShape(0, shape.source), crew.row_R
        )
        graph = self.steps.step(len(ids), shape.num_nodes, asks, shape.source)
        self.shapes.captured(graph)
        renewed = self.device_rows.update(ids, crew.allowed, crew.room, graph.num_rows)
        if renewed:  # from here on the device drafts; what the host held is stale
            self.drafter.forget(renewed)
            for row in renewed:
                self.rows.drafts[row] = None
        graph.replay()
        slot = self.steps.delivery.expect()
        requests = [self.rows.requests[row] for row in ids]
        return Flight(plan, crew, requests, graph, slot)

    def _land(self, flight: Flight) -> StepResult:
        """Wait for a step and tell the host's rows what it did."""
        graph, crew, drafter = flight.graph, flight.crew, self.device_drafter
        num_columns = self.steps.num_columns(graph.num_nodes)
        result_RC, seconds = self.steps.delivery.receive(flight.slot, len(crew.ids), num_columns)
        before, self._landed_at = self._landed_at, perf_counter()
        sources = None
        if drafter is not None:
            sources = self.shapes.learn(crew.row_R, result_RC, graph)
        writes_kv = drafter is not None and drafter.writes_kv(graph.source)
        said, results = land_rows(
            self.rows, crew.row_R, result_RC, flight.requests, sources, writes_kv=writes_kv
        )
        since = None if before is None else self._landed_at - before
        target_seconds, plain_seconds = self.shapes.landed(graph, seconds, since)
        result = StepResult(
            id=flight.plan.id,
            rows=results,
            said=said,
            target_seconds=target_seconds,
            draft_seconds=min(graph.draft_seconds, seconds),
            plain_seconds=plain_seconds,
        )
        return result if flight.others is None else _together(flight, result, flight.others)

    def _land_all(self) -> None:
        """Read everything that flies; the results wait to be collected."""
        self._queue = deque(
            self._land(item) if isinstance(item, Flight) else item for item in self._queue
        )


def _together(flight: Flight, one: StepResult, other: StepResult) -> StepResult:
    """Two halves of a step, in the order of its plan."""
    assert one.said is not None
    said = dict(zip(flight.crew.ids, one.said, strict=True))
    by_row = {row.row: row for row in (*one.rows, *other.rows)}
    order = [work.row for work in flight.plan.work]
    return StepResult(
        id=one.id,
        rows=[by_row[row] for row in order if row in by_row],
        said=[said.get(row, -1) for row in order],
        target_seconds=one.target_seconds + other.target_seconds,
        draft_seconds=one.draft_seconds + other.draft_seconds,
        plain_seconds=one.plain_seconds + other.plain_seconds,
    )

"""What goes on beside steps and decides what pays: requests that come, their prompts, the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hunch.drafting.costs import StepShape
from hunch.types import Request

# Rows from which on the host may take longer than the device, and what a checked row is thought to
# take of its time, for one of a plain row's, until it was seen.
MANY_ROWS, CHECKED_ROW = 16, 1.6
LATE, NOT_LATE, HOST_RATE, CHECKED_RATE, HOST_RISE = 1.1, 0.5, 0.1, 0.05, 2.0
LOAD_RATE, READING_RATE = 0.02, 0.1  # of the newest step and pass, in what is thought of a load
MAX_LOAD = 0.9  # share of all time that reading prompts may seem to take

# Requests keep coming if one came beside others that had gone so many steps, and after one had
# ended: of an arrival so much is left after each step, and it counts down to the least.
SETTLED, FLOW, LEAST_FLOW = 8, 0.98, 0.1


class Flow:
    """Whether requests keep coming, so that one that ends early makes room for the next.

    Long prompts of requests that came together are read one after the other: none of them waits for
    another's end.
    """

    def __init__(self, num_rows: int) -> None:
        self.level = 0.0
        self.age = np.zeros(num_rows, dtype=np.int64)  # steps of each row's request
        self._rows: set[int] = set()  # whose requests came, and may have ended
        self._has_ended = False  # one of them, since there was none

    @property
    def is_on(self) -> bool:
        return self.level > LEAST_FLOW

    def start(self, ids: Sequence[int], requests: Sequence[Request | None]) -> bool:
        """Requests came into these rows, together; whether beside none that was at it before."""
        others = {row for row in self._rows.difference(ids) if requests[row] is not None}
        self._has_ended = bool(others) and (self._has_ended or len(others) < len(self._rows))
        is_first = not any(self.age[row] >= SETTLED for row in others)
        if self._has_ended and not is_first:
            self.level = 1.0
        self._rows = others.union(ids)
        self.age[ids] = 0
        return is_first

    def step(self, ids: Sequence[int] | np.ndarray) -> None:
        """These rows took a step."""
        self.level *= FLOW
        self.age[ids] += 1


class PromptLoad:
    """What reading prompts beside captured steps adds to them, while requests keep coming.

    All prompts that wait are read in one pass beside a step. Each takes its time whatever the steps
    are, and slows all of them down alike. What a pass takes beyond that is shared by its prompts:
    where requests come so fast that every step has a pass, it is the same beside a short step as
    beside a long one, and a step that brings more tokens has the use of that.
    """

    def __init__(self) -> None:
        self._came = 0
        self._requests = self._seconds = 0.0  # per step, of late
        # Means over passes, of late: prompts, their square, seconds, and prompts times seconds.
        self._prompts, self._squares, self._reading, self._products = 1.0, 1.0, 0.0, 0.0

    def start(self, num_requests: int) -> None:
        """Requests came."""
        self._came += num_requests

    def record(self, seconds: float, reading: float) -> None:
        """A step and what was read beside it took `seconds`, `reading` of them for prompts."""
        came, self._came = self._came, 0
        self._requests += LOAD_RATE * (came - self._requests)
        self._seconds += LOAD_RATE * (seconds - self._seconds)
        if reading > 0.0 and came:
            rate = READING_RATE if self._reading else 1.0
            self._prompts += rate * (came - self._prompts)
            self._squares += rate * (came * came - self._squares)
            self._reading += rate * (reading - self._reading)
            self._products += rate * (came * reading - self._products)

    def with_reading(self, seconds: float) -> float:
        """Seconds from one step to the next, where a step alone takes this long."""
        if self._requests <= 0.0 or self._seconds <= 0.0:
            return seconds
        per_second = self._requests / self._seconds
        each = self._each()
        any_pass = self._reading - each * self._prompts
        share = min(per_second * each, MAX_LOAD)  # of all time, for prompts by themselves
        whole = (seconds + any_pass) / (1.0 - share)
        if per_second * whole >= 1.0:  # every step has a prompt to read
            return whole
        return seconds / (1.0 - min(per_second * (each + any_pass), MAX_LOAD))

    def _each(self) -> float:
        """Seconds of a prompt in a pass: the slope over passes, or all where none is seen."""
        spread = self._squares - self._prompts**2
        each = self._reading / self._prompts
        if spread > 0.05 * self._squares:
            slope = (self._products - self._prompts * self._reading) / spread
            each = min(max(slope, 0.0), each)
        return each


class HostTime:
    """How long the host takes for a step's rows, where that is longer than the device does.

    A row that was checked is more work for it than one that got a token. With many rows and a small
    target that decides what pays. What a row takes is learned from steps of both kinds, and how
    much more a checked one does apart from that: of a kind that is not in use nothing is heard, and
    what it once took with other rows would keep it out of use.
    """

    def __init__(self) -> None:
        self._per_row = 0.0  # seconds of one that is not checked; 0: it was never late
        self._checked = CHECKED_ROW

    def record(
        self,
        num_rows: int,
        shape: StepShape,
        seconds: float,
        device: float,
        *,
        has_waited: bool = False,
    ) -> None:
        """From one step to the next took `seconds`, during `device` of which the device worked.

        has_waited: the host led a pass beside the step and waited for both, so that the device
        waits for all that it does after that.
        """
        if num_rows < MANY_ROWS:
            return
        num_plain, before = num_rows * self._work(shape), self._per_row
        each = (seconds - device * has_waited) / num_plain
        if not has_waited and seconds <= LATE * device:
            if before > each:  # it was not late, so it takes less than it was thought to
                self._per_row = NOT_LATE * each
        elif not before:
            self._per_row = max(each, 0.0)
        else:  # a pause is no cost
            more = min(max(each / before, 0.0), HOST_RISE)
            self._per_row += HOST_RATE * (more - 1.0) * before
            if shape.num_nodes:
                self._checked += CHECKED_RATE * (max(more * self._checked, 1.0) - self._checked)

    def seconds(self, num_rows: int, shape: StepShape) -> float:
        """The least time from one step to the next; 0: nothing is known."""
        return num_rows * self._work(shape) * self._per_row if num_rows >= MANY_ROWS else 0.0

    def _work(self, shape: StepShape) -> float:
        """Of a row, for one that is not checked."""
        return self._checked if shape.num_nodes else 1.0

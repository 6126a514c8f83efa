"""What affects a step besides its shape: arriving requests, their prompts, and the host's time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hunch.drafting.step_shapes import StepShape
from hunch.types import Request

# The host may take longer than the device with MANY_ROWS rows or more. A row with checked nodes is
# assumed to take it CHECKED_ROW times as long as a plain one, until that was measured.
MANY_ROWS, CHECKED_ROW = 16, 1.6
LATE, NOT_LATE, HOST_RATE, CHECKED_RATE, HOST_RISE = 1.1, 0.5, 0.1, 0.05, 2.0
LOAD_RATE, READING_RATE = 0.02, 0.1  # weights of the newest step, and of the newest pass
MAX_LOAD = 0.9  # the largest share of time that prompts are taken to use

# Requests keep coming if one arrived beside others that had made SETTLED steps, and after another
# had ended. `level` is then 1, falls by the factor FLOW with each step, and counts while it is
# above LEAST_FLOW.
SETTLED, FLOW, LEAST_FLOW = 8, 0.98, 0.1


class Flow:
    """Whether requests keep coming, so that one that ends early makes room for the next.

    Requests that came together may start steps apart, as long prompts are computed one after the
    other. That is why an arrival counts only after another request has ended.
    """

    def __init__(self, num_rows: int) -> None:
        self.level = 0.0
        self.age = np.zeros(num_rows, dtype=np.int64)  # steps of each row's request
        self._rows: set[int] = set()  # rows in use, as far as `start` knows
        self._has_ended = False  # a request has, since there was none

    @property
    def is_on(self) -> bool:
        return self.level > LEAST_FLOW

    def start(self, ids: Sequence[int], requests: Sequence[Request | None]) -> bool:
        """Requests came into these rows; True: no others have been running for long."""
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
    """What the prompts of arriving requests add to the seconds of captured steps.

    All waiting prompts are computed in one pass beside a step. A pass takes a time of its own and
    some more for each prompt. The time for the prompts slows down all steps alike. The pass's own
    time does so only while requests are few: once every step has a pass beside it, that time is
    the same for a short step and a long one, and favours steps with more tokens.
    """

    def __init__(self) -> None:
        self._came = 0
        self._requests = self._seconds = 0.0  # means over recent steps
        # Means over recent passes: prompts, their square, seconds, and prompts times seconds.
        self._prompts, self._squares, self._reading, self._products = 1.0, 1.0, 0.0, 0.0

    def add(self, num_prompts: int) -> None:
        """This many prompts were read to their end."""
        self._came += num_prompts

    def record(self, seconds: float, reading: float) -> None:
        """A step and the prompts beside it took `seconds`, of which `reading` for prompts."""
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
        """Seconds from one step to the next, if a step alone takes `seconds`."""
        if self._requests <= 0.0 or self._seconds <= 0.0:
            return seconds
        per_second = self._requests / self._seconds
        each = self._each()
        any_pass = self._reading - each * self._prompts
        share = min(per_second * each, MAX_LOAD)  # of all time, without the passes' own
        whole = (seconds + any_pass) / (1.0 - share)
        if per_second * whole >= 1.0:  # every step has a prompt beside it
            return whole
        return seconds / (1.0 - min(per_second * (each + any_pass), MAX_LOAD))

    def _each(self) -> float:
        """Seconds that a prompt adds to a pass: the slope over passes, or the mean without one."""
        spread = self._squares - self._prompts**2
        each = self._reading / self._prompts
        if spread > 0.05 * self._squares:
            slope = (self._products - self._prompts * self._reading) / spread
            each = min(max(slope, 0.0), each)
        return each


class HostTime:
    """The host's seconds for a step's rows, where it takes longer than the device.

    A row with checked nodes is more work for the host than a plain one, which decides what pays
    with many rows and a small target. The seconds of a row are learned from steps of both kinds,
    and the ratio of the kinds apart from that: else an old figure could keep a kind out of use.
    """

    def __init__(self) -> None:
        self._per_row = 0.0  # seconds of a plain row; 0: the host was never late
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
        """It took `seconds` from one step to the next; the device worked for `device` of them.

        has_waited: the host ran a pass beside the step and waited for both, so that the device was
        idle during all that the host did afterwards.
        """
        if num_rows < MANY_ROWS:
            return
        num_plain, before = num_rows * self._work(shape), self._per_row
        each = (seconds - device * has_waited) / num_plain
        if not has_waited and seconds <= LATE * device:
            if before > each:  # it was not late, so it takes less than assumed
                self._per_row = NOT_LATE * each
        elif not before:
            self._per_row = max(each, 0.0)
        else:  # bounded, as a pause is no cost
            more = min(max(each / before, 0.0), HOST_RISE)
            self._per_row += HOST_RATE * (more - 1.0) * before
            if shape.num_nodes:
                self._checked += CHECKED_RATE * (max(more * self._checked, 1.0) - self._checked)

    def seconds(self, num_rows: int, shape: StepShape) -> float:
        """The host's seconds from one step to the next; 0: not known."""
        return num_rows * self._work(shape) * self._per_row if num_rows >= MANY_ROWS else 0.0

    def _work(self, shape: StepShape) -> float:
        """The host's work for a row, as a multiple of a plain row's."""
        return self._checked if shape.num_nodes else 1.0

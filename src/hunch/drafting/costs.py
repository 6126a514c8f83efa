"""The seconds that passes and captured steps take, learned from those that were run."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import exp, log

from hunch.drafting.step_shapes import StepShape

WINDOW = 15  # passes remembered per size
MAX_SINGLE = 16  # sizes up to this are remembered one by one
COMMON, OWN = 0.1, 0.1  # shares of an error by which all shapes are corrected, and the shape itself
FADE = 0.001  # share of its own correction that an unused shape loses with each step
MAX_SURPRISE = 0.3  # largest error that counts, as a logarithm: a pause is no cost
MAX_LATE = 0.5  # share of a step's seconds that counts at most as waiting for the host
TOKEN, FIXED_TOKEN, FIXED_LEVEL = 0.05, 0.01, 0.1  # assumed costs, in passes over one token


class CostCurve:
    """Seconds of a pass over n packed tokens; never falls as n grows.

    Passes are remembered by size (each one up to 16, then by eighths of a power of two); a size's
    estimate is the lower quartile of its last passes, since noise only ever adds time. Between
    sizes the curve is a straight line; beyond them it keeps its last slope. Before anything is
    measured, a pass costs one unit and every further token `prior` units.

    Passes take longer as texts grow. The sizes in use show by how much, and those measured
    earlier are corrected by the same factor, so that all stay comparable.
    """

    is_measured = True  # False: seconds are assumed, so that choices do not depend on the machine

    def __init__(self, prior: float = TOKEN) -> None:
        self.prior = prior
        self._passes: dict[int, deque[float]] = {}
        self._estimates: dict[int, float] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []  # non-decreasing, beside _sizes
        self._level = 1.0  # how much longer passes take now; follows the sizes in use
        self._levels: dict[int, float] = {}  # its value at each size's last pass
        self._known: dict[int, float] = {}  # answers given since the curve last changed

    def record(self, num_tokens: int, seconds: float) -> None:
        size = _bucket(num_tokens)
        passes = self._passes.setdefault(size, deque(maxlen=WINDOW))
        aged = self._level / self._levels.get(size, self._level)
        if aged != 1.0:
            passes = self._passes[size] = deque((old * aged for old in passes), maxlen=WINDOW)
            self._estimates[size] *= aged
        is_full = len(passes) == WINDOW
        passes.append(seconds * size / num_tokens if num_tokens > MAX_SINGLE else seconds)
        estimate, before = sorted(passes)[(len(passes) - 1) // 4], self._estimates.get(size)
        if before is not None and is_full and size <= MAX_SINGLE:  # a step, not a prompt
            self._level *= estimate / before
        self._estimates[size], self._levels[size] = estimate, self._level
        if estimate != before or aged != 1.0:
            self._redraw()

    def _redraw(self) -> None:
        self._known.clear()
        self._sizes = sorted(self._estimates)
        now = [self._estimates[n] * (self._level / self._levels[n]) for n in self._sizes]
        # The cheapest larger pass bounds every smaller one, so the curve cannot fall.
        self._seconds = list(accumulate(reversed(now), min))[::-1]

    def seconds(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._read(num_tokens)
        return known

    def _read(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 1.0 + self.prior * (num_tokens - 1)
        at = bisect_left(sizes, num_tokens)
        if at < len(sizes) and sizes[at] == num_tokens:
            return seconds[at]
        if len(sizes) == 1 or at == 0:
            unit = seconds[0] / (1.0 + self.prior * (sizes[0] - 1))
            return unit * (1.0 + self.prior * (num_tokens - 1))
        at = min(at, len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at] + slope * (num_tokens - sizes[at])


class FixedCurve(CostCurve):
    """Costs that are assumed, not measured: choices follow acceptance alone.

    With `prior` 0 all passes cost the same, and every guess pays: for tests that want many.
    """

    is_measured = False

    def record(self, num_tokens: int, seconds: float) -> None:
        pass


class StepCosts:
    """Seconds of captured steps, drafting included, by rows and shape.

    Steps are timed when they are captured, over short texts; over longer texts they take longer. By
    how much is learned from the shapes in use and applied to all, so that they stay comparable.
    Beside that, each shape in use has a correction of its own, which includes the time that the
    device waits for the host. If a capture was disturbed and timed above the next larger shape, its
    shape would never be used and so never be corrected: it is put on the line between its
    neighbours. Shapes that were not captured are estimated from a curve by packed tokens.

    Steps whose rows ask for more than tokens (rules, masks, scores) have costs of their own; `free`
    are those of steps without. Such steps are captured when they are first needed. Until then a
    shape is assumed to take as long as a free one, and as much more per packed token as the known
    ones do.
    """

    def __init__(
        self,
        *,
        is_measured: bool = True,
        free: StepCosts | None = None,
    ) -> None:
        self.free = free
        self.curve = CostCurve() if is_measured else FixedCurve(FIXED_TOKEN)
        self.is_measured = is_measured
        self._captured: dict[tuple[int, StepShape], float] = {}  # the target's part
        self._drafting: dict[tuple[int, StepShape], float] = {}
        self._common: float | None = None  # correction of all shapes, as a logarithm
        self._own: dict[tuple[int, StepShape], float] = {}
        self._num_timed: dict[tuple[int, StepShape], int] = {}
        self._more: float | None = None  # seconds per packed token more than a free step

    def capture(
        self, num_rows: int, shape: StepShape, seconds: float, draft_seconds: float = 0.0
    ) -> bool:
        """A step was timed when it was captured; True: for the first time, which counts."""
        key = num_rows, shape
        if key in self._drafting or not self.is_measured:
            return False
        self._drafting[key] = draft_seconds
        if seconds > 0.0:
            self._captured[key] = target_seconds(seconds, draft_seconds)
            self._compare(key, self._captured[key])
            self.curve.record(num_rows * (1 + shape.num_nodes), self._captured[key])
            self._straighten(num_rows, shape.source)
        return True

    def _compare(self, key: tuple[int, StepShape], target: float) -> None:
        """Learn how much longer such a step takes than a free one, per packed token."""
        if self.free is None:
            return
        num_rows, shape = key
        more = target - self.free.seconds(num_rows, shape, is_target=True)
        more = max(more, 0.0) / (num_rows * (1 + shape.num_nodes))
        self._more = more if self._more is None else self._more + OWN * (more - self._more)

    def _straighten(self, num_rows: int, source: int) -> None:
        captured = self._captured
        shapes = sorted(
            shape for rows, shape in captured if rows == num_rows and shape.source == source
        )
        for low, shape, high in zip(shapes, shapes[1:], shapes[2:], strict=False):
            least, most = captured[num_rows, low], captured[num_rows, high]
            if captured[num_rows, shape] > most:
                share = (shape.num_nodes - low.num_nodes) / (high.num_nodes - low.num_nodes)
                captured[num_rows, shape] = least + share * (most - least)

    def record(
        self, num_rows: int, shape: StepShape, seconds: float, since: float | None = None
    ) -> None:
        """A step took `seconds` on the device, and `since` seconds since the last result."""
        key = num_rows, shape
        late = 0.0 if since is None else min(max(since - seconds, 0.0), MAX_LATE * seconds)
        target = target_seconds(seconds, self._drafting.get(key, 0.0)) + late
        self.curve.record(num_rows * (1 + shape.num_nodes), target)
        if key not in self._captured:
            return
        self._compare(key, target)
        ratio = log(target / self._captured[key])
        if self._common is None:
            self._common = ratio
        own = self._own.get(key, 0.0)
        surprise, part = ratio - self._common - own, OWN
        if self.free is not None:  # its capture did not include the host's work for masks
            self._num_timed[key] = count = self._num_timed.get(key, 0) + 1
            part = max(OWN, 1.0 / count)
        if part < 0.5:
            surprise = min(surprise, MAX_SURPRISE)
        self._common += COMMON * surprise
        for other in self._own:
            self._own[other] *= 1.0 - FADE
        self._own[key] = own + part * surprise

    def seconds(self, num_rows: int, shape: StepShape, *, is_target: bool = False) -> float:
        """Seconds of a step, or of the target's part of it."""
        key = num_rows, shape
        if key in self._captured:
            target = self._captured[key] * exp((self._common or 0.0) + self._own.get(key, 0.0))
        elif self.free is not None and self._more is not None:
            target = self.free.seconds(num_rows, shape, is_target=True)
            target += num_rows * (1 + shape.num_nodes) * self._more
        else:
            target = self.curve.seconds(num_rows * (1 + shape.num_nodes))
        return target if is_target else target + self._draft_seconds(num_rows, shape)

    def _draft_seconds(self, num_rows: int, shape: StepShape) -> float:
        if not self.is_measured:
            return FIXED_LEVEL * min(shape.num_nodes, 5) * (shape.source > 0)
        size = num_rows
        while size:  # if this size was not captured: as the next smaller one
            seconds = self._drafting.get((size, shape))
            if seconds is not None:
                return seconds
            size //= 2
        return 0.0 if self.free is None else self.free._draft_seconds(num_rows, shape)


def target_seconds(seconds: float, draft_seconds: float) -> float:
    """The target's part of a step's seconds; drafting was timed apart, so it is bounded."""
    return max(seconds - draft_seconds, 0.1 * seconds)


def _bucket(num_tokens: int) -> int:
    if num_tokens <= MAX_SINGLE:
        return num_tokens
    step = 1 << (num_tokens.bit_length() - 4)  # eighths of the power of two below
    return (num_tokens + step // 2) // step * step

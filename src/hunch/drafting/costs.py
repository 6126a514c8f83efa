"""The seconds that passes and captured steps take."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from itertools import accumulate
from math import exp, log, sqrt

from hunch.drafting.step_shapes import StepKey, StepShape

WINDOW = 15  # passes remembered per size
MAX_SINGLE = 16  # sizes up to this are remembered one by one
CORRECTED = 0.1  # share of an error by which all shapes, and the shape itself, are corrected
OWN_FADE = 0.001  # share of its own correction that a shape loses with each step
LEAST_LEFT = 1e-6  # share left of faded corrections at which each is multiplied by it
MAX_SURPRISE = 0.3  # largest error that counts, as a logarithm: pauses of the process are no cost
# The device waited for the host if a step took LATE times as long as the device worked. A row with
# checked nodes is assumed to take the host CHECKED_ROW times as long as a plain one, until that is
# measured. HOST_RATE: weight of the newest step. The host's time is measured in steps of MANY_ROWS
# rows or more: in smaller ones most of it does not depend on the rows. (MANY_ROWS=1e9: 0.967)
LATE, CHECKED_ROW, HOST_RATE, MANY_ROWS = 1.1, 1.4, 0.1, 16
# Passes take longer than their curve says, which goes by the shortest ones. By how much is a mean
# of recent passes, the newest weighing LATENESS_RATE; a pass that took several times as long was
# interrupted.
LATENESS_RATE, MAX_LATENESS = 0.05, 3.0
# Assumed costs, in passes over one token: of a further token (before anything was measured, and if
# nothing is), and of a network's level.
TOKEN, FIXED_TOKEN, FIXED_LEVEL = 0.05, 0.01, 0.1


class CostCurve:
    """Seconds of a pass over n packed tokens; they never fall as n grows.

    Passes are remembered by size: each size up to 16, then eighths of a power of two. The estimate
    for a size is the lower quartile of its last passes, since noise only adds time. The curve is a
    straight line between two sizes, and keeps its slope after the last one. Before anything is
    measured, a pass costs one unit, and `prior` units more for every further token.

    Passes take longer as texts grow. The sizes in use show by how much. The other sizes are
    corrected by the same factor, so that all stay comparable.
    """

    def __init__(self, prior: float = TOKEN, *, is_measured: bool = True) -> None:
        """is_measured=False: seconds are assumed, so that choices depend on acceptance alone.

        With `prior` 0 all passes then cost the same, so every guess pays: for tests.
        """
        self.prior, self.is_measured = prior, is_measured
        self._passes: dict[int, deque[float]] = {}
        self._estimates: dict[int, float] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []  # non-decreasing, beside _sizes
        self._slowdown = 1.0  # how much longer passes take now; follows the sizes in use
        self._slowdowns: dict[int, float] = {}  # its value at each size's last pass
        self._known: dict[int, float] = {}  # answers given since the curve last changed
        self._lateness = 1.0  # seconds of recent passes over those that the curve says

    def record(self, num_tokens: int, seconds: float) -> None:
        """A pass over `num_tokens` tokens took `seconds`."""
        if not self.is_measured:
            return
        size = _bucket(num_tokens)
        passes = self._passes.setdefault(size, deque(maxlen=WINDOW))
        aged = self._slowdown / self._slowdowns.get(size, self._slowdown)
        if aged != 1.0:
            passes = self._passes[size] = deque((old * aged for old in passes), maxlen=WINDOW)
            self._estimates[size] *= aged
        is_full = len(passes) == WINDOW
        passes.append(seconds * size / num_tokens if num_tokens > MAX_SINGLE else seconds)
        estimate, before = sorted(passes)[(len(passes) - 1) // 4], self._estimates.get(size)
        if before is not None and is_full and size <= MAX_SINGLE:  # a step, not a prompt
            self._slowdown *= estimate / before
        self._estimates[size], self._slowdowns[size] = estimate, self._slowdown
        if estimate != before or aged != 1.0:
            self._redraw()
        lateness = min(seconds / self.seconds(num_tokens), MAX_LATENESS)
        self._lateness += LATENESS_RATE * (lateness - self._lateness)

    def _redraw(self) -> None:
        self._known.clear()
        self._sizes = sorted(self._estimates)
        now = [self._estimates[n] * (self._slowdown / self._slowdowns[n]) for n in self._sizes]
        # The cheapest larger pass bounds every smaller one, so the curve cannot fall.
        self._seconds = list(accumulate(reversed(now), min))[::-1]

    def seconds(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._read(num_tokens)
        return known

    def without_nodes(self, num_known: int, num_tokens: int, seconds: float) -> float:
        """What a pass over `num_tokens` that took so long would have taken over the known ones."""
        if num_known == num_tokens:
            return seconds
        if not self.is_measured:  # the curve is not in seconds
            return seconds * self.seconds(num_known) / self.seconds(num_tokens)
        return min(self.seconds(num_known) * self._lateness, seconds)

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


class StepCosts:
    """Seconds of captured steps, drafting included.

    Steps are timed when they are captured, with short texts. With longer texts they take longer.
    The steps in use show by how much, and all steps are corrected by that, so that they stay
    comparable; those of fewer nodes by less, as it is attention that takes longer. In addition,
    each step in use has a correction of its own. Seconds of steps that were not captured come from
    a curve over packed tokens.

    Steps with *extras* (rules, masks, scores: see `step.step_kinds`) are captured when they are
    first needed. For each combination of extras, one correction says how much longer such steps
    take than those without.
    """

    def __init__(self, *, is_measured: bool = True) -> None:
        self.is_measured = is_measured
        self.curve = CostCurve(TOKEN if is_measured else FIXED_TOKEN, is_measured=is_measured)
        self.host: defaultdict[int, HostTime] = defaultdict(HostTime)  # by extras
        # When captured: of the target in steps without extras, with their loads, and of drafting.
        self._captured: dict[tuple[int, StepShape], tuple[float, float]] = {}
        self._drafting: dict[StepKey, float] = {}
        self._draft_known: dict[StepKey, float] = {}  # answers given since the last capture
        # Corrections, as logarithms: of all steps with the same extras, and of single steps. Those
        # of single steps fade together, so they are divided by what is left of them.
        self._common: dict[int, float] = {}
        self._own: dict[StepKey, float] = {}
        self._own_left = 1.0
        self._usual_load = 0.0  # mean of recent steps' loads

    def capture(self, key: StepKey, seconds: float, draft_seconds: float = 0.0) -> bool:
        """A step was timed when it was captured; returns whether for the first time.

        Later times of the same step are ignored.
        """
        if key in self._drafting or not self.is_measured:
            return False
        self._drafting[key] = draft_seconds
        self._draft_known.clear()
        target = target_seconds(seconds, draft_seconds)
        if seconds > 0.0 and key.extras:
            self._common.setdefault(key.extras, log(target / self.target(key)))
        elif seconds > 0.0:
            self._captured[key[:2]] = _with_load(key, target)
            self.curve.record(_num_tokens(key), target)
        return True

    def record(self, key: StepKey, seconds: float) -> None:
        """A step took `seconds` of the device."""
        if not self.is_measured:
            return
        target = target_seconds(seconds, self._drafting.get(key, 0.0))
        if not key.extras:
            self.curve.record(_num_tokens(key), target)
        if key.extras or key[:2] in self._captured:
            self._correct(key, target)

    def _correct(self, key: StepKey, target: float) -> None:
        """Correct this step, and all steps with the same extras, by the time that it took."""
        surprise, extras = log(target / self.target(key)), key.extras
        if extras not in self._common:
            self._common[extras], surprise = surprise, 0.0
        elif not extras or key in self._own:  # else: the capture ran without the host's work
            surprise = CORRECTED * min(surprise, MAX_SURPRISE)
            self._common[extras] += surprise
        if not extras:
            load, usual = self._before_corrections(key)[1], self._usual_load
            self._usual_load = usual + CORRECTED * (load - usual) if usual else load
        self._own_left *= 1.0 - OWN_FADE
        self._own[key] = self._own.get(key, 0.0) + surprise / self._own_left
        if self._own_left < LEAST_LEFT:
            self._own = {one: own * self._own_left for one, own in self._own.items()}
            self._own_left = 1.0

    def seconds(self, key: StepKey) -> float:
        """Seconds of such a step."""
        drafting = self._draft_known.get(key)
        if drafting is None:
            drafting = self._draft_known[key] = self._draft_seconds(key)
        return self.target(key) + drafting

    def seconds_between(self, key: StepKey, num_rows: int) -> float:
        """Seconds from one step of `num_rows` rows to the next, with the host's work."""
        seconds = self.seconds(key)
        if num_rows < MANY_ROWS or not self.host:
            return seconds
        return max(seconds, self.host[key.extras].seconds(num_rows, key.shape))

    def target(self, key: StepKey) -> float:
        """Seconds of the target's part of a step."""
        known, load = self._before_corrections(key)
        common = self._common.get(key.extras, 0.0)
        if not key.extras and load < self._usual_load:
            common *= load / self._usual_load
        return known * exp(common + self._own.get(key, 0.0) * self._own_left)

    def _before_corrections(self, key: StepKey) -> tuple[float, float]:
        """Its seconds when captured, and its load."""
        known = self._captured.get(key[:2])
        return known or _with_load(key, self.curve.seconds(_num_tokens(key)))

    def _draft_seconds(self, key: StepKey) -> float:
        num_rows, shape, extras = key
        if not self.is_measured:
            return FIXED_LEVEL * min(shape.num_nodes, 5) * (shape.source > 0)
        while num_rows:  # a size that was not captured takes the time of the next smaller one
            seconds = self._drafting.get(StepKey(num_rows, shape, extras))
            if seconds is not None:
                return seconds
            num_rows //= 2
        return self._draft_seconds(StepKey(key.num_rows, shape)) if extras else 0.0


def _with_load(key: StepKey, seconds: float) -> tuple[float, float]:
    """A step's seconds, and how much longer they get with longer texts, compared with others'.

    With 1,830 tokens in place of 300, trees of 15, 31 and 63 nodes took 2.7, 4.7 and 7.2 times as
    many seconds more as plain decoding did, and trees of 7 for 8 rows 2.3 times (`hunch bench part
    kernels --context`, 7B, H200).
    """
    return seconds, key.num_rows * sqrt(1 + key.shape.num_nodes) / seconds


def _num_tokens(key: StepKey) -> int:
    return key.num_rows * (1 + key.shape.num_nodes)


def target_seconds(seconds: float, draft_seconds: float) -> float:
    """The target's part of a step's seconds: a tenth at least, as drafting was timed separately."""
    return max(seconds - draft_seconds, 0.1 * seconds)


def _bucket(num_tokens: int) -> int:
    """The size under which a pass over `num_tokens` tokens is remembered."""
    if num_tokens <= MAX_SINGLE:
        return num_tokens
    step = 1 << (num_tokens.bit_length() - 4)  # eighths of the power of two below
    return (num_tokens + step // 2) // step * step


class HostTime:
    """The host's seconds for a step's rows, where it takes longer than the device.

    A row with checked nodes is more work for the host than a plain row. Both types of steps teach
    the seconds of a row. The ratio of the two is learned only when a step follows one of the other
    type: then both were measured lately.
    """

    def __init__(self) -> None:
        self._per_row = 0.0  # seconds of a plain row; 0: the host was never late
        self._checked, self._was_checked = CHECKED_ROW, False

    def record(
        self, num_rows: int, shape: StepShape, seconds: float, device: float, *, has_waited: bool
    ) -> None:
        """It took `seconds` from one step to the next; the device worked for `device` of them.

        has_waited: the host also ran a pass and waited for it, so the device was idle during all
        of the host's later work.
        """
        if num_rows < MANY_ROWS:
            return
        before = self._per_row
        each = max(seconds - device * has_waited, 0.0) / (num_rows * self._work(shape))
        if not has_waited and seconds <= LATE * device:
            self._per_row = min(before, each)  # it takes no longer than that
        elif not before:
            self._per_row = each
        else:  # bounded, as a pause is no cost
            more = min(max(each / before - 1.0, -MAX_SURPRISE), MAX_SURPRISE)
            self._per_row += HOST_RATE * more * before
            is_checked = shape.num_nodes > 0
            if is_checked != self._was_checked:
                more = more if is_checked else -more
                self._checked = max(self._checked * (1.0 + HOST_RATE * more), 1.0)
            self._was_checked = is_checked

    def seconds(self, num_rows: int, shape: StepShape) -> float:
        """The host's seconds from one step to the next; 0: not known."""
        return num_rows * self._work(shape) * self._per_row * (num_rows >= MANY_ROWS)

    def _work(self, shape: StepShape) -> float:
        """The host's time for a row of such a step, as a multiple of a plain row's."""
        return self._checked if shape.num_nodes else 1.0

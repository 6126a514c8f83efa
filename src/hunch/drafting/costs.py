"""The shapes that steps may have, and the seconds that each was measured to take."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from math import exp, log
from typing import NamedTuple, Protocol

MAX_CHECKED = 256  # packed tokens of a step with nodes; in larger steps nodes do not pay
MIN_CHECKED = 16  # packed tokens of one tile: up to there, three nodes take no longer than one
# Shapes per source of a network, alone and beside lookups: few, as each takes time to capture.
NUM_ALONE, NUM_BESIDE = 3, 3
CHAIN_SIZES = (1, 3, 5)  # nodes checked of a network's chains, besides whole chains
SURE = 4  # tokens of a match from which on a lookup goes before a network
BEGINNING = 7  # levels drafted after a step that checked none
MIN_PAUSE = 32  # rows with which lookups may pause
WINDOW = 15  # passes remembered per size
MAX_SINGLE = 16  # sizes up to this are remembered one by one
COMMON, OWN = 0.1, 0.1  # shares of an error by which all shapes are corrected, and the shape itself
FADE = 0.001  # share of its own correction that an unused shape loses with each step
MAX_SURPRISE = 0.3  # largest error that counts, as a logarithm: a pause is no cost
MAX_LATE = 0.5  # share of a step's seconds that counts at most as waiting for the host
TOKEN, FIXED_TOKEN, FIXED_LEVEL = 0.05, 0.01, 0.1  # assumed costs, in passes over one token


class DraftSource(IntEnum):
    """Who drafts in a captured step."""

    LOOKUP_ALONE = -2  # and a head does not follow the target's states: it was dropped
    NOBODY = -1
    LOOKUP = 0
    CHAIN = 1  # of a network
    TREE = 2  # of a network
    MERGED = 3  # a network's tree, and a lookup's chain beside it


class StepShape(NamedTuple):
    """A captured step: the nodes it checks, and who drafts for the step after it."""

    num_nodes: int
    source: int = DraftSource.LOOKUP


class CapturedStep(Protocol):
    """A captured step, and how long it took when it was captured."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def extras(self) -> int:
        """What its rows ask for besides tokens, which changes its costs; 0: nothing."""


def chains_of(num_levels: int, *, is_adaptive: bool) -> tuple[StepShape, ...]:
    """Shapes of a drafter that is a network alone: steps check some of its levels, or none."""
    if not is_adaptive:
        return (StepShape(num_levels, DraftSource.CHAIN),)
    sizes = sorted({min(size, num_levels) for size in (*CHAIN_SIZES, num_levels)})
    return (StepShape(0), *(StepShape(size, DraftSource.CHAIN) for size in sizes))


def lookups_of(num_nodes: int, *, is_adaptive: bool) -> tuple[StepShape, ...]:
    """Shapes of a drafter without a network: steps check some of its nodes, or none.

    With the root these are 2, 4, 8 or 16 tokens: a step takes as long for a few less.
    """
    if not is_adaptive:
        return (StepShape(num_nodes),)
    sizes = (1, 3, 7, 15) if num_nodes > 2 else (num_nodes,)
    return (StepShape(0), *(StepShape(size) for size in sizes if size <= num_nodes))


def levels_after(num_tokens: int, most: int) -> int:
    """Levels worth drafting in a step that could commit `num_tokens` tokens.

    The next step will most likely check as many as this one. After one that checked none, drafting
    begins.
    """
    return min(most, num_tokens - 1) or min(most, BEGINNING)


class StepShapes:
    """The shapes that a device drafter's steps may have, by rows."""

    def __init__(self, shapes: Sequence[StepShape], *, can_pause: bool = True) -> None:
        self.all, self._can_pause = tuple(sorted(shapes)), can_pause
        self.max_nodes = max(shape.num_nodes for shape in self.all)
        # Most nodes of a lookup's chain that a step checks; a draft may have more.
        self.max_looked_up = max((s.num_nodes for s in self.all if s.source <= 0), default=0)
        self.has_lookup = any(shape.num_nodes for shape in self.all if not shape.source)
        self.network_sources = sorted({DraftSource(s.source) for s in self.all if s.source > 0})
        self._at: dict[int, list[StepShape]] = {}
        self._sizes: dict[int, dict[int, tuple[int, ...]]] = {}

    def at(self, num_rows: int) -> list[StepShape]:
        """The shapes of steps of `num_rows` rows; plain decoding, if among them, comes first."""
        if num_rows not in self._at:
            few = [shape for shape in self.all if num_rows * (1 + shape.num_nodes) <= MAX_CHECKED]
            if 2 * num_rows < MIN_CHECKED and StepShape(3) in few:
                few = [shape for shape in few if shape.num_nodes != 1 or not self.has_lookup]
            most = NUM_BESIDE if self.has_lookup else NUM_ALONE
            for source in self.network_sources:
                dropped = [shape for shape in few if shape.source == source][:-most]
                few = [shape for shape in few if shape not in dropped]
            self._at[num_rows] = few or [self.all[0]]
        return self._at[num_rows]

    def sizes_at(self, num_rows: int) -> dict[int, tuple[int, ...]]:
        """The numbers of nodes that steps of `num_rows` rows may check, by source."""
        if num_rows not in self._sizes:
            sizes = self._sizes[num_rows] = {}
            for num_nodes, source in self.at(num_rows):
                if num_nodes:
                    sizes[source] = (*sizes.get(source, ()), num_nodes)
        return self._sizes[num_rows]

    def checks_at(self, num_rows: int) -> bool:
        """Whether steps of `num_rows` rows may check nodes."""
        return bool(self.sizes_at(num_rows))

    def can_pause(self, num_rows: int) -> bool:
        """Whether lookups may pause with this many rows."""
        is_many = num_rows >= MIN_PAUSE and len(self.at(num_rows)) > 1
        return is_many and self._can_pause and self.has_lookup

    def to_capture(self, num_rows: int) -> list[StepShape]:
        """The shapes to capture for this many rows: also those in which drafting begins."""
        shapes = self.at(num_rows)
        first = [StepShape(0, source) for source in sorted({shape.source for shape in shapes})]
        if self.can_pause(num_rows):
            first.append(StepShape(0, DraftSource.NOBODY))
        return shapes + [shape for shape in first if shape not in shapes]


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

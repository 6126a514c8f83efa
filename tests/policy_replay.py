"""Replays texts through the policy of captured steps: how many tokens per second it brings.

A text is known beforehand: for each place, how long a match its end has, how many tokens a lookup
would guess right there, and how many a network. Steps take what they were measured to take. As on a
device, the policy chooses a step before it has heard of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hunch.drafting.acceptance import NETWORK_PRIORS
from hunch.drafting.captured_policy import CapturedPolicy
from hunch.drafting.step_shapes import MAX_CHECKED, StepKey, StepShape
from hunch.kernels.step import CHECKED, FIRST, KNOWN, MATCHED, REASON, TOKENS
from hunch.step.rows import RowBuffers
from hunch.step.step_kinds import plain_shape
from hunch.types import Capacity

PROMPT, NUM_GUESSES, NUM_LEVELS, MERGED_LEVELS, MAX_LEVELS, SURE = 50, 15, 5, 7, 10, 4
MERGED_WIDTH, MERGED_NODES = 4, 43
ALONE, LOOKUP, CHAIN, TREE, MERGED = -2, 0, 1, 2, 3
# Milliseconds of a step on an H200, by rows and packed tokens, between those measured a line.
SMALL = {  # SmolLM2-135M
    128: {1: 0.61, 16: 0.69, 32: 0.73, 64: 0.77, 128: 0.92, 256: 1.15, 512: 1.78, 1024: 2.55}
}
LARGE = {  # 7B-cost
    1: {1: 3.97, 2: 3.98, 4: 4.02, 8: 4.10, 16: 4.30},
    8: {8: 4.20, 16: 4.24, 32: 4.32, 64: 4.45, 128: 5.0},
    32: {32: 5.15, 64: 5.51, 128: 8.6},
    64: {64: 5.51, 128: 8.60, 256: 12.4, 512: 23.3},
    128: {128: 8.60, 256: 12.4, 512: 23.3, 1024: 46.0},
}
# The same while requests come at 8 to 96 per second: with these, and prompts that take 3.5 ms by
# themselves and 3.5 for a pass over them, plain decoding and fixed lengths of 3 and 7 take what
# they took there.
UNDER_LOAD = {128: {1: 4.0, 8: 4.2, 16: 4.3, 32: 4.6, 64: 5.5, 128: 6.8, 256: 9.0, 512: 13.5}}


class Drafter:
    """A device drafter of given shapes, as far as the policy asks it."""

    name, has_table, draft_model = "auto", False, object()
    trained_len = max_len = None
    priors, max_network_rows = NETWORK_PRIORS, MAX_CHECKED

    def __init__(self, *shapes: StepShape, margin: float = 0.0, num_levels: int = 5) -> None:
        self.shapes, self.margin, self.num_levels = shapes, margin, num_levels

    def levels(self, source: int, num_nodes: int) -> int:
        own = min(num_nodes, self.num_levels)
        return {TREE: NUM_LEVELS, MERGED: MERGED_LEVELS}.get(source, own)

    def num_beside(self, source: int, num_nodes: int) -> int:
        return 16 if source == MERGED else 0

    def depth(self, source: int) -> int:
        return {TREE: 15, MERGED: 43}.get(source, 0)

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def drafted_by(self, source: int, matched: int) -> str:
        return "draft" if source > 0 else "suffix"


@dataclass(slots=True)
class Text:
    """What would be right at each place of an answer."""

    matched: np.ndarray
    right: np.ndarray  # tokens a lookup guesses right
    network: np.ndarray  # tokens a chain of the network does
    tree: np.ndarray  # levels of its tree with the right token, as many as it may have
    large: np.ndarray | None = None  # the same of a large tree; None: of none

    def __len__(self) -> int:
        return len(self.matched)

    def run(self, place: int, source: int, *, has_lookup: bool = True) -> int:
        """Right tokens of what a step with this source drafts here."""
        if source == MERGED:
            return int(max(self.right[place], min(self.tree[place], MERGED_LEVELS)))
        if source in (LOOKUP, ALONE) or (has_lookup and self.matched[place] >= SURE):
            return int(self.right[place])
        return int(min(self.tree[place], NUM_LEVELS) if source == TREE else self.network[place])

    def with_levels(self, num_levels: int) -> Text:
        """The same for a network of chains that are no longer."""
        return replace(self, network=np.minimum(self.network, num_levels))


def runs(is_right: np.ndarray, most: int) -> np.ndarray:
    """How many in a row from each place on."""
    out, run = np.zeros(len(is_right), dtype=np.int64), 0
    for place in range(len(is_right) - 1, -1, -1):
        run = run + 1 if is_right[place] else 0
        out[place] = min(run, most)
    return out


def text(
    seed: int, length: int, copied: float | Callable[[int], float], first: float = 0.75
) -> Text:
    """Copied passages of about 20 tokens between new ones; `copied` is the share of copied tokens.

    After three matched tokens a copy goes on nine times in ten; new text matches a token or two by
    chance, and the guess after it is right one time in eight. `first`: how often a network's guess
    is right, anywhere.
    """
    rng = np.random.default_rng(seed)
    share = copied if callable(copied) else lambda place: copied
    matched, is_copy = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=bool)
    place = 0
    while place < length:
        is_copying = rng.random() < share(place)
        size = min(1 + int(rng.exponential(20)), length - place)
        if is_copying:
            is_copy[place + 1 : place + size] = True  # the first token of a copy is new
            matched[place : place + size] = np.minimum(np.arange(size), 16)
        else:
            matched[place : place + size] = rng.choice([0, 0, 0, 1, 1, 2], size)
        place += size
    by_chance = (rng.random(length) < 0.125) & (matched > 0)
    is_right = np.where(is_copy, rng.random(length) < 0.97, by_chance)
    right = runs(is_right, NUM_GUESSES)
    right[matched == 0] = 0
    is_net = rng.random(length) < first
    is_tree = is_net | (rng.random(length) < 0.35)
    return Text(matched, right, runs(is_net, MAX_LEVELS), runs(is_tree, MERGED_LEVELS))


def seconds_of(
    costs: dict[int, dict[int, float]], level: float, num_levels: int = NUM_LEVELS
) -> Callable[[int, Any], float]:
    """Milliseconds by rows and shape; a level of the network takes `level`, a tree's half more."""

    def seconds(num_rows: int, shape: Any) -> float:
        curve = costs[min((rows for rows in costs if rows >= num_rows), default=max(costs))]
        packed = num_rows * (1 + shape.num_nodes)
        total = float(np.interp(packed, list(curve), list(curve.values())))
        if shape.source == CHAIN:
            total += level * min(shape.num_nodes or NUM_LEVELS, num_levels)
        elif shape.source in (TREE, MERGED):
            total += 1.5 * level * (NUM_LEVELS if shape.source == TREE else MERGED_LEVELS)
        elif shape.source == LOOKUP:
            total += 0.006
        return total

    return seconds


@dataclass
class Replay:
    """Requests in rows, steps chosen by a policy (or by `force`, a fixed choice)."""

    texts: Sequence[Text]
    policy: Any
    rows: RowBuffers
    seconds: Callable[[int, Any], float]
    max_rows: int
    arrivals: Sequence[float] | None = None  # in milliseconds; None: a row is refilled at once
    # Milliseconds of a pass over prompts beside a step: of any, and of each that came.
    prompt: tuple[float, float] = (0.0, 0.0)
    host: Callable[[int, Any], float] = lambda num_rows, shape: 0.0  # what the host does for a step
    began: dict[int, float] = field(default_factory=dict)  # when each text's row was filled
    waited: list[float] = field(default_factory=list)  # milliseconds per token of each text
    ended: list[float] = field(default_factory=list)  # when each text was over
    now: float = 0.0
    num_tokens: int = 0
    shapes: list[Any] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)  # of each row, on the device
    sits: dict[int, int] = field(default_factory=dict)  # the text in each row
    waits: dict[int, int] = field(default_factory=dict)  # the source of each row's waiting draft
    made: dict[int, int] = field(default_factory=dict)  # nodes of the step that drafted it
    next_text: int = 0
    while_full: tuple[int, float] | None = None  # tokens and milliseconds until no text waited
    num_came: int = 0  # since the last step
    pending: tuple[Any, ...] | None = None  # the step whose result was not read yet

    @property
    def has_lookup(self) -> bool:
        return isinstance(self.policy, CapturedPolicy) and self.policy.shapes.has_lookup

    def run(self) -> float:
        """Tokens per millisecond."""
        while True:
            self._admit()
            if not self.place and self.next_text >= len(self.texts):
                return self.num_tokens / self.now
            if not self.place:
                assert self.arrivals is not None
                self.now = max(self.now, self.arrivals[self.next_text])
                continue
            row_R = np.array(sorted(self.place))
            shape = self.policy.choose(row_R)
            is_ready = self.policy.is_ready(shape, row_R)
            if not is_ready:
                shape = self._read_missed(shape, row_R)
            if all(self.waits[row] == -1 for row in self.place):  # nothing is there to check
                shape = StepShape(0, shape.source)
            shape = self.policy.shape_to_launch(shape, row_R)
            done = self._step(shape, row_R, has_waited=not is_ready)
            self._learn_pending()
            self.pending = done

    def _learn_pending(self) -> None:
        if self.pending is not None:
            self._learn(*self.pending)
            self.pending = None

    def _admit(self) -> None:
        free = [row for row in range(self.max_rows) if row not in self.place]
        came = []
        for row in free:
            if self.next_text >= len(self.texts):
                break
            if self.arrivals is not None and self.arrivals[self.next_text] > self.now:
                break
            self._learn_pending()  # a row is known to have ended before another request has it
            self.place[row], self.sits[row], self.waits[row] = 0, self.next_text, -1
            self.made[row] = 0
            length = len(self.texts[self.next_text])
            self.rows.known[row], self.rows.end[row] = PROMPT, PROMPT + length
            self.rows.computed[:, row] = 0
            self.rows.requests[row] = SimpleNamespace()  # type: ignore[call-overload]
            self.began[self.next_text] = self.now
            self.next_text += 1
            came.append(row)
        self.num_came = len(came)
        if self.while_full is None and self.next_text >= len(self.texts):
            self.while_full = self.num_tokens, self.now
        if came:
            self.policy.start(came)
            self.policy.catch_up(came, self._read, sorted(self.place))

    def _read(self, ids: list[int]) -> None:
        self.rows.computed[-1, ids] = self.rows.known[ids]
        self.now += 0.3

    def _read_missed(self, shape: Any, row_R: np.ndarray) -> Any:
        """The network reads what it missed, once the host knows it; the shape of the next step."""
        self._learn_pending()
        self.policy.catch_up(row_R.tolist(), self._read, sorted(self.place))
        if self.policy.network_rows.is_ready(shape, row_R):
            return shape
        return plain_shape(self.policy.shapes)

    def _say(self, row: int, count: int) -> None:
        self.num_tokens += count
        self.place[row] += count
        length = len(self.texts[self.sits[row]])
        if self.place[row] >= length:
            del self.place[row]
            self.waited.append((self.now - self.began[self.sits[row]]) / length)
            self.ended.append(self.now)
            self.rows.requests[row] = None

    def right(self, text: Text, here: int, waits: int, made: int, num_nodes: int) -> int:
        """Right tokens of the draft that waits, which a step with `made` nodes made."""
        if waits == MERGED and num_nodes < MERGED_NODES:  # what a lookup added comes last
            return min(int(text.tree[here]), num_nodes // MERGED_WIDTH)
        return text.run(here, waits, has_lookup=self.has_lookup)

    def _step(self, shape: Any, row_R: np.ndarray, *, has_waited: bool = False) -> tuple[Any, ...]:
        num_nodes, source = shape
        took = self.seconds(_bucket(len(row_R)), shape)
        reading = self.prompt[0] + self.num_came * self.prompt[1] if self.num_came else 0.0
        host = self.host(len(row_R), shape)
        # With prompts, or where the host has waited for a result, its work is not hidden.
        since = took + reading + host if self.num_came or has_waited else max(took, host)
        self.now += since
        self.shapes.append(shape)
        result_RC = np.full((len(row_R), FIRST + num_nodes + 1 + NUM_GUESSES), -1, dtype=np.int64)
        for line, row in zip(result_RC, row_R.tolist(), strict=True):
            here, text = self.place[row], self.texts[self.sits[row]]
            waits, left = self.waits[row], len(text) - self.place[row]
            run = 0 if waits == -1 else self.right(text, here, waits, self.made[row], num_nodes)
            run = min(run, num_nodes, left - 1)
            line[TOKENS], line[CHECKED] = run + 1, num_nodes if waits != -1 else 0
            line[REASON] = 0 if run + 1 < left else 2
            line[FIRST : FIRST + run + 1] = 1000 + np.arange(here, here + run + 1)
            line[KNOWN] = PROMPT + here + run + 1
            self._say(row, run + 1)
            self.waits[row], self.made[row], line[MATCHED] = source, num_nodes, 0
            now = self.place.get(row)
            if now is not None and source != -1:
                line[MATCHED] = text.matched[now]
                guesses = line[FIRST + num_nodes + 1 :]
                guesses[:] = 7
                right = int(text.right[now])
                guesses[:right] = 1000 + np.arange(now, now + right)
        graph = SimpleNamespace(key=StepKey(_bucket(len(row_R)), shape), draft_seconds=0.0)
        return row_R, result_RC, graph, took, since, reading

    def _learn(self, row_R: np.ndarray, result_RC: np.ndarray, graph: Any, *times: Any) -> None:
        self.policy.learn(row_R, result_RC.tolist(), graph)
        for row, line in zip(row_R.tolist(), result_RC, strict=True):
            if self.rows.requests[row] is not None:
                self.rows.known[row] = max(self.rows.known[row], line[KNOWN])
                if graph.key.shape.source > 0:
                    self.rows.computed[-1, row] = line[KNOWN] - 1
        self.policy.timed(graph, *times)


class Fixed:
    """A policy of one shape: what never, or always, drafting brings."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def choose(self, row_R: np.ndarray) -> Any:
        return self.shape

    def is_ready(self, shape: Any, row_R: np.ndarray) -> bool:
        return True

    def shape_to_launch(self, shape: Any, row_R: np.ndarray) -> Any:
        return shape

    def start(self, ids: list[int]) -> None: ...

    def catch_up(self, ids: list[int], run: Any, running: Sequence[int] = ()) -> None:
        if self.shape.source > 0:
            run(ids)

    def learn(self, row_R: np.ndarray, result_RC: np.ndarray, graph: Any) -> None: ...

    def timed(self, graph: Any, seconds: float, since: float, reading: float) -> None: ...


def buffers(num_rows: int) -> RowBuffers:
    return RowBuffers(
        Capacity(num_blocks=64, block_size=16, max_rows=num_rows, max_len=4096, max_nodes=15)
    )


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


def groups(texts: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    for first in range(0, len(texts) - size + 1, size):
        yield texts[first : first + size]


def steady(interval: float, count: int) -> Iterable[float]:
    return [interval * place for place in range(count)]

"""The policy beside the best fixed choice: targets, loads and drafters, replayed.

    PYTHONPATH=src:tests python tests/policy_table.py [closed,7B] [NAME=VALUE ...] [--before FILE]

With another checkout's `src` in the path it is that checkout's policy. NAME=VALUE gives a constant
of `hunch.drafting` another value.

The last lines have the geometric mean of all figures, the worst of them, and the least speed over
plain decoding's. FILE holds what an earlier run printed, with whose cells these are compared.
A change is a gain if the mean rises, no cell falls by more than 2%, and none that falls is below
0.98 of plain decoding.

A figure is the policy's speed over that of the best fixed choice, on texts of every kind in turn.
Closed: a row is refilled at once, and tokens per second count. Together: as many requests as rows,
done when the last is. Open: requests come at so many per second, and the time counts from the
moment a request was due to its last token.

Answers of the other names have stretches, copied ones among them, and are closed too. With one row,
they are held to the best choice of each stretch, as if changing it cost nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hunch.bench.loads import Load
from hunch.drafting.captured_policy import CapturedPolicy
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.step_shapes import DraftSource, StepKey, StepShape
from policy_replay import Drafter, Fixed, Replay, Text, buffers, text

CHAIN, TREE, MERGED, LARGE, ALONE = (
    DraftSource.CHAIN, DraftSource.TREE, DraftSource.MERGED, DraftSource.LARGE,
    DraftSource.HEAD_DROPPED,
)  # fmt: skip


class Target(NamedTuple):
    """Milliseconds on an H200."""

    steps: dict[int, float]  # by packed tokens
    level: float  # of a network
    prompt: tuple[float, float]  # of a pass over prompts, and of each of them
    rates: tuple[int, ...]  # requests per second


TARGETS = {
    "135M": Target(
        {1: 0.61, 16: 0.69, 32: 0.73, 64: 0.77, 128: 0.92, 256: 1.15, 512: 1.78, 1024: 2.55},
        0.09, (0.6, 0.35), (50, 100, 200, 400),
    ),
    # A vocabulary of 152k: the head's product grows with rows while the layers' does not.
    "0.5B": Target(
        {1: 0.69, 8: 0.75, 16: 0.85, 64: 1.3, 128: 1.95, 256: 3.2, 512: 5.9, 1024: 11.5},
        0.08, (0.8, 0.6), (50, 100, 200, 300),
    ),
    "2B": Target(
        {1: 1.57, 8: 1.6, 16: 1.65, 32: 1.8, 64: 2.0, 128: 2.5, 256: 3.5, 512: 6.0, 1024: 11.5},
        0.1, (1.6, 1.2), (24, 48, 96, 160),
    ),
    "7B": Target(
        {1: 4.0, 8: 4.2, 16: 4.3, 32: 4.6, 64: 5.5, 128: 6.8, 256: 9.0, 512: 13.5, 1024: 25.0},
        0.11, (3.5, 3.5), (8, 24, 48, 96),
    ),
}  # fmt: skip
# A 2B-cost target beside a trained draft, one request at a time: 1.41 ms for a plain step, 1.49 for
# a lookup's of 15 nodes, 1.80 for a tree of 15 in three levels.
TRAINED = Target(
    {1: 1.405, 8: 1.465, 16: 1.49, 32: 1.67, 64: 1.9, 128: 2.4, 256: 3.4, 512: 5.9, 1024: 11.5},
    0.075, (1.5, 0.5), (),
)  # fmt: skip
# Share of copied text, chances of a network's first guess and of a further one, and those of a
# lookup without a match, which a phrase table has.
KINDS = (
    (0.45, 0.4, 0.3, 0.2, 0.3), (0.6, 0.6, 0.6, 0.3, 0.4), (0.4, 0.8, 0.75, 0.35, 0.5),
    (0.97, 0.5, 0.5, 0.4, 0.5), (0.1, 0.2, 0.2, 0.1, 0.1), (0.9, 0.6, 0.6, 0.4, 0.5),
)  # fmt: skip
HOST, PER_ROW, CHECKED = 0.05, 0.045, 1.4  # the host's milliseconds; a checked row's over a plain's
FOLLOWING, EACH_FOLLOWED = 0.12, 0.004  # what a head takes in every step, and for each token


class Model(Drafter):
    """A draft model beside lookups, with the trees that `auto` has."""

    # Levels, and guesses of a lookup beside them.
    trees: ClassVar[dict[int, dict[int, tuple[int, int]]]] = {
        TREE: {7: (4, 0), 15: (5, 0)}, MERGED: {31: (7, 10)}, LARGE: {63: (8, 14)},
    }  # fmt: skip

    def size(self, source: int, num_nodes: int) -> tuple[int, int]:
        if source not in self.trees:
            return min(num_nodes or 7, self.num_levels), 0
        sizes = self.trees[source]
        return sizes[max((size for size in sizes if size <= num_nodes), default=min(sizes))]

    def levels(self, source: int, num_nodes: int) -> int:
        return self.size(source, num_nodes)[0]

    def num_beside(self, source: int, num_nodes: int) -> int:
        return self.size(source, num_nodes)[1]

    def depth(self, source: int) -> int:
        return max(self.trees.get(source, (0,)))


class Head(Model):
    """One that follows every step, which costs time, or is dropped."""

    draft_model = None
    trees: ClassVar[dict[int, dict[int, tuple[int, int]]]] = {TREE: {15: (5, 0)}}

    def writes_kv(self, source: int) -> bool:
        return source >= 0


class Guided(Model):
    has_table = True


LOOKUPS = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=15, margin=0.01)
CHAINS = [StepShape(n, CHAIN) for n in (1, 3, 5, 7)]
TREES = [StepShape(n, source) for source, some in Model.trees.items() for n in some]
MODELS = [*LOOKUPS.shapes, *CHAINS, *TREES]
DRAFTERS: dict[str, tuple[Any, bool]] = {  # and whether a phrase table guesses without a match
    "lookups": (LOOKUPS, False),
    "draft": (Model(*MODELS, margin=0.01, num_levels=7), False),
    "phrases": (Guided(*MODELS, margin=0.01, num_levels=7), True),
    "head": (
        Head(*LOOKUPS.shapes, *CHAINS[:3], StepShape(15, TREE),
             *(StepShape(n, ALONE) for n in (0, 3, 7, 15)), margin=0.01, num_levels=5), False,
    ),
}  # fmt: skip


@cache
def texts(count: int, most: int, *, has_phrases: bool, only: int | None = None) -> list[Text]:
    """Of every kind in turn, or of one alone; answers of requests that came together differ in
    length, or they would all end and be replaced at once."""
    made = []
    for seed in range(count):
        copied, first, further, guess, again = KINDS[seed % len(KINDS) if only is None else only]
        rng = np.random.default_rng(10_000 + seed)
        length = int(rng.integers(most // 3, most)) if most > 64 else most
        one = text(seed, length, copied)

        def run(chance: float, more: float, rng: Any = rng, length: int = length) -> np.ndarray:
            found = np.minimum(rng.geometric(1.0 - more, length), 10)
            return np.where(rng.random(length) < chance, found, 0)

        one.network = run(first, further)
        one.tree = np.minimum(np.maximum(one.network, run(0.3 * first, further)), 8)
        one.large = np.minimum(np.maximum(one.tree, run(0.2 * first, further)), 8)
        if has_phrases:
            # What phrases guess right a network mostly does too.
            other = np.where(rng.random(length) < 0.5, one.network, run(guess, again))
            one.right = np.where(one.matched > 2, one.right, np.minimum(other, run(2 * guess, 0.8)))
        made.append(one)
    return made


# Chances of a network's guesses outside of copies (the first, a further one), and of a phrase
# table's; in copies the network is right as often.
STRONG, WEAK = (0.8, 0.72, 0.3, 0.45), (0.4, 0.3, 0.35, 0.5)
# Answers by name: stretches as (is a copy, least and most tokens, chances), repeated up to the
# tokens of an answer (least and most); of several answers each is taken in turn.
COPY, OWN = (True, 30, 120, STRONG), (False, 5, 30, STRONG)
ANSWERS: dict[str, tuple[tuple[int, int, tuple[Any, ...]], ...]] = {
    "copies": ((80, 300, (COPY, (False, 2, 12, WEAK))), (80, 300, ((False, 2, 12, STRONG), COPY))),
    "summaries": ((120, 300, (OWN, COPY)), (120, 300, (COPY, OWN))),
    "short": (
        (9, 30, (COPY,)), (9, 30, ((False, 30, 31, STRONG),)),
        (9, 30, ((False, 2, 6, WEAK), COPY)),
    ),
    "switch": (
        (150, 300, (COPY, (False, 60, 150, STRONG))), (150, 300, ((False, 60, 150, STRONG), COPY)),
    ),
    "chat": ((100, 300, ((False, 300, 301, STRONG),)),),
    "weak": ((100, 300, ((False, 300, 301, WEAK),)),),
    "mixed": (
        (120, 300, (COPY, (False, 2, 12, WEAK))), (100, 300, ((False, 300, 301, STRONG),)),
        (9, 30, (COPY,)), (9, 30, ((False, 30, 31, STRONG),)),
        (100, 300, ((False, 300, 301, WEAK),)),
    ),
}  # fmt: skip


@cache
def answers(name: str, count: int) -> list[tuple[Text, list[int]]]:
    """Answers of this name, and where their stretches end."""
    made = []
    for seed in range(count):
        rng = np.random.default_rng(20_000 + seed)
        least, most, stretches = ANSWERS[name][seed % len(ANSWERS[name])]
        length = int(rng.integers(least, most))
        lines: list[np.ndarray] = []
        ends: list[int] = []
        while not ends or ends[-1] < length:
            is_copy, shortest, longest, chances = stretches[len(ends) % len(stretches)]
            size = min(int(rng.integers(shortest, longest)), length - (ends[-1] if ends else 0))
            lines.append(_stretch(rng, size, chances, is_copy=is_copy))
            ends.append(size + (ends[-1] if ends else 0))
        made.append((Text(*np.concatenate(lines, axis=1)), ends))
    return made


def _stretch(
    rng: Any, size: int, chances: tuple[float, float, float, float], *, is_copy: bool
) -> np.ndarray:
    def run(chance: float, more: float) -> np.ndarray:
        found = np.minimum(rng.geometric(1.0 - more, size), 10)
        return np.where(rng.random(size) < chance, found, 0)

    first, further, guess, again = chances
    network = run(first, further)
    tree = np.minimum(np.maximum(network, run(0.3 * first, further)), 8)
    large = np.minimum(np.maximum(tree, run(0.2 * first, further)), 8)
    if is_copy:
        matched = np.minimum(np.arange(size), 16)
        right = np.where(matched > 0, np.minimum(np.arange(size, 0, -1) - 1, 15), 0)
    else:
        matched = rng.choice([0, 0, 0, 1, 1, 2], size)
        right = np.where(rng.random(size) < 0.5, network, run(guess, again))
        right = np.minimum(right, run(2 * guess, 0.8))
    return np.stack([matched, right, network, tree, large])


class TreeReplay(Replay):
    """Trees as the drafter sizes them."""

    drafter: Any = None

    def right(self, text: Text, here: int, waits: int, made: int, num_nodes: int) -> int:
        if waits <= 0 or not isinstance(self.drafter, Model):
            return text.run(here, waits, has_lookup=self.has_lookup)
        levels, beside = self.drafter.size(waits, made)
        if waits >= MERGED:
            grown = text.tree if waits == MERGED or text.large is None else text.large
            return int(max(min(text.right[here], beside), min(grown[here], levels)))
        if self.has_lookup and text.matched[here] >= 4:
            return int(text.right[here])
        return int(min(text.tree[here] if waits == TREE else text.network[here], levels))


def seconds_of(target: Target, drafter: Any) -> Callable[[int, Any], float]:
    sizes, times = list(target.steps), list(target.steps.values())

    def seconds(num_rows: int, shape: Any) -> float:
        packed, source = num_rows * (1 + shape.num_nodes), shape.source
        took = float(np.interp(packed, sizes, times)) * max(1.0, packed / sizes[-1])
        took += 0.006 * (source != DraftSource.NOBODY)
        if isinstance(drafter, Head) and source >= 0:
            took += FOLLOWING + EACH_FOLLOWED * packed
        if source > 0:
            levels = drafter.levels(source, shape.num_nodes)
            took += (
                target.level * (1.0 + num_rows / 200) * levels * (1.0 if source == CHAIN else 1.3)
            )
        return took

    return seconds


def new_policy(drafter: Any, rows: Any, seconds: Any) -> CapturedPolicy:
    policy, size = CapturedPolicy(drafter, rows), 1
    while size <= len(rows.known):
        for shape in policy.shapes.to_capture(size):
            policy.costs.capture(StepKey(size, shape), seconds(size, shape))
        size *= 2
    return policy


def host(num_rows: int, shape: Any, per_row: float = PER_ROW) -> float:
    return HOST + num_rows * per_row * (CHECKED if shape.num_nodes else 1.0)


def fixed_shapes(name: str) -> list[StepShape]:
    shapes = [StepShape(0, DraftSource.NOBODY), *(StepShape(n) for n in (3, 7, 15))]
    if name == "head":  # lookups do without it
        shapes = [shapes[0], *(StepShape(n, ALONE) for n in (3, 7, 15))]
    if name != "lookups":
        shapes += [*CHAINS[1:], *(TREES if name != "head" else [StepShape(15, TREE)])]
    return shapes


class Case(NamedTuple):
    load: str  # closed, together, open, or a name of answers
    target: str
    drafter: str
    size: int  # rows, or requests per second
    only: int | None = None  # one kind of text
    per_row: float = PER_ROW

    def replay(self, fixed: StepShape | None) -> TreeReplay:
        drafter, has_phrases = DRAFTERS[self.drafter]
        target = TARGETS.get(self.target, TRAINED)
        seconds, is_open = seconds_of(target, drafter), self.load == "open"
        num_rows = 128 if is_open else self.size
        rows = buffers(num_rows)
        policy: Any = Fixed(fixed) if fixed else new_policy(drafter, rows, seconds)
        count = num_rows if self.load == "together" else max(3 * num_rows, 36)
        arrivals = None
        if is_open:
            count = max(self.size * 6 // 10, 20)
            arrivals = [1e3 * due for due in Load(rate=self.size, seed=0).arrivals(count)]
        if self.load in ANSWERS:
            some = [text for text, _ in answers(self.load, count)]
        else:
            some = texts(count, 64 if is_open else 144, has_phrases=has_phrases, only=self.only)
        replay = TreeReplay(
            some, policy, rows, seconds, num_rows, arrivals,
            (0.0, 0.0) if self.load == "together" else target.prompt,
            partial(host, per_row=self.per_row),
        )  # fmt: skip
        replay.drafter = drafter
        replay.run()
        return replay

    def speed(self, fixed: StepShape | None = None) -> float:
        replay = self.replay(fixed)
        if self.load == "open":
            assert replay.arrivals is not None
            return 1.0 / (float(np.mean(replay.ended)) - float(np.mean(replay.arrivals)))
        if self.load == "together":
            return replay.num_tokens / replay.now
        assert replay.while_full is not None
        return replay.while_full[0] / replay.while_full[1]

    def best_of_stretches(self) -> float:
        """The speed of the best choice for each stretch, if changes cost nothing."""
        drafter, _ = DRAFTERS[self.drafter]
        replay = TreeReplay([], SimpleNamespace(), buffers(1), seconds_of(TRAINED, drafter), 1)
        replay.drafter, num_tokens, total = drafter, 0, 0.0
        for one, ends in answers(self.load, 36):
            total += sum(TRAINED.prompt) + replay.seconds(1, StepShape(0)) + HOST
            num_tokens += len(one)
            for start, end in zip([1, *ends], ends, strict=False):
                total += min(
                    self._walk(replay, one, start, end, shape)
                    for shape in fixed_shapes(self.drafter)
                )
        return num_tokens / total

    def _walk(self, replay: TreeReplay, text: Text, here: int, end: int, shape: Any) -> float:
        num_steps = 0
        while here < end:
            run = replay.right(text, here, shape.source, shape.num_nodes, shape.num_nodes)
            here += min(run, shape.num_nodes) + 1
            num_steps += 1
        return num_steps * replay.seconds(1, shape)

    def best(self) -> tuple[float, StepShape, float]:
        """The speed of the best fixed choice, that choice, and the speed of plain decoding."""
        found = [(self.speed(shape), shape) for shape in fixed_shapes(self.drafter)
                 if self.load == "open" or self.size * (1 + shape.num_nodes) <= 1024]  # fmt: skip
        return *max(found), found[0][0]


ROWS = (1, 8, 24, 64, 128, 256)


def cases() -> Iterator[Case]:
    for target in TARGETS:
        for drafter in DRAFTERS:
            for rows in ROWS:
                yield Case("closed", target, drafter, rows)
            for rows in (8, 64):
                yield Case("together", target, drafter, rows)
            for rate in TARGETS[target].rates:
                yield Case("open", target, drafter, rate)
    for name in ANSWERS:
        for rows in (1, 8):
            yield Case(name, "trained", "phrases", rows)


class Figures(NamedTuple):
    of_best: float  # speed over that of the best fixed choice
    of_plain: float


def print_table(only: set[str], before: str | None = None) -> None:
    """The lines that have all these words, and what they say together."""
    found: dict[str, Figures] = {}
    for case in cases():
        if only <= {case.load, case.target, case.drafter, str(case.size)}:
            most, shape, plain = case.best()
            best = f"{DraftSource(shape.source).name.lower()} {shape.num_nodes}"
            if case.load in ANSWERS and case.size == 1:
                most, best = case.best_of_stretches(), f"the best of each stretch ({best})"
            name = f"{case.load:9} {case.target:7} {case.drafter:8} {case.size:4}"
            speed = case.speed()
            found[name] = Figures(speed / most, speed / plain)
            print(f"{name} {speed / most:.4f} {speed / plain:.4f} of {best}", flush=True)
    print_means(found)
    if before is not None:
        compare(read_figures(before), found)


def print_means(found: Mapping[str, Figures]) -> None:
    worst = min(found, key=lambda name: found[name].of_best)
    least = min(found, key=lambda name: found[name].of_plain)
    mean = geometric_mean(one.of_best for one in found.values())
    print(
        f"mean {mean:.4f} of the best fixed choice, at worst {found[worst].of_best:.3f} ({worst})"
    )
    print(f"at least {found[least].of_plain:.3f} of plain decoding ({least})")


def read_figures(path: str) -> dict[str, Figures]:
    """The figures of a printed table."""
    found = {}
    for line in Path(path).read_text().splitlines():
        name, (of_best, of_plain) = line[:32], line[32:].split()[:2]
        if not line.startswith(("mean", "at least", "fallen")):
            found[name.rstrip()] = Figures(float(of_best), float(of_plain))
    return found


def compare(before: Mapping[str, Figures], now: Mapping[str, Figures]) -> None:
    """Print the cells that fell too far, and whether the change is a gain."""
    both = [name for name in now if name in before]
    is_gain = True
    for name in both:
        was, (of_best, of_plain) = before[name], now[name]
        change = of_best / was.of_best
        if change < 0.98 or (change < 1.0 and of_plain < 0.98):
            is_gain = False
            print(f"fallen: {name} {was.of_best:.3f} -> {of_best:.3f}, {of_plain:.3f} of plain")
    means = [geometric_mean(some[name].of_best for name in both) for some in (before, now)]
    is_gain = is_gain and means[1] > means[0]
    print(f"mean {means[0]:.4f} -> {means[1]:.4f}: {'a gain' if is_gain else 'no gain'}")


def change(setting: str) -> None:
    """Give a constant of `hunch.drafting` another value: NAME=VALUE."""
    name, value = setting.split("=", 1)
    modules = [m for key, m in sys.modules.items() if key.startswith("hunch.drafting")]
    found = [module for module in modules if hasattr(module, name)]
    assert found, f"no constant {name}"
    for module in found:
        setattr(module, name, float(value))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of the lines to print, with commas between")
    parser.add_argument("--before", metavar="FILE")
    given = parser.parse_args()
    settings = [word for word in given.words if "=" in word]
    for setting in settings:
        change(setting)
    only = {word for some in given.words if some not in settings for word in some.split(",")}
    print_table(only, given.before)

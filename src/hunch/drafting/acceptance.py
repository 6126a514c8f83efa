"""What to draft and how much: the most tokens per second, by what is accepted and what steps take.

One estimate says how many tokens guesses will bring: log-odds of a row's first guess and of a
further one after a right one, each with a term of the row, learned while its request runs, and a
term that all requests share. One chooser takes what promises the most tokens per second by the
measured costs; zero nodes is an ordinary answer. Two policies use both: `captured_policy`, where
all rows of a step check the same number of nodes, and `host_policy`, where each has its own number.

All of it is scalar Python: steps have few rows, and for 8 of them numpy took twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, inf, log, log2
from typing import NamedTuple

from hunch.drafting.costs import DraftSource

# --- the acceptance estimate ----------------------------------------------------------------------

COMMON_RATE = 0.003  # of the shared terms, once many guesses taught them;
DOUBTED = 12.0  # and so many are as good as the priors: the first to teach count for more
HEARD = 16.0  # guesses after which half of the hope for a source is gone;
HOPED_ROWS = 4  # and rows of a step: in a step of many a trial costs much and teaches at once
# Tokens expected of guesses that were checked are compared with those that came: how many steps
# count, and as how many tokens it counts that estimates were right before any was.
CALIBRATED, FORGIVEN, TRUSTED, MAX_WRONG = 60.0, 500.0, 4.0, 2.0
LOW, HIGH = 0.02, 0.98  # chances are never thought beyond
FINE = 8  # steps of log-odds that chances are looked up by
FLOOR = 0.05  # least p (1 - p) that an error is divided by, so that chances move by the rate
UNUSED, COMMON_UNUSED = 0.003, 0.001  # what row and shared terms lose with a step without guesses
FORGOTTEN = 0.002  # share of what was heard that counts no more after a step without guesses
DOUBT_FADE = 0.03
NEW_MATCH = 1.0  # doublings of the match taken for a row of which nothing was heard

HOPE = 0.8  # log-odds that a network is given until it was tried
# Of a merged tree what the network guesses: a lookup's guesses beside it have an estimate already.
NETWORK_PRIORS = {
    DraftSource.CHAIN: (0.5, 0.6),
    DraftSource.TREE: (0.65, 0.65),
    DraftSource.MERGED: (0.7, 0.68),
}


class LookupPrior(NamedTuple):
    """What lookups are thought to be worth until they have taught.

    How long the last match was says most of it: over 1,200 answers the first guess was right 10% of
    the time where nothing had matched, 24% after one token, 53% after three, 95% after sixteen.
    """

    chances: tuple[float, float]  # of the first guess and of a further one, nothing matched
    by_match: tuple[float, float]  # log-odds that both gain with each doubling of the match
    rate: float = 0.04
    doubt: float = 0.3


OWN_TEXT = LookupPrior((0.1, 0.6), (1.0, 0.5))
WITH_PHRASES = LookupPrior((0.25, 0.45), (0.75, 0.65))


class AcceptanceEstimate:
    """How many of a row's guesses will be accepted.

    Sources differ by their priors alone: what is learned of one holds for the others, or the noise
    of two estimates would choose between them. What is known of a row's next guesses (how long a
    match they go on) may shift its log-odds; then its terms are what is learned beside that.
    """

    def __init__(
        self,
        num_rows: int,
        priors: Mapping[int, tuple[float, float]],  # by source: of the first guess, a further one
        *,
        rate: float,
        num_levels: int | Mapping[int, int],  # by source
        by_match: tuple[float, float] = (0.0, 0.0),  # what both gain with a doubling of the match
        doubt: float = 0.0,  # log-odds that a new row is thought to lack, see `gains`
        hope: float = 0.0,  # and that a source is given of which nothing was heard
    ) -> None:
        self.priors = {
            source: (log_odds(first), log_odds(further))
            for source, (first, further) in priors.items()
        }
        self.rate, self.by_match, self.doubt, self.hope = rate, by_match, doubt, hope
        self.num_levels = (
            dict.fromkeys(priors, num_levels) if isinstance(num_levels, int) else dict(num_levels)
        )
        self.first, self.further = [0.0] * num_rows, [0.0] * num_rows  # terms of the rows
        self.doubts = [doubt] * num_rows
        # Doublings of the match last heard of (0 tokens: none, 1: one, 3: two) and of the one
        # before it, after which the guesses were made that are compared next.
        self.match, self.before = [NEW_MATCH] * num_rows, [NEW_MATCH] * num_rows
        self.common_first = self.common_further = 0.0
        self.num_heard = 0.0  # guesses that taught the shared terms
        # By source: tokens expected of guesses that were checked of late, and those that came.
        self.checked = dict.fromkeys(priors, (TRUSTED, TRUSTED))

    def start(self, rows: Sequence[int]) -> None:
        """Requests came into these rows."""
        for row in rows:
            self.first[row] = self.further[row] = 0.0
            self.doubts[row] = self.doubt
        self.miss(rows)

    def miss(self, rows: Sequence[int]) -> None:
        """Nothing is known of the next guesses for these rows."""
        for row in rows:
            self.match[row] = self.before[row] = NEW_MATCH

    def hear(self, row: int, matched: int) -> None:
        """The row's new guesses go on a match of so many tokens."""
        self.before[row], self.match[row] = self.match[row], log2(1.0 + matched)

    def learn(
        self,
        row: int,
        run: int,
        compared: int,
        source: int = DraftSource.LOOKUP,
        weight: float = 1.0,  # for the shared terms: one over the rows of the step
        num_checked: int = 0,  # of its guesses, by the target
        *,
        is_most: bool = False,
        num_levels: int | None = None,
    ) -> None:
        """So many of the row's guesses were right in a row, of so many that could be compared.

        is_most: or fewer, as others were checked beside them that were right as far.
        num_levels: of the guesses that are the source's own; all that were right are its gain.
        """
        self.doubts[row] *= 1.0 - DOUBT_FADE
        if not compared:
            return
        levels = self.num_levels[source] if num_levels is None else num_levels
        odds, again = self.odds(row, source, self.before[row])
        if num_checked:
            most = min(num_checked, levels)
            (gain,) = _gains(odds, again, (most,), levels)
            came = min(run, most) if num_levels is None else run
            self.calibrate(source, gain, came, weight)
        (chance, scale), (further, further_scale) = _chance(odds), _chance(again)
        right, num_further = 1.0 if run else 0.0, min(run, levels) - 1.0
        asked = min(compared, levels) - 1.0
        if is_most and run:
            right, num_further, asked = _up_to(odds, again, min(run, levels))
        step = self.rate * scale * (right - chance)
        self.first[row] += step
        self.num_heard += 1.0
        common = max(weight * COMMON_RATE, 1.0 / (DOUBTED + self.num_heard)) / self.rate
        self.common_first += common * step
        if asked:
            step = self.rate * further_scale * (num_further - asked * further)
            self.further[row] += step
            self.common_further += common * step

    def odds(self, row: int, source: int, match: float, more: float = 0.0) -> tuple[int, int]:
        """Log-odds in steps of a row's first guess after such a match, and of a further one."""
        (first, further), (by_first, by_further) = self.priors[source], self.by_match
        first += by_first * match + self.common_first + self.first[row] + more
        further += by_further * match + self.common_further + self.further[row] + more
        return round(FINE * first), round(FINE * further)

    def calibrate(self, source: int, gain: float, came: float, weight: float) -> None:
        """So many tokens were expected of guesses of this source, and so many came."""
        for other, (expected, was) in self.checked.items():
            if other == source:
                kept = 1.0 - weight / CALIBRATED
                self.checked[source] = kept * expected + weight * gain, kept * was + weight * came
            elif expected != was:  # what is not in use is slowly thought right again
                kept = 1.0 - weight / FORGIVEN
                self.checked[other] = expected, kept * was + (1.0 - kept) * expected

    def fade(self, rows: Sequence[int]) -> None:
        """Nobody guessed for these rows: what was learned is slowly forgotten, and tried again."""
        for row in rows:
            self.first[row] *= 1.0 - UNUSED
            self.further[row] *= 1.0 - UNUSED
        self.common_first *= 1.0 - COMMON_UNUSED
        self.common_further *= 1.0 - COMMON_UNUSED
        self.num_heard *= 1.0 - FORGOTTEN

    def gains(
        self,
        rows: Sequence[int],
        sizes: tuple[int, ...],
        source: int = DraftSource.LOOKUP,
        *,
        is_doubtful: bool = False,
        is_hopeful: bool = True,
    ) -> list[tuple[float, ...]]:
        """Tokens that so many guesses would bring each row.

        Rows of a step wait for one another, and of many whose texts are not known yet some will
        gain little: so a new row may be doubted, the more the more rows the step has.
        """
        (by_first, by_further), prior = self.by_match, self.priors[source]
        hope = self.hope_left(len(rows)) if is_hopeful else 0.0
        first, further = prior[0] + self.common_first + hope, prior[1] + self.common_further + hope
        doublings = log2(len(rows)) if is_doubtful else 0.0
        most, right = self.num_levels[source], self.calibration(source)
        firsts, furthers, matches, doubts = self.first, self.further, self.match, self.doubts
        gains = []
        for row in rows:  # lean, as it runs for every row at every step
            match, doubt = matches[row], doublings * doubts[row]
            odds = round(FINE * (first + by_first * match + firsts[row] - doubt))
            again = round(FINE * (further + by_further * match + furthers[row] - doubt))
            gains.append(_gains(odds, again, sizes, most))
        if abs(right - 1.0) < 0.01:
            return gains
        return [
            tuple([min(right * gain, size) for gain, size in zip(some, sizes, strict=True)])
            for some in gains
        ]

    def hope_left(self, num_rows: int) -> float:
        """Log-odds that a source is given as little was heard of it."""
        return self.hope / (1.0 + self.num_heard / HEARD) / (1.0 + (num_rows - 1) / HOPED_ROWS)

    def calibration(self, source: int) -> float:
        """Tokens that came for one that was expected."""
        expected, came = self.checked[source]
        return min(max(came / expected, 1.0 / MAX_WRONG), MAX_WRONG)


def log_odds(chance: float) -> float:
    return log(chance / (1.0 - chance))


@lru_cache(maxsize=1 << 12)
def _chance(odds: int) -> tuple[float, float]:
    """Of log-odds in steps; and what an error is worth, so that the chance moves by the rate."""
    chance = min(max(1.0 / (1.0 + exp(-odds / FINE)), LOW), HIGH)
    return chance, 1.0 / max(chance * (1.0 - chance), FLOOR)


@lru_cache(maxsize=1 << 16)
def _gains(odds: int, again: int, sizes: tuple[int, ...], most: int) -> tuple[float, ...]:
    """Tokens that so many guesses bring; those past `most` bring none."""
    (first, _), (further, _) = _chance(odds), _chance(again)
    return tuple([first * (1.0 - further ** min(size, most)) / (1.0 - further) for size in sizes])


@lru_cache(maxsize=1 << 12)
def _up_to(odds: int, again: int, most: int) -> tuple[float, float, float]:
    """Of guesses of which at most so many were right: first ones and further ones expected right,
    and further ones compared."""
    (first, _), (further, _) = _chance(odds), _chance(again)
    shares = [1.0 - first, *(first * (1.0 - further) * further**n for n in range(most))]
    total = sum(shares)
    right = 1.0 - shares[0] / total
    num_right = sum(run * share for run, share in enumerate(shares)) / total
    return right, num_right - right, num_right


@lru_cache(maxsize=1 << 14)
def of_either(one: tuple[int, int], most: int, other: tuple[int, int], other_most: int) -> float:
    """Tokens that two drafts bring which are checked beside each other, by their log-odds."""
    missed = [1.0] * max(most, other_most)  # by level: chances that neither is right so far
    for (odds, again), levels in ((one, most), (other, other_most)):
        (first, _), (further, _) = _chance(odds), _chance(again)
        for level in range(levels):
            missed[level] *= 1.0 - first * further**level
    return len(missed) - sum(missed)


# --- the chooser ----------------------------------------------------------------------------------


def best_rate(tokens: Sequence[float], seconds: Sequence[float], margin: float = 0.0) -> int:
    """Which has the most tokens per second; the first is plain decoding, to be beaten by margin."""
    best, most = 0, tokens[0] / seconds[0] * (1.0 + margin)
    for place in range(1, len(tokens)):
        rate = tokens[place] / seconds[place]
        if rate > most:
            best, most = place, rate
    return best


class MeanCounts(NamedTuple):
    """What part counts of what the mean of a step's rows gains beyond the row that gains least.

    Each row of a step waits for what the others check, and requests that came together are done
    when the last of them is: the row that gains least decides. While requests keep coming, the next
    one has the use of what a fast row gains.
    """

    together: float  # of requests that came together
    flowing: float
    max_more: float = 1.0  # tokens of which a part counts for those that came together


# Replayed, eight that came together lose 4% of plain decoding's speed on texts of which half can be
# guessed, if the mean counts alone. Of a network's rows it knows the least less well: at 0.2, 64
# requests lost 4% with one.
OF_LOOKUPS, OF_NETWORKS = MeanCounts(0.2, 0.5), MeanCounts(0.35, 0.5)
# Where each row checks as many nodes as pay for it: replayed on answers of three models, eight that
# came together lose 5% if the mean counts alone and 1% at most at 0.35, and with 0.2 four gain half
# as much. While requests keep coming, eight have 1.29 times plain decoding's speed if the mean
# counts alone, and 1.20 at 0.5.
OF_OWN_NODES = MeanCounts(0.35, 1.0, inf)


def gain_of_rows(gains: Sequence[float], counts: MeanCounts, *, is_flowing: bool) -> float:
    """As what a step counts whose rows gain so many tokens."""
    least = min(gains)
    more = sum(gains) / len(gains) - least  # that the mean gains
    if is_flowing:
        return least + counts.flowing * more
    return least + counts.together * min(more, counts.max_more)

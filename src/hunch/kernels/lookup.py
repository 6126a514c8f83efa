"""Where a text's end stood before: the index that suffix lookup asks.

Every place where the last tokens stood before is a witness of what comes next. How many places
share the longest match, whether they agree and how long it is make the type of a guess.
"""

from __future__ import annotations

from math import log

TIERS = (4, 2, 1)  # lengths of the n-grams indexed; longer matches are found by comparing
MAX_PLACES = 12  # witnesses asked, most recent first
LENGTHS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7)  # of a match -> class
NUM_LENGTHS = 8  # classes
MAX_MATCH = len(LENGTHS) - 1
DIFFER, SECOND = 4, 5  # records after those of 1, 2, 3 and more places that agree
NUM_GUESS_TYPES = (SECOND + 1) * NUM_LENGTHS
NUM_ASKED = 7  # guesses of a chain for which a table is asked: later ones bring nothing
NEAR = 16  # tokens around the place expected next among which a single one of a prediction counts
BY_TABLE = 1  # tokens of a match that tell of the next guess as much as one of a table does
MIN_CHANCE = 0.05  # of a path, below which no cost curve would check it

# Chances to start from, by match length (1, 2, 3, 4, 5-6, 7-8, 9-15, 16): one place, two, three,
# four or more that agree; places that differ; and the second guess of places that differ.
# Measured on the default model's answers.
PRIORS = (
    (0.29, 0.52, 0.65, 0.71, 0.76, 0.80, 0.88, 0.97),
    (0.43, 0.73, 0.77, 0.85, 0.88, 0.91, 0.95, 0.985),
    (0.60, 0.90, 0.88, 0.93, 0.94, 0.97, 0.98, 0.995),
    (0.74, 0.90, 0.93, 0.96, 0.97, 0.98, 0.99, 0.998),
    (0.15, 0.28, 0.35, 0.42, 0.35, 0.40, 0.45, 0.55),
    (0.10, 0.20, 0.25, 0.30, 0.28, 0.28, 0.28, 0.28),
)

PRIOR_ODDS = [log(chance / (1 - chance)) for chances in PRIORS for chance in chances]  # by type

# How chances follow what the target really says, in log-odds per comparison.
FIRST_RATE, LAST_RATE = 0.3, 0.02  # of a guess type's term: quick at first, then slow
FADE = 0.97  # of that rate, per comparison
ROW_RATE = 0.15  # of a request's term
ROW_LIMIT = 4.0
RATES = {  # as the C++ kernels are told
    "first_rate": FIRST_RATE, "last_rate": LAST_RATE, "fade": FADE, "row_rate": ROW_RATE,
    "row_limit": ROW_LIMIT,
}  # fmt: skip


def guess_type_of(after: list[int], length: int) -> int:
    """The type of guessing the first of `after`, what follows the places of a match."""
    num_places = len(after)
    is_agreed = num_places == 1 or after.count(after[0]) == num_places
    return (min(num_places, 4) - 1 if is_agreed else DIFFER) * NUM_LENGTHS + LENGTHS[length]


class SuffixText:
    """Tokens, and for every n-gram that something follows, the places where it ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[int, int], ...] = ({}, {}, {})  # by tier: n-gram -> last place
        self._before: tuple[list[int], ...] = ([], [], [])  # place -> the place before it, or 0

    def extend(self, tokens: list[int]) -> None:
        first = len(self.tokens)
        self.tokens += tokens
        last4, last2, last1 = self._last
        before4, before2, before1 = self._before
        a, b, c, d = ([-1] * 4 + self.tokens[max(0, first - 4) : first])[-4:]
        for place, token in enumerate(tokens, start=first):
            # `token` stands at `place` and so follows the n-grams that end before it.
            two = (c << 24) + d
            four = (((a << 24) + b) << 48) + two
            before4.append(last4.get(four, 0))
            before2.append(last2.get(two, 0))
            before1.append(last1.get(d, 0))
            last4[four] = last2[two] = last1[d] = place
            a, b, c, d = b, c, d, token

    def find(self, tail: list[int]) -> tuple[int, list[int]]:
        """The longest match of `tail`, and places of what follows it, most recent first."""
        for tier, size in enumerate(TIERS):
            if len(tail) < size:
                continue
            place = self._last[tier].get(_key(tail, size), 0)
            if place:
                places, before = [place], self._before[tier]
                while len(places) < MAX_PLACES and (place := before[place]):
                    places.append(place)
                return self._longest(tail, size, places)
        return 0, []

    def _longest(self, tail: list[int], size: int, places: list[int]) -> tuple[int, list[int]]:
        if size == 1:
            return 1, places
        tokens, best, kept = self.tokens, 0, places
        limit = min(len(tail), MAX_MATCH)
        for place in places:
            length = size
            end = min(limit, place)
            while length < end and tokens[place - length - 1] == tail[-length - 1]:
                length += 1
            if length > best:
                best, kept = length, [place]
            elif length == best:
                kept.append(place)
        return best, kept


def _key(tail: list[int], size: int) -> int:
    key = 0
    for token in tail[-size:]:
        key = (key << 24) + token
    return key

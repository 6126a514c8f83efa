"""Suffix lookup: continue the longest match of the text's end, as far as its record says it pays.

Every place where the last tokens stood before is a witness of what comes next. The longest match
wins; how long it is, how many places share it and whether they agree decide how far to trust it.
Witnesses are the request's own prompt and output and, with shared=true, recent outputs of the
process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hunch.config import read_options
from hunch.errors import ConfigError
from hunch.spec.base import DeviceDrafter, DrafterContext
from hunch.spec.chance import Chances
from hunch.spec.lookup import LookupDrafter, LookupRow
from hunch.spec.trees import Node, best_first

TIERS = (4, 2, 1)  # lengths of the n-grams indexed; longer matches are found by comparing
MAX_PLACES = 12  # witnesses asked, most recent first
MIN_CHANCE = 0.02  # of a path, below which no cost curve would check it

# Chances to start from, by match length (1, 2, 3, 4, 5-6, 7-8, 9-15, 16): one place, two, three,
# four or more that agree; places that differ; and the second guess of places that differ.
# Measured on the default model's answers.
LENGTHS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7)
MAX_MATCH = len(LENGTHS) - 1
PRIORS = (
    (0.29, 0.52, 0.65, 0.71, 0.76, 0.80, 0.88, 0.97),
    (0.43, 0.73, 0.77, 0.85, 0.88, 0.91, 0.95, 0.985),
    (0.60, 0.90, 0.88, 0.93, 0.94, 0.97, 0.98, 0.995),
    (0.74, 0.90, 0.93, 0.96, 0.97, 0.98, 0.99, 0.998),
    (0.15, 0.28, 0.35, 0.42, 0.35, 0.40, 0.45, 0.55),
    (0.10, 0.20, 0.25, 0.30, 0.28, 0.28, 0.28, 0.28),
)
NUM_KINDS = len(PRIORS) * 8
DIFFER, SECOND = 4, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Options of `suffix`."""

    num_nodes: int = 16  # most nodes drafted per step
    tree: bool = False  # guess two ways where witnesses differ
    shared: bool = False  # ask recent outputs of other requests too
    shared_tokens: int = 200_000  # how many of their tokens are remembered
    adaptive: bool = True  # fewer nodes where their chance does not pay for checking them
    margin: float = 0.0  # share by which drafting must promise to beat plain decoding

    def __post_init__(self) -> None:
        for name in ("num_nodes", "shared_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"suffix: {name}={getattr(self, name)} must be 1 or more")


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


class Store:
    """Recent outputs in two halves; when the younger is full, the older is dropped at once."""

    def __init__(self, max_tokens: int) -> None:
        self._half = max(1, max_tokens // 2)
        self.young, self.old = SuffixText(), SuffixText()

    def add(self, tokens: list[int]) -> None:
        if len(self.young.tokens) + len(tokens) > self._half:
            self.young, self.old = SuffixText(), self.young
        self.young.extend([*tokens[-self._half + 1 :], -1])  # -1: no match runs over the end

    def find(self, tail: list[int]) -> tuple[int, list[int], SuffixText]:
        length, places = self.young.find(tail)
        older, older_places = self.old.find(tail)
        if older > length:
            return older, older_places, self.old
        return length, places, self.young


class Witness:
    """Where a node stands: its match, what it follows, and the guesses that led to it."""

    __slots__ = ("first_kind", "length", "path", "places", "tokens")

    def __init__(
        self, tokens: list[int], length: int, places: list[int], path: list[int], first_kind: int
    ) -> None:
        self.tokens, self.length, self.places, self.path = tokens, length, places, path
        self.first_kind = first_kind

    def followers(self) -> dict[int, list[int]]:
        """Token -> the places after it; the most recent witness's first."""
        out: dict[int, list[int]] = {}
        tokens, end = self.tokens, len(self.tokens)
        for place in self.places:
            # A match that reaches the end of the text goes on with the guesses themselves.
            token = tokens[place] if place < end else self.path[place - end]
            if token < 0:
                continue
            if token in out:
                out[token].append(place + 1)
            else:
                out[token] = [place + 1]
        return out

    def after(self, token: int, places: list[int]) -> Witness:
        length = min(self.length + 1, MAX_MATCH)
        return Witness(self.tokens, length, places, [*self.path, token], self.first_kind)


class SuffixDrafter(LookupDrafter):
    """A chain or a small tree per row, cut where its chance no longer pays."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        self.config = read_options(SuffixConfig, options, "suffix")
        kinds = {
            source * NUM_KINDS + record * 8 + length: chance
            for source in (0, 1)  # own text, shared store
            for record, chances in enumerate(PRIORS)
            for length, chance in enumerate(chances)
        }
        super().__init__(
            max_nodes=self.config.num_nodes,
            chances=Chances(kinds),
            cost=context.cost,
            device=context.device,
            margin=self.config.margin,
            is_adaptive=self.config.adaptive,
        )
        self.store = Store(self.config.shared_tokens) if self.config.shared else None

    def on_device(self) -> DeviceDrafter | None:
        """There the longest match alone is asked; trees and texts of others need the host."""
        if self.config.tree or self.config.shared:
            return None
        from hunch.spec.on_device import DeviceLookup

        return DeviceLookup(
            name="suffix",
            min_match=1,
            max_match=MAX_MATCH,
            num_nodes=self.config.num_nodes,
            margin=self.margin,
            is_adaptive=self.config.adaptive,
        )

    def new_text(self) -> SuffixText:
        return SuffixText()

    def guess(self, row: LookupRow) -> list[Node]:
        root = self._root(row)
        if root is None:
            return []
        if self.config.tree:
            return best_first(
                root,
                lambda witness: self._children(witness, row.term),
                self.config.num_nodes,
                MIN_CHANCE,
            )
        return self._chain(root, row.term)

    def _chain(self, root: Witness, term: float) -> list[Node]:
        """The first child each time; lean, as it runs for every row at every step."""
        tokens, length, places = root.tokens, root.length, root.places
        of, first_kind, end = self.chances.of, root.first_kind, len(root.tokens)
        nodes: list[Node] = []
        chance = 1.0
        for parent in range(-1, self.config.num_nodes - 1):
            # A match that reaches the end of the text goes on with the guesses themselves.
            after = [tokens[p] if p < end else nodes[p - end].token for p in places]
            token, num_places = after[0], len(after)
            if token < 0:
                break
            is_agreed = num_places == 1 or after.count(token) == num_places
            kind = first_kind + (min(num_places, 4) - 1 if is_agreed else DIFFER) * 8
            kind += LENGTHS[length]
            chance *= of(kind, term)
            if chance < MIN_CHANCE:
                break
            nodes.append(Node(token, parent, chance, kind))
            if is_agreed:
                places = [p + 1 for p in places]
            else:
                places = [p + 1 for p, t in zip(places, after, strict=True) if t == token]
            if length < MAX_MATCH:
                length += 1
        return nodes

    def _root(self, row: LookupRow) -> Witness | None:
        assert isinstance(row.text, SuffixText)
        tail = row.text.tokens[-MAX_MATCH:]
        length, places = row.text.find(tail)
        source, first_kind = row.text, 0
        if self.store is not None:
            further, further_places, other = self.store.find(tail)
            if further > length:
                length, places, source, first_kind = further, further_places, other, NUM_KINDS
        if not length:
            return None
        return Witness(source.tokens, length, places, [], first_kind)

    def _children(self, witness: Witness, term: float) -> Iterator[tuple[int, float, int, Witness]]:
        followers = witness.followers()
        record = DIFFER if len(followers) > 1 else min(len(witness.places), 4) - 1
        for token, places in followers.items():
            kind = witness.first_kind + record * 8 + LENGTHS[witness.length]
            chance = self.chances.of(kind, term)
            yield token, chance, kind, witness.after(token, places)
            if record == SECOND:
                return
            record = SECOND

    def forget(self, rows: list[int]) -> None:
        if self.store is not None:
            for row in rows:
                state = self.rows.get(row)
                if state is not None and len(state.text.tokens) > state.num_prompt:
                    self.store.add(state.text.tokens[state.num_prompt :])
        super().forget(rows)

    def clear(self) -> None:
        """Empty the shared store."""
        if self.store is not None:
            self.store = Store(self.config.shared_tokens)

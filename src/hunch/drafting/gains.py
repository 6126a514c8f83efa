"""How many tokens each source's guesses would gain in a captured step."""

from __future__ import annotations

from math import log2

from hunch.drafting.acceptance import (
    HOPE,
    NETWORK_PRIORS,
    NEW_MATCH,
    OWN_TEXT,
    WITH_PHRASES,
    AcceptanceEstimate,
    of_either,
)
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.step_shapes import SURE, DraftSource, StepShapes

SURE_MATCH = log2(1 + SURE)


class SourceGains:
    """The acceptance estimates of lookups and of a network, and of both together."""

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, num_rows: int) -> None:
        self.has_lookup = shapes.has_lookup
        prior = WITH_PHRASES if drafter is not None and drafter.is_guided else OWN_TEXT
        self.drafter, sources = drafter, shapes.network_sources
        num_looked_up = [shapes.max_looked_up or 1]
        if drafter is not None and not shapes.max_looked_up:  # checked beside a network alone
            merged = [s for s in shapes.all if s.source == DraftSource.MERGED]
            num_looked_up += [drafter.num_beside(s.source, s.num_nodes) for s in merged]
        self.lookup = AcceptanceEstimate(
            num_rows,
            {DraftSource.LOOKUP: prior.chances},
            rate=prior.rate,
            num_levels=max(num_looked_up),
            by_match=prior.by_match,
            doubt=prior.doubt,
        )
        self.network = AcceptanceEstimate(
            num_rows,
            {source: NETWORK_PRIORS[source] for source in sources},
            rate=0.06,
            hope=HOPE,
            num_levels={s: self.levels(s, _largest(shapes, s)) for s in sources},
        )

    def levels(self, source: int, num_nodes: int) -> int:
        """Levels that a network drafts in a step that checks `num_nodes` nodes."""
        assert self.drafter is not None
        return self.drafter.levels(source, num_nodes)

    def of_rows(
        self,
        ids: list[int],
        sizes: tuple[int, ...],
        source: int,
        *,
        is_doubtful: bool,
        is_hopeful: bool,
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of nodes in `sizes`.

        Beside lookups, a step of the network takes the lookup's guesses for rows with a long match,
        and the network's when such a match has just ended.
        """
        if source <= 0:
            return self.lookup.gains(ids, sizes, is_doubtful=is_doubtful)
        if source == DraftSource.MERGED:
            right, match = self.network.calibration(source), self.lookup.match
            hope = self.network.hope_left(len(ids)) if is_hopeful else 0.0
            return [
                tuple([right * self.of_both(row, match[row], size, hope) for size in sizes])
                for row in ids
            ]
        levels = tuple([self.levels(source, size) for size in sizes])
        gains = self.network.gains(
            ids, levels, source, is_doubtful=is_doubtful, is_hopeful=is_hopeful
        )
        if not self.has_lookup:
            return gains
        match = self.lookup.match
        sure = [place for place, row in enumerate(ids) if match[row] >= SURE_MATCH]
        if sure:
            looked = self.lookup.gains([ids[place] for place in sure], (1, *sizes))
            for place, (first, *found) in zip(sure, looked, strict=True):
                own = gains[place]
                gains[place] = tuple(
                    gain + (1.0 - first) * other for gain, other in zip(found, own, strict=True)
                )
        return gains

    def of_both(self, row: int, match: float, num_nodes: int, hope: float = 0.0) -> float:
        """Expected tokens of a network's tree with a lookup's guesses beside it."""
        assert self.drafter is not None
        network, lookup, source = self.network, self.lookup, DraftSource.MERGED
        beside = self.drafter.num_beside(source, num_nodes)
        return of_either(
            network.odds(row, source, NEW_MATCH, hope),
            self.levels(source, num_nodes),
            lookup.odds(row, DraftSource.LOOKUP, match),
            min(beside, lookup.num_levels[DraftSource.LOOKUP]),
        )


def _largest(shapes: StepShapes, source: int) -> int:
    """Nodes of the largest step of a source."""
    return max(shape.num_nodes for shape in shapes.all if shape.source == source)

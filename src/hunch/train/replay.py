"""Tokens per pass without an engine: walk held-out answers with the guesses a student would make.

Shape letters: T tokens of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import Tensor

from hunch.train.packs import Pack

_LOOKS = 6  # looks at held-out answers that a flat curve must have


@dataclass(slots=True)
class Drafted:
    """How many guesses were right, by position."""

    num_tokens: int = 0
    num_passes: int = 0
    tried: list[int] = field(default_factory=list)  # per place in the draft
    kept: list[int] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    @property
    def per_position(self) -> list[float]:
        """The share of drafts with a guess there whose guess was accepted, as stats have it."""
        return [kept / max(tried, 1) for tried, kept in zip(self.tried, self.kept, strict=True)]

    def deepen(self, depth: int) -> None:
        """Make room for drafts of so many places."""
        missing = [0] * (depth - len(self.tried))
        self.tried += missing
        self.kept += missing


class Replay(Drafted):
    """What drafting would have done on answers the target chose greedily."""

    def add(self, pack: Pack, agreed: list[Tensor], depth: int) -> None:
        """Walk each answer: a pass brings the guesses up to the first wrong one, and a token
        more."""
        depth = depth if len(agreed) == 1 else min(depth, len(agreed))
        self.deepen(depth)
        found = np.stack([agreed_T.cpu().numpy() for agreed_T in agreed])
        starts = zip(pairwise(pack.start_S.tolist()), pack.prompt_B.tolist(), strict=True)
        for (start, end), prompt in starts:
            # The prompt's own pass brings the answer's first token.
            at, last = start + max(prompt, 1), end - 1
            while at < last:
                run, most = 0, min(depth, last - at)
                while run < most and found[min(run, len(found) - 1), at + run]:
                    self.kept[run] += 1
                    run += 1
                for place in range(most):
                    self.tried[place] += 1
                self.num_passes += 1
                self.num_tokens += min(run + 1, last - at)
                at += run + 1


class Curve:
    """Tokens per pass on held-out answers as training goes on."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []  # seconds, and tokens per pass

    def add(self, seconds: float, tokens_per_pass: float) -> None:
        self.points.append((seconds, tokens_per_pass))

    @property
    def is_flat(self) -> bool:
        """Whether the last third of the time brought less than half a percent."""
        if len(self.points) < _LOOKS:
            return False
        mark = self.points[-1][0] * 2 / 3
        before = [value for seconds, value in self.points if seconds <= mark]
        late = [value for seconds, value in self.points if seconds > mark]
        return len(before) >= 2 and len(late) >= 2 and max(late) < 1.005 * max(before)

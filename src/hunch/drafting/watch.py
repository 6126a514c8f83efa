"""Watches how much of what a drafter guesses is accepted, and says once when it is too little."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("hunch")

MIN_SHARE = 0.3
ENOUGH = 1000  # guesses after which the share means something


def comes_with_hunch(path: str) -> bool:
    """Its card says what it does: a user who asks for it by name need not be told again."""
    return Path(path).is_relative_to(Path(__file__).parents[1])


class AcceptanceWatch:
    """Counts guessed and accepted tokens along the likeliest path, so that trees count alike."""

    def __init__(self, name: str, remedy: str) -> None:
        self.name, self.remedy = name, remedy
        self.num_guessed = self.num_accepted = 0
        self.has_warned = False

    def spare(self, path: str) -> None:
        """Say nothing of drafters that come with hunch."""
        self.has_warned = self.has_warned or comes_with_hunch(path)

    def count(self, num_guessed: int, num_accepted: int) -> None:
        self.num_guessed += num_guessed
        self.num_accepted += num_accepted
        if self.has_warned or self.num_guessed < ENOUGH:
            return
        share = self.num_accepted / self.num_guessed
        if share < MIN_SHARE:
            self.has_warned = True
            log.warning(
                "%s: only %.0f%% of the guessed tokens are accepted (%d of %d); %s",
                self.name,
                100 * share,
                self.num_accepted,
                self.num_guessed,
                self.remedy,
            )
        else:  # look again at the next stretch, not at the whole past
            self.num_guessed = self.num_accepted = 0

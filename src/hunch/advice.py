"""What acceptance says about a drafter, in the words of the field's guides."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("hunch")

LOW, HIGH = 0.4, 0.8  # shares of accepted guesses that ask for another length or drafter
LONG_PROMPT = 1000  # tokens from which a prompt is worth looking up in
ENOUGH = 1000  # guesses after which their share means something
LOOKUPS = ("ngram", "suffix", "prediction")


def advice_for(method: str, share: float, prompt_len: float = 0) -> str | None:
    """What to try with this share of a draft's levels accepted; None: it is as it should be.

    Of a tree levels count, not nodes: one node of each level can be accepted.
    """
    if share > HIGH and method != "auto":
        return f"{share:.0%} of the guesses are accepted: longer drafts (num_nodes) may pay"
    if share >= LOW:
        return None
    words = f"only {share:.0%} of the guesses are accepted"
    if method == "auto":
        return f"{words}: this text is hard to guess; auto drafts where it pays all the same"
    words += ": try shorter drafts (num_nodes)"
    if method in LOOKUPS:
        return (
            f"{words}, or a drafter made for this target: lookups pay where answers repeat their "
            "prompt (code, summaries, rewriting)"
        )
    words += (
        ", or another drafter: this one may be made for another target or chat template "
        "(`hunch doctor MODEL --speculate ...` finds the usual faults, `hunch train` makes one)"
    )
    if prompt_len >= LONG_PROMPT:
        words += "; with prompts this long, lookup (ngram, suffix) often guesses better"
    return words


class AcceptanceWatch:
    """Counts guesses by drafter, and says once of each when too few or nearly all are accepted."""

    def __init__(self, method: str) -> None:
        self.method = method  # what the engine was told to draft with
        self.counts: dict[str, list[int]] = {}  # by drafter: levels guessed, nodes accepted
        self.told: set[str] = set()

    def add(self, checks: Mapping[tuple[str, int, int, int], int]) -> None:
        """A sequence's drafts: (drafter, nodes, levels, accepted) and how often each came."""
        if self.method == "auto":  # it chooses by the same counts, and needs no advice
            return
        for (name, _, levels, accepted), times in checks.items():
            count = self.counts.setdefault(name, [0, 0])
            count[0] += levels * times
            count[1] += accepted * times
            if count[0] >= ENOUGH and name not in self.told:
                self._tell(name, count[1] / count[0])
                self.counts[name] = [0, 0]  # the next stretch, not the whole past

    def _tell(self, name: str, share: float) -> None:
        words = advice_for(name, share)
        if words is not None:
            self.told.add(name)
            log.log(logging.WARNING if share < LOW else logging.INFO, "%s: %s", name, words)

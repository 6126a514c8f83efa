"""Auto: draft where it pays on this machine, for this text, now; otherwise decode plainly.

For now it plans over one method, suffix lookup. Its guesses are compared with what the target
chooses even while none are sent, so it falls silent on text it cannot guess and comes back when it
can, and neither costs the target a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from hunch.draft import Draft, Rows, TargetStep
from hunch.registry import DRAFTERS, resolve
from hunch.spec.base import Clears, Drafter, DrafterContext

MARGIN = 0.03  # gains below this drown in the noise of the measured costs


class AutoDrafter:
    """Chooses; methods draft."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        options = {"margin": str(MARGIN), **options}
        self.method: Drafter = resolve(DRAFTERS, "suffix")(options, None, context)
        self.needs = self.method.needs

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)

    def propose(self, rows: Rows) -> Draft:
        return self.method.propose(rows)

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)

    def clear(self) -> None:
        if isinstance(self.method, Clears):
            self.method.clear()

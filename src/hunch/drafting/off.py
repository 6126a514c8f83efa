"""Off: no drafts, plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DrafterContext, Options


@dataclass(frozen=True, kw_only=True, slots=True)
class OffConfig:
    """Nothing to choose."""


class OffDrafter:
    """The empty draft, every time."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        read_options(OffConfig, options, "off")
        self.needs = Needs(max_nodes=0)
        self._device = context.device

    def observe(self, step: TargetStep) -> None:
        pass

    def propose(self, rows: Rows) -> Draft:
        return Draft.empty(len(rows.ids_R), self._device)

    def forget(self, rows: list[int]) -> None:
        pass

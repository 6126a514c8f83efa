"""What methods that look guesses up in text share: keeping up with rows, learning, planning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.chance import Chances
from hunch.drafting.cost import CostCurve
from hunch.drafting.pace import REST, StepShape
from hunch.drafting.trees import Node, share_out, to_draft
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.gpu_lookup import (
        DevicePhrases,  # these need Triton, which a CPU may not have
    )
    from hunch.kernels.gpu_step import RowState, StepRows


class Text(Protocol):
    """One request's tokens, indexed for a method."""

    tokens: list[int]

    def extend(self, tokens: list[int]) -> None: ...


@dataclass(slots=True)
class LookupRow:
    """What a method knows of one row."""

    text: Text
    num_prompt: int
    term: float = 0.0  # log-odds by which this request is easier to guess than others
    guesses: list[Node] = field(default_factory=list)  # for the tokens to come, sent or not


class LookupDrafter:
    """Base of the weightless methods: they say how to index a text and what to guess next."""

    def __init__(
        self,
        *,
        max_nodes: int,
        chances: Chances,
        cost: CostCurve,
        device: torch.device,
        margin: float = 0.0,
        is_adaptive: bool = True,
    ) -> None:
        self.needs = Needs(max_nodes=max_nodes)
        self.chances, self.cost, self.device = chances, cost, device
        self.margin = margin  # share by which drafting must promise to beat plain decoding
        self.is_adaptive = is_adaptive  # False: always as many nodes as allowed
        self.rows: dict[int, LookupRow] = {}

    def new_text(self) -> Text:
        raise NotImplementedError

    def guess(self, row: LookupRow) -> list[Node]:
        """Guesses for what follows the row's text, their chances falling."""
        raise NotImplementedError

    def new_row(self, rows: Rows, row: int) -> LookupRow:
        """A request came into the row."""
        return LookupRow(self.new_text(), int(rows.prompt_X[row]))

    def observe(self, step: TargetStep) -> None:
        self.follow(step.rows, step.rows.ids_R.tolist())

    def follow(self, rows: Rows, ids: list[int]) -> None:
        """Catch up with the tokens of these rows."""
        is_host = rows.tokens_XL.device.type == "cpu"
        tokens_XL = rows.tokens_XL.numpy() if is_host else rows.tokens_XL  # cheaper to slice
        known_X = rows.known_X.tolist()
        for row in ids:
            state = self.rows.get(row)
            if state is None:
                state = self.rows[row] = self.new_row(rows, row)
            have, known = len(state.text.tokens), known_X[row]
            if known > have:
                tokens = tokens_XL[row, have:known].tolist()
                self._learn(state, tokens)
                state.text.extend(tokens)

    def look(self, row: int) -> list[Node]:
        """Guesses for a row; what it says next is compared with them, sent or not."""
        state = self.rows[row]
        state.guesses = self.guess(state)
        return state.guesses

    def propose(self, rows: Rows) -> Draft:
        ids, max_draft_X = rows.ids_R.tolist(), rows.max_draft_X.tolist()
        trees = [self.look(row) for row in ids]
        limits = [max_draft_X[row] for row in ids]
        if self.is_adaptive:
            counts = share_out(trees, limits, self.cost, self.margin)
        else:
            counts = [min(len(t), limit) for t, limit in zip(trees, limits, strict=True)]
        return to_draft(trees, counts, self.device)

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def _learn(self, state: LookupRow, tokens: list[int]) -> None:
        """Compare the guesses on the path the target took; a miss teaches only where it parted."""
        at = -1
        guesses, state.guesses = state.guesses, []
        for token in tokens:
            found = -1
            for index, node in enumerate(guesses):
                if node.parent == at:
                    is_right = node.token == token
                    state.term = self.chances.learn(node.kind, state.term, is_right)
                    if is_right:
                        found = index
            if found < 0:
                return
            at = found


@dataclass(kw_only=True)
class DeviceLookup(DeviceDrafter):
    """The most recent of the longest matches of a row's end goes on as it went on then.

    A phrase table, where there is one, says what comes next where it is right more often.
    """

    min_match: int
    max_match: int
    phrases: DevicePhrases | None = None

    @property
    def is_guided(self) -> bool:
        return self.phrases is not None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """A step takes as long for 2, 4, 8 or 16 tokens as for a few less."""
        if not self.is_adaptive:
            return (StepShape(self.num_nodes),)
        sizes = (1, 3, 7, 15) if self.num_nodes > 2 else (self.num_nodes,)
        return (StepShape(0), *(StepShape(n) for n in sizes if n <= self.num_nodes))

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        self.look(state, step, self.num_nodes)

    def look(self, state: RowState, step: StepRows, num_nodes: int) -> None:
        """A chain of so many nodes for each row."""
        from hunch.kernels.gpu_lookup import lookup

        lookup(state, step, num_nodes, self.min_match, self.max_match, phrases=self.phrases)

    def works(self, source: int) -> bool:
        return source != REST

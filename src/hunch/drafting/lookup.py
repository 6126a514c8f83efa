"""Base of methods that look up guesses in text: following rows, learning chances, planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Protocol

from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.acceptance import log_odds
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.trees import Node, draft_of
from hunch.kernels.lookup import FADE, FIRST_RATE, LAST_RATE, ROW_LIMIT, ROW_RATE
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successor_trees import Chain
from hunch.models.target import Hidden

if TYPE_CHECKING:
    from hunch.kernels.gpu_lookup import DevicePhrases  # needs Triton, which a CPU may not have


class Chances:
    """How likely single guesses are right, by their type (match length, how often seen, ...).

    The log-odds are the sum of a term per type, shared by all requests, and a term per request,
    which the row keeps. Every guess that can be compared teaches, whether it was sent to the target
    or not.
    """

    def __init__(self, priors: Mapping[int, float]) -> None:
        self._terms = {guess_type: log_odds(chance) for guess_type, chance in priors.items()}
        self._rates = dict.fromkeys(self._terms, FIRST_RATE)

    def of(self, guess_type: int, row_term: float = 0.0) -> float:
        return 1.0 / (1.0 + exp(-self._terms[guess_type] - row_term))

    def learn(self, guess_type: int, row_term: float, is_right: bool) -> float:
        """Learn from one comparison; returns the request's new term."""
        error = is_right - self.of(guess_type, row_term)
        rate = self._rates[guess_type]
        self._terms[guess_type] += rate * error
        self._rates[guess_type] = max(LAST_RATE, rate * FADE)
        return max(-ROW_LIMIT, min(ROW_LIMIT, row_term + ROW_RATE * error))


class Text(Protocol):
    """One request's tokens, indexed for a method."""

    tokens: list[int]

    def extend(self, tokens: list[int]) -> None: ...


@dataclass(slots=True)
class LookupRow:
    """A method's state of one row."""

    text: Text
    num_prompt: int
    term: float = 0.0  # log-odds by which this request is easier to guess than others
    guesses: list[Node] = field(default_factory=list)  # for the next tokens, sent or not


class LookupDrafter:
    """Base of methods without weights: a subclass indexes a text and guesses what comes next."""

    is_alone_on_device = False  # its device form drafts by itself, not beside other drafters

    def __init__(
        self,
        *,
        max_nodes: int,
        chances: Chances,
        context: DrafterContext,
        margin: float = 0.0,
        is_adaptive: bool = True,
    ) -> None:
        self.needs = Needs(max_nodes=max_nodes)
        self.chances, self.context = chances, context
        self.margin = margin  # share by which drafting must beat plain decoding
        self.is_adaptive = is_adaptive  # False: always as many nodes as allowed
        self.rows: dict[int, LookupRow] = {}

    def new_text(self) -> Text:
        raise NotImplementedError

    def guess(self, row: LookupRow) -> list[Node]:
        """Guesses for what follows the row's text, by falling chance."""
        raise NotImplementedError

    def new_row(self, rows: Rows, row: int) -> LookupRow:
        """A request came into the row."""
        return LookupRow(self.new_text(), int(rows.prompt_X[row]))

    def observe(self, step: TargetStep) -> None:
        self.follow(step.rows, step.rows.ids_R.tolist())

    def follow(self, rows: Rows, ids: list[int]) -> None:
        """Take in the new tokens of these rows."""
        tokens_XL, known_X = rows.tokens_XL.numpy(), rows.known_X.tolist()
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
        """Guesses for a row, which are kept and compared with its next tokens, sent or not."""
        state = self.rows[row]
        state.guesses = self.guess(state)
        return state.guesses

    def chain(self, row: int, limit: int) -> Chain:
        """The same of a method without trees, as arrays; the next guesses may overwrite them."""
        raise NotImplementedError

    def propose(self, rows: Rows) -> Draft:
        ids, max_draft_X = rows.ids_R.tolist(), rows.max_draft_X.tolist()
        trees = [self.look(row) for row in ids]
        limits = [max_draft_X[row] for row in ids]
        return draft_of(
            trees, limits, self.context, margin=self.margin, is_adaptive=self.is_adaptive
        )

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def _learn(self, state: LookupRow, tokens: list[int]) -> None:
        """Compare guesses with the target's path; after the first miss nothing can be compared."""
        at = -1
        guesses, state.guesses = state.guesses, []
        for token in tokens:
            found = -1
            for index, node in enumerate(guesses):
                if node.parent == at:
                    is_right = node.token == token
                    state.term = self.chances.learn(node.guess_type, state.term, is_right)
                    if is_right:
                        found = index
            if found < 0:
                return
            at = found


@dataclass(kw_only=True)
class DeviceLookup(DeviceDrafter):
    """Guesses what followed the most recent of the longest matches of a row's end.

    A phrase table, if there is one, guesses where it is right more often. In a tree, the last nodes
    are what followed the longest match after which another token came.
    """

    min_match: int
    max_match: int
    phrases: DevicePhrases | None = None
    is_common: bool = False  # its table is of common words, and not of the target's phrases
    num_second: int = 0  # last nodes of a tree; 0: it drafts chains

    @property
    def has_table(self) -> bool:
        return self.phrases is not None and not self.is_common

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        self.look(state, step, self.num_nodes)

    def look(self, state: RowState, step: StepRows, room: int) -> None:
        """Draft for each row; the result has room for so many guesses."""
        from hunch.kernels.gpu_lookup import lookup

        lookup(
            state, step, room, self.min_match, self.max_match, phrases=self.phrases,
            num_second=self.num_second, num_guesses=self.num_guesses(room),
        )  # fmt: skip

    def num_guesses(self, room: int) -> int:
        """How many tokens it guesses where there is room for so many."""
        return min(self.num_nodes, room)

    def depth(self, source: int) -> int:
        return self.num_nodes if self.num_second else 0

    @property
    def past_end(self) -> int:
        return self.num_nodes if self.num_second else 0

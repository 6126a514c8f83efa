"""Prediction: the text the client expects, for as long as the answer keeps to it.

An edited document is mostly the old one. The answer is followed in the prediction. Where it departs
from it, the longest match of its last tokens further on says where it continues; until there is a
match, tokens are assumed to be replaced one for one. Chances are learned as for other lookups, by
how many tokens agreed before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hunch.config import read_options
from hunch.draft import Rows
from hunch.drafting.base import PREDICTION, DeviceDrafter, DrafterContext, Options
from hunch.drafting.lookup import Chances, LookupDrafter, LookupRow
from hunch.drafting.options import at_least_one
from hunch.drafting.trees import Node
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden

MAX_RUN = 18  # tokens in a row that agreed; longer runs count the same
MAX_PLACES = 8  # places compared after the answer has departed
NEAR = 16  # tokens ahead within which a match of a single token counts
MIN_CHANCE = 0.02  # least chance of a path: less never pays

# Kinds of guesses: by the tokens that agreed before (0: at the start); after the answer departed
# from the prediction, by the tokens since then, and by whether one of them is near.
PRIORS = (0.6, *(0.75, 0.85, 0.92), *(0.95,) * 2, *(0.97,) * 4, *(0.98,) * 8, 0.99)
LOST_PRIORS = (0.4, 0.2, 0.05)
NEAR_PRIOR = 0.2
LOST = len(PRIORS) - 1
NEAR_BY = LOST + len(LOST_PRIORS) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionConfig:
    """Options of `prediction`."""

    num_nodes: int = 32  # most tokens drafted per step
    adaptive: bool = True  # fewer where their chance does not pay for checking them

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", method=PREDICTION)


class PredictedText:
    """An answer and its prediction. `place`: where in the prediction its next token should be."""

    def __init__(self, expected: Sequence[int], num_prompt: int) -> None:
        self.expected, self.num_prompt = expected, num_prompt
        self.tokens: list[int] = []
        self.place = 0
        self.run = 0  # tokens that agreed up to here
        self.num_lost = 0  # tokens since they last agreed
        self._anchor = 0  # the place after the last three or more tokens that agreed
        self._places: dict[tuple[int, int], list[int]] | None = None  # after each pair of tokens

    def extend(self, tokens: list[int]) -> None:
        first = max(0, self.num_prompt - len(self.tokens))
        for token in tokens[:first]:
            self.tokens.append(token)
        expected, end = self.expected, len(self.expected)
        for token in tokens[first:]:
            self.tokens.append(token)
            if self.place < end and expected[self.place] == token:
                self._agree(self.place + 1, self.run + 1)
            else:
                self._part(token)

    def _agree(self, place: int, run: int) -> None:
        self.place, self.run, self.num_lost = place, run, 0
        if run >= 3:
            self._anchor = place

    def _part(self, token: int) -> None:
        run, place = self._longest(token)
        if run:
            self._agree(place, run)
            return
        near = self.expected[self._anchor : self.place + NEAR]
        self.num_lost += 1
        if token in near:
            self.place, self.run = self._anchor + near.index(token) + 1, 1
        else:
            self.place, self.run = self.place + 1, 0

    def _longest(self, token: int) -> tuple[int, int]:
        """The longest match of at least two of the last tokens, and the place after it."""
        if len(self.tokens) < self.num_prompt + 2:
            return 0, 0
        if self._places is None:  # made when it is needed: few answers depart
            self._places = {}
            for place in range(2, len(self.expected) + 1):
                pair = (self.expected[place - 2], self.expected[place - 1])
                self._places.setdefault(pair, []).append(place)
        places = self._places.get((self.tokens[-2], token), [])
        ahead = bisect_left(places, self._anchor)
        best = (0, 0)
        for place in (*places[ahead : ahead + MAX_PLACES], *places[max(0, ahead - 2) : ahead]):
            length = self._match(place)
            if length > best[0]:  # of equals the nearest, and one ahead before one behind
                best = (length, place)
        return best

    def _match(self, place: int) -> int:
        most = min(place, len(self.tokens) - self.num_prompt, MAX_RUN)
        length = 2
        while length < most and self.expected[place - length - 1] == self.tokens[-length - 1]:
            length += 1
        return length


class PredictionDrafter(LookupDrafter):
    """One chain per row whose request brought a prediction."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.config = read_options(PredictionConfig, options, "prediction")
        super().__init__(
            max_nodes=self.config.num_nodes,
            chances=Chances(dict(enumerate((*PRIORS, *LOST_PRIORS, NEAR_PRIOR)))),
            context=context,
            is_adaptive=self.config.adaptive,
        )

    def on_device(self) -> DeviceDrafter | None:
        return DevicePrediction(
            name=PREDICTION, num_nodes=self.config.num_nodes, is_adaptive=self.is_adaptive
        )

    def new_row(self, rows: Rows, row: int) -> LookupRow:
        request, num_prompt = rows.request(row), int(rows.prompt_X[row])
        expected = request.prediction_ids if request is not None else ()
        return LookupRow(PredictedText(expected, num_prompt), num_prompt)

    def guess(self, row: LookupRow) -> list[Node]:
        text = row.text
        assert isinstance(text, PredictedText)
        nodes: list[Node] = []
        chance = 1.0
        run, guess_type = text.run, min(text.run, MAX_RUN)
        if text.num_lost:
            guess_type = NEAR_BY if run else LOST + min(text.num_lost, len(LOST_PRIORS))
        own = self.chances.of(guess_type, row.term)
        for parent, token in enumerate(
            text.expected[text.place : text.place + self.config.num_nodes], start=-1
        ):
            chance *= own
            if chance < MIN_CHANCE:
                break
            nodes.append(Node(token, parent, chance, guess_type))
            run += 1
            if run <= MAX_RUN:  # longer runs have equal chances
                guess_type = run
                own = self.chances.of(guess_type, row.term)
        return nodes


class DevicePrediction(DeviceDrafter):
    """Captured steps draft from predictions beside every drafter; this one adds nothing."""

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        """No guess for any row; `kernels.gpu_expect` drafts for rows with a prediction."""
        first = step.guesses_at
        step.result_RC[:, first : first + self.num_nodes] = -1

"""What requests ask of captured steps besides tokens: rules, masks, scores, traces, drafters.

Shape letters: R rows of the step, X rows of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from hunch.drafting.base import PREDICTION, RowMethod
from hunch.drafting.step_shapes import StepShape
from hunch.drafting.trees import accepted_path
from hunch.kernels.step import BY_PREDICTION, FIRST, MATCHED, MAX_STOPS, TOKENS
from hunch.sampling.state import FILTERED, HISTORY, SamplingState
from hunch.step.grammars import RowGrammars
from hunch.step.results import NO_SCORES, Columns, Scores, end_at_stop, take_back
from hunch.step.rows import RowBuffers
from hunch.step.step_kinds import (
    DRAFTS,
    MANY_SCORES,
    MASKS,
    NAMED,
    RULES,
    SCORE_SIZES,
    SCORES,
    USUAL_SCORES,
    StepGraph,
    StepKind,
)
from hunch.step.upload import NamedMethods, StepMasks
from hunch.types import DecodedRows, DraftTrace, Request, RowResult, RowWork

# The usual extras, each with its number of best tokens. Combinations launch the same kernels.
USUAL_EXTRAS = (
    (RULES, NO_SCORES),
    (MASKS | DRAFTS, NO_SCORES),
    (NAMED, NO_SCORES),
    *((SCORES, size) for size in SCORE_SIZES if size <= USUAL_SCORES),
)
NO_ROWS = np.empty(0, dtype=np.int64)
HELD = 4  # steps for which the numbers of checked nodes are kept


def with_extras(kinds: list[StepKind]) -> list[StepKind]:
    """These kinds, each with each of the usual extras."""
    return [
        kind._replace(extras=extras, num_best=num_best)
        for extras, num_best in USUAL_EXTRAS
        for kind in kinds
    ]


class StepGroup:
    """The rows of a captured step, and what they ask for."""

    def __init__(self, work: list[RowWork], row_extras: RowExtras) -> None:
        self.work = work
        self.ids = [item.row for item in work]
        self.requests = [row_extras.rows.requests[row] for row in self.ids]
        self.max_checked = [item.num_nodes for item in work]  # nodes, at most
        max_draft = [item.max_draft for item in work]
        if not row_extras.undrafted.isdisjoint(self.ids):
            for place, row in enumerate(self.ids):
                if row in row_extras.undrafted:
                    self.max_checked[place] = max_draft[place] = 0
        self.has_waiting = any(self.max_checked)
        self.is_drafting = self.has_waiting or any(max_draft)
        # The rows, how many nodes of each are checked at most, and how many drafted.
        self.inputs_3R = np.array(self.ids + self.max_checked + max_draft).reshape(3, -1)
        self.row_R = row_R = self.inputs_3R[0]
        self.extras = int(np.bitwise_or.reduce(row_extras.extras_X[row_R]))
        self.has_masks = bool(self.extras & MASKS)
        self.num_best_R = row_extras.num_best_X[row_R] if self.extras & SCORES else NO_ROWS
        self.num_best = max(self.num_best_R.tolist(), default=NO_SCORES)
        # A row that is traced gets its drafts back.
        self.wants_whole_result: list[bool] | None = None
        if self.extras & DRAFTS:
            self.wants_whole_result = row_extras.is_traced_X[row_R].tolist()
        self.draws = row_extras.sampling.draws(row_R)
        self.has_more_stops = not row_extras.with_more_stops.isdisjoint(self.ids)
        self.graphs: dict[StepShape, StepGraph] = {}  # by the shapes that its steps had
        self.worth_checking: list[int] = []  # nodes of each row, kept for a few steps
        self.num_held = 0  # steps for which they are still kept


WaitingDraft = tuple[list[int], list[int]]  # tokens and parents


class Adjustments(NamedTuple):
    """How a step's result was changed before it is applied, and which drafts the step checked."""

    drafts: dict[int, WaitingDraft]  # drafts that the step checked, by row
    refused_rows: set[int]  # rows that chose without a mask what their grammar refused
    ended: dict[int, tuple[list[int], str]]  # by place: tokens that fit, and why the row ends
    is_cut: bool  # a line of the result was shortened


class RowExtras:
    """Knows what each row asks for, and adds it to the results of captured steps."""

    def __init__(
        self,
        rows: RowBuffers,
        grammars: RowGrammars,
        sampling: SamplingState,
        mark_stale: Callable[[int], None],  # to be called when the host changed a row
        methods: Mapping[str, RowMethod] | None,  # methods a request may name; None: no drafter
        named_methods: Callable[[], NamedMethods],
        *,
        can_take_back: bool,  # a step changes nothing but tokens and KV
    ) -> None:
        num_rows = len(rows.known)
        self.rows, self.grammars, self.sampling = rows, grammars, sampling
        self.mark_stale = mark_stale
        self.methods, self._named_methods = methods, named_methods
        self.extras_X = np.zeros(num_rows, dtype=np.int64)  # RULES, MASKS and so on
        self.num_best_X = np.full(num_rows, NO_SCORES)
        self.undrafted: set[int] = set()  # too long for the network, with nothing else that drafts
        self._can_take_back = can_take_back
        self.is_traced_X = np.zeros(num_rows, dtype=np.bool_)
        # Tokens and parents of the waiting drafts of rows with a grammar or a trace.
        self._drafts: dict[int, WaitingDraft] = {}
        self._method: list[RowMethod | None] = [None] * num_rows  # named by the row's request
        self._is_predicted = np.zeros(num_rows, dtype=np.bool_)  # the waiting draft
        self.with_more_stops: set[int] = set()  # rows with more stop ids than the device knows

    def start(self, row: int, request: Request, fits_network: bool = True) -> None:
        """fits_network: the drafter's network drafts for texts as long as this one may get."""
        params = request.params
        self.forget_draft(row)
        self.with_more_stops.discard(row)
        if len(request.stop_ids) > MAX_STOPS:
            self.with_more_stops.add(row)
        self._start_method(row, request, fits_network)
        extras = int(self.extras_X[row]) & NAMED
        if self.sampling.flags_X[row] & HISTORY:
            extras |= RULES
        if request.grammar is not None:
            # If the best of all tokens is allowed, it is the best of the allowed ones too. With
            # filters or rules it may not be: they depend on which tokens a mask leaves.
            has_others = extras & RULES or self.sampling.flags_X[row] & FILTERED
            can_wait = self._can_take_back and not has_others and self.grammars.ask_later(row)
            extras |= MASKS if can_wait else MASKS | DRAFTS
        if params.logprobs is not None:
            extras |= SCORES | MANY_SCORES * (params.logprobs > USUAL_SCORES)
        self.is_traced_X[row] = params.speculation.trace
        self.extras_X[row] = extras | DRAFTS * params.speculation.trace
        self.num_best_X[row] = NO_SCORES if params.logprobs is None else params.logprobs

    def _start_method(self, row: int, request: Request, fits_network: bool) -> None:
        """Tell the device which method drafts for the row, if its request names one.

        A row that the network does not follow is drafted for by a lookup, or from its prediction.
        """
        if self.methods is None:
            return
        mode, expected = request.params.speculation.mode, request.prediction_ids
        method = self.methods.get(mode)
        self.undrafted.discard(row)
        if not fits_network and mode != "off" and (method is None or method.by_network):
            lookups = (one for one in self.methods.values() if one.by_network is False)
            method = next(lookups, self.methods.get(PREDICTION))
            if not expected and (method is None or method.by_network is not False):
                self.undrafted.add(row)
        self._method[row] = method
        if mode == "off" or (method is not None and not method.with_prediction):
            expected = ()
        if method is not None or expected:
            self._named_methods().put(row, method, expected, len(request.prompt_ids))
            self.extras_X[row] = NAMED
        elif self.extras_X[row] & NAMED:
            self._named_methods().clear(row)
            self.extras_X[row] = 0

    def by_network(self, row: int) -> bool | None:
        """Whether the row's request names a network (True) or a lookup; None: it names neither."""
        method = self._method[row]
        return None if method is None else method.by_network

    def watches(self, rows: list[int]) -> bool:
        """Whether the host follows the tokens or drafts of a request in one of these rows."""
        requests = self.rows.requests
        return any(self.extras_X[row] & (MASKS | DRAFTS) and requests[row] for row in rows)

    def forget_draft(self, row: int) -> None:
        self._drafts.pop(row, None)
        self._is_predicted[row] = False

    def methods_of_step(self, group: StepGroup, lines: list[list[int]]) -> dict[int, str]:
        """Who drafted what a step checked, by place, for rows whose requests name a method.

        Also notes which of the step's new drafts come from predictions.
        """
        if not group.extras & NAMED:
            return {}
        names = {}
        for place, row in enumerate(group.ids):
            method = self._method[row]
            if self._is_predicted[row]:
                names[place] = PREDICTION
            elif method is not None:
                names[place] = method.name
        for row, line in zip(group.ids, lines, strict=True):
            self._is_predicted[row] = line[MATCHED] >= BY_PREDICTION
            line[MATCHED] &= BY_PREDICTION - 1
        return names

    def max_checked(self, group: StepGroup) -> list[int]:
        """How many nodes of each row's draft the next step may check.

        With grammars it changes every few steps at most, as each change is an upload.
        """
        if not (group.extras & MASKS and group.has_waiting):
            return group.max_checked
        if not group.num_held:
            pairs = zip(group.ids, group.max_checked, strict=True)
            group.worth_checking = [self.grammars.max_checked(row, count) for row, count in pairs]
            group.num_held = HELD
        group.num_held -= 1
        return group.worth_checking

    def fill_masks(
        self,
        group: StepGroup,
        graph: StepGraph,
        masks: StepMasks,
        refused_rows: set[int],
        *,
        is_first: bool = False,
    ) -> dict[int, int]:
        """Fill in the masks of a step's roots and nodes; see `RowGrammars.fill`."""
        num_k, fill = graph.kind.num_nodes + 1, self.grammars.fill
        drafts = self._drafts, group.max_checked
        write = partial(fill, group.ids, *drafts, num_k, refused_rows, is_first=is_first)
        return masks.fill(graph.kind.num_rows * num_k, write)

    def adjust_result(
        self,
        group: StepGroup,
        requests: list[Request | None],  # those that are still in their rows
        lines: list[list[int]],
        columns: Columns,
        num_masked: dict[int, int],
    ) -> Adjustments:
        """Keep the new drafts, and let grammars consume the committed tokens.

        Tokens chosen without a mask that a grammar refuses are taken out of the result.
        """
        if group.has_more_stops:  # of preempted rows too: their tokens count
            for request, line in zip(group.requests, lines, strict=True):
                if request is not None and len(request.stop_ids) > MAX_STOPS:
                    end_at_stop(line, request)
        checked_drafts: dict[int, WaitingDraft] = {}
        if group.extras & DRAFTS and columns.num_guesses:
            for row, request, line in zip(group.ids, requests, lines, strict=True):
                if request is not None and self.extras_X[row] & DRAFTS:
                    checked_drafts[row] = self._drafts.get(row, ([], []))
                    self._drafts[row] = columns.draft_of(line)
        refused_rows: set[int] = set()
        ended: dict[int, tuple[list[int], str]] = {}
        if group.extras & MASKS:
            for place, (row, request, line) in enumerate(
                zip(group.ids, requests, lines, strict=True)
            ):
                if request is None:
                    continue
                tokens = line[FIRST : FIRST + line[TOKENS]]
                num_taken, problem = self.grammars.consume(row, tokens, num_masked.get(row))
                if problem is not None:
                    ended[place] = tokens[:num_taken], problem
                elif num_taken < len(tokens):
                    refused_rows.add(row)
                    take_back(line, num_taken)
        is_cut = bool(refused_rows) or group.has_more_stops
        return Adjustments(checked_drafts, refused_rows, ended, is_cut)

    def complete(
        self,
        group: StepGroup,
        adjusted: Adjustments,
        scores: Scores | None,
        decoded: DecodedRows,
        results: list[RowResult],
    ) -> list[RowResult]:
        """Add what rows asked for to what a step did; returns the whole results of all rows."""
        is_scored: list[bool] = []
        if scores is not None:
            is_scored = (group.num_best_R != NO_SCORES).tolist()
            decoded.logprobs = scores.of_rows(decoded.tokens, is_scored)
        if not results and not adjusted.ended:
            return results
        whole = iter(results)
        found = [None if tokens else next(whole) for tokens in decoded.tokens]
        # Its results count for a row that was preempted after the step was launched, too.
        for place, (result, request) in enumerate(zip(found, group.requests, strict=True)):
            if result is None or request is None or not result.tokens:
                continue
            if request.params.speculation.trace:
                draft = adjusted.drafts.get(group.ids[place], ([], []))
                result.trace = _trace(draft, result)
        for place, (kept, problem) in adjusted.ended.items():
            found[place] = self._ended(group.ids[place], found[place], kept, problem)
            decoded.leave_out(place)
            self._end(group, place)
        for place, result in enumerate(found):
            if scores is not None and result is not None and result.tokens and is_scored[place]:
                first = scores.begins[place]
                result.logprobs = scores.entries[first : first + len(result.tokens)]
        return [result for result in found if result is not None]

    def _ended(
        self, row: int, result: RowResult | None, tokens: list[int], problem: str
    ) -> RowResult:
        """The result of a row that its grammar ends: the tokens it keeps, and the problem."""
        if result is None:
            computed = tuple(self.rows.computed[:, row].tolist())
            result = RowResult(row=row, num_processed=1, computed=computed)
        result.tokens, result.finish, result.problem = tokens, "abort", problem
        return result

    def _end(self, group: StepGroup, place: int) -> None:
        """End a row, unless its request has left it: another one may be there now."""
        row = group.ids[place]
        if self.rows.requests[row] is group.requests[place]:
            self.rows.leave(row)
            self.mark_stale(row)


def _trace(checked: WaitingDraft, result: RowResult) -> DraftTrace:
    """The draft that a step checked, and the nodes of it that were accepted."""
    tokens, parents = checked
    accepted = accepted_path(tokens, parents, result.tokens[: result.num_accepted])
    # Near a row's end, a tree has more nodes than tokens can still come.
    count = max(result.num_checked, accepted[-1] + 1 if accepted else 0)
    return DraftTrace(
        tokens=tokens[:count], parents=parents[:count], accepted=accepted, method=result.method
    )

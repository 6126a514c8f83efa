"""The state of rows, and what a step does with it in plain Python: the specification.

A step is pack, the target's pass, commit and compact: small functions over one state. Tests hold
the Triton kernels of `gpu_step` and `gpu_transfer` to those here, and run whole steps with them.

The host updates the state by scatter. A step names its rows by ids_R; -1 is padding. Its result is
result_RC, one line per row: number of tokens committed, why the row ended, nodes checked, length of
the match behind the next draft, nodes of that draft, known length, then the tokens and guesses.

Shape letters: R rows of the step, X rows of the engine, N nodes of a step's draft, G nodes a draft
can have, K tokens one step can commit (N + 1), M rows of logits (R times K), L longest sequence, B
blocks of a table, S stop ids, P tree depth, T packed tokens (R times K), C columns of a result, W
room of a buffer, columns of settings, Q buffers for results on the host, E tokens of a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache, slots_at

GOES_ON, STOP, LENGTH = 0, 1, 2  # whether and why a row ended


class Draws(IntEnum):
    """How the tokens of a step's rows are drawn; a captured step is made for one of these."""

    GREEDY = 0  # no row is sampled: each takes its best token
    SAMPLED = 1  # some rows are sampled
    FILTERED = 2  # and some of them with filters: top-k, top-p, min-p


TOKENS, REASON, CHECKED, MATCHED, DRAFTED, KNOWN, FIRST = range(7)  # columns of a result
MAX_STOPS = 64  # stop ids of a row
BY_PREDICTION = 1 << 20  # added to MATCHED if the draft comes from the request's prediction

# Columns of RowMethods.settings_XW. SURE is the shortest match with which the row takes a lookup's
# guesses, or AS_OTHERS, or NEVER. Three columns are of that lookup: its shortest and longest match,
# and whether it uses the phrase table. EXPECTED: tokens of the prediction. IS_ALONE: nothing else
# drafts. PROMPT: tokens of the prompt. SHIFT: how many tokens the prediction is ahead of the answer
# that follows it.
SURE, MIN_MATCH, MAX_MATCH, HAS_TABLE, EXPECTED, IS_ALONE, PROMPT, SHIFT = range(8)
AS_OTHERS, NEVER = -1, 1 << 20


@dataclass(slots=True)
class RowState:
    """Per-request state in one buffer, so that one scatter can update any of it.

    It is on the device that runs the steps. On a GPU the host has one too (`RowBuffers.state`): it
    is written first when a request comes, and is one step behind while the row decodes.
    """

    flat: Tensor
    known_X: Tensor
    end_X: Tensor  # known length at which max_tokens is reached
    is_done_X: Tensor  # ended; on a GPU the host may not know yet
    num_nodes_X: Tensor  # nodes of the waiting draft
    stop_XS: Tensor  # padded with -1
    table_XB: Tensor
    draft_XG: Tensor
    parents_XG: Tensor
    tokens_XL: Tensor
    block_size: int
    clock_2: Tensor  # steps so far, and when the last of them began, in nanoseconds

    @staticmethod
    def create(
        num_rows: int, room: int, max_blocks: int, max_nodes: int, num_stops: int,
        block_size: int, device: torch.device | str,
    ) -> RowState:  # fmt: skip
        widths = (1, 1, 1, 1, num_stops, max_blocks, max_nodes, max_nodes, room)
        flat = torch.zeros(num_rows * sum(widths), dtype=torch.int64, device=device)
        parts = flat.split([num_rows * width for width in widths])
        tables = (part.view(num_rows, -1) for part in parts[4:])
        return RowState(flat, *parts[:4], *tables, block_size, flat.new_zeros(2))

    def copy_to(self, device: torch.device) -> RowState:
        """A copy with the same layout of `flat`."""
        tables = (self.table_XB, self.draft_XG, self.stop_XS)
        widths = [table.shape[1] for table in tables]
        made = RowState.create(*self.tokens_XL.shape, *widths, self.block_size, device)
        made.flat.copy_(self.flat)
        return made


@dataclass(slots=True)
class RowMethods:
    """The methods that requests name, and their predictions. Most requests have neither."""

    settings_XW: Tensor
    expected_XE: Tensor  # predictions, int32

    @staticmethod
    def create(num_rows: int, room: int, device: torch.device | str) -> RowMethods:
        settings_XW = torch.zeros(num_rows, SHIFT + 1, dtype=torch.int64, device=device)
        settings_XW[:, SURE] = AS_OTHERS
        expected_XE = torch.zeros(num_rows, room, dtype=torch.int32, device=device)
        return RowMethods(settings_XW, expected_XE)


@dataclass(slots=True)
class StepRows:
    """The rows of a step with their limits, written by the host, and the step's results."""

    ids_R: Tensor  # rows of the engine; -1: padding
    max_checked_R: Tensor  # nodes of the waiting draft that may be checked
    max_draft_R: Tensor  # nodes that may be drafted for the next step
    num_checked_R: Tensor  # nodes checked; -1: the row had ended, or is padding
    path_RK: Tensor  # accepted nodes, -1 after the last
    result_RC: Tensor
    draws: Draws = Draws.GREEDY  # how its rows' tokens are drawn
    has_rules: bool = False  # some rows have penalties, bias or the like, which drafts must follow
    methods: RowMethods | None = None  # None: no row's request names a method, or has a prediction

    @property
    def num_nodes(self) -> int:
        """Nodes that the step checks of each row, at most."""
        return self.path_RK.shape[1] - 1

    @property
    def guesses_at(self) -> int:
        """The column of the first guess: guesses follow the tokens that the step can commit."""
        return FIRST + self.path_RK.shape[1]


def slot_of(state: RowState, row: int, pos: int) -> int:
    """The KV slot of a row's position."""
    return int(slots_at(state.table_XB, row, pos, state.block_size))


def live_rows(state: RowState, step: StepRows) -> Iterator[tuple[int, int]]:
    """Rows that go on after the step: number in the step, and the engine's."""
    for r, row in enumerate(step.ids_R.tolist()):
        if int(step.num_checked_R[r]) >= 0 and not state.is_done_X[row]:
            yield r, row


def path_of(state: RowState, row: int, node: int) -> list[int]:
    """Nodes from the root down to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(state.parents_XG[row, node])
    return path


def pack_ref(state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs) -> None:
    """Pack each row's last known token, then its nodes to check, and where each finds its keys.

    Node n's KV goes to the slot of position known + n. In a tree it sees the known positions and,
    by slot, its ancestors.
    """
    state.clock_2[0] += int(step.ids_R[0] >= 0)
    for r, row in enumerate(step.ids_R.tolist()):
        first = r * (step.num_nodes + 1)
        here = slice(first, first + step.num_nodes + 1)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        if row < 0 or state.is_done_X[row]:
            step.num_checked_R[r] = -1
            continue
        known = int(state.known_X[row])
        count = min(int(state.num_nodes_X[row]), int(step.max_checked_R[r]), step.num_nodes)
        step.num_checked_R[r] = count
        for place in range(count + 1):
            at, node = first + place, place - 1
            token = state.draft_XG[row, node] if place else state.tokens_XL[row, known - 1]
            ids_T[at] = token
            path = path_of(state, row, node)
            attn.pos_T[at] = known - 1 + len(path)
            attn.slot_T[at] = slot_of(state, row, known - 1 + place)
            attn.base_T[at] = int(attn.pos_T[at]) + 1
            if attn.tree_TP is not None:
                attn.base_T[at] = known
                for depth, above in enumerate(path):
                    attn.tree_TP[at, depth] = slot_of(state, row, known + above)


def commit_ref(state: RowState, step: StepRows, choice_M: Tensor) -> None:
    """Walk each row's draft while it agrees with the target, and append the chosen tokens.

    Of a row that had ended, CHECKED and KNOWN mean nothing in the result.
    """
    for r, row in enumerate(step.ids_R.tolist()):
        line, checked = step.result_RC[r], int(step.num_checked_R[r])
        line[: step.guesses_at] = 0
        if checked < 0:
            continue
        known, end, node, count = int(state.known_X[row]), int(state.end_X[row]), -1, 0
        stops = set(state.stop_XS[row].tolist()) - {-1}
        while True:
            token = int(choice_M[r * (step.num_nodes + 1) + 1 + node])
            state.tokens_XL[row, known + count] = token
            line[FIRST + count] = token
            found = -1
            for child in range(checked):
                if int(state.parents_XG[row, child]) == node:
                    found = child if int(state.draft_XG[row, child]) == token else found
            step.path_RK[r, count] = found
            count += 1
            reason = STOP if token in stops else LENGTH if known + count >= end else GOES_ON
            node = found
            if found < 0 or reason:
                break
        line[TOKENS], line[REASON], line[CHECKED] = count, reason, checked
        line[KNOWN] = known + count
        state.known_X[row] = known + count
        state.is_done_X[row] = int(reason != GOES_ON)
        state.num_nodes_X[row] = 0


def committed_ref(step: StepRows, at_S: Tensor, token_S: Tensor) -> None:
    """The tokens a step committed, and the rows of logits they were chosen by; -1 after the last.

    Token k was chosen after node path[k - 1], the first one after the root.
    """
    num_rows, num_k = step.path_RK.shape
    at_S.fill_(-1)
    token_S.view(num_rows, num_k).copy_(step.result_RC[:, FIRST : FIRST + num_k])
    for r in range(num_rows):
        count = int(step.result_RC[r, TOKENS]) if step.num_checked_R[r] >= 0 else 0
        for place in range(count):
            node = int(step.path_RK[r, place - 1]) if place else -1
            at_S[r * num_k + place] = r * num_k + 1 + node


def compact_ref(kv: KVCache, step: StepRows, slot_T: Tensor) -> None:
    """Move the KV of accepted nodes to the slots of the positions they now have."""
    num_k = step.path_RK.shape[1]
    for r in range(len(step.ids_R)):
        for i in range(int(step.result_RC[r, TOKENS]) - 1):
            node = int(step.path_RK[r, i])
            source, target = slot_T[r * num_k + 1 + node], slot_T[r * num_k + 1 + i]
            kv.k_LCMH[:, target] = kv.k_LCMH[:, source]
            kv.v_LCMH[:, target] = kv.v_LCMH[:, source]
    for more in (kv.scales, kv.others):
        if more is not None:
            compact_ref(more, step, slot_T)


def update_ref(state: RowState, inputs_3R: Tensor, buffer_W: Tensor, num_changes: int) -> None:
    """Apply a buffer: the step's inputs, then the places of what changed, then the values."""
    num_inputs, buffer_W = inputs_3R.numel(), buffer_W.to(inputs_3R.device)
    inputs_3R.copy_(buffer_W[:num_inputs].view(3, -1))
    places, values = buffer_W[num_inputs : num_inputs + 2 * num_changes].view(2, num_changes)
    state.flat[places] = values


def deliver_ref(state: RowState, step: StepRows, buffers_QW: Tensor) -> None:
    """Write the step's results to its buffer in the host's memory, with its time at the end."""
    if step.ids_R[0] >= 0:
        line_W = buffers_QW[int(state.clock_2[0]) % len(buffers_QW)]
        line_W[-1] = 0
        line_W[: step.result_RC.numel()] = step.result_RC.flatten()

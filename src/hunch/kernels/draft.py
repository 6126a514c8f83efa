"""How a device drafts, in plain Python: the specification of its kernels.

`gpu_lookup` guesses from the row's own text and a phrase table, `gpu_expect` from its prediction,
`gpu_synthetic` from its answer to the same request before; `gpu_draft` and `gpu_grow` prepare a
network's passes and make a level of nodes from its scores.

Shape letters: as in `step`; W nodes of a level, T packed nodes, C columns of a network's logits, A
columns of what is remembered, E tokens of an answer, U turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hunch.kernels import step as at
from hunch.kernels.attention import AttnInputs
from hunch.kernels.lookup import BY_TABLE, MAX_MATCH, NEAR, NUM_ASKED
from hunch.kernels.phrases import ContinuedChain
from hunch.kernels.process import draft_paths_ref, process_ref
from hunch.kernels.step import (
    BY_PREDICTION,
    DRAFTED,
    MATCHED,
    TOKENS,
    Draws,
    RowState,
    StepRows,
    live_rows,
    path_of,
    slot_of,
)

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_lookup import DevicePhrases


def longest_match(
    text: list[int], min_match: int, max_match: int, avoided: int = -1
) -> tuple[int, int]:
    """The last earlier match of the text's end: its length (0: none), and the place after it.

    The token there is not `avoided`.
    """
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place] != avoided and text[place - size : place] == text[-size:]:
                return size, place
    return 0, 0


def what_followed(text: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from this place on; past the text's end they repeat."""
    return [text[place + i % (len(text) - place)] for i in range(count)]


def lookup_ref(
    state: RowState,
    step: StepRows,
    room: int,
    min_match: int,
    max_match: int,
    sure: int = 0,
    phrases: DevicePhrases | None = None,
    chain: ContinuedChain | None = None,
    num_second: int = 0,
    num_guesses: int | None = None,
) -> None:
    """Draft what followed the last match of a row's end, or what the phrase table holds.

    What `sure`, `chain`, `num_second` and `num_guesses` ask for: see `gpu_lookup.lookup`.
    """
    num_guesses = room if num_guesses is None else num_guesses
    for r, row in live_rows(state, step):
        known = int(state.known_X[row])
        text: list[int] = state.tokens_XL[row, :known].tolist()
        least, most, needed, table = min_match, max_match, sure, phrases
        num_first = num_guesses - num_second
        if step.methods is not None and step.methods.settings_XW[row, at.SURE] != at.AS_OTHERS:
            settings = step.methods.settings_XW[row].tolist()
            least, most, needed = settings[at.MIN_MATCH], settings[at.MAX_MATCH], settings[at.SURE]
            table, num_first = phrases if settings[at.HAS_TABLE] else None, num_guesses
        matched, place = longest_match(text, least, most)
        guesses = what_followed(text, place, num_guesses) if matched else []
        if table is not None:
            guesses, matched = with_table(table, text, guesses, matched, num_guesses)
        step.result_RC[r, MATCHED] = matched
        write_guesses(step, r, guesses, room)
        if matched >= needed:
            write_chain(state, step, r, guesses)
            left = min(int(step.max_draft_R[r]) - 1, int(state.end_X[row]) - known - 1)
            if num_first < num_guesses and matched and left >= num_first:
                length, place = longest_match(text, least, most, guesses[0])
                if length:
                    second = what_followed(text, place, num_guesses - num_first)
                    write_second(state, step, r, second, num_first)
        elif table and chain and int(state.num_nodes_X[row]) == chain.num_drafted:
            tokens: list[int] = state.draft_XG[row, : chain.num_drafted].tolist()
            while len(tokens) < chain.num_nodes and (entry := table.table.find([*text, *tokens])):
                tokens.append(entry[0])
            write_chain(state, step, r, tokens)


def write_guesses(step: StepRows, r: int, guesses: list[int], num_nodes: int) -> None:
    """Write the guesses for a row into the step's result, whether or not they are checked."""
    first = step.guesses_at
    step.result_RC[r, first : first + num_nodes] = -1
    for node, token in enumerate(guesses):
        step.result_RC[r, first + node] = token


def write_chain(state: RowState, step: StepRows, r: int, guesses: list[int]) -> None:
    """Write the row's draft: as many of the guesses as it may check and can still use."""
    row = int(step.ids_R[r])
    left = max(int(state.end_X[row]) - int(state.known_X[row]) - 1, 0)
    count = min(len(guesses), int(step.max_draft_R[r]), left)
    for node, token in enumerate(guesses):
        state.draft_XG[row, node], state.parents_XG[row, node] = token, node - 1
    state.num_nodes_X[row], step.result_RC[r, DRAFTED] = count, count


def write_second(state: RowState, step: StepRows, r: int, guesses: list[int], first: int) -> None:
    """Write a second chain from the root, in place of the nodes from `first` on."""
    row = int(step.ids_R[r])
    for node, token in enumerate(guesses, start=first):
        state.draft_XG[row, node] = token
        state.parents_XG[row, node] = node - 1 if node > first else -1
    count = min(int(step.max_draft_R[r]), first + len(guesses))
    state.num_nodes_X[row], step.result_RC[r, DRAFTED] = count, count


def graft_ref(state: RowState, step: StepRows, num_guesses: int, most: int) -> None:
    """Follow the first guesses of a lookup down the row's tree while it has equal nodes, and append
    the others there as a chain.

    There are `most` nodes in all: of a larger tree the last ones make room. Those that might have
    to are not looked at.
    """
    first = step.guesses_at
    for r, row in live_rows(state, step):
        if step.methods is not None and step.methods.settings_XW[row, at.SURE] != at.AS_OTHERS:
            continue
        left = max(int(state.end_X[row]) - int(state.known_X[row]) - 1, 0)
        guesses = [t for t in step.result_RC[r, first : first + num_guesses].tolist() if t >= 0]
        guesses = guesses[:left]
        count, node = int(state.num_nodes_X[row]), -1
        children = {
            (int(state.parents_XG[row, n]), int(state.draft_XG[row, n])): n
            for n in range(min(count, most - num_guesses))
        }
        while guesses and (node, guesses[0]) in children:
            node = children[node, guesses.pop(0)]
        count = min(count, most - len(guesses))
        for token in guesses:
            state.draft_XG[row, count], state.parents_XG[row, count] = token, node
            node, count = count, count + 1
        count = min(count, int(step.max_draft_R[r]))
        state.num_nodes_X[row], step.result_RC[r, DRAFTED] = count, count


def longest_expected(answer: list[int], expected: list[int], ahead: int) -> tuple[int, int]:
    """The longest match of an answer's end in its prediction: its length, the place after it.

    Among equals the nearest to `ahead` counts; at the same distance, the one ahead. A single token
    counts only near there. 0: there is none.
    """
    best, found = (0, 0), (0, 0)
    for place in range(1, len(expected) + 1):
        most, length = min(place, len(answer), MAX_MATCH), 0
        while length < most and expected[place - 1 - length] == answer[-1 - length]:
            length += 1
        away = abs(place - ahead)
        score = length, -2 * away - (place < ahead)
        is_believed = length > 1 or (length == 1 and away < NEAR)
        if is_believed and (not found[0] or score > best):
            best, found = score, (length, place)
    return found


def expect_ref(state: RowState, step: StepRows, num_nodes: int) -> None:
    """Draft what comes next in a row's prediction, if the answer follows it, instead of its draft.

    If the answer has departed from it, tokens are assumed to be replaced one for one; that is
    drafted only for rows that have no draft, or that nothing else may draft for.
    """
    assert step.methods is not None
    for r, row in live_rows(state, step):
        settings = step.methods.settings_XW[row].tolist()
        expected: list[int] = step.methods.expected_XE[row, : settings[at.EXPECTED]].tolist()
        if not (expected or settings[at.IS_ALONE]):
            continue
        answer: list[int] = state.tokens_XL[row, settings[at.PROMPT] : state.known_X[row]].tolist()
        ahead = len(answer) + settings[at.SHIFT]
        matched, place = longest_expected(answer, expected, ahead)
        place = place if matched else ahead
        step.methods.settings_XW[row, at.SHIFT] = place - len(answer)
        guesses = expected[place : place + num_nodes]
        is_kept = bool(guesses) and (matched > 1 or (matched == 1 and place == ahead))
        if not (is_kept or settings[at.IS_ALONE] or not state.num_nodes_X[row]):
            continue
        # An answer follows its prediction more reliably than a text repeats itself.
        matched = min(4 + 4 * matched, MAX_MATCH) if is_kept else 0
        step.result_RC[r, MATCHED] = matched + BY_PREDICTION
        write_guesses(step, r, guesses, num_nodes)
        write_chain(state, step, r, guesses)


# Columns of Remembered.about_XA: tokens of the answer (0: none, or the row has departed from it),
# tokens of the prompt, and where among `runs_U` the row begins.
LENGTH_OF, PROMPT_OF, TURN_OF = range(3)
STRIDE = 2654435761  # of positions, to spread them over `runs_U`


@dataclass(slots=True)
class Remembered:
    """Answers to earlier requests, which rows with the same requests are drafted from."""

    about_XA: Tensor
    tokens_XE: Tensor  # int32
    runs_U: Tensor  # how many guesses of a draft are right, in turn

    @staticmethod
    def create(num_rows: int, room: int, runs: list[int], device: torch.device | str) -> Remembered:
        return Remembered(
            torch.zeros(num_rows, TURN_OF + 1, dtype=torch.int64, device=device),
            torch.zeros(num_rows, room, dtype=torch.int32, device=device),
            torch.tensor(runs, dtype=torch.int64, device=device),
        )

    def put(self, row: int, answer: Sequence[int], num_prompt: int, turn: int) -> None:
        """A request came into the row, with this answer the last time (empty: none is known)."""
        answer = answer[: self.tokens_XE.shape[1]]
        self.about_XA[row] = torch.tensor((len(answer), num_prompt, turn), dtype=torch.int64)
        if answer:
            self.tokens_XE[row, : len(answer)] = torch.tensor(answer, dtype=torch.int32)


def remembered_ref(
    state: RowState, step: StepRows, num_nodes: int, answers: Remembered, vocab_size: int
) -> None:
    """Draft what comes next in a row's remembered answer, right as far as the row's turn says.

    A row that has departed from the answer, or is longer, is no longer drafted for.
    """
    for r, row in live_rows(state, step):
        length, num_prompt, turn = answers.about_XA[row].tolist()
        known = int(state.known_X[row])
        place = known - num_prompt
        # The last tokens, as many as a step can commit, and one that the host did.
        first = max(place - num_nodes - 2, 0)
        was: list[int] = answers.tokens_XE[row, first : min(place, length)].tolist()
        if was != state.tokens_XL[row, num_prompt + first : known].tolist():
            length = answers.about_XA[row, LENGTH_OF] = 0
        right: list[int] = answers.tokens_XE[row, place : min(place + num_nodes, length)].tolist()
        run = int(answers.runs_U[(known * STRIDE + turn) % len(answers.runs_U)])
        guesses = right[:run] + [(token + 1) % vocab_size for token in right[run:]]
        step.result_RC[r, MATCHED] = 0
        write_guesses(step, r, guesses, num_nodes)
        write_chain(state, step, r, guesses)


def with_table(
    phrases: DevicePhrases, text: list[int], own: list[int], matched: int, num_nodes: int
) -> tuple[list[int], int]:
    """Guesses of the text until the table is right more often, then the table's; and the match."""
    needed, guesses = phrases.needed.tolist(), list(own)
    length = matched
    for i in range(min(num_nodes, NUM_ASKED)):
        entry = phrases.table.find([*text, *guesses[:i]])
        if entry is not None and entry[1] >= needed[length] and entry[0] not in guesses[i : i + 1]:
            guesses[i:] = [entry[0]]
            length, matched = 0, BY_TABLE if i == 0 else matched
        elif length:
            length = min(length + 1, MAX_MATCH)
        else:
            break
    return guesses, matched


def committed_inputs_ref(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, last_R: Tensor
) -> None:
    """Inputs of a network that sees each committed token at the position of its predecessor."""
    width = len(ids_T) // len(step.ids_R)
    for r, row in enumerate(step.ids_R.tolist()):
        here = slice(r * width, (r + 1) * width)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        count = int(step.result_RC[r, TOKENS]) if int(step.num_checked_R[r]) >= 0 else 0
        last_R[r] = r * width + max(count - 1, 0)
        for place in range(count):
            packed, where = r * width + place, int(state.known_X[row]) - count + place
            ids_T[packed] = state.tokens_XL[row, where]
            attn.pos_T[packed], attn.base_T[packed] = where - 1, where
            attn.slot_T[packed] = slot_of(state, row, where - 1)


def level_inputs_ref(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, *, first_node: int = 0,
    depth: int = 0, sees_next: bool = False,
) -> None:  # fmt: skip
    """The inputs of a pass over a level's nodes; with depth 0, over the last known tokens."""
    width = len(ids_T) // len(step.ids_R)
    for r, row in enumerate(step.ids_R.tolist()):
        here = slice(r * width, (r + 1) * width)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        if int(step.num_checked_R[r]) < 0 or (depth and state.is_done_X[row]):
            continue
        known = int(state.known_X[row])
        room, is_past = int(step.max_draft_R[r]), depth > int(state.end_X[row]) - known
        for place in range(width):
            packed, node = r * width + place, first_node + place
            where = known - sees_next + node if depth else known - width + place
            if where < 0 or (depth and (node >= room or is_past)):
                continue
            ids_T[packed] = state.draft_XG[row, node] if depth else state.tokens_XL[row, where]
            attn.pos_T[packed] = known - sees_next + depth - 1 if depth else where
            attn.base_T[packed] = int(attn.pos_T[packed]) + 1
            attn.slot_T[packed] = slot_of(state, row, where)
            if depth and attn.tree_TP is not None:
                attn.base_T[packed] = known - sees_next
                for i, above in enumerate(path_of(state, row, node)):
                    attn.tree_TP[packed, i] = slot_of(state, row, known - sees_next + above)


def add_nodes_ref(
    state: RowState,
    step: StepRows,
    token_T: Tensor,
    parent_T: Tensor,
    first_node: int,
    kept_R: Tensor,  # nodes of the level that count; 0: the draft ended before it
) -> None:
    """Write a level's nodes, and count those that the row may check."""
    width = len(token_T) // len(step.ids_R)
    for r, row in live_rows(state, step):
        here = slice(r * width, (r + 1) * width)
        nodes = slice(first_node, first_node + width)
        state.draft_XG[row, nodes], state.parents_XG[row, nodes] = token_T[here], parent_T[here]
        left = int(state.end_X[row]) - int(state.known_X[row]) - 1
        count = min(int(step.max_draft_R[r]), first_node + int(kept_R[r]))
        if not kept_R[r] or first_node // width >= left:
            count = int(state.num_nodes_X[row]) if first_node else 0
        state.num_nodes_X[row] = count
        step.result_RC[r, MATCHED], step.result_RC[r, DRAFTED] = 1, count
        step.result_RC[r, step.guesses_at :][nodes] = token_T[here]


def grow_level_ref(
    state: RowState, step: StepRows, logits_TC: Tensor, chances_RN: Tensor, sampling: Any, *,
    depth: int, level_size: int, row_T: Tensor, ids_C: Tensor | None,
    following: tuple[Tensor, AttnInputs] | None, sees_next: bool = False,
    branch: int | None = None, least: float | None = None,
) -> None:  # fmt: skip
    """Children of the level before become nodes where they are on the likeliest paths."""
    branch = min(branch or level_size, level_size) if depth else level_size
    num_rows, first = len(step.ids_R), depth * level_size
    pos_T = state.known_X[row_T] + depth
    if step.has_rules:
        path_TP = row_T.new_full((len(row_T), depth), -1)
        count_R = row_T.new_full((num_rows,), -1)
        for r, _ in live_rows(state, step):  # nodes of other rows are old
            count_R[r] = depth * level_size
        first_node = (depth - 1) * level_size if depth else -1
        nodes = step.ids_R, count_R, state.draft_XG, state.parents_XG
        draft_paths_ref(*nodes, first_node, path_TP)
        tables = sampling.processors.tables
        logits_TC = process_ref(logits_TC, row_T, pos_T, path_TP, tables, ids_C=ids_C)
    score_TC = (
        sampling.scores(logits_TC, row_T, pos_T, ids_C) if step.draws != Draws.GREEDY else logits_TC
    )
    column_TB = score_TC.sort(dim=1, descending=True, stable=True).indices[:, :branch]
    token_TB = column_TB if ids_C is None else ids_C[column_TB]
    value_RNB = score_TC.log_softmax(-1).gather(1, column_TB).view(num_rows, -1, branch)
    if depth:
        parents = slice(first - level_size, first - level_size + value_RNB.shape[1])
        value_RNB = value_RNB + chances_RN[:, parents, None]
    # The likeliest paths are kept, and always the path of first children.
    order = value_RNB.flatten(1).clone()
    order[:, 0] = torch.inf
    best_RW = order.sort(dim=1, descending=True, stable=True).indices[:, :level_size]
    chances_RW = chances_RN[:, first : first + level_size]
    chances_RW.copy_(value_RNB.flatten(1).gather(1, best_RW))
    is_kept_RW = chances_RW >= (-torch.inf if least is None else least)
    kept_R = (is_kept_RW * torch.arange(1, level_size + 1, device=order.device)).amax(1)
    if least is None:
        kept_R = torch.full_like(kept_R, level_size)
    token_RW = token_TB.reshape(num_rows, -1).gather(1, best_RW)
    parent_RW = first - level_size + best_RW // branch if depth else torch.full_like(best_RW, -1)
    add_nodes_ref(state, step, token_RW.flatten(), parent_RW.flatten(), first, kept_R)
    if following is not None:
        where = {"first_node": first, "depth": depth + 1, "sees_next": sees_next}
        level_inputs_ref(state, step, *following, **where)

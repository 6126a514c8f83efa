"""What may follow a token or a pair of tokens, on a device, and trees of it: the specification.

A *slot* here is an entry of the table of pairs, not of the KV cache.

Shape letters: as in `step`; S slots of pairs, W successors of a context, T packed tokens, V
vocabulary, E successors as a file has them, C candidates of a node, L levels of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.kernels.step import DRAFTED, MATCHED, RowState, StepRows, live_rows
from hunch.kernels.successor_entries import CERTAIN, WIDTH, Entries, ranks_of

MAX_PAIR_BITS = 19
MULTIPLIER = -7046029254386353131  # odd; of the pair's hash, in 64 bits with a sign
# How often the successor of each rank is the target's choice, in 255ths: about what arXiv
# 2408.08696 reports.
RANK_CHANCES = (115, 36, 20, 13, 10, 8, 5, 5)
SCALE = float(np.float32(1 / CERTAIN**2))


@dataclass(slots=True)
class Successors:
    """A successor is a number: its token times 256, plus its chance. 0: none.

    Pairs are hashed; each slot holds one. Of the last row of tokens nothing is read.
    """

    pair_S: Tensor  # int64: the pair of the slot; -1: none
    after_pair_SW: Tensor  # int32, likeliest first
    after_token_VW: Tensor  # the same
    chance_W: Tensor  # int32: of the target's best successors, by rank
    num_best: int  # successors of a token that are kept
    entries: Entries | None  # that it begins with

    @staticmethod
    def create(
        vocab_size: int,
        device: torch.device | str,
        entries: Entries | None = None,
        *,
        num_best: int = WIDTH,
        pair_bits: int | None = None,
    ) -> Successors:
        """`pair_bits`: of a slot's number; None: as many as the entries need."""
        if pair_bits is None:
            num_pairs = 0 if entries is None else len(np.unique(entries.context_E))
            pair_bits = min((2 * num_pairs).bit_length(), MAX_PAIR_BITS)
        num_slots = 1 << pair_bits
        made = Successors(
            torch.empty(num_slots, dtype=torch.int64, device=device),
            torch.empty(num_slots, WIDTH, dtype=torch.int32, device=device),
            torch.empty(vocab_size + 1, WIDTH, dtype=torch.int32, device=device),
            torch.tensor(RANK_CHANCES, dtype=torch.int32, device=device),
            min(num_best, WIDTH, vocab_size),
            entries,
        )
        made.clear()
        return made

    @property
    def nbytes(self) -> int:
        return self.pair_S.nbytes + self.after_pair_SW.nbytes + self.after_token_VW.nbytes

    def clear(self) -> None:
        """Forget what was learned. Of pairs that share a slot the first one has it."""
        self.pair_S.fill_(-1)
        self.after_pair_SW.zero_()
        self.after_token_VW.zero_()
        if (entries := self.entries) is None or not len(entries):
            return
        context_E, last_E = entries.context_E, entries.last_E.astype(np.int64)
        rank_E = ranks_of(context_E)
        packed_E = entries.next_E.astype(np.int64) * 256 + entries.chance_E
        is_one_E = context_E < 0
        chosen = is_one_E & (rank_E < WIDTH)
        rows = self.after_token_VW.cpu().numpy().copy()
        rows[last_E[chosen], rank_E[chosen]] = packed_E[chosen]
        self.after_token_VW.copy_(torch.from_numpy(rows))
        slot_E = slots_of(context_E, len(self.pair_S))
        heads = np.flatnonzero((rank_E == 0) & ~is_one_E)
        _, first = np.unique(slot_E[heads], return_index=True)
        owner_S = np.full(len(self.pair_S), -1, np.int64)
        owner_S[slot_E[heads[first]]] = context_E[heads[first]]
        chosen = ~is_one_E & (rank_E < WIDTH) & (owner_S[slot_E] == context_E)
        rows = np.zeros(tuple(self.after_pair_SW.shape), np.int32)
        rows[slot_E[chosen], rank_E[chosen]] = packed_E[chosen]
        self.pair_S.copy_(torch.from_numpy(owner_S))
        self.after_pair_SW.copy_(torch.from_numpy(rows))

    def keep(self, ids_T: Tensor, is_token_T: Tensor, logits_TV: Tensor) -> None:
        """Keep the best successors of these tokens.

        Of equal logits, the lower token comes first; of equal tokens, the last one counts.
        """
        nowhere = len(self.after_token_VW) - 1
        place_T = torch.arange(len(ids_T), device=ids_T.device)
        row_T = torch.where(is_token_T, ids_T, nowhere)
        last_V = place_T.new_full((nowhere + 1,), -1).scatter_reduce_(0, row_T, place_T, "amax")
        row_T = torch.where(last_V[row_T] == place_T, row_T, nowhere)
        best_TW = logits_TV.sort(dim=-1, descending=True, stable=True).indices
        self.keep_best(row_T, best_TW[:, : self.num_best])

    def keep_best(self, row_T: Tensor, best_TW: Tensor) -> None:
        """Keep the best successors of tokens, best first."""
        packed_TW = self.after_token_VW.new_zeros(len(row_T), WIDTH)
        width = best_TW.shape[1]
        packed_TW[:, :width] = (best_TW * 256 + self.chance_W[:width]).int()
        self.after_token_VW.index_copy_(0, row_T, packed_TW)

    def find(self, before: int, last: int) -> list[tuple[int, int]]:
        """What may follow these two tokens: each token once, and its chance in `CERTAIN ** 2`ths.

        A successor of the pair has its chance; those of the last token share what is left.
        """
        pair = before << 32 | last
        slot = slot_of(pair, len(self.pair_S))
        found: dict[int, int] = {}
        left = CERTAIN
        if before >= 0 and int(self.pair_S[slot]) == pair:
            for successor in self.after_pair_SW[slot].tolist():
                if successor & 255:
                    found[successor >> 8] = (successor & 255) * CERTAIN
                    left -= successor & 255
        for successor in self.after_token_VW[last].tolist():
            if successor & 255:
                found.setdefault(successor >> 8, (successor & 255) * left)
        return [(token, chance) for token, chance in found.items() if chance > 0]


def slots_of(pair: np.ndarray, num_slots: int) -> np.ndarray:
    """The slots of pairs, of which there is a power of two."""
    with np.errstate(over="ignore"):
        return (pair * np.int64(MULTIPLIER) >> 32) & (num_slots - 1)


def slot_of(pair: int, num_slots: int) -> int:
    """The slot of one pair; all its bits are among the product's first 64."""
    return (pair * MULTIPLIER >> 32) & (num_slots - 1)


def level_widths(num_nodes: int, num_levels: int) -> list[int]:
    """Nodes of each level of a tree: about half as many as on the level above, at most `WIDTH`."""
    widths: list[int] = []
    for level in range(num_levels):
        share = 1 / (2 - 2 ** (1 + level - num_levels))  # of a series that halves from here on
        width = min(WIDTH, max(1, round(num_nodes * share)), num_nodes)
        if not width:
            break
        widths.append(width)
        num_nodes -= width
    return widths


def successor_tree_ref(
    state: RowState, step: StepRows, successors: Successors, width_L: Tensor, num_nodes: int
) -> None:
    """Draft a tree: on each level the likeliest successors of the nodes above, likeliest paths
    first; of equal ones the first candidate of the first node. No level is past the row's end.

    num_nodes: the sum of the widths.
    """
    for r, row in live_rows(state, step):
        known = int(state.known_X[row])
        left = int(state.end_X[row]) - known - 1  # levels that can still be committed
        before = int(state.tokens_XL[row, known - 2]) if known > 1 else -1
        one = np.float32(1.0)
        level = [(one, -1, before, int(state.tokens_XL[row, known - 1]))]
        nodes: list[tuple[np.float32, int, int]] = []  # chance, parent, token
        for width in width_L.tolist()[: max(left, 0)]:
            paths = [
                (chance * (np.float32(share) * np.float32(SCALE)), number, last, token)
                for chance, number, before, last in level
                for token, share in successors.find(before, last)
            ]
            paths.sort(key=lambda path: -path[0])
            level = []
            for chance, parent, last, token in paths[:width]:
                level.append((chance, len(nodes), last, token))
                nodes.append((chance, parent, token))
        order = sorted(range(len(nodes)), key=lambda number: -nodes[number][0])
        place = {number: at for at, number in enumerate(order)} | {-1: -1}
        for number in order:
            _, parent, token = nodes[number]
            state.draft_XG[row, place[number]] = token
            state.parents_XG[row, place[number]] = place[parent]
        count = min(len(nodes), int(step.max_draft_R[r]))
        state.num_nodes_X[row], step.result_RC[r, DRAFTED], step.result_RC[r, MATCHED] = (
            count, count, 1,
        )  # fmt: skip

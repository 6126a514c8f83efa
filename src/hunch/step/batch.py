"""Pack: the rows of a plan become one packed batch of tokens with their slots and key paths.

Shape letters: T packed tokens, S sequences of the step, B blocks, P tree depth, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import write_slots
from hunch.step.rows import MAX_STAGED, NOTHING, Nodes, RowBuffers, Stage
from hunch.types import RowWork


@dataclass(slots=True)
class RowPart:
    """One row's share of the packed step: known tokens first, then the nodes of its draft."""

    row: int
    first: int  # packed index of its first token
    start: int  # position of that token
    num_known: int
    nodes: Nodes
    is_caught_up: bool  # its last known token is among them: the target chooses what follows
    num_levels: int | None = None  # depth of a draft that branches; None: a chain

    @property
    def tokens_N(self) -> np.ndarray:
        return self.nodes.tokens_N

    @property
    def parents_N(self) -> np.ndarray:
        return self.nodes.parents_N

    @property
    def num_nodes(self) -> int:
        return len(self.nodes.tokens_N)

    @property
    def root(self) -> int:
        """Packed index of the last known token; the nodes follow it."""
        return self.first + self.num_known - 1

    @property
    def num_tokens(self) -> int:
        return self.num_known + self.num_nodes

    @property
    def is_tree(self) -> bool:
        parents: list[int] = self.parents_N.tolist()
        return parents != list(range(-1, len(parents) - 1))


@dataclass(slots=True)
class Batch:
    """A packed step."""

    ids_T: Tensor
    attn: AttnInputs
    parts: list[RowPart]  # in the order of the plan's work; rows with nothing to do are left out
    # Ids, positions, slots, sequences and bases: the same memory as that of the tensors.
    packed_5T: np.ndarray | None = None

    @property
    def columns(self) -> np.ndarray:
        """`packed_5T`, from tensors on the host if it is not there."""
        if self.packed_5T is not None:
            return self.packed_5T
        attn = self.attn
        lines = self.ids_T, attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T
        return np.stack([line.numpy() for line in lines])

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on the target's device."""
        if device.type == "cpu":
            return self
        tensors = ("pos_T", "slot_T", "seq_T", "table_SB", "base_T", "tree_TP", "row_S")
        moved = {name: getattr(self.attn, name) for name in tensors}
        moved = {
            name: x.to(device, non_blocking=True) for name, x in moved.items() if x is not None
        }
        return Batch(self.ids_T.to(device), replace(self.attn, **moved), self.parts)

    def copy(self) -> Batch:
        """A copy, which the next packed step does not overwrite."""
        attn = self.attn
        columns = ("pos_T", "slot_T", "seq_T", "table_SB", "base_T")
        copied = {name: getattr(attn, name).clone() for name in columns}
        return Batch(self.ids_T.clone(), replace(attn, **copied, memo={}), self.parts)


def pack(rows: RowBuffers, work: list[RowWork]) -> Batch:
    """Pack a plan's work; a row with fewer known tokens than the plan assumed packs those."""
    parts: list[RowPart] = []
    first = 0
    for item in work:
        if rows.requests[item.row] is None:
            continue  # finished on the device before this plan was made
        start, known = int(rows.computed[0, item.row]), int(rows.known[item.row])
        num_known = min(item.num_tokens, known - start)
        is_caught_up = start + num_known == known
        max_nodes = item.num_nodes if is_caught_up else 0
        nodes = rows.take_draft(item.row, max_nodes)
        parts.append(RowPart(item.row, first, start, num_known, nodes, is_caught_up))
        first += parts[-1].num_tokens
    return _pack(rows, parts, first)


def pack_known(rows: RowBuffers, spans: list[tuple[int, int, int]]) -> Batch:
    """Pack known tokens alone, given as (row, start, stop), for a drafter's network."""
    parts: list[RowPart] = []
    first = 0
    for row, start, stop in spans:
        parts.append(RowPart(row, first, start, stop - start, NOTHING, is_caught_up=False))
        first += stop - start
    return _pack(rows, parts, first)


def _pack(rows: RowBuffers, parts: list[RowPart], num_tokens: int) -> Batch:
    stage = rows.stage(num_tokens)
    if len(parts) == 1 and num_tokens <= MAX_STAGED and not parts[0].is_tree:
        return _pack_chain(rows, parts, stage)
    ids_T, pos_T, slot_T, seq_T, base_T = stage.arrays
    spans: list[Span] = []
    paths: list[tuple[RowPart, np.ndarray]] = []
    for place, part in enumerate(parts):
        known = part.start + part.num_known
        here, last = slice(part.first, part.first + part.num_tokens), part.first + part.num_tokens
        ids_T[part.first : part.root + 1] = rows.tokens[part.row, part.start : known]
        ids_T[part.root + 1 : last] = part.tokens_N
        pos_T[here] = rows.positions[part.start : part.start + part.num_tokens]
        slot_T[here] = rows.slots(part.row, part.start, part.start + part.num_tokens)
        seq_T[here] = place
        base_T[here] = known + part.num_nodes  # everything through the table
        is_tree = part.num_nodes > 0 and part.is_tree
        if is_tree:
            path_NP = _paths(part.parents_N)
            pos_T[part.root + 1 : last] = known + (path_NP >= 0).sum(1) - 1
            base_T[here] = known
            part.num_levels = path_NP.shape[1]
            paths.append((part, path_NP))
        spans.append(Span(part.first, last, place, part.start, part.num_known, is_tree))
    ids, pos, slot, seq, base = stage.tensors
    attn = AttnInputs(
        pos_T=pos,
        slot_T=slot,
        seq_T=seq,
        table_SB=torch.from_numpy(_tables(rows, parts)),
        base_T=base,
        tree_TP=_tree_slots(slot_T, paths),
        block_size=rows.block_size,
        spans=tuple(spans),
        row_S=torch.tensor([part.row for part in parts]) if rows.has_recurrent_states else None,
    )
    return Batch(ids, attn, parts, stage.packed_5T)


def _pack_chain(rows: RowBuffers, parts: list[RowPart], stage: Stage) -> Batch:
    """`_pack` for a single row without a tree: it only fills buffers that exist already."""
    (part,) = parts
    ids_T, pos_T, slot_T, seq_T, base_T = stage.arrays
    row, start, num_known = part.row, part.start, part.num_known
    stop = start + len(ids_T)
    ids_T[:num_known] = rows.tokens[row, start : start + num_known]
    ids_T[num_known:] = part.nodes.tokens_N
    pos_T[:] = rows.positions[start:stop]
    write_slots(rows.table[row], start, rows.block_size, rows.positions, slot_T)
    seq_T[:] = 0
    base_T[:] = stop
    ids, pos, slot, seq, base = stage.tensors
    spans = (Span(0, len(ids_T), 0, start, num_known, False),)
    table_1B = rows.tables_1B[row]
    row_1 = rows.rows_1[row] if rows.has_recurrent_states else None
    attn = AttnInputs(pos, slot, seq, table_1B, base, None, rows.block_size, spans, row_1)
    return Batch(ids, attn, parts, stage.packed_5T)


def drafts_of(parts: list[RowPart], device: torch.device) -> Draft:
    """The drafts of `parts` without q, one row each, on a device."""
    num_nodes = max((part.num_nodes for part in parts), default=0)
    if not num_nodes:
        return Draft.empty(len(parts), device)
    tokens_RN = np.zeros((len(parts), num_nodes), dtype=np.int64)
    parents_RN = np.full((len(parts), num_nodes), -1, dtype=np.int64)
    for place, part in enumerate(parts):
        tokens_RN[place, : part.num_nodes] = part.tokens_N
        parents_RN[place, : part.num_nodes] = part.parents_N
    num_nodes_R = np.array([part.num_nodes for part in parts], dtype=np.int64)
    tokens, parents = torch.from_numpy(tokens_RN), torch.from_numpy(parents_RN)
    return Draft(tokens, parents, torch.from_numpy(num_nodes_R)).to(device)


def _tables(rows: RowBuffers, parts: list[RowPart]) -> np.ndarray:
    longest = max((rows.num_blocks[part.row] for part in parts), default=0)
    return np.ascontiguousarray(rows.table[[part.row for part in parts], :longest])


def _paths(parents_N: np.ndarray) -> np.ndarray:
    """Per node, the nodes from the root down to itself, padded with -1."""
    chains: list[list[int]] = []
    for node, parent in enumerate(parents_N.tolist()):
        chains.append((chains[parent] if parent >= 0 else []) + [node])
    path_NP = np.full((len(chains), max(map(len, chains))), -1, dtype=np.int64)
    for node, chain in enumerate(chains):
        path_NP[node, : len(chain)] = chain
    return path_NP


def _tree_slots(slot_T: np.ndarray, paths: list[tuple[RowPart, np.ndarray]]) -> Tensor | None:
    """Slots of each branching node's ancestors and its own, by depth."""
    if not paths:
        return None
    tree_TP = np.full((len(slot_T), max(path.shape[1] for _, path in paths)), -1, dtype=np.int64)
    for part, path_NP in paths:
        slots_N = slot_T[part.root + 1 : part.root + 1 + part.num_nodes]
        tree_TP[part.root + 1 : part.root + 1 + part.num_nodes, : path_NP.shape[1]] = np.where(
            path_NP >= 0, slots_N[path_NP], -1
        )
    return torch.from_numpy(tree_TP)

"""One step, one specification: the host's form and the kernels do what plain Python says.

Random rows are packed, walked, committed and compacted by the host's functions, by the Triton
kernels and by the specification in `kernels/step.py`; everything a later step can see is compared.

Shape letters: as in `step`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hunch.kernels import gpu_step
from hunch.kernels import step as spec
from hunch.kernels.attention import AttnInputs, seen_slots
from hunch.kernels.kv_store import KVCache, slots_at
from hunch.sampling.stop import REASONS
from hunch.step.batch import Batch, pack
from hunch.step.host_step import HostStep
from hunch.step.parts import Outcome
from hunch.step.rows import Nodes, RowBuffers
from hunch.types import Capacity, Request, RowResult, RowStart, RowWork, SamplingParams
from hunch.verify.base import RowDraft, TargetChoices
from hunch.verify.exact import walk
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

BLOCK, MAX_NODES, NUM_BLOCKS = 4, 6, 10


@dataclass
class Row:
    """A row that decodes, its draft, how much of it may be checked, and what the target chooses."""

    text: list[int]
    end: int
    stops: tuple[int, ...]
    blocks: list[int]
    tokens: list[int]
    parents: list[int]
    max_checked: int
    choices: list[int]  # after the last known token, then after each node

    @property
    def num_checked(self) -> int:
        return min(len(self.tokens), self.max_checked)


@dataclass
class Seen:
    """What a step leaves of a row."""

    ids: list[int]  # packed: the last known token, then the checked nodes
    positions: list[int]
    slots: list[int]
    keys: list[list[int]]  # slots that each of them reads, by position
    tokens: list[int]  # committed
    reason: int
    text: list[int]
    kv: list[list[float]]  # of every position that is computed


def rows_of(seed: int, *, is_tree: bool) -> list[Row]:
    gen = random.Random(seed)
    blocks = list(range(4 * NUM_BLOCKS))
    gen.shuffle(blocks)
    rows = []
    for number in range(4):
        num_nodes = gen.randint(0, MAX_NODES)
        parents = [gen.randint(-1, n - 1) if is_tree else n - 1 for n in range(num_nodes)]
        tokens: list[int] = []
        for node, parent in enumerate(parents):  # no two children of one parent say the same
            taken = {tokens[n] for n in range(node) if parents[n] == parent}
            tokens.append(gen.choice([token for token in range(1, 9) if token not in taken]))
        # Mostly the token of a child, so that walks get somewhere.
        children = [[t for t, p in zip(tokens, parents, strict=True) if p == node]
                    for node in range(-1, num_nodes)]  # fmt: skip
        choices = [gen.choice(some) if some and gen.random() < 0.8 else 9 for some in children]
        known = gen.randint(1, 18)
        rows.append(
            Row(
                text=[gen.randint(10, 99) for _ in range(known)],
                end=known + gen.randint(1, 6),
                stops=(gen.randint(1, 9),) if number % 2 else (),
                blocks=blocks[number * NUM_BLOCKS : (number + 1) * NUM_BLOCKS],
                tokens=tokens,
                parents=parents,
                max_checked=gen.randint(0, MAX_NODES),
                choices=choices,
            )
        )
    return rows


def new_kv() -> KVCache:
    """Keys and values by which one knows their slot."""
    k = torch.arange(2 * 4 * NUM_BLOCKS * BLOCK, dtype=torch.float32, device=DEVICE)
    k = k.view(2, -1, 1, 1)
    return KVCache(k.clone(), -k)


def kv_at(kv: KVCache, row: Row, count: int) -> list[list[float]]:
    table = np.array([row.blocks])
    slots = [int(slots_at(table, 0, pos, BLOCK)) for pos in range(count)]
    both = torch.cat([kv.k_LCMH, kv.v_LCMH])[:, slots, 0, 0]
    return cast("list[list[float]]", both.tolist())


def packed(
    ids_T: Tensor, attn: AttnInputs, places: Iterable[int]
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    at = list(places)
    columns = (ids_T[at].tolist(), attn.pos_T[at].tolist(), attn.slot_T[at].tolist())
    return (*columns, [seen_slots(attn, place).tolist() for place in at])


def by_kernels(
    rows: list[Row], pack: Callable[..., None], commit: Callable[..., None],
    compact: Callable[..., None],
) -> list[Seen]:  # fmt: skip
    ends = [row.end for row in rows]
    state = cells_of([row.text for row in rows], ends=ends, max_nodes=MAX_NODES)
    state.table_XB.copy_(torch.tensor([row.blocks for row in rows]))
    for number, row in enumerate(rows):
        count = len(row.tokens)
        state.draft_XG[number, :count] = torch.tensor(row.tokens, dtype=torch.int64)
        state.parents_XG[number, :count] = torch.tensor(row.parents, dtype=torch.int64)
        state.num_nodes_X[number] = count
        state.stop_XS[number, : len(row.stops)] = torch.tensor(row.stops, dtype=torch.int64)
    order = [2, 0, -1, 3, 1]  # rows are named in any order, with padding among them
    most = [rows[number].max_checked if number >= 0 else 0 for number in order]
    step = step_of(order, MAX_NODES, max_checked=most)
    width = MAX_NODES + 1
    packed_5T = torch.zeros(5, len(order) * width, dtype=torch.int64, device=DEVICE)
    attn = AttnInputs.over(packed_5T, state.table_XB, BLOCK, depth=MAX_NODES)
    pack(state, step, packed_5T[0], attn)
    choice_M = torch.zeros(len(order) * width, dtype=torch.int64, device=DEVICE)
    for r, number in enumerate(order):
        if number >= 0:
            choices = torch.tensor(rows[number].choices)
            choice_M[r * width : r * width + len(choices)] = choices
    commit(state, step, choice_M)
    kv = new_kv()
    compact(kv, step, attn.slot_T)
    found = []
    for number, row in enumerate(rows):
        r = order.index(number)
        line, known = step.result_RC[r].tolist(), int(state.known_X[number])
        places = range(r * width, r * width + 1 + row.num_checked)
        tokens = line[spec.FIRST : spec.FIRST + line[spec.TOKENS]]
        text = state.tokens_XL[number, :known].tolist()
        kept = kv_at(kv, row, known - 1)
        assert line[spec.KNOWN] == known
        found.append(
            Seen(*packed(packed_5T[0], attn, places), tokens, line[spec.REASON], text, kept)
        )
    return found


def by_host(rows: list[Row]) -> list[Seen]:
    capacity = Capacity(
        num_blocks=4 * NUM_BLOCKS, block_size=BLOCK, max_rows=len(rows), max_len=32,
        max_nodes=MAX_NODES,
    )  # fmt: skip
    buffers = RowBuffers(capacity)
    for number, row in enumerate(rows):
        request = Request(
            id=str(number), prompt_ids=row.text, params=SamplingParams(), seed=0,
            max_tokens=row.end - len(row.text), stop_ids=row.stops,
        )  # fmt: skip
        done = (len(row.text) - 1,)
        blocks = row.blocks[: capacity.max_len // BLOCK]
        buffers.start(
            RowStart(row=number, request=request, tokens=row.text, num_computed=done, blocks=blocks)
        )
        buffers.drafts[number] = Nodes(
            np.array(row.tokens, dtype=np.int64), np.array(row.parents, dtype=np.int64)
        )
    work = [
        RowWork(row=number, num_tokens=1, num_nodes=rows[number].max_checked, max_draft=0)
        for number in (2, 0, 3, 1)
    ]
    batch = pack(buffers, work)
    kv = new_kv()
    outcomes = [_walked(part, rows[part.row]) for part in batch.parts]
    host = SimpleNamespace(
        rows=buffers,
        kv=[kv],
        grammars=SimpleNamespace(commit=lambda row, tokens: (len(tokens), None)),
        sampling=SimpleNamespace(commit=lambda rows, tokens: None),
    )
    HostStep._before_commit(cast("HostStep", host), outcomes)
    HostStep._commit(cast("HostStep", host), outcomes)
    return [_seen(batch, kv, buffers, rows, outcomes, number) for number in range(len(rows))]


def _walked(part: Any, row: Row) -> Outcome:
    draft = RowDraft(part.row, 0, 0, part.tokens_N.tolist(), part.parents_N.tolist())
    target = SimpleNamespace(choice=lambda draft, node, path: row.choices[1 + node])
    tokens, path = walk(draft, cast("TargetChoices", target))
    return Outcome(part, RowResult(row=part.row, tokens=tokens), path[:-1])


def _seen(
    batch: Batch, kv: KVCache, buffers: RowBuffers, rows: list[Row], outcomes: list[Outcome],
    number: int,
) -> Seen:  # fmt: skip
    outcome = next(one for one in outcomes if one.part.row == number)
    part, known = outcome.part, int(buffers.known[number])
    places = range(part.root, part.root + 1 + part.num_nodes)
    assert buffers.computed[0, number] >= known - 1  # more where the row ends within its draft
    return Seen(
        *packed(batch.ids_T, batch.attn, places),
        outcome.result.tokens,
        REASONS.index(outcome.result.finish),
        buffers.tokens[number, :known].tolist(),
        kv_at(kv, rows[number], known - 1),
    )


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(4))
def test_all_forms_of_a_step_agree(seed: int, is_tree: bool) -> None:
    rows = rows_of(seed, is_tree=is_tree)
    want = by_kernels(rows, spec.pack_ref, spec.commit_ref, spec.compact_ref)
    assert by_kernels(rows, gpu_step.pack, gpu_step.commit, gpu_step.compact) == want
    assert by_host(rows) == want

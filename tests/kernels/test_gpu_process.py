"""Rules over logits and counts of committed tokens in Triton, against their specification."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import step as columns
from hunch.kernels.gpu_process import (
    CHUNK,
    count_committed,
    draft_paths,
    process,
    process_level,
)
from hunch.kernels.process import (
    ProcessTables,
    count_committed_ref,
    draft_paths_ref,
    process_ref,
)
from hunch.sampling.dense import DeviceProcessors
from hunch.types import SamplingParams
from random_rules import logits_of, padded, request_of, token
from row_states import DEVICE, numbers, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

VOCAB, NUM_ROWS = CHUNK + 70, 5


def processors_of(rng: random.Random, vocab_size: int = VOCAB) -> DeviceProcessors:
    """All rows but the last have rules."""
    processors = DeviceProcessors(NUM_ROWS, vocab_size, torch.device(DEVICE))
    for row in range(NUM_ROWS - 1):
        output = [token(rng, vocab_size) for _ in range(rng.randint(0, 9))]
        processors.start(row, request_of(rng, vocab_size), output)
    return processors


def kept_of(tables: ProcessTables) -> list[torch.Tensor]:
    return [tables.counts_XV.clone(), tables.words_XN.clone()]


@pytest.mark.parametrize("seed", range(4))
def test_process_is_the_specification_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    depth, in_place = (0, 1, 3, 5)[seed], seed % 3 == 0
    tables = processors_of(rng).tables
    rows = [-1, NUM_ROWS - 1, *(rng.randrange(NUM_ROWS) for _ in range(4))]
    paths = [[token(rng, VOCAB) for _ in range(rng.randint(0, depth))] for _ in rows]
    where = (
        numbers(*rows),
        numbers(*(rng.randint(1, 25) for _ in rows)),
        padded(paths, depth).to(DEVICE),
    )
    logits_MV = logits_of(seed, len(rows), VOCAB).to(DEVICE)
    is_masked_M = numbers(*(rng.random() < 0.5 for _ in rows), dtype=torch.bool)
    bits = torch.randint(-(2**31), 2**31, (len(rows), -(-VOCAB // 32)), dtype=torch.int32)
    for mask in ((None, None), (bits.to(DEVICE), is_masked_M)):
        want_MV = process_ref(logits_MV, *where, tables, *mask)
        given_MV = logits_MV.clone()
        out_MV = given_MV if in_place else torch.full_like(given_MV, 7.0)
        got_MV = process(given_MV, *where, tables, *mask, out_MV)
        assert got_MV is out_MV
        assert torch.equal(got_MV.view(torch.int32), want_MV.view(torch.int32))
        if not in_place:
            assert torch.equal(given_MV, logits_MV)
    allowed_MV = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    is_kept_MV = torch.from_numpy(allowed_MV != 0).to(DEVICE) | ~is_masked_M[:, None]
    for m, row in enumerate(rows):
        if row in (-1, NUM_ROWS - 1):  # nothing asked: only the mask acts
            assert torch.equal(got_MV[m] == -torch.inf, ~is_kept_MV[m])


@pytest.mark.parametrize("seed", range(3))
def test_a_part_of_the_columns_is_processed_as_in_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    tables = processors_of(rng, 50).tables
    ids_C = numbers(*rng.sample(range(50), 30))
    rows = [rng.randrange(NUM_ROWS) for _ in range(8)]
    paths = [[token(rng, 50) for _ in range(rng.randint(0, 3))] for _ in rows]
    where = numbers(*rows), numbers(*[9] * len(rows)), padded(paths, 3).to(DEVICE)
    logits_MV = logits_of(seed, len(rows), 50).to(DEVICE)
    want_MV = process_ref(logits_MV, *where, tables)
    logits_MC = logits_MV[:, ids_C].contiguous()
    got_MC = process(logits_MC, *where, tables, ids_C=ids_C)
    assert torch.equal(got_MC.view(torch.int32), want_MV[:, ids_C].view(torch.int32))
    plain_MC = process_ref(logits_MC, *where, tables, ids_C=ids_C)
    assert torch.equal(plain_MC.view(torch.int32), want_MV[:, ids_C].view(torch.int32))


@pytest.mark.parametrize("first_node", [-1, 0, 2])
def test_paths_lead_from_the_root_to_each_node(first_node: int) -> None:
    draft_XG = torch.arange(10, 28, device=DEVICE).view(3, 6)
    parents_XG = torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, -1, 0, 2, 0, 4], [-1, 0, 0, 1, 1, 2]])
    width = 4
    given = numbers(2, 0, -1, 1), numbers(6, 3, 6, -1), draft_XG, parents_XG.to(DEVICE), first_node
    want_MP, got_MP = (torch.full((4 * width, 6), -7, device=DEVICE) for _ in range(2))
    draft_paths_ref(*given, want_MP)
    draft_paths(*given, got_MP)
    assert torch.equal(got_MP, want_MP)
    if first_node == 2:
        assert got_MP[1].tolist() == [22, 23, 25, -1, -1, -1]  # node 3 of row 2, through 0 and 1
        assert (got_MP[2 * width :] == -1).all()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_level_of_a_draft_has_its_own_tokens_as_history(depth: int) -> None:
    """As the target's logits would be processed once the path were committed."""
    rng, width = random.Random(depth), 2 if depth else 1
    processors = processors_of(rng, 50)
    draft_XG = numbers(*(token(rng, 50) for _ in range(NUM_ROWS * 8))).view(NUM_ROWS, 8)
    parents_XG = numbers(-1, -1, 0, 0, 3, 2, 4, 5).expand(NUM_ROWS, 8).contiguous()
    known_X = numbers(*(rng.randint(1, 25) for _ in range(NUM_ROWS)))
    rows = [3, 0, 1]
    row_T = numbers(*(row for row in rows for _ in range(width)))
    logits_TC = logits_of(depth, len(row_T), 50).to(DEVICE)
    state = numbers(*rows), known_X, draft_XG, parents_XG
    got_TC = process_level(logits_TC, row_T, *state, depth, width, processors.tables)
    paths = {0: [[]], 1: [[0], [1]], 3: [[0, 3, 4], [0, 2, 5]]}[depth]
    for t, row in enumerate(row_T.tolist()):
        committed = draft_XG[row, paths[t % width]].tolist()
        after = DeviceProcessors(NUM_ROWS, 50, torch.device(DEVICE))
        for name in ("rules_X", "min_pos_X", "penalties_X3", "counts_XV", "bias_XV", "flags_XV",
                     "words_XN"):  # fmt: skip
            getattr(after.tables, name).copy_(getattr(processors.tables, name))
        after.commit([row], [committed])
        where = numbers(row), known_X[row : row + 1] + depth, padded([[]], 0).to(DEVICE)
        want_1C = process_ref(logits_TC[t : t + 1], *where, after.tables)
        assert torch.equal(got_TC[t : t + 1].view(torch.int32), want_1C.view(torch.int32))


@pytest.mark.parametrize("seed", range(4))
def test_committed_tokens_are_counted_as_specified(seed: int) -> None:
    rng = random.Random(seed)
    tables = processors_of(rng, 50).tables
    num_nodes = rng.choice([0, 3, 12])
    rows = rng.sample(range(NUM_ROWS), 4)
    step = step_of([*rows, -1], num_nodes)
    for r in range(len(rows)):
        count = rng.randint(0, num_nodes + 1)
        new = [token(rng, 50) for _ in range(count)]
        line = [count, 0, 0, 0, 0, 0, *new]
        assert len(line) == columns.FIRST + count
        step.result_RC[r, : len(line)] = numbers(*line)
    step.result_RC[len(rows), columns.TOKENS] = 1  # of a row that is not there
    first = columns.FIRST
    committed = (
        step.ids_R,
        step.result_RC[:, first : first + num_nodes + 1],
        step.result_RC[:, columns.TOKENS],
    )
    before = kept_of(tables)
    count_committed_ref(tables, *committed)
    want = kept_of(tables)
    tables.counts_XV.copy_(before[0])
    tables.words_XN.copy_(before[1])
    count_committed(tables, *committed)
    assert all(map(torch.equal, kept_of(tables), want))


def test_steps_count_as_a_start_with_the_longer_output_does() -> None:
    rng = random.Random(3)
    request = request_of(rng, 50)
    request.params = SamplingParams(presence_penalty=0.5)
    request.bad_word_ids = ((1, 2, 3), (4, 5))
    output = [token(rng, 50) for _ in range(30)]
    stepwise, at_once = (DeviceProcessors(1, 50, torch.device(DEVICE)) for _ in range(2))
    stepwise.start(0, request, output[:2])
    at_once.start(0, request, output)
    for first in range(2, 30, 7):
        tokens_RK = numbers(*output[first : first + 7])[None]
        count_committed(stepwise.tables, numbers(0), tokens_RK, numbers(7))
    assert all(map(torch.equal, kept_of(stepwise.tables), kept_of(at_once.tables)))
    assert int(at_once.tables.counts_XV.sum()) == 30

"""Rules by tables against the rules of the host, bit for bit; tables that stay where they are."""

from __future__ import annotations

import random

import pytest
import torch

from hunch.sampling.dense import NUM_PREFIX, NUM_WORDS, DeviceProcessors
from hunch.sampling.processors import HostProcessors
from hunch.types import Request, SamplingParams
from random_rules import logits_of, padded, request_of, token

VOCAB, NUM_ROWS, DEPTH = 50, 4, 5


def request_with(words: list[list[int]]) -> Request:
    words_of = tuple(tuple(word) for word in words)
    params = SamplingParams(temperature=0)
    return Request(id="r", prompt_ids=[1], params=params, seed=0, bad_word_ids=words_of)


@pytest.mark.parametrize("seed", range(40))
def test_tables_are_the_hosts_rules_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    host = HostProcessors(VOCAB)
    dense = DeviceProcessors(NUM_ROWS, VOCAB, torch.device("cpu"))
    requests = [request_of(rng, VOCAB) for _ in range(NUM_ROWS)]
    outputs = [[token(rng, VOCAB) for _ in range(rng.randint(0, 9))] for _ in requests]
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        for processors in (host, dense):
            processors.start(row, request_of(rng, VOCAB), [1, 2, 2])  # who was there before
            processors.leave(row)
            processors.start(row, request, output)
    for step in range(3):
        rows = [rng.randrange(NUM_ROWS) for _ in range(12)]
        paths = [[token(rng, VOCAB) for _ in range(rng.randint(0, DEPTH))] for _ in rows]
        lengths = [len(requests[row].prompt_ids) + len(outputs[row]) for row in rows]
        pos_M = torch.tensor([n + len(path) for n, path in zip(lengths, paths, strict=True)])
        logits_MV = logits_of(seed + step, len(rows), VOCAB)
        found = []
        for processors in (host, dense):
            x_MV = logits_MV.clone()
            processors.apply(x_MV, torch.tensor(rows), pos_M, padded(paths, DEPTH))
            found.append(x_MV.view(torch.int32))
        assert torch.equal(*found)
        new = [[token(rng, VOCAB) for _ in range(rng.randint(0, 4))] for _ in requests]
        for output, more in zip(outputs, new, strict=True):
            output += more
        for processors in (host, dense):
            processors.commit(list(range(NUM_ROWS)), new)


def test_tables_stay_where_they_are_until_bad_words_need_more_room() -> None:
    dense = DeviceProcessors(3, VOCAB, torch.device("cpu"))
    assert dense.generation == 0
    dense.start(0, request_with([[4, 6]]), [4])
    first = dense.tables
    assert dense.generation == 1
    dense.start(1, request_of(random.Random(1), VOCAB), [])
    dense.leave(1)
    assert dense.tables is first
    assert dense.generation == 1

    long = [*range(10, 10 + NUM_PREFIX + 1), 7]
    dense.start(2, request_with([[8, 9]] * NUM_WORDS + [long]), long[:-1])
    assert dense.generation == 2
    assert dense.tables.counts_XV is first.counts_XV
    assert dense.tables.words_XN.data_ptr() != first.words_XN.data_ptr()

    logits_MV = torch.zeros(2, VOCAB)  # both rows stand before a bad word's end
    dense.apply(logits_MV, torch.tensor([0, 2]), torch.tensor([2, 11]), padded([[], []], 0))
    assert (logits_MV == -torch.inf).nonzero().tolist() == [[0, 6], [1, 7]]


def test_a_row_of_logits_without_a_row_has_no_rules() -> None:
    dense = DeviceProcessors(2, VOCAB, torch.device("cpu"))
    for row in range(2):
        dense.start(row, request_with([[4]]), [])
    logits_MV = torch.zeros(2, VOCAB)
    dense.apply(logits_MV, torch.tensor([-1, 1]), torch.tensor([0, 1]), padded([[], []], 2))
    assert (logits_MV == -torch.inf).nonzero().tolist() == [[1, 4]]

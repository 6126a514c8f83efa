"""A step's size follows what its rows matched, what was right, and what each has left to say."""

from dataclasses import replace
from typing import Any

import numpy as np

from hunch.kernels.gpu_spec import FIRST, MATCHED, TOKENS
from hunch.runner.gaits import Gaits
from hunch.runner.graphs import StepGraph
from hunch.runner.rows import RowBuffers
from hunch.spec.on_device import DeviceLookup
from hunch.spec.pace import Gait
from hunch.types import Capacity

NUM_ROWS, NUM_GUESSES = 4, 7
ROWS = np.arange(NUM_ROWS)
SECONDS = {Gait(0): 1.0, Gait(3): 1.3, Gait(7): 1.4}
NO_GRAPH: Any = None
PLAIN = StepGraph(NO_GRAPH, NUM_ROWS, 0, 0, SECONDS[Gait(0)], 0.0)


def new() -> Gaits:
    rows = RowBuffers(
        Capacity(num_blocks=64, block_size=16, max_rows=NUM_ROWS, max_len=256, max_nodes=7)
    )
    rows.known[:], rows.end[:] = 100, 200
    lookup = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=NUM_GUESSES)
    gaits = Gaits(lookup, rows)
    for gait, seconds in SECONDS.items():
        gaits.captured(StepGraph(NO_GRAPH, NUM_ROWS, gait.num_nodes, 0, seconds, 0.0))
    return gaits


def land(gaits: Gaits, matched: list[int], is_right: list[bool]) -> None:
    """A plain step: the one token each row said, and new guesses after matches so long."""
    result_RC = np.zeros((NUM_ROWS, FIRST + 1 + NUM_GUESSES), dtype=np.int64)
    result_RC[:, TOKENS], result_RC[:, MATCHED] = 1, matched
    result_RC[:, FIRST] = np.where(is_right, 5, 9)
    result_RC[:, FIRST + 1 :] = 5
    gaits.learn(ROWS, result_RC, PLAIN)


def test_steps_check_where_the_last_match_was_long() -> None:
    gaits = new()
    for matched, is_checking in ((16, True), (0, False), (16, True), (0, False)):
        land(gaits, [matched] * NUM_ROWS, [matched > 0] * NUM_ROWS)
        assert (gaits.choose(ROWS).num_nodes > 0) == is_checking


def test_a_host_that_is_slower_than_the_device_counts() -> None:
    gaits = new()
    land(gaits, [16] * NUM_ROWS, [True] * NUM_ROWS)
    size = gaits.choose(ROWS).num_nodes
    flown = StepGraph(NO_GRAPH, NUM_ROWS, size, 0, SECONDS[Gait(size)], 0.0)
    gaits.landed(flown, flown.seconds, 500.0)
    assert gaits.choose(ROWS) == Gait(size), "one pause"
    for _ in range(100):
        gaits.landed(flown, flown.seconds, 0.1)
    assert gaits.choose(ROWS) == Gait(size), "the device leads"
    for _ in range(300):
        gaits.landed(flown, flown.seconds, 50.0)
    assert gaits.choose(ROWS) == Gait(0), "the host is slow where nodes are checked"
    for _ in range(300):
        gaits.landed(PLAIN, PLAIN.seconds, 0.1)
    assert gaits.choose(ROWS) == Gait(size), "it may not be any more"


def test_many_rows_may_check_one_node_each() -> None:
    gaits = new()
    assert [gait.num_nodes for gait in gaits.at(4)] == [0, 3, 7]
    assert [gait.num_nodes for gait in gaits.at(8)] == [0, 1, 3, 7]
    assert [gait.num_nodes for gait in gaits.at(64)] == [0, 1]
    few = Gaits(replace(gaits.drafter, num_nodes=1), gaits.rows)
    assert [gait.num_nodes for gait in few.at(1)] == [0, 1]


def test_the_row_furthest_behind_gets_what_is_best_for_it() -> None:
    gaits = new()
    for _ in range(60):
        land(gaits, [8, 0, 0, 0], [True, False, False, False])
    assert gaits.choose(ROWS) == Gait(0)
    gaits.rows.known[:] = [120, 160, 160, 160]  # of 200: the others are ahead, without guesses
    assert gaits.choose(ROWS).num_nodes > 0
    gaits.rows.known[:] = [160, 120, 120, 120]
    assert gaits.choose(ROWS) == Gait(0)
    gaits.rows.known[:], gaits.rows.end[:] = 200, 200  # all said, as far as the host has heard
    assert gaits.choose(ROWS) == Gait(0)

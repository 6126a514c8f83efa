"""A step's size follows what its rows matched, what was right, and what each has left to say."""

from dataclasses import replace
from typing import Any

import numpy as np

from hunch.drafting.on_device import DeviceLookup
from hunch.drafting.pace import REST, Gait
from hunch.kernels.gpu_spec import FIRST, MATCHED, TOKENS
from hunch.step.gaits import LISTENING, RESTED, TIRED, Gaits
from hunch.step.graphs import StepGraph
from hunch.step.rows import RowBuffers
from hunch.types import Capacity

NUM_ROWS, NUM_GUESSES = 4, 7
ROWS = np.arange(NUM_ROWS)
SECONDS = {Gait(0): 1.0, Gait(3): 1.3, Gait(7): 1.4}
NO_GRAPH: Any = None
PLAIN = StepGraph(NO_GRAPH, NUM_ROWS, 0, 0, SECONDS[Gait(0)], 0.0)


def new(num_rows: int = NUM_ROWS) -> Gaits:
    rows = RowBuffers(
        Capacity(num_blocks=64, block_size=16, max_rows=num_rows, max_len=256, max_nodes=7)
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


def test_a_host_that_keeps_the_device_waiting_counts() -> None:
    gaits = new()
    land(gaits, [16] * NUM_ROWS, [True] * NUM_ROWS)
    size = gaits.choose(ROWS).num_nodes
    flown = StepGraph(NO_GRAPH, NUM_ROWS, size, 0, SECONDS[Gait(size)], 0.0)
    gaits.landed(flown, flown.seconds, 500.0)
    assert gaits.choose(ROWS) == Gait(size), "one pause"
    for _ in range(100):
        gaits.landed(flown, flown.seconds, flown.seconds)
    assert gaits.choose(ROWS) == Gait(size), "the device leads"
    gains = gaits.pace._gains(ROWS, [Gait(size)], None)[Gait(size)]
    gaits.pace.margin = (1.0 + gains) / SECONDS[Gait(size)] - 1.1  # a tenth more than is asked for
    assert gaits.choose(ROWS) == Gait(size)
    for _ in range(100):
        gaits.landed(flown, flown.seconds, 1.4 * flown.seconds)
    assert gaits.choose(ROWS) == Gait(0), "the host is slow where nodes are checked"
    for _ in range(1000):
        gaits.landed(PLAIN, PLAIN.seconds, PLAIN.seconds)
    assert gaits.choose(ROWS) == Gait(size), "it may not be any more"


def test_many_rows_may_check_one_node_each() -> None:
    gaits = new()
    assert [gait.num_nodes for gait in gaits.at(4)] == [0, 3, 7]
    assert [gait.num_nodes for gait in gaits.at(8)] == [0, 1, 3, 7]
    assert [gait.num_nodes for gait in gaits.at(64)] == [0, 1]
    few = Gaits(replace(gaits.drafter, num_nodes=1), gaits.rows)
    assert [gait.num_nodes for gait in few.at(1)] == [0, 1]


def test_lookups_of_many_rows_rest_while_they_do_not_pay() -> None:
    gaits, rows = new(num_rows=32), np.arange(32)
    gaits.captured(StepGraph(NO_GRAPH, 32, 0, 0, 1.0, 0.0))
    gaits.captured(StepGraph(NO_GRAPH, 32, 1, 0, 1.9, 0.0))
    assert Gait(0, REST) in gaits.to_prepare(32)
    gaits.start(list(range(32)))
    chosen = [gaits.choose(rows) for _ in range(LISTENING + TIRED + RESTED + LISTENING + 1)]
    ways = [0] * (LISTENING + TIRED) + [REST] * RESTED + [0] * (LISTENING + 1)
    assert chosen == [Gait(0, way) for way in ways]
    gaits.captured(StepGraph(NO_GRAPH, 32, 3, 0, 2.0, 0.0))
    result_RC = np.zeros((32, FIRST + 1 + NUM_GUESSES), dtype=np.int64)
    result_RC[:, TOKENS] = 1
    gaits.learn(rows, result_RC, StepGraph(NO_GRAPH, 32, 0, REST, 1.0, 0.0))
    assert (gaits.pace.guess_XG == -1).all(), "nobody guessed"
    assert gaits.choose(rows[:8]).way == 0, "fewer do not"


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

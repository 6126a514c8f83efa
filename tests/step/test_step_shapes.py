"""A step's size follows what its rows matched, what was right, and what each has left to say."""

from dataclasses import replace
from typing import Any

import numpy as np

from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.pace import REST, StepShape
from hunch.kernels.gpu_step import FIRST, MATCHED, TOKENS
from hunch.step.rows import RowBuffers
from hunch.step.step_graphs import StepGraph, StepKind
from hunch.step.step_shapes import LISTENING, RESTED, TIRED, StepShapes
from hunch.types import Capacity

NUM_ROWS, NUM_GUESSES = 4, 7
ROWS = np.arange(NUM_ROWS)
SECONDS = {StepShape(0): 1.0, StepShape(3): 1.3, StepShape(7): 1.4}


def timed(num_rows: int, num_nodes: int, source: int, seconds: float, drafting: float) -> StepGraph:
    """A step of which only the cost matters."""
    no_graph: Any = None
    return StepGraph(
        StepKind(num_rows, num_nodes, source, 0), no_graph, no_graph, seconds, drafting
    )


PLAIN = timed(NUM_ROWS, 0, 0, SECONDS[StepShape(0)], 0.0)


def new(num_rows: int = NUM_ROWS) -> StepShapes:
    rows = RowBuffers(
        Capacity(num_blocks=64, block_size=16, max_rows=num_rows, max_len=256, max_nodes=7)
    )
    rows.known[:], rows.end[:] = 100, 200
    lookup = DeviceLookup(name="suffix", min_match=1, max_match=16, num_nodes=NUM_GUESSES)
    shapes = StepShapes(lookup, rows)
    for shape, seconds in SECONDS.items():
        shapes.captured(timed(NUM_ROWS, shape.num_nodes, 0, seconds, 0.0))
    return shapes


def land(shapes: StepShapes, matched: list[int], is_right: list[bool]) -> None:
    """A plain step: the one token each row said, and new guesses after matches so long."""
    result_RC = np.zeros((NUM_ROWS, FIRST + 1 + NUM_GUESSES), dtype=np.int64)
    result_RC[:, TOKENS], result_RC[:, MATCHED] = 1, matched
    result_RC[:, FIRST] = np.where(is_right, 5, 9)
    result_RC[:, FIRST + 1 :] = 5
    shapes.learn(ROWS, result_RC, PLAIN)


def test_steps_check_where_the_last_match_was_long() -> None:
    shapes = new()
    for matched, is_checking in ((16, True), (0, False), (16, True), (0, False)):
        land(shapes, [matched] * NUM_ROWS, [matched > 0] * NUM_ROWS)
        assert (shapes.choose(ROWS).num_nodes > 0) == is_checking


def test_a_host_that_keeps_the_device_waiting_counts() -> None:
    shapes = new()
    land(shapes, [16] * NUM_ROWS, [True] * NUM_ROWS)
    size = shapes.choose(ROWS).num_nodes
    flown = timed(NUM_ROWS, size, 0, SECONDS[StepShape(size)], 0.0)
    shapes.landed(flown, flown.seconds, 500.0)
    assert shapes.choose(ROWS) == StepShape(size), "one pause"
    for _ in range(100):
        shapes.landed(flown, flown.seconds, flown.seconds)
    assert shapes.choose(ROWS) == StepShape(size), "the device leads"
    gains = shapes.pace._gains(ROWS, [StepShape(size)], None)[StepShape(size)]
    shapes.pace.margin = (1.0 + gains) / SECONDS[
        StepShape(size)
    ] - 1.1  # a tenth more than is asked for
    assert shapes.choose(ROWS) == StepShape(size)
    for _ in range(100):
        shapes.landed(flown, flown.seconds, 1.4 * flown.seconds)
    assert shapes.choose(ROWS) == StepShape(0), "the host is slow where nodes are checked"
    for _ in range(1000):
        shapes.landed(PLAIN, PLAIN.seconds, PLAIN.seconds)
    assert shapes.choose(ROWS) == StepShape(size), "it may not be any more"


def test_many_rows_may_check_one_node_each() -> None:
    shapes = new()
    assert [shape.num_nodes for shape in shapes.at(4)] == [0, 3, 7]
    assert [shape.num_nodes for shape in shapes.at(8)] == [0, 1, 3, 7]
    assert [shape.num_nodes for shape in shapes.at(64)] == [0, 1]
    few = StepShapes(replace(shapes.drafter, num_nodes=1), shapes.rows)
    assert [shape.num_nodes for shape in few.at(1)] == [0, 1]


def test_lookups_of_many_rows_rest_while_they_do_not_pay() -> None:
    shapes, rows = new(num_rows=32), np.arange(32)
    shapes.captured(timed(32, 0, 0, 1.0, 0.0))
    shapes.captured(timed(32, 1, 0, 1.9, 0.0))
    assert StepShape(0, REST) in shapes.to_prepare(32)
    shapes.start(list(range(32)))
    chosen = [shapes.choose(rows) for _ in range(LISTENING + TIRED + RESTED + LISTENING + 1)]
    sources = [0] * (LISTENING + TIRED) + [REST] * RESTED + [0] * (LISTENING + 1)
    assert chosen == [StepShape(0, source) for source in sources]
    shapes.captured(timed(32, 3, 0, 2.0, 0.0))
    result_RC = np.zeros((32, FIRST + 1 + NUM_GUESSES), dtype=np.int64)
    result_RC[:, TOKENS] = 1
    shapes.learn(rows, result_RC, timed(32, 0, REST, 1.0, 0.0))
    assert (shapes.pace.guess_XG == -1).all(), "nobody guessed"
    assert shapes.choose(rows[:8]).source == 0, "fewer do not"


def test_the_row_furthest_behind_gets_what_is_best_for_it() -> None:
    shapes = new()
    for _ in range(60):
        land(shapes, [8, 0, 0, 0], [True, False, False, False])
    assert shapes.choose(ROWS) == StepShape(0)
    shapes.rows.known[:] = [
        120,
        160,
        160,
        160,
    ]  # of 200: the others are ahead, without guesses
    assert shapes.choose(ROWS).num_nodes > 0
    shapes.rows.known[:] = [160, 120, 120, 120]
    assert shapes.choose(ROWS) == StepShape(0)
    shapes.rows.known[:], shapes.rows.end[:] = (
        200,
        200,
    )  # all said, as far as the host has heard
    assert shapes.choose(ROWS) == StepShape(0)

"""The chooser in C++ learns and chooses as the one in numpy does."""

import numpy as np
import pytest

from hunch.drafting.fast_pace import FastPace, new_pace
from hunch.drafting.pace import Pace, StepShape
from hunch.kernels.build import find_compiler

GAITS = tuple(map(StepShape, (0, 3, 7, 15)))
NUM_ROWS, NUM_GUESSES = 12, 15
TOKENS, MATCHED, FIRST = 0, 3, 6
ARRAYS = ("match_X", "before_X", "guess_XG", "age_X", "seen_X")
RECORDED = ("first_X", "next_X", "doubt_X", "common")

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def a_step(noise: np.random.Generator, rows: np.ndarray, num_nodes: int) -> np.ndarray:
    """A result as a device writes it; with two tokens to say, guesses are often right."""
    result_RC = noise.integers(0, 2, (len(rows), FIRST + num_nodes + 1 + NUM_GUESSES))
    result_RC[:, TOKENS] = noise.integers(0, num_nodes + 2, len(rows))
    result_RC[:, MATCHED] = noise.choice([0, 0, 1, 3, 16], len(rows))
    return result_RC


def learn(pace: Pace, rows: np.ndarray, result_RC: np.ndarray, num_nodes: int) -> None:
    split = FIRST + num_nodes + 1
    pace.learn(
        rows,
        result_RC[:, TOKENS],
        result_RC[:, FIRST:split],
        result_RC[:, split:],
        result_RC[:, MATCHED],
    )


@pytest.mark.parametrize("seed", range(4))
def test_both_choosers_learn_and_choose_alike(seed: int) -> None:
    noise = np.random.default_rng(seed)
    plain, fast = Pace(NUM_ROWS, GAITS, 0.03), FastPace(NUM_ROWS, GAITS, 0.03)
    chosen = set()
    for step in range(300):
        rows = noise.permutation(NUM_ROWS)[: noise.choice([1, 2, 8])]
        if step % 20 == 0:
            is_beside = bool(noise.integers(2))
            for pace in (plain, fast):
                pace.start([int(rows[0])], is_beside=is_beside)
        if step % 31 == 0:
            for pace in (plain, fast):
                pace.pass_by(rows)
        num_nodes = int(noise.choice([0, 3, 7, 15]))
        result_RC = a_step(noise, rows, num_nodes)
        seconds = {shape: 1.0 + noise.uniform(0.01, 0.1) * shape.num_nodes for shape in GAITS}
        left_R = noise.integers(1, 200, len(rows))
        for pace in (plain, fast):
            learn(pace, rows, result_RC, num_nodes)
        gains = [list(p._gains(rows, list(GAITS), left_R).values()) for p in (plain, fast)]
        np.testing.assert_allclose(gains[1], gains[0], rtol=1e-9)
        best = plain.choose(rows, seconds, left_R)
        assert fast.choose(rows, seconds, left_R) == best
        chosen.add(best)
        for name in ARRAYS:
            np.testing.assert_allclose(getattr(fast, name), getattr(plain, name), rtol=1e-9)
        for name in RECORDED:
            ours, theirs = getattr(fast.lookup, name), getattr(plain.lookup, name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert len(chosen) > 2  # or the comparison would say little
    assert fast.settled() == plain.settled()


def test_a_network_is_left_to_numpy() -> None:
    assert type(new_pace(4, GAITS)) is FastPace
    assert type(new_pace(4, (*GAITS, StepShape(3, 1)))) is Pace
    assert type(new_pace(4, (StepShape(5),))) is Pace


def test_without_a_compiler_numpy_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hunch.kernels.native_pace.load_host_library", lambda: None)
    assert type(new_pace(4, GAITS)) is Pace

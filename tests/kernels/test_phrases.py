"""A phrase table is found by the longest context, and guesses where it has the better chance."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hunch.errors import ConfigError
from hunch.kernels import native_library
from hunch.kernels.guided import GuidedLookup
from hunch.kernels.lookup import NUM_GUESS_TYPES
from hunch.kernels.native_lookup import NativeLookup
from hunch.kernels.phrases import NUM_LEVELS, PhraseTable, read_phrases
from hunch.kernels.successor_entries import CERTAIN, ONE_TOKEN, Entries
from phrase_tables import ODDS, VOCAB, table_of


def test_the_longest_context_counts() -> None:
    table = table_of({(3,): (10, 8), (2, 3): (11, 9), (1, 2, 3): (12, 10)})
    assert table.find([9, 3]) == (10, 8)
    assert table.find([9, 2, 3]) == (11, 9)
    assert table.find([7, 1, 2, 3]) == (12, 10)
    assert table.find([3, 2]) is None
    assert table.find([]) is None


def test_a_chain_goes_through_text_and_table() -> None:
    """The text knows what follows 1 2; what follows 20 21 only the table knows."""
    lookup = GuidedLookup(ODDS, table_of({(20, 21): (30, 15), (21, 30): (31, 15)}))
    lookup.follow(0, [1, 2, 3, 4, 5, 20, 1, 2, 3, 4, 5, 20, 21, 9, 1, 2, 3, 4, 5, 20, 21])
    tokens, chances = lookup.guess(0, 3)
    assert tokens[0] == 30  # 0.97 there, against one place that said 9
    assert tokens[1] == 31
    assert all(a >= b for a, b in pairwise(chances))


def test_trust_in_a_token_moves_its_chance() -> None:
    text = [5, 6, 7, 9, 5, 6]
    trust = np.zeros(VOCAB)
    trust[7] = -3.0
    plain, doubted = table_of({(50,): (51, 3)}), table_of({(50,): (51, 3)}, guess_trust_V=trust)
    chances = []
    for table in (plain, doubted):
        lookup = GuidedLookup(ODDS, table)
        lookup.follow(0, text)
        chances.append(lookup.guess(0, 1)[1])
    assert chances[1] == [] or chances[1][0] < chances[0][0] / 2


def test_a_table_that_is_wrong_here_is_left() -> None:
    lookup = GuidedLookup(ODDS, table_of({(3,): (10, 12)}))
    chances = []
    for _ in range(12):
        lookup.follow(0, [random.Random(4).randrange(40, 60), 3])
        tokens, found = lookup.guess(0, 1)
        chances.append(found[0] if tokens == [10] else 0.0)
    assert chances[-1] < chances[0] / 2


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_the_kernels_guess_the_same(seed: int, has_table: bool) -> None:
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    contexts = {
        tuple(rng.choices(range(8), k=rng.randint(1, 3))): (rng.randrange(8), rng.randrange(16))
        for _ in range(60)
    }
    table = table_of(
        contexts,
        seen_odds=noise.normal(size=1 + 2 * NUM_LEVELS),
        versus_odds=noise.normal(size=NUM_GUESS_TYPES + 1),
        guess_trust_V=noise.normal(size=VOCAB),
        last_trust_V=noise.normal(size=VOCAB),
    )
    plain = GuidedLookup(ODDS, table if has_table else None)
    fast = NativeLookup(ODDS, table if has_table else None, 2, 16)
    for _ in range(2):  # a second request meets nothing of the first
        for _ in range(30):
            said = np.array(rng.choices(range(8), k=rng.randint(1, 12)), dtype=np.int64)
            plain.follow(1, said.tolist())
            fast.follow(1, said.ctypes.data, len(said))
            tokens, chances = plain.guess(1, 16)
            assert fast.guess(1, 16) == len(tokens)
            assert fast.tokens_N[: len(tokens)].tolist() == tokens
            np.testing.assert_allclose(fast.chance_N[: len(tokens)], chances, rtol=1e-9)
        plain.forget(1)
        fast.forget(1)


def test_files_hold_a_table(tmp_path: Path) -> None:
    trust = np.linspace(-2, 2, VOCAB)
    save_file(
        table_of({(2, 3): (11, 9)}, last_trust_V=trust).files(), tmp_path / "model.safetensors"
    )
    table = read_phrases(tmp_path, VOCAB)
    assert table.find([2, 3]) == (11, 9)
    np.testing.assert_allclose(table.last_trust_V, trust, atol=1 / 32)


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file(table_of({(2,): (11, 9)}).files(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="vocabulary of 64, the target has 100"):
        read_phrases(tmp_path, 100)
    with pytest.raises(ConfigError, match="no phrase table there"):
        read_phrases(tmp_path / "nowhere", VOCAB)


def test_a_table_of_successors_guesses_the_likeliest_one() -> None:
    """As sure as it is likely; after the longest context that it knows."""
    known = Entries(
        first_E=np.array([ONE_TOKEN, ONE_TOKEN, 4]),
        last_E=np.array([5, 5, 5]),
        next_E=np.array([1, 2, 3]),
        chance_E=np.array([100, 50, CERTAIN]),
    )
    table = PhraseTable.of_successors(known, 10)
    assert table.find([9, 5]) == (1, 100 * NUM_LEVELS // (CERTAIN + 1))
    assert table.find([4, 5]) == (3, NUM_LEVELS - 1)
    assert table.find([5, 4]) is None
    lookup = GuidedLookup(ODDS, table)
    lookup.follow(0, [7, 4, 5])
    (token, *_), (chance, *_) = lookup.guess(0, 3)
    assert token == 3
    assert chance > 0.9

"""Successors of contexts: counted, mixed, stored."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from hunch.errors import ConfigError
from hunch.kernels.successor_entries import (
    CERTAIN,
    DOUBT,
    ONE_TOKEN,
    WIDTH,
    Entries,
    counted,
    mixed,
)

Found = dict[tuple[int, int], list[tuple[int, int]]]


def entries(*lines: tuple[int, int, int, int]) -> Entries:
    return Entries(*map(np.array, zip(*lines, strict=True)))


def as_dict(found: Entries) -> Found:
    out: Found = defaultdict(list)
    for line in zip(found.first_E, found.last_E, found.next_E, found.chance_E, strict=True):
        first, last, token, chance = map(int, line)
        out[first, last].append((token, chance))
    return dict(out)


def count(tokens: list[int], max_pairs: int = 1000) -> Entries:
    text = np.array(tokens)
    first_N = np.concatenate(([ONE_TOKEN], text[:-2]))
    return counted(first_N, text[:-1], text[1:], max_pairs)


def test_chances_are_shares_less_a_doubt() -> None:
    found = as_dict(count([1, 2, 3, 1, 2, 4, 1, 2, 3]))
    assert found[1, 2] == [(3, int(CERTAIN * 2 / (3 + DOUBT))), (4, int(CERTAIN / (3 + DOUBT)))]
    assert found[ONE_TOKEN, 2] == found[1, 2]
    assert found[ONE_TOKEN, 4] == [(1, int(CERTAIN / (1 + DOUBT)))]
    assert (2, 4) not in found, "it occurs once"


def test_counts_agree_with_plain_ones() -> None:
    """Random texts of few tokens: contexts, order, the eight likeliest, sums."""
    tokens = np.random.default_rng(0).geometric(0.2, 3000).tolist()
    plain: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for place in range(1, len(tokens)):
        plain[ONE_TOKEN, tokens[place - 1]][tokens[place]] += 1
        if place > 1:
            plain[tokens[place - 2], tokens[place - 1]][tokens[place]] += 1
    found = as_dict(count(tokens))
    for context, followers in plain.items():
        total = sum(followers.values())
        if context[0] != ONE_TOKEN and total < 2:
            assert context not in found
            continue
        shares = {t: int(CERTAIN * n / (total + DOUBT) + 0.001) for t, n in followers.items()}
        best = sorted((-share, token) for token, share in shares.items() if share)[:WIDTH]
        assert found.get(context, []) == [(token, -share) for share, token in best]
    totals = [sum(plain[context].values()) for context in found]
    assert totals == sorted(totals, reverse=True), "frequent contexts come first"


def test_only_the_most_frequent_pairs_are_kept() -> None:
    tokens = [1, 2, 3] * 9 + [4, 5, 6] * 5 + [7, 8, 9] * 2
    found = as_dict(count(tokens, max_pairs=3))
    pairs = {context for context in found if context[0] != ONE_TOKEN}
    assert pairs == {(1, 2), (2, 3), (3, 1)}
    assert {context[1] for context in found} == set(range(1, 10)), "all single tokens are"


def test_what_is_left_of_a_context_goes_to_common_texts() -> None:
    own = entries((1, 2, 3, 100), (1, 2, 4, 55), (ONE_TOKEN, 9, 1, 10))
    common = entries((1, 2, 4, 102), (1, 2, 7, 51), (5, 6, 7, 90), (ONE_TOKEN, 9, 1, CERTAIN))
    found = as_dict(mixed(own, common))
    left = (CERTAIN - 155) / CERTAIN
    assert found[1, 2] == [(3, 100), (4, int(55 + left * 102)), (7, int(left * 51))]
    assert found[5, 6] == [(7, 90)]
    assert found[ONE_TOKEN, 9] == [(1, CERTAIN)]
    assert list(found) == [(1, 2), (ONE_TOKEN, 9), (5, 6)]
    nothing = Entries(*[np.zeros(0, np.int64)] * 4)
    for both in (mixed(own, nothing), mixed(nothing, own)):
        assert as_dict(both) == as_dict(own)
    assert len(mixed(nothing, nothing)) == 0


def test_files_are_checked_when_they_are_read() -> None:
    known = entries((ONE_TOKEN, 2, 3, 100), (1, 2, 4, 55))
    files = known.files("x_")
    back = Entries.of_files(files, "x_", 10, "here")
    assert back is not None
    assert as_dict(back) == as_dict(known)
    assert Entries.of_files({}, "x_", 10, "here") is None
    for name, value in (("next", 10), ("first", -2), ("last", -1), ("chance", 0)):
        column = files[f"x_{name}"].astype(np.int32)
        column[1] = value
        with pytest.raises(ConfigError, match="here"):
            Entries.of_files({**files, f"x_{name}": column}, "x_", 10, "here")
    with pytest.raises(ConfigError, match="several sizes"):
        Entries.of_files({**files, "x_last": files["x_last"][:1]}, "x_", 10, "here")

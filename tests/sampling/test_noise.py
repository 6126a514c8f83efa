"""Noise is Philox4x32-10 by the published vectors, Gumbel by its distribution, and keyed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from hunch.kernels import noise
from hunch.kernels.noise import COIN, DRAFT, RESIDUAL, TARGET

VECTORS = [  # counter, key, words: the known answers of the authors' library
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter, key, expected):
    assert noise.philox_ref(counter, key) == expected
    by_torch = noise.philox_torch(tuple(map(rows, counter)), tuple(map(rows, key)))
    assert tuple(int(word) for word in by_torch) == expected
    arrays = [np.array([x], np.uint64) for x in (*counter, *key)]
    by_numpy = noise.philox_numpy(tuple(arrays[:4]), tuple(arrays[4:]))
    assert tuple(int(word[0]) for word in by_numpy) == expected


def test_words_follow_the_key_of_the_definition():
    seed, index, pos, token = 0x123456789ABCDEF0 >> 1, 3, 1000, 4097
    words_MV = noise.words(rows(seed), rows(index), rows(pos), DRAFT, 5000)
    counter, key = (token >> 2, pos, index, DRAFT), (seed & 0xFFFFFFFF, seed >> 32)
    assert int(words_MV[0, token]) == noise.philox_ref(counter, key)[token & 3]


def test_some_ids_get_what_the_whole_vocabulary_gets():
    seed, index, pos = rows(7, 2**62 + 5), rows(0, 2), rows(11, 12)
    all_MV = noise.gumbel(seed, index, pos, TARGET, 1003)
    ids_MK = torch.randint(0, 1003, (2, 50), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.gumbel_at(seed, index, pos, TARGET, ids_MK), all_MV.gather(1, ids_MK))
    row = noise.gumbel_row(2**62 + 5, 2, 12, TARGET, ids_MK[1].numpy())
    assert np.array_equal(row, all_MV[1, ids_MK[1]].numpy())
    few = noise.gumbel_row(2**62 + 5, 2, 12, TARGET, ids_MK[1, :9].numpy())
    assert np.array_equal(few, row[:9])
    assert np.array_equal(noise.gumbel_row(2**62 + 5, 2, 12, TARGET, 1003), all_MV[1].numpy())


def test_a_row_does_not_depend_on_its_neighbours():
    seed, index, pos = rows(1, 2, 3, 4, 5), rows(0, 0, 1, 1, 2), rows(5, 6, 7, 8, 9)
    together = noise.gumbel(seed, index, pos, TARGET, 999)
    for m in range(5):
        alone = noise.gumbel(seed[m : m + 1], index[m : m + 1], pos[m : m + 1], TARGET, 999)
        assert torch.equal(alone[0], together[m])


@pytest.mark.parametrize("stream", [TARGET, DRAFT, COIN, RESIDUAL])
def test_noise_is_gumbel(stream):
    sample = noise.gumbel(rows(42), rows(0), rows(17), stream, 20_000)[0].numpy()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    assert stats.kstest(sample * 1.1, "gumbel_r").pvalue < 1e-3  # the test can tell


def test_every_part_of_the_key_gives_other_noise():
    def draw(seed: int, index: int, pos: int, stream: int) -> torch.Tensor:
        return noise.gumbel(rows(seed), rows(index), rows(pos), stream, 4000)[0]

    base = draw(1, 0, 0, TARGET)
    for other in (draw(2, 0, 0, TARGET), draw(2**40 + 1, 0, 0, TARGET), draw(1, 1, 0, TARGET),
                  draw(1, 0, 1, TARGET), draw(1, 0, 0, DRAFT)):  # fmt: skip
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.06


def test_bounds_hold_for_the_extreme_words():
    extreme = noise.gumbel_of(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert torch.isfinite(extreme).all()
    assert float(extreme.max()) == noise.MAX_GUMBEL
    assert float(extreme.min()) == noise.MIN_GUMBEL

"""Keyed noise: a random number is a function of (seed, sample index, position, stream, token id).

Definition. Philox4x32-10 with key (seed's low 32 bits, seed's high 32 bits) and counter
(token >> 2, position, sample index, stream) gives four 32-bit words; the token's is word token & 3.
In float32: v = min((float(word) + 0.5) * 2**-32, 1 - 2**-24), gumbel = -log(-log1p(-v)).
Nothing is advanced and nothing is stored, so the order and the batch in which noise is asked for
cannot change it.

Shape letters: M rows, V vocabulary, K ids asked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TARGET, DRAFT, COIN, RESIDUAL = 0, 1, 2, 3  # streams
NUM_STREAMS = 4

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW = 0xFFFFFFFF
FEW = 24  # up to here Python's own numbers are quicker than arrays
Words = npt.NDArray[np.uint64]
BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


def stream_at(stream: int, depth: int) -> int:
    """The stream of a draft's depth: a position drafted again from a later root gets new noise."""
    return stream + NUM_STREAMS * depth


def philox_ref(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The specification, in whole numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def philox_torch(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """`philox_ref` on int64 tensors that broadcast; every word is in 0 .. 2**32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The product wraps modulo 2**64; its bits are right, only the sign has to be masked off.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & LOW) ^ c1 ^ k0,
            p1 & LOW,
            ((p0 >> 32) & LOW) ^ c3 ^ k1,
            p0 & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def philox_numpy(counter: tuple[Words, ...], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """The same for arrays of uint64: on a CPU, numpy's small operations cost a sixth of torch's."""
    shift, low = np.uint64(32), np.uint64(LOW)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c2 = (p1 >> shift) ^ (c1 ^ k0), (p0 >> shift) ^ (c3 ^ k1)
        c1, c3 = np.bitwise_and(p1, low, out=p1), np.bitwise_and(p0, low, out=p0)
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    return c0, c1, c2, c3


def philox(block: Tensor, pos: Tensor, index: Tensor, stream: int, seed: Tensor) -> Tensor:
    """The four words of each block, stacked in front; all arguments are int64 and broadcast."""
    counter = (block, pos, index, torch.full_like(pos, stream))
    key = (seed & LOW, (seed >> 32) & LOW)
    if block.device.type != "cpu":
        return torch.stack(philox_torch(counter, key))
    arrays = [x.numpy().view(np.uint64) for x in (*counter, *key)]
    four = np.stack(philox_numpy(tuple(arrays[:4]), (arrays[4], arrays[5])))
    return torch.from_numpy(four.view(np.int64))


def uniform_of(word: Tensor) -> Tensor:
    """Words to float32 in (0, 1)."""
    return word.float().add_(0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE)


def gumbel_of(word: Tensor) -> Tensor:
    """Words to standard Gumbel noise in float32."""
    return uniform_of(word).neg_().log1p_().neg_().log_().neg_()


# What gumbel can return at most and at least: a token whose score cannot reach the best one even
# with MAX_GUMBEL needs no noise.
MIN_GUMBEL, MAX_GUMBEL = gumbel_of(torch.tensor([LOW, 0])).tolist()


def words(seed_M: Tensor, index_M: Tensor, pos_M: Tensor, stream: int, vocab_size: int) -> Tensor:
    """The raw words of a whole vocabulary, int64 [M, V]."""
    block = torch.arange((vocab_size + 3) // 4, device=seed_M.device)
    words_4MB = philox(block, pos_M[:, None], index_M[:, None], stream, seed_M[:, None])
    return words_4MB.movedim(0, 2).reshape(len(seed_M), -1)[:, :vocab_size]


def words_at(seed_M: Tensor, index_M: Tensor, pos_M: Tensor, stream: int, ids_MK: Tensor) -> Tensor:
    """The raw words of some tokens, int64 [M, K]; ids of shape [M] get one word per row."""
    if ids_MK.dim() == 2:
        seed_M, index_M, pos_M = seed_M[:, None], index_M[:, None], pos_M[:, None]
    words_4MK = philox(ids_MK >> 2, pos_M, index_M, stream, seed_M)
    return words_4MK.gather(0, (ids_MK & 3)[None])[0]


def gumbel(seed_M: Tensor, index_M: Tensor, pos_M: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Noise for a whole vocabulary, float32 [M, V]."""
    return gumbel_of(words(seed_M, index_M, pos_M, stream, vocab_size).contiguous())


def gumbel_at(
    seed_M: Tensor, index_M: Tensor, pos_M: Tensor, stream: int, ids_MK: Tensor
) -> Tensor:
    """The same noise for some tokens only, float32 [M, K] (or [M], for ids of that shape)."""
    return gumbel_of(words_at(seed_M, index_M, pos_M, stream, ids_MK))


def gumbel_row(
    seed: int, index: int, pos: int, stream: int, ids: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.float32]:
    """The noise of one row on a CPU: for some ids, or for a vocabulary of this many tokens."""
    if not isinstance(ids, int) and len(ids) <= FEW:
        key = (seed & LOW, seed >> 32)
        few = [philox_ref((t >> 2, pos, index, stream), key)[t & 3] for t in ids.tolist()]
        return gumbel_of(torch.tensor(few)).numpy()
    blocks = np.arange((ids + 3) // 4) if isinstance(ids, int) else ids >> 2
    single = [np.array([x], np.uint64) for x in (pos, index, stream, seed & LOW, seed >> 32)]
    four = philox_numpy((blocks.view(np.uint64), *single[:3]), (single[3], single[4]))
    if isinstance(ids, int):
        word = np.stack(four, axis=1).reshape(-1)[:ids]
    else:
        word = np.choose(ids & 3, four)
    return gumbel_of(torch.from_numpy(word.view(np.int64))).numpy()

"""Into how many slices the sum of a product is cut: fixed by the weight's shape.

Few outputs leave most of a GPU idle, so their sums are shared out. The number of rows has no say in
it: the order of additions is the weight's alone.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache

SLICE = 64  # a slice of K is a multiple of this
NUM_SMS = 132
SPAN = 128  # most inputs whose codes stand together, where weights are in few bits
_FEW = 8192  # outputs
_LONG = 8192  # inputs
_LEAST = 192  # inputs of a slice that are worth a program


@cache
def split_of(num_outputs: int, k: int, bits: int = 16) -> int:
    """Slices of K, so that few-output weights still fill the chip.

    Weights in few bits have more: a program has as much to compute, and fewer bytes to wait for.
    Slices of whole spans come first: the kernels of few rows take no others.
    """
    if bits < 16 and num_outputs <= _FEW:
        for split in (8, 4, 2) if bits == 4 and k > _LONG else (4, 2):
            if k % (split * SPAN) == 0 and k // split >= _LEAST:
                return split
        if slice_of(k, 4) >= _LEAST:
            return 4
    best = 1
    for split in (2, 3, 4, 6, 8):
        slice_k = slice_of(k, split)
        if -(-num_outputs // 32) * best >= 1.5 * NUM_SMS:
            break
        if slice_k >= _LEAST and slice_k * (split - 1) < k:
            best = split
    return best


def slice_of(k: int, split: int) -> int:
    """Inputs of a slice; the last one may have fewer."""
    most = -(-k // split)
    return -(-most // SLICE) * SLICE

"""The C++ choice of tokens (temperature, filters and keyed noise in one call), and their scores.

Shape letters: M rows, V vocabulary, C columns where they are a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.kernels.native_library import library, team
from hunch.kernels.native_structs import address_of


def choose(
    logits_MV: Tensor,
    temperature_M: Tensor,
    top_k_M: Tensor,
    top_p_M: Tensor,
    log_min_p_M: Tensor,
    seed_M: Tensor,
    index_M: Tensor,
    pos_M: Tensor,
    stream: int = 0,
    num_threads: int | None = None,
    ids_C: Tensor | None = None,
) -> Tensor:
    """A token per row: temperature, min-p, top-k, top-p, then the best with keyed noise.

    The rule is that of sampling/state.py, its filters and kernels/noise.py; temperature 0 takes
    the argmax. ids_C names the token of each column where they are a part of the
    vocabulary. float32 logits, temperature and log_min_p; float64 top_p; the rest int64.
    """
    assert logits_MV.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    columns = (temperature_M, top_k_M, top_p_M, log_min_p_M, seed_M, index_M, pos_M)
    columns = tuple(column.contiguous() for column in columns)
    num_rows, size = logits_MV.shape
    out_M = torch.empty(num_rows, dtype=torch.int64)
    library().hunch_choose(
        team(num_threads), logits_MV.data_ptr(), *(column.data_ptr() for column in columns),
        address_of(ids_C), out_M.data_ptr(), num_rows, size, logits_MV.stride(0), stream,
    )  # fmt: skip
    return out_M


def choose_row(
    logits_V: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
    seed: int,
    index: int,
    pos: int,
    stream: int = 0,
) -> int:
    """`choose` for one row, without waking the team."""
    assert logits_V.dtype == np.float32
    assert logits_V.strides == (4,)
    return library().hunch_choose_row(
        logits_V.ctypes.data, len(logits_V), temperature, top_k, top_p, log_min_p, seed, index,
        pos, stream,
    )  # fmt: skip


def scores(
    logits_MV: Tensor, at: Sequence[int], tokens: Sequence[int], num_best: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of these rows, each with its token, as `sampling.logprobs.scores_ref`.

    By the team's threads, a row each: torch's own wait for one another where cores are busy.
    """
    assert logits_MV.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    at_M, token_M = torch.tensor(at), torch.tensor(tokens)
    ids_MC = torch.empty(len(at), 1 + num_best, dtype=torch.int64)
    value_MC = torch.empty(len(at), 1 + num_best)
    rank_M = torch.empty(len(at), dtype=torch.int64)
    library().hunch_scores(
        team(None), logits_MV.data_ptr(), at_M.data_ptr(), token_M.data_ptr(), ids_MC.data_ptr(),
        value_MC.data_ptr(), rank_M.data_ptr(), len(at), logits_MV.shape[1], logits_MV.stride(0),
        num_best,
    )  # fmt: skip
    return ids_MC, value_MC, rank_M

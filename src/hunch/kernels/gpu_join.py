"""A token's embedding and a state side by side, each normed: the input of a drafter's network.

Shape letters: T rows out, V rows of a table, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_fused import norm_ref
from hunch.kernels.gpu_launch import next_power_of_2, options, take_turns


def join_ref(
    table_VD: Tensor, ids_T: Tensor, state_TD: Tensor, norms: tuple[Tensor, Tensor] | None,
    eps: float, *, is_state_first: bool = False, pos_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Tokens' embeddings beside states, each normed, in float64; see `join`."""
    token_TD, state_TD = table_VD[ids_T].double(), state_TD.double()
    if pos_T is not None:
        token_TD[pos_T == 0] = 0.0
    if norms is not None:
        token_TD, state_TD = norm_ref(token_TD, norms[0], eps), norm_ref(state_TD, norms[1], eps)
    return torch.cat((state_TD, token_TD) if is_state_first else (token_TD, state_TD), dim=-1)


@triton.jit
def _join_kernel(
    table_ptr, ids_ptr, state_ptr, token_norm_ptr, state_norm_ptr, pos_ptr, y_ptr, normed_ptr, D,
    eps, IS_STATE_FIRST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row, 0 for its token or 1 for its state)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_D)
    is_in = offs < D
    if token_norm_ptr is not None:
        norm_ptr = token_norm_ptr if part == 0 else state_norm_ptr
        weight = tl.load(norm_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    take_turns()
    token = tl.load(ids_ptr + row).to(tl.int64)
    from_ptr = table_ptr + token * D if part == 0 else state_ptr + row * D
    is_there = is_in
    if pos_ptr is not None:
        is_there = is_in & ((tl.load(pos_ptr + row) != 0) | (part == 1))
    x = tl.load(from_ptr + offs, mask=is_there, other=0.0).to(tl.float32)
    if token_norm_ptr is not None:
        x = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    y = x.to(y_ptr.dtype.element_ty)
    place = 1 - part if IS_STATE_FIRST else part
    tl.store(y_ptr + (row * 2 + place) * D + offs, y, mask=is_in)
    if normed_ptr is not None:
        tl.store(normed_ptr + row * D + offs, y, mask=is_in & (part == 1))


def join(
    table_VD: Tensor, ids_T: Tensor, state_TD: Tensor, norms: tuple[Tensor, Tensor] | None,
    eps: float, y_T2D: Tensor, *, is_state_first: bool = False, pos_T: Tensor | None = None,
    normed_TD: Tensor | None = None,
) -> None:  # fmt: skip
    """Each token's embedding beside its state, normed by `norms` (token's, state's) where given.

    If pos_T is given, position 0 has no token, but zeros. normed_TD also gets the normed state.
    """
    assert table_VD.dtype == state_TD.dtype
    assert state_TD.is_contiguous()
    width = state_TD.shape[1]
    block = next_power_of_2(width)
    _join_kernel[(len(ids_T), 2)](
        table_VD, ids_T, state_TD, *(norms or (None, None)), pos_T, y_T2D, normed_TD, width, eps,
        IS_STATE_FIRST=is_state_first, BLOCK_D=block, **options(max(1, min(8, block // 512))),
    )  # fmt: skip

"""Rounding a matrix to few bits when it is loaded.

Shape letters: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.quant import Codes

SCALE_OF_ZEROS = 2.0**-7  # any will do; with all scales below 1 a GPU's products have less to do


def quantise(weight_NK: Tensor, code_format: str, group: int = 128) -> Codes:
    """Round a matrix: int4 in groups of inputs with scales of its own dtype, int8 and fp8 by row.

    The scale is the one of a few with the least squared error: what lies far out is cut off.
    """
    num_out, num_in = weight_NK.shape
    dtype = weight_NK.dtype if weight_NK.dtype.itemsize == 2 else torch.float32
    if code_format != "int4" or num_in % group:
        group = 32 if code_format == "int4" and num_in % 32 == 0 else num_in
    most = {"int4": 8.0, "int8": 127.0, "fp8": 448.0}[code_format]
    w_NGK = weight_NK.float().view(num_out, -1, group)
    # The entry furthest from zero gets the code that only one sign has.
    peak_NG1 = w_NGK.gather(2, w_NGK.abs().argmax(2, keepdim=True))
    best_NG1, scale_NG1 = torch.full_like(peak_NG1, torch.inf), torch.ones_like(peak_NG1)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8) if code_format == "int4" else (1.0,):
        tried_NG1 = (
            peak_NG1 * share / -most if code_format == "int4" else peak_NG1.abs() / most
        ).to(dtype)
        tried_NG1 = torch.where(tried_NG1 == 0, SCALE_OF_ZEROS, tried_NG1.float())
        error_NG1 = (_rounded(w_NGK / tried_NG1, code_format) * tried_NG1 - w_NGK).square()
        error_NG1 = error_NG1.sum(2, keepdim=True)
        is_better = error_NG1 < best_NG1
        best_NG1 = torch.where(is_better, error_NG1, best_NG1)
        scale_NG1 = torch.where(is_better, tried_NG1, scale_NG1)
    code_NK = _rounded(w_NGK / scale_NG1, code_format).view(num_out, num_in)
    if code_format == "int4":
        stored_NK = (code_NK + 8).to(torch.uint8)
    elif code_format == "int8":
        stored_NK = code_NK.to(torch.int8).view(torch.uint8)
    else:
        stored_NK = code_NK.to(torch.float8_e4m3fn).view(torch.uint8)
    return Codes(
        format=code_format,
        code_NK=stored_NK,
        group=group,
        offset=8 if code_format == "int4" else 0,
        scale_NG=scale_NG1[:, :, 0].to(dtype),
    )


def _rounded(x: Tensor, code_format: str) -> Tensor:
    if code_format == "int4":
        return x.round().clamp(-8, 7)
    if code_format == "int8":
        return x.round().clamp(-127, 127)
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()

"""Codes of few bits in words of 16, in the order of a tensor core's registers; see `quant`.

Shape letters: N outputs, K inputs, S spans, W words of an output's span, P parts of a span.
"""

from __future__ import annotations

import torch
from torch import Tensor

FOUR_BITS = ("int4", "fp4", "nf4", "fp4_bnb")


def num_parts(code_format: str) -> int:
    """Codes of a word."""
    return 4 if code_format in FOUR_BITS else 2


def _in_registers(word_SNW: Tensor, *, is_packed: bool) -> Tensor:
    """Words from the order of inputs (step, half, thread, which of two) to that of threads, or,
    with `is_packed`, back. Spans of fewer than 32 words stay as they are."""
    if word_SNW.shape[2] % 32:
        return word_SNW
    sizes, order = ((4, 2, 2, 2), (1, 2, 0, 3)) if is_packed else ((2, 2, 4, 2), (2, 0, 1, 3))
    word = word_SNW.unflatten(2, (-1, *sizes))
    return word.permute(0, 1, 2, *(3 + axis for axis in order)).reshape(word_SNW.shape)


def pack_words(code_format: str, code_NK: Tensor, num_words: int) -> Tensor:
    (num_out, num_in), parts = code_NK.shape, num_parts(code_format)
    span = num_words * parts
    num_spans = -(-num_in // span)
    if num_in % span:
        code_NK = torch.nn.functional.pad(code_NK, (0, num_spans * span - num_in))
    code_SNPW = code_NK.view(num_out, num_spans, parts, num_words).transpose(0, 1)
    word_SNW = torch.zeros(num_spans, num_out, num_words, dtype=torch.int32, device=code_NK.device)
    for part in range(parts):
        word_SNW |= code_SNPW[:, :, part].int() << (part * 16 // parts)
    return _in_registers(word_SNW.to(torch.int16), is_packed=False)  # the low 16 bits


def unpack_words(code_format: str, data_SNW: Tensor) -> Tensor:
    parts = num_parts(code_format)
    bits = 16 // parts
    word_SNW = _in_registers(data_SNW, is_packed=True).int()
    code_SNPW = torch.stack(
        [(word_SNW >> (part * bits)) & ((1 << bits) - 1) for part in range(parts)], dim=2
    )
    return code_SNPW.to(torch.uint8).transpose(0, 1).reshape(data_SNW.shape[1], -1)

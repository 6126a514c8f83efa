"""Checkpoints that bitsandbytes wrote: 4 bits by a code book, or 8 bits by row.

With 4 bits a byte has two codes, the first in its high bits. They follow one another through the
rows, and so do the blocks of codes that share a scale (`absmax`): where a row is no whole number of
blocks, one goes on in the next row. Scales may be codes of 8 bits themselves: an entry of
`nested_quant_map` times the scale of their own block, plus an offset.

Shape letters: N outputs, K inputs, G groups of inputs, B blocks, Y bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.quant import BOOKS, Codes

# Of the quantised matrix in `weight`: the names of what stands beside it, after its module's name.
ABSMAX, SCALES = "weight.absmax", "SCB"
_FORM = "weight_format"  # of 8 bits: how the codes lie
_STATES = {f"weight.quant_state.bitsandbytes__{name}": name for name in ("nf4", "fp4")}
_BOOK_OF = {"nf4": "nf4", "fp4": "fp4_bnb"}
BESIDE = (
    ABSMAX, "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_STATES,
    SCALES, _FORM,
)  # fmt: skip


def state_name(names: set[str], module: str) -> str | None:
    """The tensor that describes a matrix of 4 bits; None where there is none."""
    return next((name for last in _STATES if (name := f"{module}.{last}") in names), None)


def shape_in(state_Y: Tensor, where: str) -> tuple[int, int]:
    """The shape of a matrix of 4 bits, which its codes alone do not show."""
    num_out, num_in = _content(state_Y, where)["shape"]
    return num_out, num_in


def _content(state_Y: Tensor, where: str) -> dict[str, Any]:
    """What a file says of a matrix, checked as far as reading it goes by that."""
    try:
        content = json.loads(state_Y.flatten().view(torch.uint8).numpy().tobytes())
        shape, block = content["shape"], content["blocksize"]
        is_good = len(shape) == 2 and all(type(n) is int and n > 0 for n in (*shape, block))
    except (ValueError, TypeError, KeyError):
        is_good = False
    if not is_good:
        raise ModelFormatError(f"{where}: its quant_state is no JSON with a shape and a blocksize")
    found: dict[str, Any] = content
    return found


def read(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    """A matrix's stored tensors as its codes."""
    if SCALES in tensors:
        return _by_row(tensors, where)
    last = next((name for name in _STATES if name in tensors), None)
    if last is None:
        raise ModelFormatError(f"{where}: {ABSMAX} without a quant_state that says its format")
    state, book = _content(tensors[last].cpu(), where), _BOOK_OF[_STATES[last]]
    entries = torch.tensor(BOOKS[book])
    if not torch.equal(tensors["weight.quant_map"].cpu().float(), entries):
        raise UnsupportedModelError(f"{where}: its quant_map is not that of {_STATES[last]}")
    num_out, num_in = state["shape"]
    byte_Y = tensors["weight"].flatten().view(torch.uint8)  # of whatever type they are stored in
    if 2 * len(byte_Y) < num_out * num_in:
        raise ModelFormatError(f"{where}: {len(byte_Y)} bytes are too few for {num_out} x {num_in}")
    code = torch.stack([byte_Y >> 4, byte_Y & 15], dim=1).flatten()[: num_out * num_in]
    block = state["blocksize"]
    group = math.gcd(num_in, block)
    first_G = torch.arange(0, num_out * num_in, group, device=byte_Y.device)
    return Codes(
        format=book,
        code_NK=code.view(num_out, num_in),
        group=group,
        scale_NG=_scales(tensors, state)[first_G // block].view(num_out, -1),
    )


def _scales(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """A scale for each block, in float32."""
    absmax_B = tensors[ABSMAX]
    if "weight.nested_absmax" not in tensors:
        return absmax_B.float()
    unit_B = tensors["weight.nested_absmax"].float()
    unit_B = unit_B.repeat_interleave(int(state["nested_blocksize"]))[: len(absmax_B)]
    scale_B = tensors["weight.nested_quant_map"].float()[absmax_B.long()] * unit_B
    return scale_B + float(state["nested_offset"])


def _by_row(tensors: Mapping[str, Tensor], where: str) -> Codes:
    """int8 with the largest of each row, which 127 stands for."""
    form, weight = tensors.get(_FORM), tensors["weight"]
    if form is not None and int(form) != 0:
        raise UnsupportedModelError(
            f"{where}: {_FORM}={int(form)}, codes in the order of one GPU's registers; only 0, rows"
        )
    return Codes(
        format="int8",
        code_NK=weight.view(torch.uint8),
        group=weight.shape[1],
        scale_NG=tensors[SCALES].float()[:, None] / 127,
    )

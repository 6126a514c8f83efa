"""Codes of few bits to numbers, in registers: what products with them share.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import IS_INTERPRETED
from hunch.kernels.quant import BOOKS, CODE_FORMATS, UNIT_GROUP, Quantised
from hunch.kernels.words import num_parts

# Assembly for two words in a register ($1) to two numbers of 16 bits ($0). First the code's value,
# exactly, in `c`: whole numbers are put into the mantissa of a power of two that $2 takes off with
# the offset, floats into a float of 16 bits whose exponent is then moved. Then scale and minimum.
_BITS = "shr.u32 d, $1, {at};"
_FLOAT = (  # exponent and mantissa to their places, then the sign; times what biases differ by
    "shl.b32 c, d, {left}; and.b32 c, c, {mask}; shl.b32 d, d, {sign};"
    "lop3.b32 c, d, 0x80008000, c, 0xEA; mov.b32 d, {high}; mul.{type}x2 c, c, d;"
)
_VALUE = {
    ("int4", "bf16"): "shr.u32 c, $1, {at}; lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;"
    "sub.bf16x2 c, c, $2;",
    ("int4", "f16"): "shr.u32 c, $1, {at}; lop3.b32 c, c, 0x000F000F, 0x64006400, 0xEA;"
    "sub.f16x2 c, c, $2;",
    ("int8", "bf16"): _BITS + "lop3.b32 c, d, 0x007F007F, 0x43004300, 0xEA;"
    "lop3.b32 d, d, 0x00800080, 0x43004300, 0xEA; sub.bf16x2 c, c, d; {minus}",
    ("int8", "f16"): _BITS + "xor.b32 d, d, 0x00800080;"
    "lop3.b32 c, d, 0x00FF00FF, 0x64006400, 0xEA;"
    "mov.b32 d, 0x64806480; sub.f16x2 c, c, d; {minus}",
    ("fp8", "bf16", 1): "shr.u32 c, $1, 4; and.b32 c, c, 0x07F007F0;"
    "lop3.b32 c, $1, 0x80008000, c, 0xEA; mov.b32 d, 0x7B807B80; mul.bf16x2 c, c, d;",
}  # fmt: skip
_FLOATS = {  # format, type: left, mask, sign, high
    ("fp4", "bf16"): (6, "0x01C001C0", 12, "0x7E807E80"),
    ("fp4", "f16"): (9, "0x0E000E00", 12, "0x74007400"),
    ("fp8", "bf16"): (4, "0x07F007F0", 8, "0x7B807B80"),
    ("fp8", "f16"): (7, "0x3F803F80", 8, "0x5C005C00"),
}
for _key, (_left, _mask, _sign, _high) in _FLOATS.items():
    _VALUE[_key] = _BITS + _FLOAT.format(
        left=_left, mask=_mask, sign=_sign, high=_high, type=_key[1]
    )
_APART = {
    "bf16": "shl.b32 c0, c, 16; and.b32 c1, c, 0xFFFF0000; mov.b32 f0, c0; mov.b32 f1, c1;",
    "f16": "mov.b32 {h0, h1}, c; cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;",
}
_END = {
    "half": "mul.{type}x2 $0, c, $3;",
    "float": "{apart} mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $4;cvt.rn.{type}x2.f32 $0, f1, f0;",
    "affine": "{apart} fma.rn.f32 f0, f0, $3, $5; fma.rn.f32 f1, f1, $4, $6;"
    "cvt.rn.{type}x2.f32 $0, f1, f0;",
}
# All parts of a word in bfloat16, one multiplication each; numbers are MOVED of what they are.
# The lowest 8 bits of a bfloat16 count its smallest steps, so a code is a number where it stands:
# 2^-133 (4 bits up 2^-129) of its value. Scales come times 2^126 (2^122), and minus the offset
# times the scale is added, exactly, as offsets are 8 and 128. fp8 has 2^-120 of its value.
MOVED = tl.constexpr(2.0**-7)
_FOUR = tl.constexpr(
    "{ .reg .b32 c, d; shr.u32 d, $4, 8;"
    "and.b32 c, $4, 0x000F000F; fma.rn.bf16x2 $0, c, $5, $9;"
    "and.b32 c, $4, 0x00F000F0; fma.rn.bf16x2 $1, c, $6, $10;"
    "and.b32 c, d, 0x000F000F; fma.rn.bf16x2 $2, c, $7, $11;"
    "and.b32 c, d, 0x00F000F0; fma.rn.bf16x2 $3, c, $8, $12; }"
)
_TWO = {  # lop3: (a & b) ^ c and (a & b) | c
    "int8": "{ .reg .b32 c, d; lop3.b32 c, $2, 0x00FF00FF, 0x00800080, 0x6A;"
    "fma.rn.bf16x2 $0, c, $3, $5; shr.u32 d, $2, 8; lop3.b32 c, d, 0x00FF00FF, 0x00800080, 0x6A;"
    "fma.rn.bf16x2 $1, c, $4, $6; }",
    "fp8": "{ .reg .b32 c, d; shl.b32 c, $2, 4; shl.b32 d, $2, 8; and.b32 c, c, 0x07F007F0;"
    "lop3.b32 c, d, 0x80008000, c, 0xEA; mul.bf16x2 $0, c, $3; shr.u32 c, $2, 4;"
    "and.b32 c, c, 0x07F007F0; lop3.b32 c, $2, 0x80008000, c, 0xEA; mul.bf16x2 $1, c, $4;"
    " // $5 $6\n }",
}
_UP = {"int4": 2.0**126, "int8": 2.0**126, "fp8": 2.0**113}
_WIDTHS = {name: 16 // num_parts(name) for name in CODE_FORMATS}  # bits of a code
_OFFSETS = {"int4": 8.0, "int8": 128.0, "fp8": 0.0}


@triton.constexpr_function
def _two(code_format):
    return _TWO[code_format]


@triton.constexpr_function
def _up(code_format):
    return _UP[code_format]


@triton.constexpr_function
def _minus(code_format):
    return -_OFFSETS[code_format] * 2.0**-7


def can_move(w: Quantised) -> bool:
    """Whether `moved_of` gives a weight's numbers."""
    is_plain = w.offset == (8 if w.format == "int4" else 0) and not w.has_zero
    is_half = w.dtype == torch.bfloat16 and route_of(w) == "half"
    return w.format in _UP and is_plain and is_half and w.is_small


@triton.constexpr_function
def _asm(code_format, part, dtype, route, has_zero):
    """The instructions for one part. Multiplying and adding at once is exact where a minimum is
    added."""
    name = "bf16" if dtype == tl.bfloat16 else "f16"
    at = part * _WIDTHS[code_format]
    minus = f"sub.{name}x2 c, c, $2;" if has_zero else ""
    key = (code_format, name, part) if (code_format, name, part) in _VALUE else (code_format, name)
    value = _VALUE[key].format(at=at, minus=minus)
    end = _END[route].format(type=name, apart=_APART[name])
    return "{ .reg .b32 c, d, c0, c1; .reg .f32 f0, f1; .reg .b16 h0, h1; " + value + end + " }"


@triton.constexpr_function
def _power(code_format, dtype):
    """What stands in the mantissa's power of two beside the offset."""
    return 0.0 if code_format != "int4" else 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.constexpr_function
def _width(code_format):
    return _WIDTHS[code_format]


@triton.constexpr_function
def _has_book(code_format):
    return code_format in BOOKS


@triton.constexpr_function
def _entry(code_format, at):
    return BOOKS[code_format][at]


@triton.jit
def _one_of_four(is_odd, is_second, FORMAT: tl.constexpr, AT: tl.constexpr):
    low = tl.where(is_odd, _entry(FORMAT, AT + 1), _entry(FORMAT, AT))
    high = tl.where(is_odd, _entry(FORMAT, AT + 3), _entry(FORMAT, AT + 2))
    return tl.where(is_second, high, low)


@triton.jit
def _in_book(code, FORMAT: tl.constexpr):
    """The entries of a book that codes number, chosen bit by bit: no memory is read."""
    is_odd, is_second, is_third = (code & 1) != 0, (code & 2) != 0, (code & 4) != 0
    low = tl.where(
        is_third,
        _one_of_four(is_odd, is_second, FORMAT, 4),
        _one_of_four(is_odd, is_second, FORMAT, 0),
    )
    high = tl.where(
        is_third,
        _one_of_four(is_odd, is_second, FORMAT, 12),
        _one_of_four(is_odd, is_second, FORMAT, 8),
    )
    return tl.where((code & 8) != 0, high, low)


@triton.jit
def _code_values(word, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Codes as float32, in Triton's own words."""
    code = word.to(tl.int32) >> _width(FORMAT) * PART
    if _has_book(FORMAT):
        return _in_book(code, FORMAT)
    if FORMAT == "fp8":
        return (code & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if FORMAT == "int8":
        return (code & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    if FORMAT == "fp4":  # into the exponent and mantissa of a float, whose bias is 126 more
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (code & 15).to(tl.float32)


@triton.jit
def numbers_of(
    word, scale, offset, minimum, dtype: tl.constexpr, PART: tl.constexpr, FORMAT: tl.constexpr,
    ROUTE: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """One part of a span as numbers, [outputs, inputs]; scale, offset and minimum by output.

    ROUTE: "half" where a product of 16 bits is exact but for its rounding, "float", "affine" with
    a minimum; "plain" computes the same without assembly.
    """
    if ROUTE == "plain":
        scale = scale.to(tl.float32)
        value = (_code_values(word, PART, FORMAT) - offset[:, None]) * scale[:, None]
        w = (value + minimum[:, None]).to(dtype)
    else:
        off = (offset + _power(FORMAT, dtype)).to(dtype)[:, None].broadcast_to(word.shape)
        factor = scale.to(dtype if ROUTE == "half" else tl.float32)[:, None]
        factor = factor.broadcast_to(word.shape)
        ASM: tl.constexpr = _asm(FORMAT, PART, dtype, ROUTE, HAS_ZERO)
        if ROUTE == "half":
            args = [word, off, factor]
            CONSTRAINTS: tl.constexpr = "=r,r,r,r"
        elif ROUTE == "float":
            args = [word, off, factor]
            CONSTRAINTS: tl.constexpr = "=r,r,r,f,f"
        else:
            args = [word, off, factor, minimum[:, None].broadcast_to(word.shape)]
            CONSTRAINTS: tl.constexpr = "=r,r,r,f,f,f,f"
        if dtype == tl.bfloat16:
            w = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, args, dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            w = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, args, dtype=tl.float16, is_pure=True, pack=2
            )
    return w


@triton.jit
def _wide(scale, by: tl.constexpr, word):
    return (scale * by).to(tl.bfloat16)[:, None].broadcast_to(word.shape)


@triton.jit
def moved_of(word, scales, FORMAT: tl.constexpr):
    """MOVED of `numbers_of` for all parts, by their scales, of weights that `can_move`."""
    UP: tl.constexpr = _up(FORMAT)
    LESS: tl.constexpr = _minus(FORMAT)
    if FORMAT == "int4":
        numbers = tl.inline_asm_elementwise(
            _FOUR, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [word, _wide(scales[0], UP, word), _wide(scales[1], UP / 16, word),
             _wide(scales[2], UP, word), _wide(scales[3], UP / 16, word),
             _wide(scales[0], LESS, word), _wide(scales[1], LESS, word),
             _wide(scales[2], LESS, word), _wide(scales[3], LESS, word)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            _two(FORMAT), "=r,=r,r,r,r,r,r",
            [word, _wide(scales[0], UP, word), _wide(scales[1], UP, word),
             _wide(scales[0], LESS, word), _wide(scales[1], LESS, word)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@triton.jit
def read_scales(
    scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, k, offs_w, num_rows,
    GROUP_K: tl.constexpr, UNIT_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_UNIT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What is stored for the group that k lies in, for each output; see `scales_of`."""
    at = (k // GROUP_K) * num_rows + offs_w
    scale = tl.load(scale_ptr + at)
    zero, minimum, unit, min_unit = scale, scale, scale, scale
    if HAS_ZERO and PAIRED == "":
        zero = tl.load(zero_ptr + at)
    if HAS_MINIMUM and PAIRED == "":
        minimum = tl.load(minimum_ptr + at)
    if HAS_UNIT:
        to = (k // UNIT_K) * num_rows + offs_w
        unit = tl.load(unit_ptr + to)
        if HAS_MINIMUM and PAIRED == "":
            min_unit = tl.load(min_unit_ptr + to)
    return scale, zero, minimum, unit, min_unit


@triton.jit
def scales_of(
    read, OFFSET: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    HAS_UNIT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Scale, offset and minimum of each output from what was read: in float32, but a scale that
    stands beside its offset in its own 16 bits."""
    pair, zero, minimum, unit, min_unit = read
    offset = (pair * 0).to(tl.float32) + OFFSET  # wherever the threads have the outputs
    scale, minimum = pair, minimum.to(tl.float32) if HAS_MINIMUM else offset * 0
    if PAIRED == "":
        scale = scale.to(tl.float32)
        if HAS_ZERO:
            offset = zero.to(tl.float32)
        if HAS_UNIT:
            scale *= unit.to(tl.float32)
            if HAS_MINIMUM:
                minimum *= -min_unit.to(tl.float32)
    elif (
        PAIRED == "units"
    ):  # counts become the mantissas of floats, which is faster than converting
        scale = ((pair & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8421376.0
        scale *= unit.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if HAS_MINIMUM:
            count = (((pair >> 16) & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            minimum = -count * (unit >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PAIRED == "minimum":
        scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if HAS_ZERO:
            offset = (pair >> 16).to(tl.float32)
        tl.static_assert(PAIRED == "bf16" or PAIRED == "f16")  # a word, and no type of Triton's
        if PAIRED == "bf16":
            scale = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            scale = pair.to(tl.int16).to(tl.float16, bitcast=True)
    return scale, offset, minimum


@triton.jit
def scales_at(
    scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, k, offs_w, num_rows,
    OFFSET: tl.constexpr, GROUP_K: tl.constexpr, UNIT_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_UNIT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    read = read_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, k, offs_w,
                       num_rows, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                       PAIRED)  # fmt: skip
    return scales_of(read, OFFSET, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED)


@triton.jit
def places(WORDS: tl.constexpr):
    """Where the word of an input stands in its span, see `quant`. Pairs of neighbours stay."""
    offs_k = tl.arange(0, WORDS)
    if WORDS % 32 == 0:
        step, half, thread = (offs_k >> 4) & 1, (offs_k >> 3) & 1, (offs_k >> 1) & 3
        place = (offs_k & -32) + thread * 8 + step * 4 + half * 2 + (offs_k & 1)
        offs_k = tl.max_contiguous(tl.multiple_of(place, 2), 2)
    return offs_k


def pointers_of(w: Quantised) -> tuple[Tensor | None, ...]:
    """What kernels read of a weight: codes, scales, zeros, minima, units and units of minima."""
    return w.data_SNW, w.scale_GN, w.zero_GN, w.minimum_GN, w.unit_UN, w.min_unit_UN


def form_of(w: Quantised) -> dict[str, object]:
    """What kernels are compiled for."""
    return {
        "FORMAT": w.format, "SPAN": w.span, "WORDS": w.data_SNW.shape[2], "OFFSET": w.offset,
        "GROUP_K": w.group, "UNIT_K": UNIT_GROUP, "HAS_ZERO": w.has_zero,
        "HAS_MINIMUM": w.has_minimum, "HAS_UNIT": w.unit_UN is not None, "PAIRED": w.paired,
        "ROUTE": route_of(w),
    }  # fmt: skip


def route_of(w: Quantised) -> str:
    if IS_INTERPRETED or w.format in BOOKS or w.dtype not in (torch.bfloat16, torch.float16):
        return "plain"
    if w.has_minimum:
        return "affine"
    own = "bf16" if w.dtype == torch.bfloat16 else "f16"
    return "half" if w.paired == own else "float"

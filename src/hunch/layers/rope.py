"""Rotary frequencies and their scalings, and the table every step reads.

Shape letters: T packed tokens, H head width, F pairs of a head, L positions of the table, P some of
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hunch.kernels.rope import Rotation, rotation
from hunch.layers.part import Part

_PART = 1024  # positions at once: memory beside the table would not be given back


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """How positions turn the heads. `rope_type` is Hugging Face's."""

    theta: float = 10000.0
    rope_type: str = (
        "default"  # default, linear, llama3, yarn, longrope, factors, proportional, none
    )
    head_dim: int = 0  # of the heads it turns; 0: the model's
    dim: int = 0  # numbers of a head that are turned, the first ones; 0: all
    num_pairs: int = 0  # proportional: pairs that are turned, the first ones of a whole head's
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_len: int = 0  # llama3, yarn, longrope: context the model was first trained at
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: by factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: ramp ends at whole dimensions
    factors: tuple[float, ...] = ()  # longrope, factors: one divisor per frequency
    # Queries are multiplied with 1 + temper * log(1 + floor((position + temper_shift) / span)).
    temper: float = 0.0
    temper_span: int = 1
    temper_shift: int = 0


def frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position for each pair of a head, float32, H/2 of them.

    Pairs that are not turned have zero: `head_order` has placed them behind the others.
    """
    num_pairs = head_dim // 2
    if spec.rope_type == "none":
        return torch.zeros(num_pairs)
    freq = _turned(spec, spec.dim or head_dim)
    return torch.cat((freq, freq.new_zeros(num_pairs - len(freq))))


def _turned(spec: RopeSpec, head_dim: int) -> Tensor:
    freq = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if spec.rope_type == "linear":
        return freq / spec.factor
    if spec.rope_type == "proportional":
        freq[spec.num_pairs :] = 0.0
        return freq / spec.factor
    if spec.rope_type == "llama3":
        return _llama3(spec, freq)
    if spec.rope_type == "yarn":
        return _yarn(spec, freq, head_dim)
    if spec.rope_type in ("factors", "longrope"):
        return freq / torch.tensor(spec.factors, dtype=torch.float32)
    return freq


def _llama3(spec: RopeSpec, freq: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / freq
    low_span = spec.high_freq_factor - spec.low_freq_factor
    share = (spec.original_len / wavelength - spec.low_freq_factor) / low_span
    share = share.clamp(0, 1)
    return (1 - share) * freq / spec.factor + share * freq


def _yarn(spec: RopeSpec, freq: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn fewer than beta_slow times in the original context are stretched."""

    def pair_turning(num_turns: float) -> float:
        waves = spec.original_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return stretch * freq / spec.factor + (1 - stretch) * freq


def amplitude(spec: RopeSpec) -> float:
    """What cos and sin are multiplied with: 1 but for yarn and longrope."""
    if spec.rope_type not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    return stretch(spec.factor)


def stretch(factor: float, mscale: float = 1.0) -> float:
    """How much yarn sharpens attention over a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def head_order(head_dim: int, dim: int, is_interleaved: bool) -> list[int] | None:
    """Which number of a head on disk stands where, so that pairs are (h, h + H/2) and those that
    are turned come first; None: they do already.

    Scores do not change by it as long as q and k are ordered alike.
    """
    dim = dim or head_dim
    if dim == head_dim and not is_interleaved:
        return None
    half = dim // 2
    lower = [2 * i if is_interleaved else i for i in range(half)]
    upper = [2 * i + 1 if is_interleaved else half + i for i in range(half)]
    rest = list(range(dim, head_dim))
    num_rest = len(rest) // 2
    return lower + rest[:num_rest] + upper + rest[num_rest:]


class Rope(Part):
    """The table of a model: cos | sin per position, float32 whatever the model's dtype."""

    def __init__(
        self,
        spec: RopeSpec,
        head_dim: int,
        max_len: int,
        device: torch.device | str = "cpu",
        *,
        is_whole: bool = True,
    ) -> None:
        """`is_whole` False: `reach` fills the table as far as positions come."""
        head_dim = spec.head_dim or head_dim
        freq_F = frequencies(spec, head_dim).to(device)
        scale_F = torch.ones(head_dim // 2, device=device)
        scale_F[: (spec.dim or head_dim) // 2] = amplitude(spec)
        self.table_LH = torch.empty(max_len, head_dim, device=device)
        self._turns = partial(_turns, freq_F, scale_F)
        self._num_ready = 0
        if is_whole:
            self.reach(max_len)
        self.temper_L = None
        if spec.temper:
            positions = torch.arange(max_len, dtype=torch.float32, device=device)
            spans = ((positions + spec.temper_shift) / spec.temper_span).floor()
            self.temper_L = 1 + spec.temper * spans.log1p()

    def reach(self, num_positions: int) -> None:
        """Fill the table for this many positions at least, as far as it goes."""
        max_len = len(self.table_LH)
        for first in range(self._num_ready, min(num_positions, max_len), _PART):
            last = min(first + _PART, max_len)
            self.table_LH[first:last] = self._turns(first, last)
            self._num_ready = last

    def __call__(self, pos_T: Tensor) -> Rotation:
        turn = rotation(self.table_LH, pos_T)
        if self.temper_L is not None:
            turn.temper_T11 = self.temper_L.index_select(0, pos_T)[:, None, None]
        return turn


def _turns(freq_F: Tensor, scale_F: Tensor, first: int, last: int) -> Tensor:
    """Rows [first, last) of the table."""
    positions = torch.arange(first, last, dtype=torch.float32, device=freq_F.device)
    angle_PF = torch.outer(positions, freq_F)
    return torch.cat((angle_PF.cos() * scale_F, angle_PF.sin() * scale_F), dim=-1)

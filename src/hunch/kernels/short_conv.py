"""A gated convolution over the last few tokens: a recurrent layer whose ring is all it remembers.

Shape letters: I = 2D inputs of a token, D width, J taps of the convolution.
Model: LFM2 of Liquid AI.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hunch.kernels.recurrence import Recurrence, convolved


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvShape(Recurrence):
    """The sizes of a short convolution."""

    width: int
    num_taps: int  # tokens that the convolution sees, its own included

    @property
    def state(self) -> tuple[int, int, int]:
        return 1, 0, self.width

    @property
    def num_inputs(self) -> int:
        """Inputs per token: two factors of every channel."""
        return 2 * self.width

    def fold(
        self, weights: ConvWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_JD = window_JI[:, : self.width] * window_JI[:, self.width :]
        return state_NHD, convolved(x_JD, weights.conv_JD)[None]


@dataclass(slots=True)
class ConvWeights:
    """What a layer mixes tokens with; float32."""

    conv_JD: Tensor  # the tap of the token itself is the last

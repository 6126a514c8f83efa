"""Lightning attention: how such a layer folds a token into a row's state.

A head's state is the sum of its keys times values, which fades at a rate of the head and the layer.

Shape letters: N heads, D their width, I = 3 * N * D inputs of a token, J taps: one.
Paper: arXiv 2401.04658.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hunch.kernels.activation import sigmoid
from hunch.kernels.recurrence import Recurrence


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningShape(Recurrence):
    """The sizes of a lightning attention."""

    num_heads: int
    head_dim: int
    num_taps: int = 1  # there is no convolution

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def num_inputs(self) -> int:
        """Inputs per token: query, key and value of each head, one head after the other."""
        return 3 * self.num_heads * self.head_dim

    def fold(
        self, weights: LightningWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_I = window_JI[-1]
        x_N3D = (x_I * sigmoid(x_I)).view(self.num_heads, 3, self.head_dim)
        q_ND, k_ND, v_ND = x_N3D.unbind(1)
        state_NHD = state_NHD * weights.kept_N[:, None, None] + k_ND[:, :, None] * v_ND[:, None]
        return state_NHD, (state_NHD * q_ND[:, :, None]).sum(1)


@dataclass(slots=True)
class LightningWeights:
    """What a layer folds tokens in with; float32."""

    kept_N: Tensor  # of a state, from token to token

"""A decoder layer: attention and MLP around a residual stream.

Shape letters: T packed tokens, D width, E width of the attention's input, where it differs.
"""

from __future__ import annotations

from torch import Tensor

from hunch.layers.attention import Attend, Attention
from hunch.layers.experts import Experts
from hunch.layers.mlp import MLP
from hunch.layers.norm import Norm
from hunch.layers.part import Part


class Block(Part):
    """x + attention(norm(x)), then x + mlp(norm(x)); without attn_norm its input goes in bare."""

    def __init__(
        self, attn_norm: Norm | None, attn: Attention, mlp_norm: Norm, mlp: MLP | Experts
    ) -> None:
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        input_TD = x_TD if self.attn_norm is None else self.attn_norm(x_TD)
        return self.mix(x_TD, input_TD, attend)

    def mix(self, residual_TD: Tensor, input_TE: Tensor, attend: Attend) -> Tensor:
        """The layer with an attention input of the caller's making, say [embedding; hidden]."""
        x_TD = residual_TD + self.attn(input_TE, attend)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)): the first transformers' order."""

    attn_norm: Norm

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        x_TD = self.attn_norm(x_TD + self.attn(x_TD, attend))
        return self.mlp_norm(x_TD + self.mlp(x_TD))

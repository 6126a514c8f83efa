"""A decoder layer: attention and MLP around a residual stream.

Shape letters: T packed tokens, D width, E width of the attention's input, where it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hunch.layers.attention import Attend, Attention
from hunch.layers.experts import Experts, ExpertsBeside
from hunch.layers.inputs import InputGate
from hunch.layers.mlp import MLP
from hunch.layers.norm import Norm, RMSNorm
from hunch.layers.part import Part


@dataclass(eq=False, repr=False)
class PlainBlock(Part):
    """x + mixer(norm(x)), then x + mlp(norm(x)); what mixes tokens need not be attention."""

    attn_norm: RMSNorm
    attn: Callable[[Tensor, Attend], Tensor]
    mlp_norm: RMSNorm
    mlp: MLP | Experts
    residual_scale: float = 1.0

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self._scaled(self.attn(self.attn_norm(x_TD), attend))
        return x_TD + self._scaled(self.mlp(self.mlp_norm(x_TD)))

    def _scaled(self, branch_TD: Tensor) -> Tensor:
        return branch_TD if self.residual_scale == 1.0 else branch_TD * self.residual_scale


@dataclass(eq=False, repr=False)
class Block(Part):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Without its norm a half reads x as it is. What a half gives may be normed and scaled before it
    is added.
    """

    attn_norm: Norm | None
    attn: Attention
    mlp_norm: Norm | None
    mlp: MLP | Experts
    attn_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    residual_scale: float = 1.0
    beside: ExpertsBeside | None = None
    inputs: InputGate | None = None
    scale_1: Tensor | None = None  # of the stream, at the end

    def __call__(self, x_TD: Tensor, attend: Attend, input_TP: Tensor | None = None) -> Tensor:
        """`input_TP`: what a table says of the tokens, where the layer has a gate for it."""
        input_TD = x_TD if self.attn_norm is None else self.attn_norm(x_TD)
        x_TD = self.mix(x_TD, input_TD, attend)
        if self.inputs is not None:
            assert input_TP is not None
            x_TD = self.inputs(x_TD, input_TP)
        return x_TD if self.scale_1 is None else x_TD * self.scale_1

    def mix(self, residual_TD: Tensor, input_TE: Tensor, attend: Attend) -> Tensor:
        """The layer with an attention input of the caller's making, say [embedding; hidden]."""
        x_TD = self._add(residual_TD, self.attn(input_TE, attend), self.attn_out_norm)
        branch_TD = self.mlp(x_TD if self.mlp_norm is None else self.mlp_norm(x_TD))
        if self.beside is not None:
            branch_TD = self.beside(x_TD, branch_TD)
        return self._add(x_TD, branch_TD, self.mlp_out_norm)

    def _add(self, x_TD: Tensor, branch_TD: Tensor, norm: Norm | None) -> Tensor:
        if norm is not None:
            branch_TD = norm(branch_TD)
        if self.residual_scale != 1.0:
            branch_TD = branch_TD * self.residual_scale
        return x_TD + branch_TD


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)); without mlp_norm both read one norm."""

    def mix(self, residual_TD: Tensor, input_TE: Tensor, attend: Attend) -> Tensor:
        h_TD = input_TE if self.mlp_norm is None else self.mlp_norm(residual_TD)
        x_TD = self._add(residual_TD, self.attn(input_TE, attend), self.attn_out_norm)
        return self._add(x_TD, self.mlp(h_TD), self.mlp_out_norm)


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)): the first transformers' order."""

    attn_norm: Norm
    mlp_norm: Norm

    def __call__(self, x_TD: Tensor, attend: Attend, input_TP: Tensor | None = None) -> Tensor:
        x_TD = self.attn_norm(x_TD + self.attn(x_TD, attend))
        return self.mlp_norm(x_TD + self.mlp(x_TD))

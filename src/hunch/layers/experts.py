"""A mixture of experts in place of the MLP: a few of many for each token, and shared ones.

Shape letters: T packed tokens, D width, E experts, K experts per token, F inner width, N outputs
and I inputs of a product per expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels.activation import gated, sigmoid
from hunch.kernels.experts import Routing, route
from hunch.kernels.linear import linear, linear_in_tiles
from hunch.kernels.quant import Quantised, Weight
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part
from hunch.parallel.group import SINGLE, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """The experts of a model."""

    routing: Routing
    width: int  # inner width of each
    layers: tuple[bool, ...]  # per layer: whether experts stand in place of the MLP
    has_router_bias: bool = False
    has_choice_bias: bool = False  # added to the scores for the choice alone
    has_bias: bool = False  # of the experts' products
    shared_width: int = 0  # inner width of the expert every token asks; 0: there is none
    is_shared_gated: bool = False  # a sigmoid says how much of the shared expert is added
    narrow_width: int = 0  # of what chosen experts read and answer; 0: as wide as the model
    is_beside: bool = False  # the MLP stays, and both are normed and added; see ExpertsBeside

    def check(self) -> None:
        self.routing.check()


@dataclass(eq=False, repr=False)
class Router(Part):
    """Logits in float32, as small gaps decide."""

    logits: Linear
    routing: Routing
    choice_bias_E: Tensor | None = None
    factor_E: Tensor | None = None  # of the weights of each expert

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, TK both."""
        logits_TE = self.logits(x_TD.float())
        return route(logits_TE, self.routing, self.choice_bias_E, self.factor_E)


class StackedLinear(Linear):
    """A matrix per expert, [E, N, I], with biases [E, N]. In few bits, all rows are one matrix's,
    [E * N, I]."""

    def __init__(
        self, weight: Weight, bias_EN: Tensor | None = None, num_experts: int | None = None
    ) -> None:
        super().__init__(weight, bias_EN)
        self.num_experts = len(weight) if num_experts is None else num_experts

    @property
    def weight_NK(self) -> Tensor:
        if isinstance(self.weight, Quantised):
            return self.weight.dense().view(self.num_experts, -1, self.weight.shape[1])
        return self.weight

    def _matrix(self, expert: int) -> Tensor:
        if not isinstance(self.weight, Quantised):
            return self.weight[expert]
        size = len(self.weight) // self.num_experts
        return self.weight.rows(torch.arange(expert * size, (expert + 1) * size)).dense()

    def of(self, expert: int, x_TI: Tensor) -> Tensor:
        weight_NI = self._matrix(expert)
        bias_N = None if self.bias_N is None else self.bias_N[expert]
        if self.num_tile_rows:
            return linear_in_tiles(x_TI, weight_NI, bias_N, self.num_tile_rows)
        return linear(x_TI, weight_NI, bias_N)


@dataclass(eq=False, repr=False)
class Experts(Part):
    """sum of weight * expert(x) over a token's experts in ascending order, plus the shared one."""

    router: Router
    gate_up: StackedLinear
    down: StackedLinear
    activation: str
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None  # float32: small gaps, one number per token
    group: Group = SINGLE  # over which the inner width is split
    narrow: Linear | None = None  # before the chosen experts, where they read narrower vectors
    widen: Linear | None = None  # after them

    def __call__(self, x_TD: Tensor, routed_TD: Tensor | None = None) -> Tensor:
        """`routed_TD`: what the router reads, where it is not x."""
        chosen_TK, weight_TK = self.router(x_TD if routed_TD is None else routed_TD)
        y_TD = self._chosen(
            x_TD if self.narrow is None else self.narrow(x_TD), chosen_TK, weight_TK
        )
        if self.widen is not None:
            y_TD = self.widen(y_TD)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * sigmoid(self.shared_gate(x_TD.float())).to(x_TD.dtype)
        return y_TD + shared_TD

    def _chosen(self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The sum of what a token's experts answer."""
        y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert in torch.unique(chosen_TK).tolist():  # ascending
            token, place = (chosen_TK == expert).nonzero(as_tuple=True)
            read_TD, weight_T1 = x_TD[token], weight_TK[token, place, None]
            if self.router.routing.is_of_input:
                read_TD, weight_T1 = (
                    (read_TD * weight_T1).to(x_TD.dtype),
                    torch.ones_like(weight_T1),
                )
            out_TD = self.down.of(expert, gated(self.gate_up.of(expert, read_TD), self.activation))
            part_TD = out_TD.float() * weight_T1
            y_TD = y_TD.index_add(0, token, part_TD)  # once per token: nothing to be ordered
        y_TD = y_TD.to(x_TD.dtype)
        return self.group.all_reduce(y_TD) if self.group.size > 1 else y_TD


class ExpertsBeside(Part):
    """norm(mlp's answer) + norm(experts' answer): experts beside an MLP, which read the stream by a
    norm of their own. The router reads it divided by its root mean square."""

    def __init__(
        self, experts: Experts, norm: RMSNorm, mlp_out_norm: RMSNorm, out_norm: RMSNorm
    ) -> None:
        self.experts, self.norm = experts, norm
        self.mlp_out_norm, self.out_norm = mlp_out_norm, out_norm
        self.router_norm = RMSNorm(torch.ones_like(norm.weight_D), norm.eps)

    def __call__(self, x_TD: Tensor, mlp_TD: Tensor) -> Tensor:
        """`mlp_TD` is the MLP's answer to the stream x."""
        answer_TD = self.experts(self.norm(x_TD), self.router_norm(x_TD))
        return self.mlp_out_norm(mlp_TD) + self.out_norm(answer_TD)

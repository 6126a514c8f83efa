"""A layer's experts by a GPU's kernels.

Shape letters: T packed tokens, P the same padded, or pairs of a token and an expert; D width,
E experts, K experts per token, F inner width, S slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.gpu_experts import CHUNK, arrange, combine, experts_down, experts_up, share
from hunch.kernels.gpu_gemm import gemm_gated, gemm_parts, num_parts
from hunch.kernels.gpu_route import Timing, route
from hunch.kernels.slices import split_of
from hunch.layers.experts import Experts
from hunch.layers.linear import Linear


class FusedExperts:
    """`Experts` over the same weights; the router's are held in the model's precision."""

    def __init__(self, experts: Experts, timing: Timing) -> None:
        self.experts, self.router, self.timing = experts, experts.router, timing
        dtype = experts.gate_up.weight.dtype
        self.activation = KERNEL_NAMES[experts.activation]
        self.router_ED = self.router.logits.weight_NK.to(dtype)
        gate = experts.shared_gate
        self.share_1D = None if gate is None else gate.weight_NK.to(dtype)

    def parts(
        self, h_PD: Tensor, num_tokens: int, slot_T: Tensor, routed_TD: Tensor | None = None
    ) -> Tensor:
        """What the layer adds to the stream, as slices to add in order. The router reads
        `routed_TD`; None: what the experts read.

        The shared expert's slices come first, then the outputs of the chosen ones. For many tokens
        only the sum is kept, added in the same order.
        """
        h_TD, width = h_PD[:num_tokens], h_PD.shape[1]
        routed_TD = h_TD if routed_TD is None else routed_TD
        num_chosen = self.router.routing.num_chosen
        num_shared = self._num_shared(num_tokens)
        is_whole = num_tokens <= CHUNK
        size = (num_shared + num_chosen if is_whole else num_shared, num_tokens, width)
        parts_STD = torch.empty(size, dtype=torch.float32, device=h_PD.device)
        if num_shared:
            self._ask_shared(h_TD, parts_STD[:num_shared])
        if is_whole:
            self._ask(h_TD, routed_TD, slot_T, parts_STD[num_shared:])
            return parts_STD
        sum_TD = parts_STD.new_empty(num_tokens, width)
        for first in range(0, num_tokens, CHUNK):
            last = min(first + CHUNK, num_tokens)
            answer_KTD = parts_STD.new_empty(num_chosen, last - first, width)
            chunk = slice(first, last)
            self._ask(h_TD[chunk], routed_TD[chunk], slot_T[chunk], answer_KTD)
            shared_STD = parts_STD[:, first:last] if num_shared else None
            combine(shared_STD, answer_KTD, sum_TD[first:last])
        return sum_TD[None]

    def _ask(self, h_TD: Tensor, routed_TD: Tensor, slot_T: Tensor, answer_KTD: Tensor) -> None:
        experts, router = self.experts, self.router
        num_tokens, (num_experts, width) = len(h_TD), self.router_ED.shape
        num_slices = split_of(num_experts, width)
        logits_STE = answer_KTD.new_empty(num_slices, num_tokens, num_experts)
        gemm_parts(routed_TD, self.router_ED, logits_STE)
        chosen_TK, weight_TK = route(
            logits_STE, router.routing, router.logits.bias_N, router.choice_bias_E, slot_T,
            answer_KTD, self.timing, router.factor_E,
        )  # fmt: skip
        choice = arrange(chosen_TK, weight_TK, num_experts, router.routing.is_of_input)
        up, down = experts.gate_up, experts.down
        y_PF = h_TD.new_empty(chosen_TK.numel(), down.weight.shape[-1])
        experts_up(choice, h_TD, up.weight, y_PF, up.bias_N, activation=self.activation)
        experts_down(choice, y_PF, down.weight, answer_KTD, down.bias_N)

    def _num_shared(self, num_tokens: int) -> int:
        shared = self.experts.shared
        return 0 if shared is None else num_parts(num_tokens, shared.down.weight)

    def _ask_shared(self, h_TD: Tensor, parts_STD: Tensor) -> None:
        shared = self.experts.shared
        assert shared is not None
        y_TF = h_TD.new_empty(len(h_TD), shared.down.shape[1])
        gemm_gated(h_TD, shared.gate_up.weight, y_TF, activation=self.activation)
        if self.share_1D is not None:
            num_slices = split_of(*self.share_1D.shape)
            logit_ST1 = parts_STD.new_empty(num_slices, len(h_TD), 1)
            gemm_parts(h_TD, self.share_1D, logit_ST1)
            share(y_TF, logit_ST1[:, :, 0])
        gemm_parts(y_TF, shared.down.weight, parts_STD)

    def linears(self) -> list[Linear]:
        """The products besides those per expert."""
        shared = self.experts.shared
        return [] if shared is None else [shared.gate_up, shared.down]

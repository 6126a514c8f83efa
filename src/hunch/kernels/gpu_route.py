"""The choice of experts on a GPU, one program per token, which does not depend on other tokens.

Shape letters: T packed tokens, D width, E experts, K experts per token, S slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.experts import Routing
from hunch.kernels.gpu_launch import next_power_of_2, options, take_turns


@triton.jit
def _route_kernel(
    parts_ptr, bias_ptr, choice_ptr, factor_ptr, slot_ptr, timed_ptr, chosen_ptr, weight_ptr,
    answer_ptr, part_stride, answer_stride, scale, spread, D,
    NUM_SPLITS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_KEPT: tl.constexpr, NUM_BEST: tl.constexpr,
    SCORES: tl.constexpr, IS_NORMED: tl.constexpr, PAD_G: tl.constexpr, PAD_E: tl.constexpr,
):  # fmt: skip
    """One program per token: slices of its logits added in order, then as `experts.route`."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group, member = tl.arange(0, PAD_G)[:, None], tl.arange(0, PAD_E)[None, :]
    is_in = (group < NUM_GROUPS) & (member < SIZE)
    expert = group * SIZE + member
    take_turns()
    at = parts_ptr + token * NUM_EXPERTS + expert
    logit = tl.load(at, mask=is_in, other=0.0)
    for s in tl.static_range(1, NUM_SPLITS):
        logit += tl.load(at + s * part_stride, mask=is_in, other=0.0)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + expert, mask=is_in, other=0.0)
    if slot_ptr is not None:
        is_padding, is_timed = tl.load(slot_ptr + token) < 0, tl.load(timed_ptr) > 0
        number = (token.to(tl.int32) * NUM_EXPERTS + expert) * -1640531527  # spreads the bits
        noise = ((number ^ (number >> 15)) * 739982445 & 0xFFFFFF).to(tl.float32) * 1e-7
        logit = tl.where(is_padding & is_timed, noise, logit)  # see `Timing`
    logit = tl.where(is_in, logit, float("-inf"))
    score = logit
    if SCORES == "softmax":
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    if SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if choice_ptr is not None:
        choice += tl.load(choice_ptr + expert, mask=is_in, other=0.0)
    choice = tl.where(is_in & (choice == choice), choice, float("-inf"))  # NaN equals nothing
    if NUM_KEPT < NUM_GROUPS:
        choice = _in_best_groups(choice, group, member, NUM_KEPT, NUM_BEST, PAD_G, PAD_E)
    is_chosen = expert < 0
    for _ in tl.static_range(NUM_CHOSEN):
        best = tl.max(tl.max(choice, 1), 0)
        is_best = (choice == best) & is_in & ~is_chosen  # all different, even if none is a number
        first = tl.min(tl.min(tl.where(is_best, expert, NUM_EXPERTS - 1), 1), 0)
        is_chosen = is_chosen | (expert == first) & is_in
        if SCORES == "near":
            score = tl.where(expert == first, _share(choice, best, spread), score)
        choice = tl.where(expert == first, float("-inf"), choice)
    if SCORES == "chosen":
        top = tl.max(tl.max(tl.where(is_chosen, logit, float("-inf")), 1), 0)
        score = tl.exp(logit - top)
    if SCORES == "chosen_sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    if IS_NORMED:
        score = score / (tl.sum(tl.sum(tl.where(is_chosen, score, 0.0), 1), 0) + 1e-20)
    if factor_ptr is not None:
        score = score * tl.load(factor_ptr + expert, mask=is_in, other=0.0)
    flat_is = tl.reshape(is_chosen.to(tl.int32), (PAD_G * PAD_E,))
    flat_expert = tl.reshape(expert, (PAD_G * PAD_E,))
    flat_score = tl.reshape(score, (PAD_G * PAD_E,))
    place = token * NUM_CHOSEN + tl.cumsum(flat_is, 0) - 1
    if slot_ptr is not None:
        is_dead = is_padding & (is_timed == 0)
        flat_expert = tl.where(is_dead, NUM_EXPERTS, flat_expert)  # padding has no experts
        if is_dead:  # and its answers are zeros
            _answer_nothing(answer_ptr + token * D, answer_stride, D, NUM_CHOSEN)
    tl.store(chosen_ptr + place, flat_expert, mask=flat_is > 0)
    tl.store(weight_ptr + place, flat_score * scale, mask=flat_is > 0)


@triton.jit
def _share(left, best, spread):
    """The best one's among the experts that are left and near to it."""
    is_far = (best - left) / tl.maximum(tl.abs(left), best) > spread
    share = tl.where(is_far | (left == float("-inf")), 0.0, tl.exp(left - best))
    return 1.0 / tl.sum(tl.sum(share, 1), 0)


@triton.jit
def _answer_nothing(answer_ptr, answer_stride, D, NUM_CHOSEN: tl.constexpr):
    for k in range(NUM_CHOSEN):
        for d in range(0, D, 1024):
            offs = d + tl.arange(0, 1024)
            to = answer_ptr + k * answer_stride + offs
            tl.store(to, tl.zeros((1024,), tl.float32), mask=offs < D)


@triton.jit
def _in_best_groups(
    choice, group, member, NUM_KEPT: tl.constexpr, NUM_BEST: tl.constexpr, PAD_G: tl.constexpr,
    PAD_E: tl.constexpr,
):  # fmt: skip
    """Experts outside of the best groups cannot be chosen."""
    left = choice
    worth = tl.zeros((PAD_G, 1), tl.float32)
    for _ in tl.static_range(NUM_BEST):
        best = tl.max(left, 1, keep_dims=True)
        worth += best
        first = tl.min(tl.where(left == best, member, PAD_E), 1, keep_dims=True)
        left = tl.where(member == first, float("-inf"), left)
    is_kept = group < 0
    for _ in tl.static_range(NUM_KEPT):
        best = tl.max(tl.max(worth, 1), 0)
        first = tl.min(tl.min(tl.where(worth == best, group, PAD_G), 1), 0)
        is_kept = is_kept | (group == first)
        worth = tl.where(group == first, float("-inf"), worth)
    return tl.where(is_kept, choice, float("-inf"))


class Timing:
    """A switch on the device: while it is on, padding chooses experts at random.

    Steps are timed with padding alone. A step with experts takes longer the more experts its tokens
    choose, so that padding must choose some to be timed right.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def __enter__(self) -> None:
        self._put(1)

    def __exit__(self, *_: object) -> None:
        self._put(0)

    @torch.inference_mode()  # the model's tensors were made in it, and may only be changed in it
    def _put(self, value: int) -> None:
        self.is_on_1.fill_(value)


def route(
    parts_STE: Tensor, routing: Routing, bias_E: Tensor | None, choice_bias_E: Tensor | None,
    slot_T: Tensor | None, answer_KTD: Tensor, timing: Timing | None = None,
    factor_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Experts and weights from slices of the router's logits.

    A row whose slot is below zero is padding: it has no experts, and its answers become zeros.
    """
    assert (slot_T is None) == (timing is None)
    num_tokens, num_experts = parts_STE.shape[1:]
    size = (num_tokens, routing.num_chosen)
    chosen_TK = torch.empty(size, dtype=torch.int32, device=parts_STE.device)
    weight_TK = torch.empty(size, dtype=torch.float32, device=parts_STE.device)
    group_size = num_experts // routing.num_groups
    _route_kernel[(num_tokens,)](
        parts_STE, bias_E, choice_bias_E, factor_E, slot_T,
        None if timing is None else timing.is_on_1, chosen_TK, weight_TK, answer_KTD,
        parts_STE.stride(0), answer_KTD.stride(0), routing.scale, routing.spread,
        answer_KTD.shape[2],
        NUM_SPLITS=len(parts_STE), NUM_EXPERTS=num_experts, NUM_CHOSEN=routing.num_chosen,
        NUM_GROUPS=routing.num_groups, NUM_KEPT=routing.num_groups_kept,
        NUM_BEST=min(routing.num_best, group_size), SCORES=routing.scores,
        IS_NORMED=routing.is_normed or routing.scores == "chosen",
        PAD_G=next_power_of_2(routing.num_groups), PAD_E=next_power_of_2(group_size),
        **options(1 if num_experts <= 128 else 4),
    )  # fmt: skip
    return chosen_TK, weight_TK

"""The experts' Triton kernels against their references: on a GPU, else by the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from builders import replace_tensors, tiny_spec
from hunch.kernels import experts, gpu_experts, gpu_route
from hunch.kernels.experts import Routing
from hunch.kernels.quant import Quantised
from hunch.layers.experts import Experts, ExpertSpec, Router, StackedLinear
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.models.experts import EXPERT_NAMES, build_experts
from hunch.models.fused_experts import FusedExperts
from random_models import RandomSource

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

ROUTINGS = {
    "softmax": Routing(num_experts=6, num_chosen=2),
    "normed": Routing(num_experts=8, num_chosen=3, is_normed=True, scale=1.5),
    "chosen": Routing(num_experts=5, num_chosen=2, scores="chosen"),
    "sigmoid of the chosen": Routing(num_experts=5, num_chosen=2, scores="chosen_sigmoid"),
    "near": Routing(num_experts=6, num_chosen=2, scores="near", spread=0.6),
    "groups": Routing(
        num_experts=12, num_chosen=4, scores="sigmoid", is_normed=True, num_groups=4,
        num_groups_kept=2, scale=2.5,
    ),
    "groups by their best": Routing(
        num_experts=12, num_chosen=3, num_groups=3, num_groups_kept=2, num_best=1
    ),
}  # fmt: skip


def rand(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=gen) * scale).to(DEVICE)


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_and_weights(name: str) -> None:
    routing = ROUTINGS[name]
    num_experts = routing.num_experts
    parts = rand(3, 7, num_experts)
    parts[:, 0] = 0.0  # all equal: the lowest win
    bias = rand(num_experts) if routing.scores == "chosen" else None
    choice = rand(num_experts, scale=0.1) if routing.scores == "sigmoid" else None
    slot = torch.tensor([0, 1, 2, -1, 4, 5, 6], device=DEVICE)
    answer = torch.full((routing.num_chosen, 7, 40), float("nan"), device=DEVICE)
    timing = gpu_route.Timing(torch.device(DEVICE))
    got, weight = gpu_route.route(parts, routing, bias, choice, slot, answer, timing)
    logits = parts.sum(0) if bias is None else parts.sum(0) + bias
    want, want_weight = experts.route(logits, routing, choice)
    live = slot >= 0
    assert torch.equal(got[live].long(), want[live])
    torch.testing.assert_close(weight[live], want_weight[live], atol=1e-5, rtol=1e-5)
    assert (got[~live] == num_experts).all()
    assert (answer[:, ~live] == 0).all()
    assert answer[:, live].isnan().all()
    if bias is None and choice is None:
        assert got[0].tolist() == list(range(routing.num_chosen))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen"])
def test_a_token_whose_logits_are_no_numbers_has_experts_too(scores: str) -> None:
    """A row whose states have overflowed must not read other memory as experts' numbers."""
    routing = Routing(num_experts=12, num_chosen=5, scores=scores)
    logits = rand(1, 3, 12)
    logits[:, 1], logits[:, 2, 7] = float("nan"), float("nan")
    answer = torch.zeros(5, 3, 8, device=DEVICE)
    chosen, weight = gpu_route.route(logits, routing, None, None, None, answer)
    for experts_of_token in chosen.tolist():
        assert len(set(experts_of_token)) == 5
        assert 0 <= min(experts_of_token) <= max(experts_of_token) < 12
    assert weight[0].isfinite().all()
    assert weight[1].isnan().all()


def test_steps_are_timed_with_experts_at_random() -> None:
    routing = Routing(num_experts=16, num_chosen=2)
    slot, answer = torch.full((12,), -1, device=DEVICE), torch.zeros(2, 12, 8, device=DEVICE)
    timing = gpu_route.Timing(torch.device(DEVICE))
    inputs = (torch.zeros(1, 12, 16, device=DEVICE), routing, None, None, slot, answer, timing)
    with timing:
        chosen, _ = gpu_route.route(*inputs)
    assert (chosen[:, 0] < chosen[:, 1]).all()
    assert (chosen < 16).all()
    assert 8 <= len(chosen.unique()) <= 16
    assert (gpu_route.route(*inputs)[0] == 16).all()


@pytest.mark.parametrize(("num_tokens", "has_bias"), [(2, True), (5, False), (40, True)])
def test_answers_are_the_experts(num_tokens: int, has_bias: bool) -> None:
    routing, width, inner = ROUTINGS["normed"], 24, 16
    x = rand(num_tokens, width)
    up, down = rand(8, 2 * inner, width, scale=0.2), rand(8, width, inner, scale=0.2)
    biases = (rand(8, 2 * inner), rand(8, width)) if has_bias else (None, None)
    chosen, weight = experts.route(rand(num_tokens, 8), routing)
    choice = gpu_experts.arrange(chosen.int(), weight, 8)
    y = torch.full((num_tokens * 3, inner), float("nan"), device=DEVICE)
    answer = torch.full((3, num_tokens, width), float("nan"), device=DEVICE)
    act = "clipped" if has_bias else "silu"
    gpu_experts.experts_up(choice, x, up, y, biases[0], activation=act)
    gpu_experts.experts_down(choice, y, down, answer, biases[1])
    want = experts.experts_ref(x, chosen, weight, up, down, act, *biases)
    torch.testing.assert_close(answer.sum(0).double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("code_format", "num_tokens"), [("int4", 2), ("fp8", 20)])
def test_experts_in_few_bits_are_those_of_their_numbers(code_format: str, num_tokens: int) -> None:
    source = RandomSource(0, torch.float16)
    source.hold = code_format
    sizes = ExpertSpec(routing=ROUTINGS["normed"], width=32, layers=(True,), has_bias=True)
    spec = replace(tiny_spec(), width=64, experts=sizes)
    few = build_experts(spec, source, "", EXPERT_NAMES)
    assert isinstance(few.gate_up.weight, Quantised)
    assert few.gate_up.weight.nbytes < 0.7 * few.gate_up.weight_NK.nbytes
    whole = [StackedLinear(each.weight_NK, each.bias_N) for each in (few.gate_up, few.down)]
    numbers = Experts(few.router, *whole, few.activation)
    for some in (few, numbers):
        replace_tensors(some, lambda tensor: tensor.to(DEVICE))
    x = rand(num_tokens, 64).half()
    slot = torch.arange(num_tokens, device=DEVICE)
    got, want = (
        FusedExperts(some, gpu_route.Timing(torch.device(DEVICE))).parts(x, num_tokens, slot)
        for some in (few, numbers)
    )
    if DEVICE == "cuda":
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=3e-3, rtol=3e-3)  # the interpreter adds otherwise
    torch.testing.assert_close(few(x), numbers(x))


def layer(routing: Routing, *, is_shared: bool, is_gated: bool) -> Experts:
    width, inner, count = 48, 32, routing.num_experts
    shared = gate = None
    if is_shared:
        shared = GatedMLP(Linear(rand(80, width, scale=0.2)), Linear(rand(width, 40)), "silu")
        gate = Linear(rand(1, width)) if is_gated else None
    return Experts(
        Router(Linear(rand(count, width)), routing),
        StackedLinear(rand(count, 2 * inner, width, scale=0.2)),
        StackedLinear(rand(count, width, inner, scale=0.2)),
        "silu",
        shared,
        gate,
    )


@pytest.mark.parametrize(
    ("is_shared", "is_gated"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)]
)
def test_a_row_is_the_same_bits_in_any_batch(
    is_shared: bool, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, sorted into blocks, and in chunks whose answers are added at once."""
    monkeypatch.setattr("hunch.models.fused_experts.CHUNK", 5)
    whole = layer(ROUTINGS["normed"], is_shared=is_shared, is_gated=is_gated)
    fused = FusedExperts(whole, gpu_route.Timing(torch.device(DEVICE)))
    x = rand(9, 48)
    slot = torch.arange(9, device=DEVICE)

    def run(first: int, last: int) -> torch.Tensor:
        parts = fused.parts(x[first:last].contiguous(), last - first, slot[first:last])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    expected = torch.cat([run(row, min(row + 4, 9)) for row in range(0, 9, 4)])
    torch.testing.assert_close(expected, whole(x), atol=1e-4, rtol=1e-4)
    assert torch.equal(run(2, 3), expected[2:3])
    assert torch.equal(run(3, 8), expected[3:8])
    assert torch.equal(run(0, 9), expected)

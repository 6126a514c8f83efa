"""What a pass costs on this machine, by packed tokens: measured once at start, on free blocks."""

from __future__ import annotations

from math import inf
from time import perf_counter

import torch
from torch import Tensor

from hunch.models.weights import Weights
from hunch.step.batch import pack
from hunch.step.runner import Runner
from hunch.types import Request, RowStart, RowWork, SamplingParams

SIZES = (1, 2, 4, 8, 16, 32)
SPREAD = 7919  # from one token id to the next
MAX_SECONDS = 0.5  # then the rest of the curve is left to be measured while serving


@torch.inference_mode()
def calibrate(runner: Runner) -> None:
    """Time passes over a few rows. Nothing is running yet, so every block is free to be written."""
    spent, capacity = 0.0, runner.capacity
    for size in SIZES:
        num_blocks = -(-size // capacity.block_size)
        if num_blocks > capacity.num_blocks or size > capacity.max_len or spent > MAX_SECONDS:
            break
        for _ in range(3):  # the first pass at a size warms caches and is dropped with the slowest
            seconds, _ = _pass(runner, size, num_blocks)
            spent += seconds
            runner.cost.record(size, seconds)


@torch.inference_mode()
def is_finite(runner: Runner) -> bool:
    """Whether the logits of a short pass are finite; with damaged weights they may not be.

    Only those of real tokens count: a captured pass also has padding.
    """
    size = min(2, runner.capacity.block_size, runner.capacity.max_len)
    _, logits_TV = _pass(runner, size, 1)
    return bool((logits_TV[:size] < inf).all())  # a model may forbid tokens by -inf


def not_finite(weights: Weights) -> str:
    """Why passes over these weights come to no numbers."""
    for name in weights.names():
        if not weights.tensor(name).isfinite().all():
            return f"{name} has NaN or infinite numbers in it. Download the model again"
    return (
        "its weights are finite numbers, and what it computes from them is not; try dtype=float32"
    )


def _pass(runner: Runner, size: int, num_blocks: int) -> tuple[float, Tensor]:
    """The seconds that a pass over this many tokens takes, and the logits after them."""
    # All different: equal tokens would use the same few experts.
    ids = [(SPREAD * i + 1) % runner.target.spec.vocab_size for i in range(size)]
    request = Request(id="", prompt_ids=ids, params=SamplingParams(), seed=0)
    start = RowStart(
        row=0,
        request=request,
        tokens=request.prompt_ids,
        num_computed=(0,) * len(runner.capacity.groups),
        blocks=list(range(num_blocks)),
    )
    runner.rows.start(start)
    batch = pack(runner.rows, [RowWork(row=0, num_tokens=size, num_nodes=0, max_draft=0)])
    began = perf_counter()
    logits_TV = runner.target.logits(runner.host.forward(batch).last_TD)
    logits_TV.argmax(-1).tolist()  # waits for a device
    seconds = perf_counter() - began
    runner.rows.leave(0)
    return seconds, logits_TV

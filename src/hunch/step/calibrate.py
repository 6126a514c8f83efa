"""What a pass costs on this machine, by packed tokens: measured once at start, on free blocks."""

from __future__ import annotations

from time import perf_counter

import torch

from hunch.step.batch import pack
from hunch.step.runner import Runner
from hunch.types import Request, RowStart, RowWork, SamplingParams

SIZES = (1, 2, 4, 8, 16, 32)
SPREAD = 7919  # from one token id to the next
MAX_SECONDS = 0.5  # a slow model learns the rest of its curve while it serves


@torch.inference_mode()
def calibrate(runner: Runner) -> None:
    """Time passes over a few rows. Nothing is running yet, so every block is free to be written."""
    spent, capacity = 0.0, runner.capacity
    for size in SIZES:
        num_blocks = -(-size // capacity.block_size)
        if num_blocks > capacity.num_blocks or size > capacity.max_len or spent > MAX_SECONDS:
            break
        # All different: tokens that are alike would ask the same few experts.
        ids = [(SPREAD * i + 1) % runner.target.spec.vocab_size for i in range(size)]
        request = Request(id="", prompt_ids=ids, params=SamplingParams(), seed=0)
        start = RowStart(
            row=0,
            request=request,
            tokens=request.prompt_ids,
            num_computed=(0,) * len(capacity.groups),
            blocks=list(range(num_blocks)),
        )
        for _ in range(3):  # the first pass at a size warms caches and is dropped with the slowest
            runner.rows.start(start)
            work = RowWork(row=0, num_tokens=size, num_nodes=0, max_draft=0)
            batch = pack(runner.rows, [work])
            began = perf_counter()
            hidden = runner.host.forward(batch)
            runner.target.logits(hidden.last_TD).argmax(-1).tolist()  # waits for a device
            seconds = perf_counter() - began
            spent += seconds
            runner.cost.record(size, seconds)
    runner.rows.leave(0)

"""A head that continues the target's states on a GPU: one level of a draft, and prompts to cover.

The target is the default model, the head its EAGLE-3. A level is one pass and its logits, captured
as a step holds it: by fused kernels, and by torch's with our attention. Prompts are covered as the
host does it, one by one, each of a length that was not seen before: by both, and with torch's
attention as well. The first of each source is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hunch.bench.parts import PartOptions
from hunch.hub import resolve
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.models.cuda import CudaDecoder
from hunch.models.heads.eagle import load_eagle3
from hunch.models.heads.step import StepNet
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.step.capture import Graph, new_pool, seconds_of

BLOCK_SIZE, MAX_LEN = 16, 2048
MODEL = "smollm2-135m"


def inputs(device: torch.device, num_rows: int, first: int, last: int) -> AttnInputs:
    """Positions [first, last) of each row."""
    count, num_blocks = last - first, MAX_LEN // BLOCK_SIZE
    table_SB = torch.arange(num_rows * num_blocks, device=device).view(num_rows, num_blocks)
    seq_T = torch.arange(num_rows, device=device).repeat_interleave(count)
    pos_T = torch.arange(first, last, device=device).repeat(num_rows)
    slot_T = table_SB[seq_T, pos_T // BLOCK_SIZE] * BLOCK_SIZE + pos_T % BLOCK_SIZE
    spans = tuple(Span(r * count, (r + 1) * count, r, first, count) for r in range(num_rows))
    return AttnInputs(pos_T, slot_T, seq_T, table_SB, pos_T + 1, None, BLOCK_SIZE, spans)


def new_kv(net: StepNet, num_rows: int, device: torch.device) -> KVCache:
    spec = net.spec
    size = (2, net.num_kv_layers, num_rows * MAX_LEN, spec.num_kv_heads, spec.head_dim)
    return KVCache(*torch.zeros(size, dtype=net.kv_dtype, device=device))


def level(net: StepNet, num_rows: int, context: int, device: torch.device) -> float:
    """Seconds of a captured pass of one token per row, and its logits."""
    attn, kv = inputs(device, num_rows, context, context + 1), new_kv(net, num_rows, device)
    token_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
    state_TD = torch.randn(num_rows, net.spec.width, device=device).to(net.kv_dtype)

    def body() -> None:
        net.logits(net.step(token_T, state_TD, attn, kv))

    return seconds_of(Graph(body, device, new_pool(device)), device)


def covers(net: StepNet, lengths: list[int], device: torch.device) -> list[float]:
    """Seconds of each prompt, from its states to the head's last."""
    kv, found = new_kv(net, 1, device), []
    for length in lengths:
        token_T = torch.zeros(length, dtype=torch.int64, device=device)
        states = torch.randn(length, net.spec.width, device=device).to(net.kv_dtype)
        attn = inputs(device, 1, 0, length)
        wait(device)
        began = time.perf_counter()
        net.step(token_T, net.fuse(states, (states,) * len(net.feature_layers)), attn, kv)
        wait(device)
        found.append(time.perf_counter() - began)
    return found[1:]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("heads", __doc__)
    parser.add_argument("--head", type=Path, required=True, help="an eagle3 head's directory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=12)
    asked = parser.parse_args(words)
    weights, device = open_weights(resolve(MODEL)), torch.device(asked.device)
    target = CudaDecoder(load_decoder(weights, dtype=asked.dtype, device=device))
    net = load_eagle3(asked.head, target)
    fused = net.fused
    assert fused is not None

    def by_torch(is_tiled: bool) -> None:
        net.fused, net.is_tiled = None, is_tiled

    def by_kernels() -> None:
        net.fused, net.is_tiled = fused, True

    sources: dict[str, Callable[[], None]] = {
        "fused kernels": by_kernels,
        "torch, our attention": lambda: by_torch(True),
        "torch": lambda: by_torch(False),
    }
    lengths = [37 + 61 * i % 509 for i in range(asked.prompts + 1)]
    for place, (name, use) in enumerate(sources.items()):
        use()
        times = covers(net, [length + place for length in lengths], device)
        median, worst = statistics.median(times) * 1e3, max(times) * 1e3
        line = f"{name:22} prompts of new lengths: median {median:.2f} ms, worst {worst:.2f} ms"
        if net.is_tiled:  # what torch's attention asks of the host no graph can hold
            for rows in map(int, asked.rows.split(",")):
                line += f"; level of {rows}: {level(net, rows, asked.context, device) * 1e6:.0f} us"
        print(line, flush=True)

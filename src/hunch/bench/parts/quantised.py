"""What a quantised file costs on a CPU: memory, and processor time of a pass, beside llama.cpp's.

One thread each, in turn. Processor time, not time on the clock: a busy machine disturbs it least.
llama.cpp's is its server's between two requests that differ by 32 tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from hunch.bench.parts.fidelity import post, start_llama
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs
from hunch.models.native import NativeDecoder, load_native
from hunch.models.weights import open_weights

CONTEXT, ROWS = 32, 8


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("hunch bench part quantised", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--skip-llama", action="store_true")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    before, size = _resident(), args.file.stat().st_size
    model = load_native(open_weights(args.file), num_threads=1, bits=args.bits)
    if model is None:
        raise ConfigError(f"{args.file}: the CPU's kernels do not compute this model")
    grown = _resident() - before
    print(f"file {size / 1e6:.0f} MB, weights {model.weight_bytes / 1e6:.0f} MB", end="; ")
    print(f"memory grew by {grown / 1e6:.0f} MB, {grown / size:.2f} times the file")
    server = nullcontext(None) if args.skip_llama else start_llama(str(args.file), threads=1)
    found: dict[str, list[float]] = {"1 row": [], f"{ROWS} rows": [], "llama.cpp": []}
    with server as llama:
        for _ in range(args.repeats):
            found["1 row"].append(_pass_seconds(model, 1))
            found[f"{ROWS} rows"].append(_pass_seconds(model, ROWS))
            if llama is not None:
                found["llama.cpp"].append(_llama_seconds(*llama))
    middle = {name: statistics.median(times) for name, times in found.items() if times}
    for name, seconds in middle.items():
        print(f"{name}: {1e3 * seconds:.1f} ms, {seconds / middle['1 row']:.2f} times 1 row")


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _pass_seconds(model: NativeDecoder, num_rows: int, count: int = 6) -> float:
    """A pass over one token each of so many sequences, logits included."""
    row_T = torch.arange(num_rows)
    attn = AttnInputs(
        pos_T=torch.full((num_rows,), CONTEXT - 1),
        slot_T=row_T * CONTEXT + CONTEXT - 1,
        seq_T=row_T,
        table_SB=row_T[:, None],
        base_T=torch.full((num_rows,), CONTEXT),
        tree_TP=None,
        block_size=CONTEXT,
    )
    kv = model.new_kv(num_rows * CONTEXT)
    started = time.thread_time()
    for _ in range(count):
        model.logits(model.forward(row_T + 100, attn, kv).last_TD)
    return (time.thread_time() - started) / count


def _llama_seconds(url: str, pid: int) -> float:
    def cost(num_tokens: int) -> float:
        before = _cpu_seconds(pid)
        body = {"prompt": "def quicksort(items):", "n_predict": num_tokens, "temperature": 0}
        post(f"{url}/completion", {**body, "ignore_eos": True, "cache_prompt": True})
        return _cpu_seconds(pid) - before

    return (cost(36) - cost(4)) / 32


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""The cost of a quantised file on a CPU: memory, and processor time of a pass, beside llama.cpp's.

One thread each, in turn. Processor time is measured, as other work disturbs it least. That of
llama.cpp is its server's difference between two requests that differ by 32 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from hunch.bench.environment import cpu_seconds, own_bytes
from hunch.bench.parts import PartOptions
from hunch.bench.parts.fidelity import start_llama
from hunch.bench.peers import post
from hunch.errors import ConfigError
from hunch.hub import resolve
from hunch.kernels.attention import AttnInputs
from hunch.models.native import NativeDecoder, load_native
from hunch.models.weights import open_weights

NUM_PASSES = 6  # whose mean is a figure


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("quantised", __doc__)
    parser.add_argument("file", help="a .gguf file, or a model's name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", default="1,8", help="of a pass, commas between")
    parser.add_argument("--context", type=int, default=32, help="tokens before each row")
    parser.add_argument("--bits", default="8", help="of activations: 8, 14 or 8,14")
    parser.add_argument("--skip-llama", action="store_true")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    path = resolve(args.file).path
    server = nullcontext(None) if args.skip_llama else start_llama(str(path), threads=1)
    found: dict[str, list[float]] = {}
    with server as llama:
        models = {int(bits): _load(path, int(bits)) for bits in args.bits.split(",")}
        passes = [(bits, int(rows)) for rows in args.rows.split(",") for bits in models]
        for _ in range(args.repeats):
            for bits, rows in passes:
                name = f"{rows} row{'s' * (rows > 1)}" + f", {bits} bits" * (len(models) > 1)
                seconds = _pass_seconds(models[bits], rows, args.context)
                found.setdefault(name, []).append(seconds)
            if llama is not None:
                found.setdefault("llama.cpp", []).append(_llama_seconds(*llama))
    middle = {name: statistics.median(times) for name, times in found.items()}
    first = next(iter(middle))
    for name, seconds in middle.items():
        print(f"{name}: {1e3 * seconds:.1f} ms, {seconds / middle[first]:.2f} times {first}")


def _load(path: Path, bits: int) -> NativeDecoder:
    """The model, and a line on the memory that it takes."""
    before, size = own_bytes("VmRSS"), path.stat().st_size
    model = load_native(open_weights(path), num_threads=1, bits=bits)
    if model is None:
        raise ConfigError(f"{path}: the CPU's kernels do not compute this model")
    grown = own_bytes("VmRSS") - before
    print(f"file {size / 1e6:.0f} MB, weights {model.weight_bytes / 1e6:.0f} MB", end="; ")
    print(f"memory grew by {grown / 1e6:.0f} MB, {grown / size:.2f} times the file")
    return model


def _pass_seconds(model: NativeDecoder, num_rows: int, context: int) -> float:
    """A pass over one token each of this many sequences, logits included."""
    row_T = torch.arange(num_rows)
    attn = AttnInputs(
        pos_T=torch.full((num_rows,), context - 1),
        slot_T=row_T * context + context - 1,
        seq_T=row_T,
        table_SB=row_T[:, None],
        base_T=torch.full((num_rows,), context),
        tree_TP=None,
        block_size=context,
    )
    kv = model.new_kv(num_rows * context)
    started = time.thread_time()
    for _ in range(NUM_PASSES):
        model.logits(model.forward(row_T + 100, attn, kv).last_TD)
    return (time.thread_time() - started) / NUM_PASSES


def _llama_seconds(url: str, pid: int) -> float:
    def cost(num_tokens: int) -> float:
        before = cpu_seconds(pid) or 0.0
        body = {"prompt": "def quicksort(items):", "n_predict": num_tokens, "temperature": 0}
        post(f"{url}/completion", {**body, "ignore_eos": True, "cache_prompt": True})
        return (cpu_seconds(pid) or 0.0) - before

    return (cost(36) - cost(4)) / 32

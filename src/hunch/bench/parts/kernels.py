"""A decoder's pass alone on a GPU, random weights, in a CUDA graph: time, and share of the wall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hunch.bench.parts import PartOptions
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.models.cuda import CudaDecoder
from hunch.models.load import MadeWeights, load_decoder
from hunch.models.spec import ModelSpec

COMMON = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
GEOMETRIES = {  # in the order of the sizes
    "7B": (4096, 32, 32, 8, 128, 14336, 49152),
    "7B-own": (4096, 32, 32, 32, 128, 11008, 32000),  # each head has its own: Llama-2-7B
    "3B": (3072, 28, 24, 8, 128, 8192, 128256),
    "1.5B": (1536, 28, 12, 2, 128, 8960, 151936),
    "1B": (2048, 16, 32, 8, 64, 8192, 128256),
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
}
NUM_REPLAYS = 10  # whose median counts
WALL = 4.45e12  # bytes per second an H200 was measured to read
BLOCK = 16
LEVEL, MAX_TREE = 4, 64  # nodes of a tree's level, and of the largest tree


class RandomWeights(MadeWeights):
    """Weights of a model's config, made where they are used."""

    def __init__(self, config: dict[str, Any], device: str = "cuda") -> None:
        super().__init__(config, ModelSpec.from_config(config))
        self.device = device

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = self.shapes[name]
        noise = torch.randn(shape, device=self.device, dtype=dtype)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


def build(config: dict[str, Any]) -> CudaDecoder:
    torch.manual_seed(0)
    return CudaDecoder(load_decoder(RandomWeights(config), dtype="bfloat16", device="cuda"))


def config_of(geometry: str) -> dict[str, Any]:
    sizes = dict(zip(SIZES, GEOMETRIES[geometry], strict=True))
    tied = {"tie_word_embeddings": geometry == "135M"}
    return {**COMMON, "architectures": ["LlamaForCausalLM"], **sizes, **tied}


def graph_ms(run: Callable[[], None]) -> float:
    """Median milliseconds of one call, replayed from a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(float(a.elapsed_time(b)) for a, b in pairwise(events))
    return times[len(times) // 2]


def last_tokens(lengths: Sequence[int], news: Sequence[int]) -> AttnInputs:
    """Sequences of `lengths` positions, the last `news` of each packed; blocks in any order."""
    counts = [n // BLOCK + 2 for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    pos: list[Tensor] = []
    slot: list[Tensor] = []
    seq: list[int] = []
    spans: list[Span] = []
    at = 0
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        table[s, : counts[s]] = order[at : at + counts[s]]
        at += counts[s]
        p = torch.arange(length - new, length)
        spans.append(Span(len(seq), len(seq) + new, s, length - new, new))
        pos.append(p)
        slot.append(table[s, p // BLOCK] * BLOCK + p % BLOCK)
        seq += [s] * new
    pos_T = torch.cat(pos).cuda()
    return AttnInputs(pos_T, torch.cat(slot).cuda(), torch.tensor(seq).cuda(),
                      table.cuda(), pos_T + 1, None, BLOCK, tuple(spans))  # fmt: skip


def tree_nodes(context: int, num_nodes: int) -> AttnInputs:
    """A sequence's last token and a tree under it, each node of a level under another one."""
    attn = last_tokens([context + num_nodes], [num_nodes])
    paths: list[list[int]] = [[]]  # slots of each node and those above it
    slots = attn.slot_T.tolist()
    for node in range(1, num_nodes):
        above = paths[max(node - LEVEL, 0)]
        paths.append([*above, slots[node]])
    depth = max(map(len, paths))
    attn.pos_T = torch.tensor([context + len(path) for path in paths]).cuda()
    attn.base_T = torch.full_like(attn.pos_T, context + 1)
    attn.tree_TP = torch.tensor([path + [0] * (depth - len(path)) for path in paths]).cuda()
    return attn


@torch.inference_mode()
def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("kernels", __doc__)
    parser.add_argument("--context", type=int, default=300, help="tokens before each row")
    parser.add_argument("--rows", default="1,8,32,64,128,256,512")
    parser.add_argument("--geometries", default="7B,135M", help=f"of {', '.join(GEOMETRIES)}")
    given = parser.parse_args(words)
    print(f"whole pass in a CUDA graph, context {given.context}: ms (share of the wall)")
    for geometry in given.geometries.split(","):
        fast = build(config_of(geometry))
        rows_alone = 0 if geometry == "135M" else fast.decoder.embedding_VD.nbytes
        size = fast.weight_bytes - rows_alone  # of the embedding, only rows are read
        for num_rows in map(int, given.rows.split(",")):
            kv = fast.new_kv((given.context // BLOCK + 2) * BLOCK * num_rows)
            ids = torch.randint(0, 1000, (num_rows,), device="cuda")
            several = last_tokens([given.context] * num_rows, [1] * num_rows)
            one = last_tokens([given.context + num_rows], [num_rows])

            def run(
                attn: AttnInputs, ids: Tensor = ids, fast: CudaDecoder = fast, kv: KVCache = kv
            ) -> None:
                fast.logits(fast.forward(ids, attn, kv).last_TD)

            ms = graph_ms(lambda attn=several, run=run: run(attn))  # type: ignore[misc]
            of_one = graph_ms(lambda attn=one, run=run: run(attn))  # type: ignore[misc]
            line = (
                f"{geometry:5} {num_rows:4} rows {ms:7.3f} ms  {size / WALL / ms * 1e5:5.1f}%   "
                f"as nodes of one sequence {of_one:7.3f} ms"
            )
            if 1 < num_rows <= MAX_TREE:
                tree = tree_nodes(given.context, num_rows)
                of_tree = graph_ms(lambda attn=tree, run=run: run(attn))  # type: ignore[misc]
                line += f"   as a tree {of_tree:7.3f} ms"
            print(line, flush=True)

"""A decode step of a 30B model with 3B active on random weights: time against bytes touched."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hunch.bench.parts.kernels import WALL, RandomSource, graph_ms
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models import fused_experts
from hunch.models.cuda import CudaDecoder
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve

CONTEXT, BLOCK = 512, 16  # tokens before each row; slots of a block


def build(num_layers: int) -> CudaDecoder:
    routing = Routing(num_experts=128, num_chosen=8, is_normed=True)
    spec = ModelSpec(
        architecture="Qwen3MoeForCausalLM", vocab_size=151936, width=2048, num_layers=num_layers,
        num_heads=32, num_kv_heads=4, head_dim=128, ffn_width=6144, max_len=4096, rope=RopeSpec(),
        windows=(None,) * num_layers, has_qk_norm=True,
        experts=ExpertSpec(routing=routing, width=768, layers=(True,) * num_layers),
    )  # fmt: skip
    torch.manual_seed(0)
    return CudaDecoder(resolve(MODELS, spec.architecture)(spec, RandomSource()))


def step(model: CudaDecoder, num_rows: int) -> tuple[Tensor, AttnInputs]:
    """One new token of each row, after a context of zeros."""
    blocks = CONTEXT // BLOCK + 1
    table = torch.arange(num_rows * blocks, device="cuda").view(num_rows, blocks)
    pos = torch.full((num_rows,), CONTEXT, device="cuda")
    slot = table[:, CONTEXT // BLOCK] * BLOCK
    spans = tuple(Span(r, r + 1, r, CONTEXT, 1) for r in range(num_rows))
    attn = AttnInputs(
        pos, slot, torch.arange(num_rows, device="cuda"), table, pos + 1, None, BLOCK, spans
    )
    attn.memo["tiling"] = model.tiling(spans, num_rows)
    ids = torch.arange(num_rows, device="cuda") * 2311 % model.spec.vocab_size
    return ids, attn


def count_touched(model: CudaDecoder, ids: Tensor, attn: AttnInputs, kv: KVCache) -> float:
    """Experts that the step's tokens ask, per layer on average."""
    seen: list[Tensor] = []
    module: Any = fused_experts
    route = module.route

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        chosen, weight = route(*arguments)
        seen.append(chosen)
        return chosen, weight

    module.route = watched
    model.forward(ids, attn, kv)
    module.route = route
    return sum(len(set(chosen.flatten().tolist())) for chosen in seen) / len(seen)


@torch.inference_mode()
def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("hunch bench part experts", description=__doc__)
    parser.add_argument("--layers", type=int, default=48, help="48 take 61 GB in bfloat16")
    num_layers: int = parser.parse_args(words).layers
    model = build(num_layers)
    experts = model.spec.experts
    assert experts is not None
    per_expert = 3 * experts.width * model.spec.width * 2
    dense = model.weight_bytes - num_layers * experts.routing.num_experts * per_expert
    dense -= model.spec.vocab_size * model.spec.width * 2  # of the embedding, only rows are read
    print(f"{model.weight_bytes / 1e9:.1f} GB, {num_layers} layers; {torch.cuda.get_device_name()}")
    kv = model.new_kv(64 * (CONTEXT + BLOCK))
    for num_rows in (1, 2, 4, 8, 16, 32, 64):
        ids, attn = step(model, num_rows)
        touched = count_touched(model, ids, attn, kv)

        def run(ids: Tensor = ids, attn: AttnInputs = attn) -> None:
            model.logits(model.forward(ids, attn, kv).last_TD)

        num_bytes = dense + num_layers * touched * per_expert
        num_bytes += num_rows * CONTEXT * num_layers * 2 * 4 * 128 * 2
        ms, wall = graph_ms(run), num_bytes / WALL * 1e3
        print(
            f"{num_rows:3} rows: {touched:5.1f} experts per layer, {num_bytes / 1e9:6.2f} GB, "
            f"{ms:7.3f} ms, {wall:7.3f} ms at the wall: {wall / ms:.2f}"
        )

"""A decode step of a model with experts on random weights, its time against the bytes it touches;
with --auto, drafting by `auto` beside plain decoding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.bench.parts.kernels import (
    BLOCK,
    COMMON,
    WALL,
    RandomWeights,
    build,
    graph_ms,
    last_tokens,
)
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.models import fused_experts
from hunch.models.cuda import CudaDecoder

ROWS, PAIR_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 64)
NUM_TOKENS = 96  # of each answer beside plain decoding
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {  # 61 GB in bfloat16
        **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {  # 31 GB; latent attention
        **COMMON, "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "topk_method": "greedy", "tie_word_embeddings": False,
    },
}  # fmt: skip


def count_touched(model: CudaDecoder, ids: Tensor, attn: AttnInputs, kv: KVCache) -> float:
    """Experts that the step's tokens use, on average per layer."""
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
def time_steps(config: dict[str, Any], context: int, rows: Sequence[int]) -> None:
    model = build(config)
    spec, experts = model.spec, model.spec.experts
    assert experts is not None
    num_layers = sum(experts.layers)
    per_expert = 3 * experts.width * spec.width * 2
    dense = model.weight_bytes - num_layers * experts.routing.num_experts * per_expert
    dense -= spec.vocab_size * spec.width * 2  # of the embedding, only rows are read
    per_token = sum(2 * math.prod(shape) for shape in model.kv_shapes())
    per_token *= 2 - (spec.latent is not None)
    print(
        f"{model.weight_bytes / 1e9:.1f} GB, {spec.num_layers} layers, {context} tokens before "
        f"each row; {torch.cuda.get_device_name()}"
    )
    kv = model.new_kv(max(rows) * ((context + 1) // BLOCK + 2) * BLOCK)
    for num_rows in rows:
        ids = torch.arange(num_rows, device="cuda") * 2311 % spec.vocab_size
        attn = last_tokens([context + 1] * num_rows, [1] * num_rows)
        attn.memo["tiling"] = model.tiling(attn.spans, num_rows)
        touched = count_touched(model, ids, attn, kv)

        def run(ids: Tensor = ids, attn: AttnInputs = attn) -> None:
            model.logits(model.forward(ids, attn, kv).last_TD)

        num_bytes = dense + num_layers * touched * per_expert + num_rows * context * per_token
        ms, wall = graph_ms(run), num_bytes / WALL * 1e3
        print(
            f"{num_rows:3} rows: {touched:5.1f} experts per layer, {num_bytes / 1e9:6.2f} GB, "
            f"{ms:7.3f} ms, {wall:7.3f} ms at the wall: {wall / ms:.2f}",
            flush=True,
        )


def compare(
    config: dict[str, Any],
    rows: Sequence[int],
    temperatures: Sequence[float],
    rounds: int,
    **options: Any,
) -> None:
    """Compare drafting by `auto` with plain decoding. Greedy texts of random weights repeat, so
    that guesses are right; sampled ones do not."""
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    weights = RandomWeights(config, device)
    with LLM(weights=weights, speculate="off", **options) as plain, plain.sibling("auto") as auto:
        print(f"both engines are ready after {time.perf_counter() - began:.0f} s", flush=True)
        for num_rows, temperature in product(rows, temperatures):
            params = SamplingParams(
                temperature=temperature, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            random = torch.Generator().manual_seed(num_rows)
            prompts = torch.randint(5, 9000, (num_rows, 64), generator=random).tolist()
            seconds: dict[LLM, list[float]] = {plain: [], auto: []}
            texts: dict[LLM, list[list[int]]] = {}
            for _ in range(rounds):
                for llm in (plain, auto):
                    began = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    seconds[llm].append(time.perf_counter() - began)
                    texts[llm] = [output.outputs[0].token_ids for output in outputs]
            off, on = (statistics.median(seconds[llm][1:]) for llm in (plain, auto))
            tokens, stats = num_rows * NUM_TOKENS, auto.stats()
            print(
                f"{num_rows:3} rows, temperature {temperature:.0f}: plain {tokens / off:7.1f} "
                f"tok/s, auto {tokens / on:7.1f}: {off / on:.3f} of plain; "
                f"equal {texts[plain] == texts[auto]}; "
                f"{stats['accepted']} of {stats['drafted']} nodes accepted so far",
                flush=True,
            )


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("experts", __doc__)
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer than the geometry has")
    parser.add_argument("--context", type=int, default=512, help="tokens before each row")
    parser.add_argument("--auto", action="store_true", help="compare `auto` with plain decoding")
    parser.add_argument("--rows", type=int, nargs="+", help="tokens of a step, or requests")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of requests, with --auto"
    )
    parser.add_argument("--rounds", type=int, default=5, help="with --auto; the first is left out")
    asked = parser.parse_args(words)
    config = dict(GEOMETRIES[asked.geometry])
    if asked.layers is not None:
        config["num_hidden_layers"] = asked.layers
    if asked.auto:
        config["vocab_size"] = 49152  # that of the default model's tokenizer
        rows = asked.rows or PAIR_ROWS
        sizes = {"max_model_len": 1024, "max_num_seqs": max(rows), "kv_bytes": 8_000_000_000}
        compare(config, rows, asked.temperatures, asked.rounds, **sizes)
    else:
        time_steps(config, asked.context, asked.rows or ROWS)

"""A model with experts on a GPU: the same bits for every batch, captured or not, near float32's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from builders import Seq, pack, replace_tensors, tables, tiny_config
from hunch.models.cuda import CudaDecoder
from hunch.models.decoder import Decoder
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve
from hunch.step.batch import Batch
from random_models import RandomSource

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 2048,
    "num_experts_per_tok": 4, "moe_intermediate_size": 384,
}  # fmt: skip
CONFIGS = {
    "qwen3": tiny_config("Qwen3MoeForCausalLM", **SIZES, num_experts=32, norm_topk_prob=True),
    "qwen2": tiny_config(
        "Qwen2MoeForCausalLM", **SIZES, num_experts=12, shared_expert_intermediate_size=640
    ),
}
LATENT = SIZES | {
    "num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": None, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS |= {
    "deepseek v3": tiny_config(
        "DeepseekV3ForCausalLM", **LATENT, q_lora_rank=384, n_group=4, topk_group=2
    ),
    "deepseek v2": tiny_config("DeepseekV2ForCausalLM", **LATENT, n_group=1, topk_group=1),
}
CONFIGS["llama 4"] = tiny_config(
    "Llama4ForCausalLM", **SIZES | {"num_experts_per_tok": 1, "moe_intermediate_size": None},
    num_local_experts=16,
    intermediate_size_mlp=512, no_rope_layer_interval=2, attention_chunk_size=16, floor_scale=8,
)  # fmt: skip
CUDA = torch.device("cuda")


def build(name: str, dtype: torch.dtype) -> Decoder:
    spec = ModelSpec.from_config(CONFIGS[name])
    decoder: Decoder = resolve(MODELS, spec.architecture)(spec, RandomSource(0, dtype))
    replace_tensors(decoder, lambda tensor: tensor.cuda())
    decoder.device = CUDA
    return decoder


def run(model: CudaDecoder | Decoder, seqs: list[Seq], kv: object, table: torch.Tensor) -> Batch:
    ids_T, attn = pack(seqs, table)
    batch = Batch(ids_T, attn, []).to(CUDA)
    return model.forward(batch.ids_T, batch.attn, kv).last_TD


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_rows_are_the_same_bits_in_every_batch(name: str) -> None:
    model = CudaDecoder(build(name, torch.bfloat16))
    gen = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 512, (64, 41), generator=gen).tolist()
    table = tables(64, 16)
    whole = run(model, [Seq(p) for p in prompts], model.new_kv(64 * 64), table)
    expected = whole.view(64, 41, -1)[:, -1]
    for size in (1, 3, 5, 16, 33, 64):
        kv = model.new_kv(64 * 64)
        run(model, [Seq(p[:40]) for p in prompts[:size]], kv, table)
        rows = run(model, [Seq(p[40:], start=40) for p in prompts[:size]], kv, table)
        assert torch.equal(rows, expected[:size]), size
    plain = build(name, torch.float32)
    exact = run(plain, [Seq(p) for p in prompts[:4]], plain.new_kv(64 * 64), table)
    error = (whole[: 4 * 41].float() - exact).norm() / exact.norm()
    assert error < 0.1  # a choice that falls otherwise is a large step


@torch.inference_mode()
def test_a_captured_pass_follows_its_inputs() -> None:
    model = CudaDecoder(build("qwen3", torch.bfloat16))
    table = tables(8, 16)
    kv = model.new_kv(8 * 64)
    ids_T, attn = pack([Seq([r]) for r in range(8)], table)
    batch = Batch(ids_T, attn, []).to(CUDA)
    attn = batch.attn
    attn.memo["tiling"] = model.tiling(attn.spans, 8)
    model.forward(batch.ids_T, attn, kv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model.forward(batch.ids_T, attn, kv)
    for shift in (0, 100, 7):
        batch.ids_T.copy_(torch.arange(8) + shift)
        graph.replay()
        eager = model.forward(batch.ids_T.clone(), attn, model.new_kv(8 * 64))
        assert torch.equal(hidden.last_TD, eager.last_TD)

"""Latent attention on a GPU: its kernels against their references, a whole pass against torch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from builders import replace_tensors, tiny_spec
from gpu_inputs import DEVICE, close, packed, rand, step
from hunch.kernels import gpu_attention, gpu_latent, gpu_tiling
from hunch.kernels.attention import attention_ref
from hunch.models.cuda import CudaDecoder
from hunch.models.decoder import Decoder
from hunch.registry import MODELS, resolve
from random_models import RandomSource

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
TABLE = torch.rand(64, 8, generator=torch.Generator().manual_seed(4)).to(DEVICE)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("rank", [0, 24])
def test_what_is_kept_and_what_queries_come_from(num_parts: int, rank: int) -> None:
    latent, rope = 20, 8
    x = rand(num_parts, 3, rank + latent + rope)
    q_norm, kv_norm = rand(max(rank, 1)), rand(latent)
    pos, slot = (torch.tensor(v, device=DEVICE) for v in ([5, 0, 9], [2, -1, 4]))
    cache, want = (torch.zeros(6, latent + rope, device=DEVICE) for _ in range(2))
    q = torch.empty(3, rank, device=DEVICE) if rank else None
    norm = (q_norm, 1e-5) if rank else None
    gpu_latent.narrow(x, norm, (kv_norm, 1e-6), q, cache, pos, slot, TABLE, torch.float32)
    whole = x.sum(0)
    gpu_latent.keep_latent_ref(whole[:, rank:], kv_norm, 1e-6, want, pos, slot, TABLE)
    close(cache, want)
    if q is not None:
        close(q, gpu_latent.norm_ref(whole[:, :rank].double(), q_norm, 1e-5))


@pytest.mark.parametrize("num_rows", [3, 20])
def test_products_per_head(num_rows: int) -> None:
    q, k_up = rand(num_rows, 3, 70 + 8), rand(3, 40, 70)
    pos = torch.arange(num_rows, device=DEVICE)
    out = torch.empty(num_rows, 3, 48, device=DEVICE)
    gpu_latent.heads_product(q, k_up, out, pos, TABLE)
    close(out, gpu_latent.absorb_ref(q, k_up, pos, TABLE))
    values = torch.empty(num_rows, 3, 24, device=DEVICE)
    v_up = rand(3, 24, 40)
    gpu_latent.heads_product(out[..., :40], v_up, values)
    close(values, torch.einsum("tni,noi->tno", out[..., :40].double(), v_up.double()))


@pytest.mark.parametrize(
    ("programs", "tree"), [(1, None), (3, [-1, 0, -1, 0, 1]), (1, [-1, 0, -1, 0, 1])]
)
def test_heads_read_one_latent_as_key_and_value(programs: int, tree: list[int] | None) -> None:
    heads, latent, tail = 6, 24, 8
    attn = packed([200, 1, 62], [3, 1, 2], tree)
    num_tokens, num_slots = len(attn.pos_T), int(attn.table_SB.max() + 1) * 16
    q, cache = rand(num_tokens, heads, latent + tail), rand(num_slots, 1, latent + tail)
    out = torch.full((num_tokens, heads, latent), float("nan"), device=DEVICE)
    tiles = gpu_tiling.tiles_of(attn.spans, 2, 10).to(DEVICE)
    space = gpu_tiling.Workspace.create(num_tokens, heads, latent, 512, DEVICE)
    tiling = gpu_tiling.Tiling(tiles, 2, programs, space)
    gpu_attention.attention(q, cache, cache, attn, 0.2, out, tiling=tiling)
    close(out, attention_ref(q, cache, cache, attn, 0.2)[..., :latent])
    assert not space.count.any()


def test_wide_heads_are_divided_over_programs() -> None:
    assert gpu_tiling.parts_of(128, 1, 512) == 4
    assert gpu_tiling.parts_of(20, 1, 512) == 1
    assert gpu_tiling.parts_of(66, 1, 512) == 3
    assert gpu_tiling.parts_of(128, 1, 128) == 1
    heads, latent = 34, 260
    attn = packed([30], [2], None)
    num_slots = int(attn.table_SB.max() + 1) * 16
    q, cache = rand(2, heads, latent + 4), rand(num_slots, 1, latent + 4)
    out = torch.empty(2, heads, latent, device=DEVICE)
    gpu_attention.attention(q, cache, cache, attn, 0.05, out)
    close(out, attention_ref(q, cache, cache, attn, 0.05)[..., :latent])


SIZES = {
    "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 50,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


GROUPS = {"n_group": 2, "topk_group": 1}
DENSE = dict.fromkeys((*(k for k in SIZES if "expert" in k or "moe" in k), "first_k_dense_replace"))


def build(dtype: torch.dtype, architecture: str, **changes: object) -> Decoder:
    spec = tiny_spec(architecture, **SIZES | changes)
    decoder: Decoder = resolve(MODELS, architecture)(spec, RandomSource(0, dtype))
    replace_tensors(decoder, lambda tensor: tensor.to(DEVICE))
    decoder.device = torch.device(DEVICE)
    return decoder


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("DeepseekV3ForCausalLM", {"q_lora_rank": 40, **GROUPS, "attention_bias": True}),
        pytest.param("DeepseekV2ForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param(
            "MiniCPM3ForCausalLM",
            {**DENSE, "q_lora_rank": 40, "scale_emb": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fused_pass_is_the_plain_pass(architecture: str, changes: dict[str, object]) -> None:
    half, whole = (build(d, architecture, **changes) for d in (torch.float16, torch.float32))
    fast = CudaDecoder(half)
    ids = torch.tensor([5, 17, 3, 40, 9, 33, 21], device=DEVICE)
    kv, kv_ref = fast.new_kv(64), whole.new_kv(64)
    assert kv.k_LCMH is kv.v_LCMH
    want = whole.forward(ids, step(0, 7), kv_ref, (1,))
    parts = [
        fast.forward(ids[:6], step(0, 6), kv, (1,)),
        fast.forward(ids[6:], step(6, 7), kv, (1,)),
    ]
    hidden = torch.cat([part.last_TD for part in parts])
    close(torch.cat([part.features[0] for part in parts]), want.features[0], 5e-3)
    close(hidden, want.last_TD, 5e-3)
    close(kv.k_LCMH, kv_ref.k_LCMH, 5e-3)

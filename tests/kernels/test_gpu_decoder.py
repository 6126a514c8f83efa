"""The fused pass against the plain one: hidden states, features and KV, however it is packed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gpu_inputs import DEVICE, build, step
from hunch.errors import UnsupportedModelError
from hunch.kernels import gpu_gemm
from hunch.kernels.delta import DeltaShape
from hunch.kernels.experts import Routing
from hunch.kernels.short_conv import ConvShape
from hunch.kernels.ssm import SsmShape
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models import cuda
from hunch.models.cuda import CudaDecoder
from hunch.models.load_target import with_kv
from hunch.models.spec import OtherHeads, TokenInputs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want.double()).norm() / want.double().norm() < 5e-3


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        pytest.param("Qwen2ForCausalLM", {"has_qkv_bias": True}, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", {"has_qk_norm": True}, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {"width": 64}, id="bulk copies"),
    ],
)
def test_fused_pass_is_the_plain_pass(
    architecture: str, changes: dict[str, object], monkeypatch
) -> None:
    monkeypatch.setattr(gpu_gemm, "LONG_K", changes.get("width", gpu_gemm.LONG_K))
    half, whole = (build(architecture, d, **changes) for d in (torch.float16, torch.float32))
    fast = CudaDecoder(half)
    ids = torch.randint(0, 50, (18,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kv, kv_ref = fast.new_kv(64), whole.new_kv(64)
    want = whole.forward(ids, step(0, 18), kv_ref, (0, 1, 3))
    parts = [fast.forward(ids[:17], step(0, 17), kv, (0, 1, 3))]
    parts += [fast.forward(ids[17:], step(17, 18), kv, (0, 1, 3))]
    hidden = torch.cat([part.last_TD for part in parts])
    close(hidden, want.last_TD)
    for index in range(3):
        close(torch.cat([part.features[index] for part in parts]), want.features[index])
    close(fast.logits(hidden), whole.logits(want.last_TD))
    for name in ("k_LCMH", "v_LCMH"):
        close(getattr(kv, name), getattr(kv_ref, name))


LEARNED = {"rope": None, "norm": "layer", "is_gated": False, "has_mlp_bias": True}
LEARNED |= {"has_qkv_bias": True, "has_out_bias": True, "position_offset": 2}
GEMMA = {"has_branch_norms": True, "has_qk_norm": True, "is_norm_shifted": True}
GEMMA |= {"activation": "gelu_pytorch_tanh", "embed_scale": 7.0, "attn_scale": 0.3}
GEMMA |= {"more_ropes": (RopeSpec(theta=100.0),), "rope_of": (0, 1)}
GEMMA |= {"attn_cap": 2.0, "logits_cap": 3.0}
GEMMA4 = {"has_branch_norms": True, "has_qk_norm": True, "has_v_norm": True, "attn_scale": 1.0}
GEMMA4 |= {"activation": "gelu_pytorch_tanh", "num_layers": 3, "windows": (4, None, None)}
GEMMA4 |= {"other_heads": OtherHeads(num_kv_heads=2, head_dim=32, layers=(False, True, True))}
GEMMA4 |= {"more_ropes": (RopeSpec(head_dim=32, rope_type="proportional", num_pairs=4),)}
GEMMA4 |= {"rope_of": (0, 1, 1), "kv_of": (0, 1, 1), "ffn_widths": (32, 32, 48)}
GEMMA4 |= {"inputs": TokenInputs(width=16, vocab_size=50), "has_layer_scale": True}
BESIDE = ExpertSpec(
    routing=Routing(num_experts=4, num_chosen=2, is_normed=True),
    width=16,
    layers=(True, False),
    is_beside=True,
)
GEMMA4_EXPERTS = {"has_branch_norms": True, "has_layer_scale": True, "experts": BESIDE}
MIXED = {"has_sinks": True, "is_parallel": True, "has_mlp_norm": False, "embed_scale": 3.0}
MIXED |= {"activation": "clipped"}
MIXED |= {"residual_scale": 0.3, "logits_scale": 0.5, "rope": RopeSpec(dim=8)}
DELTA = DeltaShape(num_k_heads=1, num_v_heads=2, k_dim=8, v_dim=16, num_taps=4)
RECURRENT = {"recurrence": DELTA, "is_recurrent": (True, False), "has_attn_gate": True}
SSM = SsmShape(num_groups=1, num_heads=4, k_dim=8, v_dim=16, num_taps=3)
MAMBA = {"recurrence": SSM, "is_recurrent": (True, False), "residual_scale": 0.3}
BOTH = {"recurrence": SSM, "is_recurrent": (True, True), "attends_too": True}
HALVES = {"recurrence": SSM, "is_recurrent": (False, True, False), "is_mlp": (True, False, False)}
HALVES |= {"num_layers": 3, "windows": (None,) * 3, "is_gated": False, "activation": "relu2"}
SQUARES = ExpertSpec(
    routing=Routing(num_experts=4, num_chosen=2, scores="sigmoid"),
    width=16,
    layers=(True, False, False),
    has_choice_bias=True,
    shared_width=16,
)
EXPERT_HALVES = HALVES | {"is_gated": True, "activation": "relu", "experts": SQUARES}
CONV = {"recurrence": ConvShape(width=32, num_taps=3), "is_recurrent": (True, False)}
RECURRENT |= {"has_qk_norm": True, "is_norm_shifted": True, "rope": RopeSpec(dim=8)}
ONE = Routing(num_experts=4, num_chosen=1, scores="chosen_sigmoid", is_of_input=True)
LLAMA4 = {"windows": (-4, None), "has_qk_norm": True, "unnormed": (False, True)}
LLAMA4 |= {
    "more_ropes": (RopeSpec(rope_type="none", temper=0.5, temper_span=2, temper_shift=1),),
    "rope_of": (0, 1),
}
LLAMA4 |= {"experts": ExpertSpec(routing=ONE, width=16, layers=(True, False), shared_width=16)}
BARE = {"has_input_norms": False, "has_branch_norms": True, "residual_scale": 0.5}
BARE |= {"has_qk_norm": True, "is_qk_norm_whole": True, "num_kv_heads": 2, "num_heads": 4}
BESIDE_MLP = {"norm": "layer", "is_parallel": True, "is_gated": False, "activation": "relu2"}
BESIDE_MLP |= {"has_head_bias": True, "is_tied": False}
AFTER = {"activation": "relu", "is_post_norm": True, "has_final_norm": False}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param("Gemma3ForCausalLM", GEMMA, id="gemma", marks=pytest.mark.slow),
        pytest.param("Gemma4ForCausalLM", GEMMA4, id="gemma 4"),
        pytest.param("Gemma4ForCausalLM", GEMMA4_EXPERTS, id="gemma 4, experts"),
        pytest.param("Llama4ForCausalLM", LLAMA4, id="llama 4"),
        pytest.param("GPT2LMHeadModel", LEARNED | {"activation": "gelu_new"}, id="gpt-2"),
        pytest.param("OPTForCausalLM", LEARNED | AFTER, id="norms after the sums"),
        pytest.param("GraniteForCausalLM", MIXED, id="sinks, scales, one norm"),
        pytest.param("Olmo2ForCausalLM", BARE, id="no norms before, one norm of all heads"),
        pytest.param("PhiForCausalLM", BESIDE_MLP, id="parallel, two norms, squares"),
        pytest.param("Qwen3_5ForCausalLM", RECURRENT, id="recurrent", marks=pytest.mark.slow),
        pytest.param("BambaForCausalLM", MAMBA, id="mamba", marks=pytest.mark.slow),
        pytest.param("FalconH1ForCausalLM", BOTH, id="attention and mamba", marks=pytest.mark.slow),
        pytest.param("NemotronHForCausalLM", HALVES, id="halves", marks=pytest.mark.slow),
        pytest.param(
            "NemotronHForCausalLM", EXPERT_HALVES, id="halves, experts", marks=pytest.mark.slow
        ),
        pytest.param("Lfm2ForCausalLM", CONV, id="convolution", marks=pytest.mark.slow),
    ],
)
def test_parts_of_families_are_those_of_the_plain_pass(
    architecture: str, changes: dict[str, object]
) -> None:
    sizes = {"num_layers": 2, "width": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_width": 32}
    changes = {**sizes, "windows": (None, 4), **changes}
    half, whole = (build(architecture, d, **changes) for d in (torch.float16, torch.float32))
    fast = CudaDecoder(half)
    ids = torch.tensor([5, 17, 3, 40, 9, 33, 21], device=DEVICE)
    kv, kv_ref = fast.new_kv(64), whole.new_kv(64)
    want = whole.forward(ids, step(0, 7), kv_ref, (0, 1))
    parts = [fast.forward(ids[:6], step(0, 6), kv, (0, 1))]
    parts += [fast.forward(ids[6:], step(6, 7), kv, (0, 1))]
    hidden = torch.cat([part.last_TD for part in parts])
    close(hidden, want.last_TD)
    for index in range(2):
        close(torch.cat([part.features[index] for part in parts]), want.features[index])
    close(fast.logits(hidden), whole.logits(want.last_TD))


def test_models_it_does_not_know_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="float32"):
        CudaDecoder(build("LlamaForCausalLM", torch.float32))
    spec = {"norm": "layer", "is_post_norm": True}
    with pytest.raises(UnsupportedModelError, match="norms after the sums"):
        CudaDecoder(build("OPTForCausalLM", torch.float16, **spec))


@pytest.mark.parametrize("hold", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_weights_in_few_bits_are_the_numbers_they_stand_for(hold: str) -> None:
    small = {"width": 64, "num_layers": 1, "windows": (None,), "is_tied": False, "vocab_size": 20}
    held, numbers = (build("LlamaForCausalLM", torch.float16, hold=hold, **small) for _ in "ab")
    numbers.expand()
    assert held.weight_bytes < numbers.weight_bytes
    ids = torch.arange(2, device=DEVICE)
    results = []
    for decoder in (held, numbers):
        fast = CudaDecoder(decoder)
        hidden = fast.forward(ids, step(0, 2), fast.new_kv(64)).last_TD
        results.append(fast.logits(hidden))
    if DEVICE == "cuda":
        assert torch.equal(*results)
    close(*results)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param("fp8", torch.float8_e4m3fn, marks=pytest.mark.slow), ("int8", torch.int8)],
)
def test_keys_and_values_in_8_bits_are_written_once_and_read_alike(
    name: str, dtype: torch.dtype
) -> None:
    small = {"width": 64, "num_layers": 1, "windows": (None,), "vocab_size": 20}
    fast = CudaDecoder(build("LlamaForCausalLM", torch.float16, **small))
    ids = torch.arange(2, device=DEVICE)
    exact = fast.forward(ids, step(0, 2), fast.new_kv(64)).last_TD
    with_kv(fast, name)
    kv = fast.new_kv(64)
    assert kv.k_LCMH.dtype == dtype
    whole = fast.forward(ids, step(0, 2), kv).last_TD
    assert not torch.equal(whole, exact)
    assert (whole - exact).norm() / exact.norm() < (0.1 if name == "fp8" else 0.02)
    again = fast.new_kv(64)
    parts = [fast.forward(ids[t : t + 1], step(t, t + 1), again).last_TD for t in range(2)]
    close(torch.cat(parts), whole)
    assert torch.equal(again.k_LCMH.view(torch.uint8), kv.k_LCMH.view(torch.uint8))
    assert kv.scales is not None
    assert again.scales is not None
    assert torch.equal(again.scales.v_LCMH, kv.scales.v_LCMH)
    slots = torch.tensor([0]), torch.tensor([40])
    kv.move(*slots)  # a path that was accepted takes its scales along
    assert torch.equal(kv.scales.k_LCMH[:, 40], kv.scales.k_LCMH[:, 0])


def test_shorter_texts_leave_memory_to_share_more_tokens_attention(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "SHARED_BYTES", 2**20)
    decoder = build("LlamaForCausalLM", torch.float16, max_len=2**16)
    tilers = [CudaDecoder(decoder, length).tiler for length in (None, 2**20, 2000)]
    assert [tiler.max_len for tiler in tilers] == [2**16, 2**16, 2000]
    few, same, many = (tiler.workspace.max_tokens for tiler in tilers)
    assert few == same
    assert many > 16 * few


def test_a_large_gpu_has_memory_to_share_more_tokens_attention(monkeypatch) -> None:
    """A model of 131,072 positions and 64 heads takes 34 MB of it for each token."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Memory(150 * 10**9))
    gpu = torch.device("cuda")
    assert cuda.shared_bytes(gpu) // 34_000_000 > 32
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Memory(24 * 10**9))
    assert cuda.shared_bytes(gpu) == cuda.SHARED_BYTES == cuda.shared_bytes(torch.device("cpu"))


class Memory:
    """Properties of a GPU of this much memory."""

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory

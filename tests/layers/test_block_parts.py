"""Layers as drafters and trainers use them: on their own, with an attention of the caller's."""

import math
import resource
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from builders import (
    Seq,
    new_kv,
    pack,
    plain_logits,
    replace_tensors,
    tiny_config,
    tiny_model,
    tiny_spec,
)
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Paged, split_heads
from hunch.layers.rope import Rope, RopeSpec, amplitude, frequencies
from hunch.models.build import build_block
from random_models import RandomSource

IDS = [5, 9, 2, 40, 41, 7, 8]


def full_sequence(rotation):
    """Attention over one whole sequence without a cache, as a trainer would write it."""

    def attend(qkv_TAH, heads, layer, sinks_N=None):
        q, k, v = (x.transpose(0, 1)[None] for x in split_heads(qkv_TAH, heads, rotation))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=heads.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend


def test_layers_run_over_any_attention_and_let_gradients_through():
    model = tiny_model()
    ids_T, pos_T = torch.tensor(IDS), torch.arange(len(IDS))
    replace_tensors(model, lambda t: t.clone().requires_grad_())
    hidden = model.run(model.start(ids_T, pos_T), full_sequence(model.rope(pos_T)))
    logits = model.logits(hidden.last_TD)
    torch.testing.assert_close(
        logits.detach(), plain_logits(tiny_model(), IDS), atol=1e-5, rtol=1e-5
    )
    functional.cross_entropy(logits[:-1], ids_T[1:]).backward()
    tensors = dict(model.named_tensors())
    assert "layers.2.attn.qkv.weight" in tensors
    without = [n for n, t in tensors.items() if t.grad is None or not t.grad.abs().sum() > 0]
    assert without == []


def test_replaced_tensors_stay_shared():
    model = tiny_model(tie_word_embeddings=True)
    num_bytes = model.weight_bytes
    replace_tensors(model, lambda t: t.to(torch.bfloat16))
    assert model.embedding_VD is model.head.weight_NK
    assert model.weight_bytes * 2 == num_bytes


def test_a_block_with_a_wider_input_and_without_its_norm():
    """An EAGLE head's layer: two inputs joined, a residual of the caller's choice."""
    spec = tiny_spec(num_hidden_layers=1)
    block = build_block(
        spec, RandomSource(4), "layers.0.", 0, input_width=2 * spec.width, has_attn_norm=False
    )
    model = tiny_model()
    kv = new_kv(model)
    _, attn = pack([Seq(IDS)])
    x_TD, h_TD = torch.randn(2, len(IDS), spec.width, generator=torch.Generator().manual_seed(1))
    rotation = model.rope(attn.pos_T)
    joined = torch.cat((x_TD, h_TD), dim=-1)
    paged = block.mix(h_TD, joined, Paged(attn, KVCache(kv.k_LCMH[:1], kv.v_LCMH[:1]), rotation))
    whole = block.mix(h_TD, joined, full_sequence(rotation))
    torch.testing.assert_close(paged, whole, atol=1e-5, rtol=1e-5)
    assert block.attn_norm is None


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones():
    spec = RopeSpec(
        theta=500000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_len=8192,
    )
    scaled, plain = frequencies(spec, 128), frequencies(RopeSpec(theta=500000.0), 128)
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(scaled[wavelength < 2048], plain[wavelength < 2048])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert (scaled.diff() < 0).all()


def test_factors_divide_the_frequencies():
    """Files that store Llama 3's scaling worked out give what its formula gives."""
    llama3 = RopeSpec(rope_type="llama3", factor=4.0, original_len=64)
    divisors = frequencies(RopeSpec(), 16) / frequencies(llama3, 16)
    stored = RopeSpec(rope_type="factors", factors=tuple(divisors.tolist()))
    torch.testing.assert_close(frequencies(stored, 16), frequencies(llama3, 16))


def test_yarn_raises_the_amplitude():
    assert amplitude(RopeSpec(rope_type="yarn", factor=4.0)) == 0.1 * math.log(4.0) + 1.0
    assert amplitude(RopeSpec(rope_type="yarn", factor=4.0, attention_factor=1.5)) == 1.5
    assert amplitude(RopeSpec()) == 1.0


def test_the_rope_table_reaches_the_last_position():
    rope = Rope(RopeSpec(), 8, tiny_config()["max_position_embeddings"])
    turned = rope(torch.tensor([0, 255]))
    assert turned.cos_T1H[0].eq(1).all()
    torch.testing.assert_close(turned.cos_T1H[1, 0, 0], torch.tensor(255.0).cos())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's files")
def test_a_rope_table_of_a_long_context_takes_memory_as_far_as_positions_come():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before, length = resident(), 1 << 18
    rope = Rope(RopeSpec(), 64, length, is_whole=False)
    rope.reach(1500)
    assert resident() - before < rope.table_LH.nbytes / 2
    whole = Rope(RopeSpec(), 64, 2048)
    assert rope.table_LH[:1500].equal(whole.table_LH[:1500])
    rope.reach(2 * length)
    last = torch.tensor(length - 1.0).cos()
    torch.testing.assert_close(rope.table_LH[-1, 0], last)

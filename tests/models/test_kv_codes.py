"""Keys and values in 8 bits on a CPU: what is written, what is read, and that no pass matters."""

import pytest
import torch

from builders import Seq, pack, tables, tiny_config, tiny_weights
from cases import every_pair
from hunch.draft import KVShape
from hunch.errors import ConfigError
from hunch.kernels import native_library
from hunch.kernels.kv_store import KVCache, codes_ref
from hunch.models.load import load_decoder
from hunch.models.load_target import with_kv
from hunch.models.native import load_native
from hunch.step.kv_cache import bytes_per_slot
from tiny_families import FAMILIES

needs_native = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
GEMMA4 = {**SIZES, "sliding_window": 50, "global_head_dim": 64, "rope_theta": None}
GEMMA4 |= {"hidden_size_per_layer_input": 48, "vocab_size_per_layer_input": 97}
GEMMA4 |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS = {
    "llama": tiny_config(**SIZES, head_dim=32),
    "long heads": tiny_config(**SIZES, head_dim=320),
    "windows, two shapes": tiny_config("Gemma4ForCausalLM", **GEMMA4, head_dim=32),
    "biases": tiny_config(**SIZES, head_dim=32, attention_bias=True),
    "by torch": tiny_config(**SIZES, head_dim=24),
}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCKS = 128  # of 4 slots


def words(num, seed=0):
    return torch.randint(0, 97, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_of(name, kv_dtype="auto", dtype="float32"):
    weights = tiny_weights(CONFIGS[name])
    native_model = load_native(weights, dtype=dtype, num_threads=2)
    return with_kv(native_model or load_decoder(weights), kv_dtype)


def run(model, seqs, kv):
    ids_T, attn = pack(seqs, tables(len(seqs), BLOCKS))
    return model.forward(ids_T, attn, kv).last_TD


def copy_kv(kv):
    if kv is None:
        return None
    return KVCache(
        kv.k_LCMH.clone(), kv.v_LCMH.clone(), scales=copy_kv(kv.scales), others=copy_kv(kv.others)
    )


@needs_native
@pytest.mark.parametrize("held", DTYPES)
def test_codes_are_those_of_the_reference(held):
    """The first layer's keys and values do not depend on what was read."""
    prompt, plain, model = words(40), model_of("llama"), model_of("llama", held)
    floats, codes = plain.new_kv(4 * BLOCKS), model.new_kv(4 * BLOCKS)
    for m, kv in ((plain, floats), (model, codes)):
        run(m, [Seq(prompt)], kv)
    pairs = zip(floats.layer(0), codes.layer(0), codes.scales_of(0), strict=True)
    for floats_CMH, codes_CMH, scales_CM1 in pairs:
        written = floats_CMH.any(-1).any(-1)
        assert written.sum() == 40
        expected, scales = codes_ref(floats_CMH[written], DTYPES[held])
        assert codes_CMH[written].view(torch.uint8).equal(expected.view(torch.uint8))
        assert scales_CM1[written].equal(scales)


@pytest.mark.parametrize(
    ("name", "held", "dtype"), every_pair([*CONFIGS], [*DTYPES], ["float32", "int8"])
)
def test_text_stays_near(name, held, dtype):
    """Of the rounding of keys and values alone: that of the weights is on both sides."""
    prompt, plain = words(200), model_of(name, dtype=dtype)
    model = model_of(name, held, dtype)
    assert model.kv_dtype == DTYPES[held]
    assert model.is_quantised == plain.is_quantised
    expected = run(plain, [Seq(prompt)], plain.new_kv(4 * BLOCKS))
    got = run(model, [Seq(prompt)], model.new_kv(4 * BLOCKS))
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.25


@pytest.mark.parametrize(("name", "held", "start"), every_pair([*CONFIGS], [*DTYPES], [5, 126]))
def test_no_pass_changes_a_bit(name, held, start):
    """A prompt in chunks; a path of a tree, a chain and plain decoding."""
    model, prompt = model_of(name, held), words(start)
    kv = model.new_kv(4 * BLOCKS)
    whole = run(model, [Seq(prompt)], kv)
    chunked = model.new_kv(4 * BLOCKS)
    parts = [run(model, [Seq(prompt[:3])], chunked)]
    parts.append(run(model, [Seq(prompt[3:], start=3)], chunked))
    assert torch.cat(parts).equal(whole)
    draft, parents = [11, 12, 13, 14, 15, 16], [-1, -1, 0, 2, 1, 3]
    tree = run(model, [Seq([7], start=start, draft=draft, parents=parents)], copy_kv(kv))
    for path in ([0, 2, 3, 5], [1, 4]):
        plain_kv, at = copy_kv(kv), start
        hidden = run(model, [Seq([7], start=at)], plain_kv)
        assert hidden[0].equal(tree[0])
        for node in path:
            at += 1
            hidden = run(model, [Seq([draft[node]], start=at)], plain_kv)
            assert hidden[0].equal(tree[node + 1])
        chain = [draft[node] for node in path]
        verified = run(model, [Seq([7], start=start, draft=chain)], copy_kv(kv))
        assert verified[-1].equal(hidden[0])


@needs_native
@pytest.mark.parametrize("held", DTYPES)
def test_extremes_stay_numbers(held):
    """Zeros have a scale. An infinite one would reach rows that do not see its value."""
    model = model_of("biases", held)
    kv, part = model.new_kv(4 * BLOCKS), model.network.layers[0].values
    part["attn_norm"].zero_()
    part["k_bias"].zero_()
    part["v_bias"].fill_(torch.inf)
    run(model, [Seq(words(20))], kv)
    k_CM1, v_CM1 = kv.scales_of(0)
    assert set(k_CM1.flatten().tolist()) == {0.0, 1.0}  # not written, written
    assert v_CM1.isfinite().all()


def test_a_slot_takes_a_byte_a_number_and_a_scale_a_head():
    model = model_of("llama", "int8")
    shape = KVShape.of(model.kv_shapes(), model.kv_dtype)
    assert bytes_per_slot([shape]) == 2 * 2 * 2 * (32 + 4)  # k and v, layers, heads


def test_latent_attention_is_refused_in_words():
    architecture, changes = FAMILIES["deepseek v2"]
    config = tiny_config(architecture, **changes)
    with pytest.raises(ConfigError, match="latent attention"):
        with_kv(load_decoder(tiny_weights(config)), "int8")

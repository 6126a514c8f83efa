"""Families with experts against transformers, and the independence of their rows."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from builders import check_rows, plain_logits
from expert_models import CASES, IDS, TORCH_CASES, make
from hunch.kernels import native_library
from hunch.kernels.native_matrix import FP4
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import for_length, open_weights
from published_files import random_mxfp4, write

SLOW_TYPES = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int8", "int4")]


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@pytest.fixture(scope="module", params=CASES | TORCH_CASES)
def torch_pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@torch.no_grad()
def test_logits_are_those_of_transformers(torch_pair):
    theirs, weights = torch_pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(
        plain_logits(load_decoder(weights), IDS), expected, atol=2e-4, rtol=2e-4
    )


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@torch.no_grad()
def test_native_kernels_compute_what_transformers_does(pair):
    theirs, weights = pair
    ours = load_native(weights, dtype="float32", num_threads=2)
    expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=5e-4, rtol=5e-4)


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", *SLOW_TYPES])
def test_a_row_is_the_same_bits_in_any_batch_and_any_chunk(pair, dtype):
    check_rows(load_native(pair[1], dtype=dtype, num_threads=2))


@pytest.mark.parametrize("name", ["deepseek-v3, narrow", "deepseek-v2, groups"])
def test_so_it_is_with_latent_attention_by_torch(name, tmp_path):
    make(name, tmp_path)
    model = load_decoder(open_weights(tmp_path))
    check_rows(model)
    kv = model.new_kv(8)
    assert kv.v_LCMH is kv.k_LCMH  # one vector per token and layer
    assert kv.k_LCMH.shape == (3, 8, 1, 32 if "narrow" in name else 48)


@torch.no_grad()
def test_phi_moe_has_scales_of_its_own_for_its_rope_factors(tmp_path):
    theirs = make("phi-moe, long", tmp_path)
    weights = for_length(open_weights(tmp_path), 64)  # its original context
    expected = theirs(torch.tensor([IDS])).logits[0]
    ours = load_decoder(weights)
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=2e-4, rtol=2e-4)
    assert (ours.spec.rope.attention_factor, ours.spec.rope.factors[0]) == (1.3, 1.0)
    whole = load_decoder(open_weights(tmp_path))
    assert (whole.spec.rope.attention_factor, whole.spec.rope.factors[0]) == (1.6, 2.0)
    # transformers has the first factors with the scale of the others past the original context.
    rope = theirs.model.rotary_emb
    rope.rope_init_fn = partial(rope.rope_init_fn, seq_len=65)
    expected = theirs(torch.tensor([IDS + IDS])).logits[0]
    torch.testing.assert_close(plain_logits(whole, IDS + IDS), expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_gpt_oss_as_published_in_mxfp4(tmp_path):
    """Blocks are stored [expert, out, in], plain tensors [expert, in, out]."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make("gpt-oss, 64", plain)
    tensors = load_file(plain / "model.safetensors")
    stored = random_mxfp4(tensors)
    for name in tensors.keys() - stored.keys():
        parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        tensors[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    write(packed, config, stored)
    expected = plain_logits(load_decoder(open_weights(plain)), IDS)
    assert torch.equal(plain_logits(load_decoder(open_weights(packed)), IDS), expected)
    theirs = GptOssForCausalLM.from_pretrained(plain, dtype=torch.float32)
    logits = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(expected, logits, atol=2e-4, rtol=2e-4)
    if native_library.is_available():
        ours = load_native(open_weights(packed), num_threads=1, bits=14)
        experts = [layer.values["experts"].values for layer in ours.network.layers]
        assert {each[part].format for each in experts for part in ("up", "down")} == {FP4}
        assert (plain_logits(ours, IDS) - logits).norm() / logits.norm() < 2e-3

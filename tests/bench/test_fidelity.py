"""The distance of quantised kernels to float32."""

from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hunch.bench.device import gguf_blocks, published
from hunch.bench.device.enlarged import in_blocks
from hunch.bench.device.fidelity import (
    compare,
    float32_bytes,
    measure,
    measure_kernels,
    measure_rounded,
    scores,
)
from hunch.bench.parts import fidelity as part
from hunch.errors import ConfigError
from hunch.hub import resolve
from hunch.kernels import native_library
from hunch.kernels.quant import Quantised
from hunch.models.backends import TORCH
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights
from tiny_gguf import random_tensors, write_gguf
from tiny_models import write_llama

DTYPES = ("int8", "fp8", "int4")
IDS = [5, 17, 80, 3, 299, 41] * 12


def test_a_shift_of_all_scores_is_no_distance_and_another_favourite_counts():
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    same = compare(iter([exact]), iter([exact + 7]))
    assert same.top1 == 1
    assert same.kl == pytest.approx(0, abs=1e-12)
    other = compare(iter([exact]), iter([exact.flip(1)]))
    assert other.top1 == 0
    p, q = exact.double().softmax(1), exact.flip(1).double().softmax(1)
    assert other.kl == pytest.approx(float((p * (p / q).log()).sum(1).mean()))


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
def test_more_bits_of_activations_come_nearer(tmp_path):
    sizes = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    tensors = {
        name: value.repeat(2, 0) if "q_proj" in name or "k_proj" in name or "v_proj" in name
        else value.repeat(2, 1) if "o_proj" in name else value
        for name, value in random_tensors().items()
    }  # fmt: skip
    model = str(write_gguf(tmp_path / "m.gguf", tensors, block_format="Q8_0", metadata=sizes))
    weights = open_weights(resolve(model).path)
    coarse, fine = (measure(model, IDS, load_native(weights, bits=bits)) for bits in (8, 14))
    assert coarse.num_tokens == len(IDS)
    assert 0 < fine.kl < coarse.kl / 10
    assert float32_bytes(model) == sum(4 * value.size for value in tensors.values())


def test_fewer_bits_of_weights_go_further_away(tmp_path):
    model, ids = str(write_llama(tmp_path, width=128)), [i % 256 for i in IDS]
    weights = open_weights(resolve(model).path)
    found = {}
    for name in DTYPES:
        held = TORCH.like_target(load_decoder(weights, dtype=name, device="cpu"))
        found[name] = measure_rounded(model, ids, scores(held, ids), device="cpu")
    assert 0 < found["int8"].kl < found["fp8"].kl < found["int4"].kl
    assert found["int8"].top1 > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_rounded_weights_are_the_reference_of_kernels_in_few_bits(tmp_path, dtype):
    """On a CPU torch multiplies the numbers themselves, so nothing but the products' own rounding
    is left: bits that the weights lost are in the reference too."""
    model, ids = str(write_llama(tmp_path, width=128)), [i % 256 for i in IDS]
    ours, expanded = measure_kernels(model, ids, dtype, device="cpu")
    assert ours == expanded
    assert abs(ours.kl) < 1e-9
    weights = open_weights(resolve(model).path)
    rounded = TORCH.like_target(load_decoder(weights, dtype=dtype, device="cpu"))
    assert measure_rounded(model, ids, scores(rounded, ids), device="cpu").kl > 1e-7


@pytest.mark.parametrize("form", sorted(published.FORMATS))
def test_checkpoints_of_published_formats_hold_the_model_they_are_made_of(tmp_path, form):
    weights = in_blocks(open_weights(write_llama(tmp_path, width=64)), "cpu", min_width=256)
    made = open_weights(published.write_published(tmp_path / "made", form, weights))
    name = "model.layers.1.self_attn.q_proj.weight"
    whole, few = weights.tensor(name)[:32], made.tensor(name)[:32]  # random after the first head
    error = (whole - few).norm() / whole.norm()
    assert 1e-3 < error < (0.15 if "4" in str(made.packed(name).codes().format) else 0.04)
    assert made.config["hidden_size"] == 256
    held = load_decoder(made, hold="keep")
    assert all(isinstance(layer.attn.qkv.weight, Quantised) for layer in held.layers)


@pytest.mark.parametrize(
    ("block_format", "most"),
    [("Q4_0", 0.1), ("Q4_1", 0.09), ("Q5_0", 0.05), ("Q5_1", 0.045), ("Q8_0", 0.006),
     ("Q4_K", 0.09), ("Q5_K", 0.045), ("Q6_K", 0.025)],
)  # fmt: skip
def test_blocks_stand_for_numbers_near_those_they_are_made_of(block_format, most):
    """As the gguf package reads them; blocks of zeros are zeros."""
    w_NK = torch.randn(7, 1024, generator=torch.Generator().manual_seed(0)) * 0.05
    w_NK[:, 256:600] = 0
    blocks = gguf_blocks.rounded(block_format, w_NK).numpy()
    found = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[block_format]))
    assert found[:, 256:512].abs().max() == 0
    assert most / 3 < (found - w_NK).norm() / w_NK.norm() < most


def test_a_gguf_of_another_type_is_the_same_model(tmp_path):
    """Rows of q and k too, which llama files have in another order."""
    small = open_weights(write_gguf(tmp_path / "small.gguf", random_tensors()))
    weights = in_blocks(small, "cpu", min_width=256)
    path = gguf_blocks.write_gguf(tmp_path / "made.gguf", "Q8_0", weights, small.path)
    made = open_weights(path)
    assert made.config["head_dim"] == small.config["head_dim"]
    ids = IDS[:20]
    exact, held = (load_decoder(some, dtype="float32", device="cpu") for some in (small, made))
    assert compare(scores(exact, ids), scores(held, ids)).kl < 0.1  # another order: several


def test_experts_in_mxfp4_are_their_own_reference(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300, "num_hidden_layers": 2}
    model = str(published.write_experts(tmp_path / "oss", **sizes))
    ours, expanded = measure_kernels(model, IDS, "keep", device="cpu")
    assert ours == expanded
    assert abs(ours.kl) < 1e-9
    with pytest.raises(ConfigError, match="no matrix of it is in few bits"):
        measure_kernels(str(write_llama(tmp_path, width=128)), IDS[:4], "keep", device="cpu")


def test_formats_are_named_and_shown_one_to_a_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="--formats q4: one of all, Q4_0"):
        part.main(["--formats", "q4"])
    asked = []

    def measured(path, ids, *, ask_llama):
        asked.append((open_weights(path).config["hidden_size"], ask_llama))
        return {"hunch": {"kl": 0.25}, "llama.cpp": {"kl": 0.5}}

    model = write_gguf(tmp_path / "small.gguf", random_tensors())
    monkeypatch.setattr(part, "resolve", lambda name: SimpleNamespace(path=model))
    monkeypatch.setattr(part, "load_text", lambda config: SimpleNamespace(encode=lambda t: IDS))
    monkeypatch.setattr(part, "_on_cpu", measured)
    part.main(["--formats", "Q6_K,awq", "--device", "cpu"])
    assert asked == [(1024, True), (1024, False)]  # llama.cpp reads GGUF alone
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Q6_K", "awq"]
    assert all("hunch: kl 0.25  llama.cpp: kl 0.5" in line for line in lines)

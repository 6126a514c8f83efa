"""The distance of quantised kernels to float32."""

import pytest
import torch

from hunch.bench.device.fidelity import (
    compare,
    float32_bytes,
    measure,
    measure_kernels,
    measure_rounded,
    scores,
)
from hunch.hub import resolve
from hunch.kernels import native
from hunch.models.backends import TORCH
from hunch.models.load import load_decoder
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


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")
def test_more_bits_of_activations_come_nearer(tmp_path):
    sizes = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    tensors = {
        name: value.repeat(2, 0) if "q_proj" in name or "k_proj" in name or "v_proj" in name
        else value.repeat(2, 1) if "o_proj" in name else value
        for name, value in random_tensors().items()
    }  # fmt: skip
    model = str(write_gguf(tmp_path / "m.gguf", tensors, kind="Q8_0", metadata=sizes))
    coarse, fine = measure(model, IDS), measure(model, IDS, bits=14)
    assert coarse.num_tokens == len(IDS)
    assert 0 < fine.kl < coarse.kl / 10
    assert measure(model, IDS, dtype="float32") is None
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

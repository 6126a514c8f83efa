"""The torch paths of the small operations against their float64 references."""

import pytest
import torch
import torch.nn.functional as F

from hunch.kernels.activation import ACTIVATIONS, gated, gated_ref
from hunch.kernels.kv_store import kv_store, kv_store_ref
from hunch.kernels.linear import linear, linear_ref
from hunch.kernels.norm import (
    layer_norm,
    layer_norm_ref,
    rms_norm,
    rms_norm_ref,
    row_moments,
    row_moments_ref,
)
from hunch.kernels.rope import rope, rope_ref, rotation


def close(given, expected):
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(num_rows, has_bias):
    x, w = torch.randn(num_rows, 33), torch.randn(21, 33)
    b = torch.randn(21) if has_bias else None
    close(linear(x, w, b), linear_ref(x, w, b))
    assert linear(x, w, b).is_contiguous()


def test_linear_lets_gradients_through():
    x, w, b = torch.randn(5, 9), torch.randn(4, 9), torch.randn(4)
    for tensor in (x, w, b):
        tensor.requires_grad_()
    grads = torch.autograd.grad(linear(x, w, b).square().sum(), (x, w, b))
    expected = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))
    for given, want in zip(grads, expected, strict=True):
        close(given, want)


def test_norms():
    x, w, b = torch.randn(5, 24) * 3 + 1, torch.randn(24), torch.randn(24)
    close(rms_norm(x, w, 1e-5), rms_norm_ref(x, w, 1e-5))
    close(layer_norm(x, w, b, 1e-5), layer_norm_ref(x, w, b, 1e-5))
    for ours, theirs in zip(row_moments(x), row_moments_ref(x), strict=True):
        close(ours, theirs)
    assert not torch.allclose(rms_norm_ref(x, w, 1e-5), layer_norm_ref(x, w, b * 0, 1e-5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation):
    x = torch.randn(3, 20)
    close(gated(x, activation), gated_ref(x, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_has_the_same_bits_wherever_a_number_stands(activation):
    """torch computes a tensor's last few numbers apart from the others, and rounds them so too."""
    x_P = 3 * torch.randn(4099)
    activate = ACTIVATIONS[activation]
    whole_P = activate(x_P)
    for first in range(0, 4096, 7):
        part = slice(first, first + 7)
        assert activate(x_P[part].clone()).equal(whole_P[part])


def test_rope_turns_pairs_by_their_angle():
    angle = torch.outer(torch.arange(50.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    pos = torch.tensor([0, 3, 49])
    x = torch.randn(3, 2, 8)
    turned = rotation(table, pos)
    given = rope(x, turned.cos_T1H, turned.sin_T1H)
    close(given, rope_ref(x, turned.cos_T1H, turned.sin_T1H))
    pairs = (
        torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.tensor(1.0), angle[pos])[:, None]
    )
    close(given, torch.cat((pairs.real, pairs.imag), dim=-1))


def test_kv_store():
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = torch.tensor([5, -1, 0, 9])
    caches = [torch.zeros(12, 2, 8) for _ in range(4)]
    kv_store_ref(k, v, caches[0], caches[1], slots)
    live = slots >= 0
    kv_store(k[live], v[live], caches[2], caches[3], slots[live])
    close(caches[2], caches[0])
    close(caches[3], caches[1])
    assert caches[0][9].equal(k[3])
    assert caches[0].count_nonzero() == 3 * 16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_kv_store_of_codes(dtype):
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = torch.tensor([5, -1, 0, 9])
    expected, got = ([torch.zeros(12, 2, 8, dtype=dtype) for _ in "kv"] for _ in range(2))
    scales, got_scales = (tuple(torch.zeros(12, 2, 1) for _ in "kv") for _ in range(2))
    kv_store_ref(k, v, *expected, slots, scales)
    live = slots >= 0
    kv_store(k[live], v[live], *got, slots[live], got_scales)
    for ours, theirs in zip((*got, *got_scales), (*expected, *scales), strict=True):
        assert ours.float().equal(theirs.float())
    kept = expected[0][9].float() * scales[0][9]
    torch.testing.assert_close(kept, k[3], atol=0.02, rtol=0.07)

"""How near a model's kernels come to a float32 pass over its file's weights.

Every token of a page of text is predicted by both. `kl` is the mean of KL(float32 || held) in nats,
`top1` the share of tokens where both have the same favourite. These figures depend on the kernels,
above all on quantised activations; the loss from a file's own rounding is in both and cancels.

Shape letters: T tokens, M rows of logits at a time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hunch.bench.workloads import ARTICLES, TEXTS
from hunch.errors import ConfigError
from hunch.hub import resolve
from hunch.kernels.attention import AttnInputs
from hunch.kernels.quant import Quantised
from hunch.layers.linear import Linear
from hunch.models.backends import TORCH, TRITON
from hunch.models.load import load_decoder
from hunch.models.native import NativeDecoder, load_native
from hunch.models.source import KEEP
from hunch.models.target import Target
from hunch.models.weights import open_weights

PAGE = "\n\n".join(
    (
        *ARTICLES.values(),
        *TEXTS["code"].values(),
        TEXTS["assistant"],
        *TEXTS["mathematics"].values(),
    )
)
_ROWS = 32  # rows whose logits are held at once
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Fidelity:
    kl: float
    top1: float
    num_tokens: int


def measure(
    model: str, ids: Sequence[int], held: NativeDecoder, threads: int | None = None
) -> Fidelity:
    """A model on the CPU's kernels, compared with the same in float32."""
    exact = load_native(open_weights(resolve(model).path), dtype="float32", num_threads=threads)
    assert exact is not None
    return compare(scores(exact, ids), scores(held, ids))


def measure_rounded(
    model: str, ids: Sequence[int], held: Iterator[Tensor], *, device: str = "cuda"
) -> Fidelity:
    """Compare the scores of a model that was rounded when loaded with those in bfloat16 (float32 on
    a CPU)."""
    is_gpu = device.startswith("cuda")
    whole, backend = ("bfloat16", TRITON) if is_gpu else ("float32", TORCH)
    weights = open_weights(resolve(model).path)
    exact = backend.like_target(load_decoder(weights, dtype=whole, device=device))
    return compare(scores(exact, ids), (part_MV.to(device) for part_MV in held))


def measure_kernels(
    model: str, ids: Sequence[int], dtype: str, *, device: str = "cuda"
) -> tuple[Fidelity, Fidelity]:
    """Compare a model in few bits, as `dtype` rounds it (`keep`: as its file has it), with a
    float32 pass over the same weights: by the GPU's kernels, and expanded to 16 bits for
    torch's."""
    backend = TRITON if device.startswith("cuda") else TORCH
    weights = open_weights(resolve(model).path)
    # Codes become numbers on the device, not on the host.
    exact = load_decoder(weights, dtype="float32", device=device, hold=KEEP)
    exact.expand()
    held = load_decoder(weights, dtype=dtype, device=device)
    num_few = 0
    for whole, few in zip(exact.parts(), held.parts(), strict=True):
        if isinstance(whole, Linear) and isinstance(few, Linear):
            held_NK = few.weight
            if isinstance(held_NK, Quantised):
                num_few += 1
                held_NK = held_NK.codes().numbers(torch.float32).view(whole.weight.shape)
            whole.weight = held_NK.float()
    if not num_few:
        raise ConfigError(f"{model}: no matrix of it is in few bits with dtype={dtype!r}")
    by_kernels = compare(scores(exact, ids), scores(backend.like_target(held), ids))
    held.expand()
    return by_kernels, compare(scores(exact, ids), scores(held, ids))


def float32_bytes(model: str) -> int:
    """Memory that `measure` takes beside the model itself."""
    weights = open_weights(resolve(model).path)
    return sum(4 * prod(weights.shape(name)) for name in weights.names())


def scores(target: Target, ids: Sequence[int]) -> Iterator[Tensor]:
    """A model's scores after each token, part by part."""
    num, device = len(ids), target.device
    attn = AttnInputs.first(num, _BLOCK, device)
    kv = target.new_kv(attn.table_SB.numel() * _BLOCK)
    hidden_TD = target.forward(torch.tensor(ids, device=device), attn, kv).last_TD
    for first in range(0, num, _ROWS):
        yield target.logits(hidden_TD[first : first + _ROWS])


def compare(exact: Iterator[Tensor], held: Iterator[Tensor]) -> Fidelity:
    """Compare the scores of both over all tokens."""
    total, num_equal, num = 0.0, 0, 0
    for exact_MV, held_MV in zip(exact, held, strict=True):
        p_MV, q_MV = exact_MV.double().log_softmax(1), held_MV.double().log_softmax(1)
        total += float((p_MV.exp() * (p_MV - q_MV)).sum())
        num_equal += int((exact_MV.argmax(1) == held_MV.argmax(1)).sum())
        num += len(exact_MV)
    return Fidelity(total / num, num_equal / num, num)

"""Inputs for tests of a GPU's kernels: on the GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import torch

from builders import replace_tensors
from hunch.kernels.attention import AttnInputs, Span
from hunch.layers.rope import RopeSpec
from hunch.models.decoder import Decoder
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve
from random_models import RandomSource

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=gen) * scale).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert (got.double() - want.double()).norm() / want.double().norm() < tolerance


def packed(lengths: list[int], news: list[int], tree: list[int] | None = None) -> AttnInputs:
    """Sequences of `lengths` positions, the last `news` packed; tree: parents of extra nodes."""
    block = 16
    num_blocks = [(n + 64) // block + 1 for n in lengths]
    gen = torch.Generator().manual_seed(sum(lengths))
    order = torch.randperm(sum(num_blocks), generator=gen)
    table = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int64)
    pos, slot, seq, base, paths, spans, at = [], [], [], [], [], [], 0
    for s, (length, new) in enumerate(zip(lengths, news, strict=True)):
        table[s, : num_blocks[s]] = order[at : at + num_blocks[s]]
        at += num_blocks[s]
        first = len(pos)

        def slot_of(p: int, s: int = s) -> int:
            return int(table[s, p // block]) * block + p % block

        for p in range(length - new, length):
            pos.append(p), slot.append(slot_of(p)), seq.append(s)
            base.append(length), paths.append([])
        for n, parent in enumerate(tree or []):
            path = [] if parent < 0 else paths[first + new + parent]
            slot.append(slot_of(length + n)), seq.append(s)
            pos.append(length + len(path)), base.append(length)
            paths.append([*path, slot[-1]])
        spans.append(Span(first, len(pos), s, length - new, new, bool(tree)))
    depth = max(map(len, paths))
    tree_TP = torch.tensor([p + [0] * (depth - len(p)) for p in paths]) if tree else None
    slot[-1] = -1  # the last token is padding
    return AttnInputs(
        *(torch.tensor(v).to(DEVICE) for v in (pos, slot, seq)), table.to(DEVICE),
        torch.tensor(base).to(DEVICE), None if tree_TP is None else tree_TP.to(DEVICE), block,
        tuple(spans),
    )  # fmt: skip


def step(first: int, last: int) -> AttnInputs:
    pos = torch.arange(first, last, device=DEVICE)
    table = torch.tensor([[3, 0, 2]], device=DEVICE)
    slot = table[0, pos // 16] * 16 + pos % 16
    span = Span(0, last - first, 0, first, last - first)
    return AttnInputs(pos, slot, torch.zeros_like(pos), table, pos + 1, None, 16, (span,))


def build(
    architecture: str, dtype: torch.dtype, hold: str = "expand", **changes: object
) -> Decoder:
    options = {
        "architecture": architecture, "vocab_size": 50, "width": 48, "num_layers": 3,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_width": 64, "max_len": 256,
        "norm_eps": 1e-5, "rope": RopeSpec(), "windows": (None, 5, None), "is_tied": True,
        **changes,
    }  # fmt: skip
    source = RandomSource(0, dtype)
    source.hold = hold
    decoder: Decoder = resolve(MODELS, architecture)(ModelSpec(**options), source)
    replace_tensors(decoder, lambda tensor: tensor.to(DEVICE))
    decoder.device = torch.device(DEVICE)
    return decoder

"""The MLP speculator's network: one small stage per drafted token, fed with the token before.

Shape letters: M packed nodes, D width of the target, I inner width, C columns of logits.
Paper: arXiv 2404.19124. File form: architectures ["MLPSpeculatorPreTrainedModel"], and a
token_map as Medusa has it where the output matrix has the rows of some tokens alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hunch.layers.linear import Linear
from hunch.layers.part import Part
from hunch.models.heads.files import (
    HeadSource,
    Table,
    check_hidden,
    check_map,
    check_vocab,
    column_ids,
    number,
    read_config,
)
from hunch.models.target import Target

EPS = 1e-6


class BiasedNorm(Part):
    """Divide by the root mean square, times a weight, plus a bias."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> None:
        self.weight_D, self.bias_D, self.eps = weight_D, bias_D, eps

    def __call__(self, x_MD: Tensor) -> Tensor:
        return F.rms_norm(x_MD, self.weight_D.shape, self.weight_D, self.eps) + self.bias_D


class MlpNet(Part):
    """Stage i turns (state, token) into the next state and logits."""

    matrix_bytes = 0  # of weights held outside of tensors

    def __init__(
        self,
        emb: list[Table],
        proj: list[Linear],
        norm: list[BiasedNorm],
        head: list[Linear],
        inner: int,
        is_scaled: bool,
    ) -> None:
        self.emb, self.proj, self.norm, self.head = emb, proj, norm, head
        self.is_scaled = is_scaled
        self.num_stages = len(proj)
        state_weight = 0.5 ** (0.5 / self.num_stages)
        self.emb_scale = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def start(self, hidden_MD: Tensor) -> Tensor:
        """The first state: the target's last hidden state."""
        if self.is_scaled:
            return F.rms_norm(hidden_MD, hidden_MD.shape[-1:], None, EPS) / math.sqrt(2)
        return hidden_MD

    def step(self, stage: int, state_MI: Tensor, token_M: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and logits for the token after `token_M`."""
        state_MI = self.proj[stage](state_MI)
        state_MI = torch.add(state_MI, self.emb[stage](token_M), alpha=self.emb_scale)
        state_MI = F.gelu(self.norm[stage](state_MI))
        return state_MI, self.head[stage](state_MI)


def load_mlp(path: str | Path, target: Target) -> tuple[MlpNet, Tensor | None]:
    """The network, and the target's id of each column of its logits (None: all of them)."""
    config = read_config(path)
    source = HeadSource(path, target, prefixes=("speculator.",))
    where, vocab_size = source.where, target.spec.vocab_size
    width = number(config, "emb_dim", where)
    inner = number(config, "inner_dim", where, default=0) or width
    num_stages = number(config, "n_predict", where)
    rows = number(config, "vocab_size", where)
    check_hidden(where, width, target)
    check_vocab(where, rows, vocab_size)
    # Tied weights are stored once; the first projection alone has another shape.
    is_tied = bool(config.get("tie_weights", False))
    num_stored = 1 if is_tied else num_stages
    norm = [
        BiasedNorm(source.take(f"ln.{i}.weight", inner), source.take(f"ln.{i}.bias", inner), EPS)
        for i in range(num_stored)
    ]
    ids_C = column_ids(min(rows, vocab_size), vocab_size)
    num_columns = number(config, "truncated_vocab_size", where, default=rows)
    if "token_map" in source:
        ids_C = check_map(source.ids("token_map", num_columns), vocab_size, where)
    emb = [Table(source.take(f"emb.{i}.weight", rows, inner)) for i in range(num_stored)]
    head = [
        source.output(f"head.{i}.weight", num_columns, inner, vocab_size) for i in range(num_stored)
    ]
    proj = [
        source.dense(f"proj.{i}", inner, inner if i else width)
        for i in range(min(num_stages, 2) if is_tied else num_stages)
    ]

    def spread(parts: list[Any]) -> list[Any]:
        return [parts[min(i, len(parts) - 1)] for i in range(num_stages)]

    net = MlpNet(
        spread(emb),
        spread(proj),
        spread(norm),
        spread(head),
        inner,
        bool(config.get("scale_input")),
    )
    net.matrix_bytes = source.matrix_bytes
    return net, ids_C

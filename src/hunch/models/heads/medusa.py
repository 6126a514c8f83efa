"""Medusa's network: heads that each guess one further token from the target's hidden state.

Shape letters: M packed rows, D width of the target, C columns of logits.
Paper: arXiv 2401.10774. File forms: model_type "medusa" (blocks.*), and the older
medusa_lm_head.pt (numbered modules) whose config names no sizes.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.layers.linear import Linear
from hunch.layers.part import Part
from hunch.models.heads.files import (
    HeadSource,
    check_hidden,
    check_map,
    check_vocab,
    column_ids,
    number,
    read_config,
)
from hunch.models.target import Target

_OLD_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


class MedusaHead(Part):
    """x + SiLU(W x + b) per layer, then an output matrix; None: the target's own."""

    def __init__(self, layers: list[Linear], lm_head: Linear | None) -> None:
        self.layers, self.lm_head = layers, lm_head

    def hidden(self, x_MD: Tensor) -> Tensor:
        for layer in self.layers:
            x_MD = x_MD + F.silu(layer(x_MD))
        return x_MD


class MedusaNet(Part):
    """Head h predicts token t + 2 + h from the hidden state of position t."""

    matrix_bytes = 0  # of weights held outside of tensors

    def __init__(self, heads: list[MedusaHead], target: Target, scale: float = 1.0) -> None:
        self.heads, self.scale = heads, scale
        self.output = target.backend.shared_output(target, *(head.lm_head for head in heads))

    def logits(self, head: int, state_MD: Tensor) -> Tensor:
        """Scores of one head's token, a row per state."""
        part = self.heads[head]
        logits_MC = (part.lm_head or self.output)(part.hidden(state_MD))
        return logits_MC if self.scale == 1.0 else logits_MC * self.scale


def load_medusa(path: str | Path, target: Target) -> tuple[MedusaNet, Tensor | None]:
    """The network, and the target's id of each column of its logits (None: all of them)."""
    config = read_config(path)
    source = HeadSource(path, target, prefixes=("medusa_heads.",))
    if any(_OLD_LAYER.fullmatch(name) for name in source.names):
        return _load_old(source, target)
    where, vocab_size = source.where, target.spec.vocab_size
    width, vocab = number(config, "hidden_size", where), number(config, "vocab_size", where)
    check_hidden(where, width, target)
    check_vocab(where, vocab, vocab_size)
    rows = number(config, "truncated_vocab_size", where, default=vocab)
    ids_C = _token_map(source, rows, vocab, vocab_size)
    num_kept = vocab_size if ids_C is None else None
    shared = None
    if "lm_head.weight" in source:
        shared = source.output("lm_head.weight", rows, width, num_kept)
    is_targets = bool(config.get("original_lm_head")) and "lm_heads.0.weight" not in source
    if is_targets and shared is None and ids_C is not None:
        shared = source.output_of(target, ids_C)
    num_layers = number(config, "num_hidden_layers", where, default=1)
    heads = []
    for head in range(number(config, "num_heads", where)):
        layers = [
            source.dense(f"blocks.{head}.layers.{layer}", width, width)
            for layer in range(num_layers)
        ]
        lm_head = shared
        if shared is None and not is_targets:
            lm_head = source.output(f"lm_heads.{head}.weight", rows, width, num_kept)
        heads.append(MedusaHead(layers, lm_head))
    if ids_C is None and not (is_targets and shared is None):
        ids_C = column_ids(min(rows, vocab_size), vocab_size)
    net = MedusaNet(heads, target, float(config.get("logit_scale") or 1.0))
    net.matrix_bytes = source.matrix_bytes
    return net, ids_C


def _token_map(source: HeadSource, rows: int, vocab: int, vocab_size: int) -> Tensor | None:
    if "token_map" in source:
        return check_map(source.ids("token_map", rows), vocab_size, source.where)
    if rows != vocab:
        raise ModelFormatError(
            f"{source.where}: truncated_vocab_size={rows} of {vocab} needs a tensor token_map"
        )
    return None


def _load_old(source: HeadSource, target: Target) -> tuple[MedusaNet, Tensor | None]:
    """The numbers of heads and layers follow from the tensors, as the config is often wrong."""
    found = [_OLD_LAYER.fullmatch(name) for name in source.names]
    places = {(int(match[1]), int(match[2])) for match in found if match}
    num_heads = 1 + max(head for head, _ in places)
    num_layers = 1 + max(layer for _, layer in places)
    width = source.shape("0.0.linear.weight")[0]
    check_hidden(source.where, width, target)
    rows, vocab_size = source.shape(f"0.{num_layers}.weight")[0], target.spec.vocab_size
    check_vocab(source.where, rows, vocab_size)
    heads = []
    for head in range(num_heads):
        layers = [
            source.dense(f"{head}.{layer}.linear", width, width) for layer in range(num_layers)
        ]
        lm_head = source.output(f"{head}.{num_layers}.weight", rows, width, vocab_size)
        heads.append(MedusaHead(layers, lm_head))
    net = MedusaNet(heads, target)
    net.matrix_bytes = source.matrix_bytes
    return net, column_ids(min(rows, vocab_size), vocab_size)

"""EAGLE-1 and EAGLE-2's network: one decoder layer that continues the target's last hidden state.

Shape letters: T packed tokens, D width, C columns of logits.
Papers: arXiv 2401.15077, 2406.16858 (the same weights, a dynamic tree at run time). File forms: a
Llama config of one layer with fc.weight beside it, and the form converted for vLLM
(model_type "eagle", its layer's config under "model").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.layers.block import Block
from hunch.layers.linear import Linear
from hunch.models.build import build_block
from hunch.models.heads.files import (
    HeadSource,
    check_hidden,
    check_vocab,
    read_config,
    read_geometry,
)
from hunch.models.heads.kernels import use_kernels
from hunch.models.heads.parts import Table
from hunch.models.heads.step import StepNet
from hunch.models.spec import ModelSpec


class EagleNet(StepNet):
    """hidden = layer(fc([embedding of the next token ; hidden]))."""

    def __init__(
        self, spec: ModelSpec, target: Any, embed: Table | None, fc: Linear, block: Block
    ) -> None:
        super().__init__(spec, target, embed, num_kv_layers=1)
        self.fc, self.block = fc, block

    def fuse(self, hidden_TD: Tensor | None, features: tuple[Tensor, ...]) -> Tensor:
        assert hidden_TD is not None
        return hidden_TD

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        x_TD = self.fc(torch.cat((self.embed(token_T), hidden_TD), dim=-1))
        return self.block(x_TD, self.attend(attn, kv))

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        logits_TV: Tensor = self.target_logits(hidden_TD)
        return logits_TV


def load_eagle(path: str | Path, target: Any) -> EagleNet:
    config = read_config(path)
    source = HeadSource(path, target, prefixes=("model.",))
    where = source.where
    if "model" in config and isinstance(config["model"], dict):
        config = {**config["model"], "torch_dtype": config.get("torch_dtype")}
    has_bias = "layers.0.self_attn.q_proj.bias" in source
    spec = read_geometry(config, where, has_qkv_bias=has_bias)
    check_hidden(where, spec.width, target)
    check_vocab(where, spec.vocab_size, target.spec.vocab_size)
    embed = None
    if "embed_tokens.weight" in source:
        embed = Table(source.take("embed_tokens.weight", spec.vocab_size, spec.width))
    has_norm = "layers.0.input_layernorm.weight" in source
    block = build_block(spec, source, "layers.0.", 0, has_attn_norm=has_norm)
    fc = source.dense("fc", spec.width, 2 * spec.width)
    net = EagleNet(spec, target, embed, fc, block)
    net.matrix_bytes = source.matrix_bytes
    use_kernels(net, target, [block], project=fc, lm_head=None)
    return net

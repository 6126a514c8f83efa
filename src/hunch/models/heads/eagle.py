"""EAGLE's networks: decoder layers that continue the target's hidden states.

EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858: the same weights, a dynamic tree at run time)
continue the last state with one layer. File forms: a Llama config of one layer with fc.weight
beside it, and the form converted for vLLM (model_type "eagle", its layer's config under "model").

EAGLE-3 (arXiv 2503.01840) fuses the states of three target layers; its first layer sees the token
beside the state, and it has a vocabulary of its own. The norms of 3.1 (input_norm, fc_norm,
norm_output) are read where the config or the tensors name them. File forms: LlamaForCausalLMEagle3
(midlayer.*) and the "speculators" form (layers.0.*).

Shape letters: T packed tokens, D width of the head, E of the target, C columns of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.layers.block import Block
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.models.build import build_block
from hunch.models.heads.files import (
    HeadSource,
    Table,
    check_hidden,
    check_layers,
    check_vocab,
    number,
    read_config,
    read_geometry,
    read_output,
    read_table,
    speculative_tokens,
    tell_unread,
)
from hunch.models.heads.step import StepNet
from hunch.models.spec import ModelSpec
from hunch.models.target import Target


class EagleNet(StepNet):
    """hidden = layer(fc([embedding of the next token ; hidden]))."""

    def __init__(
        self, spec: ModelSpec, target: Target, embed: Table | None, fc: Linear, block: Block
    ) -> None:
        super().__init__(spec, target, embed, num_kv_layers=1)
        self.fc, self.block = fc, block
        self.output = target.backend.shared_output(target)

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        x_TD = self.fc(torch.cat((self.embed(token_T), hidden_TD), dim=-1))
        return self.block(x_TD, self.attend(attn, kv))

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        return self.output(hidden_TD)


def load_eagle(path: str | Path, target: Target) -> EagleNet:
    config = read_config(path)
    source = HeadSource(path, target, prefixes=("model.",))
    where = source.where
    if "model" in config and isinstance(config["model"], dict):
        config = {**config["model"], "torch_dtype": config.get("torch_dtype")}
    has_bias = "layers.0.self_attn.q_proj.bias" in source
    spec = read_geometry(config, where, has_qkv_bias=has_bias)
    check_hidden(where, spec.width, target)
    check_vocab(where, spec.vocab_size, target.spec.vocab_size)
    has_norm = "layers.0.input_layernorm.weight" in source
    block = build_block(spec, source, "layers.0.", 0, has_attn_norm=has_norm)
    fc = source.dense("fc", spec.width, 2 * spec.width)
    net = EagleNet(spec, target, read_table(source, spec), fc, block)
    net.matrix_bytes = source.matrix_bytes
    target.backend.accelerate(net, target, [block], project=fc, lm_head=None)
    return net


class Eagle3Net(StepNet):
    """hidden = layers([norm(embedding of the next token) ; norm(hidden)])."""

    def __init__(
        self,
        spec: ModelSpec,
        target: Target,
        *,
        embed: Table | None,
        feature_layers: tuple[int, ...],
        input_norm: RMSNorm | None,  # over all features side by side
        fc_norms: list[RMSNorm],  # or one per feature
        fc: Linear,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        blocks: list[Block],
        norm: RMSNorm,
        lm_head: Linear | None,  # None: the target's
        ids_C: Tensor | None,
        is_residual_normed: bool,
        is_output_normed: bool,
    ) -> None:
        super().__init__(spec, target, embed, num_kv_layers=len(blocks))
        self.feature_layers, self.ids_C = feature_layers, ids_C
        self.input_norm, self.fc_norms, self.fc = input_norm, fc_norms, fc
        self.embed_norm, self.hidden_norm = embed_norm, hidden_norm
        self.blocks, self.norm = blocks, norm
        self.lm_head = lm_head
        self.output = target.backend.shared_output(target, lm_head)
        self.is_residual_normed, self.is_output_normed = is_residual_normed, is_output_normed

    def fuse(self, hidden_TD: Tensor | None, features: tuple[Tensor, ...]) -> Tensor:
        if self.fc_norms:
            features = tuple(norm(x) for norm, x in zip(self.fc_norms, features, strict=True))
        x_TE = torch.cat(features, dim=-1)
        return self.fc(x_TE if self.input_norm is None else self.input_norm(x_TE))

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        attend = self.attend(attn, kv)
        normed_TD = self.hidden_norm(hidden_TD)
        input_TE = torch.cat((self.embed_norm(self.embed(token_T)), normed_TD), dim=-1)
        residual_TD = normed_TD if self.is_residual_normed else hidden_TD
        x_TD = self.blocks[0].mix(residual_TD, input_TE, attend)
        for block in self.blocks[1:]:
            x_TD = block(x_TD, attend)
        return self.norm(x_TD) if self.is_output_normed else x_TD

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        x_TD = hidden_TD if self.is_output_normed else self.norm(hidden_TD)
        return (self.lm_head or self.output)(x_TD).float()


def load_eagle3(path: str | Path, target: Target) -> Eagle3Net:
    """Either file form. Everything that belongs to the target is checked against it."""
    config, where = read_config(path), str(path)
    is_speculators = "speculators_model_type" in config
    options = {**config, **(config.get("eagle_config") or {})}
    layer_config = config["transformer_layer_config"] if is_speculators else config
    source = HeadSource(path, target, prefixes=("model.",))
    _refuse_parallel(source, config)
    first = "midlayer." if "midlayer.hidden_norm.weight" in source else "layers.0."
    has_qk_norm = f"{first}self_attn.q_norm.weight" in source
    has_bias = f"{first}self_attn.q_proj.bias" in source
    spec = read_geometry(
        layer_config,
        where,
        has_qkv_bias=has_bias,
        has_out_bias=f"{first}self_attn.o_proj.bias" in source,
        has_qk_norm=has_qk_norm,
    )
    check_vocab(where, spec.vocab_size, target.spec.vocab_size)
    feature_layers = _feature_layers(options, target, where)
    width, eps = spec.width, spec.norm_eps
    target_width = number(options, "target_hidden_size", where, default=width)
    check_hidden(where, target_width, target)
    fused = len(feature_layers) * target_width
    lm_head, ids_C = read_output(source, options, spec, target)
    has_fc_norm = bool(options.get("fc_norm")) or "fc_norm.0.weight" in source
    has_input_norm = bool(options.get("norm_before_fc")) or "input_norm.weight" in source
    blocks = [build_block(spec, source, first, 0, input_width=2 * width, has_attn_norm=False)]
    for layer in range(1, spec.num_layers):
        blocks.append(build_block(spec, source, f"layers.{layer}.", layer))
    net = Eagle3Net(
        spec,
        target,
        embed=read_table(source, spec),
        feature_layers=feature_layers,
        input_norm=source.rms_norm("input_norm", fused, eps) if has_input_norm else None,
        fc_norms=[
            source.rms_norm(f"fc_norm.{i}", fused // len(feature_layers), eps)
            for i in range(len(feature_layers) if has_fc_norm else 0)
        ],
        fc=source.dense("fc", width, fused),
        embed_norm=source.rms_norm(f"{first}input_layernorm", width, eps),
        hidden_norm=source.rms_norm(f"{first}hidden_norm", width, eps),
        blocks=blocks,
        norm=source.rms_norm("norm", width, eps),
        lm_head=lm_head,
        ids_C=ids_C,
        is_residual_normed=bool(options.get("norm_before_residual", is_speculators)),
        is_output_normed=bool(options.get("norm_output", False)),
    )
    net.num_tokens = speculative_tokens(path)
    net.matrix_bytes = source.matrix_bytes
    tell_unread(source, "t2d", "lm_head.weight", "embed_tokens.weight")
    _accelerate(net, target)
    return net


def _accelerate(net: Eagle3Net, target: Target) -> None:
    target.backend.accelerate(
        net,
        target,
        net.blocks,
        project=None,
        lm_head=net.lm_head,
        final_norm=net.norm if net.is_output_normed else None,
        logits_norm=None if net.is_output_normed else net.norm,
        token_norm=net.embed_norm,
        state_norm=net.hidden_norm,
        is_residual_normed=net.is_residual_normed,
    )


def _refuse_parallel(source: HeadSource, config: Mapping[str, Any]) -> None:
    if "mask_hidden" in source or "ptd_token_id" in config or "pard_token" in config:
        raise ModelFormatError(
            f"{source.where}: a head that drafts all tokens in one pass (P-EAGLE) was found, an "
            "EAGLE-3 head that drafts one by one was expected; use such a head"
        )


def _feature_layers(options: Mapping[str, Any], target: Target, where: str) -> tuple[int, ...]:
    """Which states are fused: after this many target layers; by default low, middle and high."""
    num_layers = target.spec.num_layers
    if options.get("use_aux_hidden_state", True) is False:
        raise ModelFormatError(f"{where}: use_aux_hidden_state=false is not supported")
    given = options.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
    return check_layers(tuple(int(layer) for layer in given), target, where)

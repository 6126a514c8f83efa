"""MTP layers: a norm for the token, a norm for the state, one projection, one decoder layer.

Shape letters: T packed tokens, D width.
Paper: arXiv 2412.19437. File forms, told apart by their tensors: MiMo (model.mtp_layers.i.*),
Qwen3-Next (mtp.*), DeepSeek (model.layers.L.* with L layers before it; enorm, hnorm, eh_proj).
Of several such layers the first is used, again for every further token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.attention import AttnInputs, KVCache
from hunch.layers.attention import Paged
from hunch.layers.block import Block
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.models.build import build_block
from hunch.models.heads.files import (
    HeadSource,
    check_hidden,
    check_vocab,
    read_config,
    read_geometry,
)
from hunch.models.heads.native import build_network
from hunch.models.heads.parts import Table
from hunch.models.heads.step import StepNet
from hunch.models.spec import ModelSpec

_SHIFTED = ("qwen3_next", "qwen3_5")  # these families store norm weights minus one


class MtpNet(StepNet):
    """state = norm(layer(project([norm(token), norm(state)])))."""

    def __init__(
        self,
        spec: ModelSpec,
        target: Any,
        *,
        embed: Table | None,
        token_norm: RMSNorm,
        state_norm: RMSNorm,
        project: Linear,
        block: Block,
        norm: RMSNorm,
        lm_head: Linear | None,
        is_state_first: bool,  # the order in which the projection takes its two inputs
        is_first_masked: bool,  # position 0 has no embedding
    ) -> None:
        super().__init__(spec, target, embed, num_kv_layers=1)
        self.token_norm, self.state_norm = token_norm, state_norm
        self.project, self.block, self.norm, self.lm_head = project, block, norm, lm_head
        self.is_state_first, self.is_first_masked = is_state_first, is_first_masked

    def fuse(self, hidden_TD: Tensor | None, features: tuple[Tensor, ...]) -> Tensor:
        assert hidden_TD is not None
        return hidden_TD

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        token_TD = self.embed(token_T)
        if self.is_first_masked:
            token_TD = token_TD.masked_fill((attn.pos_T == 0)[:, None], 0.0)
        pair = [self.token_norm(token_TD), self.state_norm(hidden_TD)]
        x_TD = self.project(torch.cat(pair[::-1] if self.is_state_first else pair, dim=-1))
        x_TD = self.block(x_TD, Paged(attn, kv, self.rope(attn.pos_T)))
        return self.norm(x_TD)

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        logits_TC: Tensor = (self.lm_head or self.target_logits)(hidden_TD)
        return logits_TC.float()


@dataclass(frozen=True, slots=True)
class Form:
    """Where a file form keeps the parts of its first layer."""

    prefix: str
    token_norm: str
    state_norm: str
    project: str
    norm: str
    layer: str  # prefix of the decoder layer itself
    embed: str = ""
    head: str = ""
    is_state_first: bool = False
    is_first_masked: bool = False


MIMO = Form(
    prefix="model.mtp_layers.0.",
    token_norm="token_layernorm",
    state_norm="hidden_layernorm",
    project="input_proj",
    norm="final_layernorm",
    layer="model.mtp_layers.0.",
    is_state_first=True,
)
QWEN = Form(
    prefix="mtp.",
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    project="fc",
    norm="norm",
    layer="mtp.layers.0.",
)


def deepseek_form(layer: int) -> Form:
    prefix = f"model.layers.{layer}."
    return Form(
        prefix=prefix,
        token_norm="enorm",
        state_norm="hnorm",
        project="eh_proj",
        norm="shared_head.norm",
        layer=prefix,
        embed="embed_tokens.weight",
        head="shared_head.head.weight",
        is_first_masked=True,
    )


def load_mtp(path: str | Path, target: Any) -> MtpNet:
    config = read_config(path)
    source = HeadSource(path, target)
    form = _find_form(source)
    if f"{form.layer}self_attn.kv_a_proj_with_mqa.weight" in source:
        raise UnsupportedModelError(
            f"{path}: its layer uses DeepSeek's latent attention, which no target of hunch has "
            "yet; a head with plain attention was expected"
        )
    attn = f"{form.layer}self_attn."
    spec = read_geometry(
        config,
        source.where,
        has_qkv_bias=f"{attn}q_proj.bias" in source,
        has_out_bias=f"{attn}o_proj.bias" in source,
        has_qk_norm=f"{attn}q_norm.weight" in source,
    )
    check_hidden(source.where, spec.width, target)
    check_vocab(source.where, spec.vocab_size, target.spec.vocab_size)
    width, eps = spec.width, spec.norm_eps
    is_shifted = str(config.get("model_type", "")).startswith(_SHIFTED)
    embed = lm_head = None
    if form.embed and form.prefix + form.embed in source:
        embed = Table(source.take(form.prefix + form.embed, spec.vocab_size, width))
    if form.head and form.prefix + form.head in source:
        name = form.prefix + form.head
        lm_head = source.output(name, spec.vocab_size, width, target.spec.vocab_size)
    net = MtpNet(
        spec,
        target,
        embed=embed,
        token_norm=source.rms(form.prefix + form.token_norm, width, eps),
        state_norm=source.rms(form.prefix + form.state_norm, width, eps),
        project=source.dense(form.prefix + form.project, width, 2 * width),
        block=build_block(spec, source, form.layer, 0),
        norm=source.rms(form.prefix + form.norm, width, eps),
        lm_head=lm_head,
        is_state_first=form.is_state_first,
        is_first_masked=form.is_first_masked,
    )
    net.matrix_bytes = source.matrix_bytes
    if is_shifted:
        _add_one(net)
    net.network = build_network(
        net,
        target,
        [net.block],
        project=net.project,
        lm_head=lm_head,
        final_norm=net.norm,
        token_norm=net.token_norm,
        state_norm=net.state_norm,
        is_state_first=form.is_state_first,
        is_first_masked=form.is_first_masked,
    )
    return net


def _find_form(source: HeadSource) -> Form:
    if f"{MIMO.prefix}{MIMO.project}.weight" in source:
        return MIMO
    if f"{QWEN.prefix}{QWEN.project}.weight" in source:
        return QWEN
    for name in source.names:
        found = re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name)
        if found:
            return deepseek_form(int(found[1]))
    raise ModelFormatError(
        f"{source.where}: no MTP layer found; tensors model.mtp_layers.0.input_proj.weight (MiMo), "
        "mtp.fc.weight (Qwen3-Next) or model.layers.L.eh_proj.weight (DeepSeek) were expected"
    )


def _add_one(net: MtpNet) -> None:
    attn = net.block.attn
    norms = (net.token_norm, net.state_norm, net.norm, net.block.attn_norm, net.block.mlp_norm)
    for norm in (*norms, attn.q_norm, attn.k_norm):
        if norm is not None:
            norm.weight_D = norm.weight_D + 1.0

"""MTP layers: a norm for the token, a norm for the state, one projection, one decoder layer.

Shape letters: T packed tokens, D width, S = D times the number of states side by side, W tokens of
a span, K its keys.
Paper: arXiv 2412.19437. File forms, told apart by their tensors: see mtp_files.py.

Of several layers, layer i drafts token i + 1 from the states of the layer before it. A longer draft
continues with the last layer: its input is an MTP layer's state, as in training, and its KV has
every drafted token. Some serving code begins again with the first layer. But that reads the
target's own states, which drafted tokens do not have, and its KV lacks the tokens between.

Several layers share one KV cache: layer k of the paper takes, at position i, the state of layer k -
1 at i and token i + 1 + k. Here its KV is kept at position i + k, so that the KV of every layer at
position p has seen tokens up to p + 1 and no further: blocks can be shared, and a drafted node is
one token to each layer. Rotations depend on differences of positions alone, so nothing else
changes; only the first k positions, which layer k does not have, must not be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.attention import AttnInputs, Piece, Span, live_tokens, pieces_of, spans_of
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Attend, Paged
from hunch.layers.block import Block
from hunch.layers.experts import Experts
from hunch.layers.latent import LatentBlock, TailPaged
from hunch.layers.linear import Linear
from hunch.layers.norm import Norm, RMSNorm
from hunch.layers.part import Part
from hunch.models.build import Names, build_block
from hunch.models.heads.files import HeadSource, Table, check_hidden, check_vocab, read_config
from hunch.models.heads.mtp_files import Form, arranged, find_forms, read_layers
from hunch.models.heads.step import StepNet
from hunch.models.latent import build_latent_block
from hunch.models.spec import ModelSpec
from hunch.models.target import Target
from hunch.models.weights import open_weights

_SHIFTED = ("qwen3_next", "qwen3_5")  # these families store norm weights minus one


@dataclass(eq=False, repr=False)
class Stage(Part):
    """state = norm(layer(project([norm(token), norm(state)]))), KV in cache layer `number`."""

    number: int
    form: Form
    token_norm: RMSNorm
    state_norm: RMSNorm
    project: Linear
    block: Block | LatentBlock
    norm: RMSNorm
    lm_head: Linear | None

    def __call__(
        self, token_TD: Tensor, hidden_TD: Tensor, pos_T: Tensor, attend: Attend
    ) -> Tensor:
        if self.form.is_first_masked:
            # The layer's first position; see the module's docstring.
            token_TD = token_TD.masked_fill((pos_T == self.number)[:, None], 0.0)
        pair = [self.token_norm(token_TD), self.state_norm(hidden_TD)]
        x_TD = self.project(torch.cat(pair[::-1] if self.form.is_state_first else pair, dim=-1))
        return self.norm(self.block(x_TD, attend))


class MtpNet(StepNet):
    """One stage per drafted token.

    A state has the inputs of the stages that follow, side by side: of all stages at a known
    position, of one less at each level of a draft, finally of the last alone. The first part
    guesses the next token.
    """

    def __init__(
        self,
        spec: ModelSpec,
        target: Target,
        embed: Table | None,
        stages: list[Stage],
        rope_dim: int | None = None,
    ) -> None:
        super().__init__(spec, target, embed, num_kv_layers=len(stages), rope_dim=rope_dim)
        self.stages = stages
        self.output = target.backend.shared_output(target, *(stage.lm_head for stage in stages))
        self.is_staged = len(stages) > 1
        self.is_capturable = False  # until load_mtp finds kernels for it
        self.state_width = spec.width * len(stages)

    def cover(
        self,
        token_T: Tensor,
        hidden_TD: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        before: Sequence[Tensor | None],
    ) -> Tensor:
        token_TD, width = self.embed(token_T), self.spec.width
        states: list[Tensor] = []
        for stage in self.stages:
            if states:
                part = slice((stage.number - 1) * width, stage.number * width)
                rows = [None if state_S is None else state_S[part] for state_S in before]
                hidden_TD = _delayed(states[-1], spans_of(attn), rows)
            states.append(self._run(stage, token_TD, hidden_TD, attn, kv))
        return torch.cat(states, dim=-1)

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        token_TD, parts = self.embed(token_T), self._parts(hidden_TD)
        if len(parts) == 1:
            return self._run(self.stages[-1], token_TD, parts[0], attn, kv)
        # Each stage's own last state has no use: its stage goes on from the stage before.
        stages = self.stages[1 - len(parts) :]
        states = [
            self._run(stage, token_TD, state_TD, attn, kv)
            for stage, state_TD in zip(stages, parts[:-1], strict=True)
        ]
        return torch.cat(states, dim=-1)

    def _parts(self, state_TS: Tensor) -> tuple[Tensor, ...]:
        return state_TS.chunk(state_TS.shape[-1] // self.spec.width, dim=-1)

    def _run(
        self, stage: Stage, token_TD: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache
    ) -> Tensor:
        attend = self._attend_of(stage, attn, kv, token_TD.dtype)
        return stage(token_TD, hidden_TD, attn.pos_T, attend)

    def _attend_of(self, stage: Stage, attn: AttnInputs, kv: KVCache, dtype: torch.dtype) -> Attend:
        block = stage.block
        if stage.number == 0 and isinstance(block, Block):
            return self.attend(attn, kv)
        window, rotation = block.attn.heads.window, self.rope(attn.pos_T)
        seen = _without_first(attn, stage.number, window, dtype, attn.pos_T.device)
        if isinstance(block, LatentBlock):
            return TailPaged(seen, kv, rotation)
        return Paged(seen, kv, rotation)  # only torch's can hide positions

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        parts = self._parts(hidden_TD)
        stage = self.stages[-len(parts)]
        return (stage.lm_head or self.output)(parts[0]).float()


def load_mtp(path: str | Path, target: Target) -> MtpNet:
    config, weights = read_config(path), open_weights(path)
    source = HeadSource(path, target, weights=weights)
    forms = find_forms(source, config)
    _refuse_scales(source, forms)
    spec, names = read_layers(source, config, weights, forms)
    spec, weights = arranged(weights, spec, names, forms)
    source = HeadSource(path, target, weights=weights)
    check_hidden(source.where, spec.width, target)
    check_vocab(source.where, spec.vocab_size, target.spec.vocab_size)
    embed = None
    if forms[0].embed and forms[0].embed in source:
        embed = Table(source.take(forms[0].embed, spec.vocab_size, spec.width))
    stages: list[Stage] = []
    for form in forms:
        stages.append(_stage(spec, names, source, form, stages, target.spec.vocab_size))
    if str(config.get("model_type", "")).startswith(_SHIFTED):
        for stage in stages:
            _add_one(stage, has_whole=spec.is_norm_shifted)
    net = MtpNet(spec, target, embed, stages, spec.latent.rope_dim if spec.latent else None)
    net.matrix_bytes = source.matrix_bytes
    stage = stages[0]
    if not net.is_staged:
        target.backend.accelerate(
            net,
            target,
            [stage.block],
            project=stage.project,
            lm_head=stage.lm_head,
            final_norm=stage.norm,
            token_norm=stage.token_norm,
            state_norm=stage.state_norm,
            is_state_first=stage.form.is_state_first,
            is_first_masked=stage.form.is_first_masked,
        )
        is_plain = isinstance(stage.block, Block) and not isinstance(stage.block.mlp, Experts)
        net.is_capturable = is_plain or net.fused is not None  # torch's experts need the host
    return net


def _stage(
    spec: ModelSpec,
    names: Names,
    source: HeadSource,
    form: Form,
    before: list[Stage],
    vocab_size: int,
) -> Stage:
    number, width, eps = len(before), spec.width, spec.norm_eps
    if before and form.project == before[0].form.project:
        project = before[0].project
    else:
        project = source.dense(form.project, width, 2 * width)
    lm_head = None
    if form.head and form.head in source:
        lm_head = source.output(form.head, spec.vocab_size, width, vocab_size)
    block: Block | LatentBlock
    if spec.latent is not None:
        block = build_latent_block(spec, source, form.layer, 0, names)
        block.attn.k_up.is_exact = block.attn.v_up.is_exact = False  # a draft's bits may differ
    else:
        block = build_block(spec, source, form.layer, 0, names=names)
    block.attn.layer = number
    return Stage(
        number,
        form,
        token_norm=source.rms_norm(form.token_norm, width, eps),
        state_norm=source.rms_norm(form.state_norm, width, eps),
        project=project,
        block=block,
        norm=source.rms_norm(form.norm, width, eps),
        lm_head=lm_head,
    )


def _refuse_scales(source: HeadSource, forms: list[Form]) -> None:
    scaled = [name for name in source.names if name.endswith("weight_scale_inv")]
    scaled = [name for name in scaled if name.startswith(tuple(form.layer for form in forms))]
    if scaled:
        raise UnsupportedModelError(
            f"{source.where}: {scaled[0]} is a block scale of fp8 weights, which hunch does not "
            "read; a head in bfloat16 was expected: convert the checkpoint first"
        )


def _add_one(stage: Stage, *, has_whole: bool) -> None:
    """`has_whole`: the layer's own norms are whole already."""
    block = stage.block
    norms: list[Norm | None] = [stage.token_norm, stage.state_norm]
    if not has_whole:
        norms += [stage.norm, block.attn_norm, block.mlp_norm, block.attn.q_norm]
    if isinstance(block, Block) and not has_whole:
        norms.append(block.attn.k_norm)
    for norm in norms:
        if norm is not None:
            norm.weight_D = norm.weight_D + 1.0


def _delayed(state_TD: Tensor, spans: Sequence[Span], before: Sequence[Tensor | None]) -> Tensor:
    """The state one position before each; `before` has the one before each span.

    If that is not known any more (after a prefix-cache hit, in a new window), the span's first
    state is used instead: then one entry per layer is a little off, and with it a guess.
    """
    shifted_TD = state_TD.roll(1, 0)
    for span, state_D in zip(spans, before, strict=True):
        shifted_TD[span.first] = state_TD[span.first] if state_D is None else state_D
    return shifted_TD


def _without_first(
    attn: AttnInputs, count: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> AttnInputs:
    """The same inputs with the first `count` positions hidden from every token."""
    if count == 0:
        return attn
    pieces = [
        _cut(piece, span, attn, count, window)
        for piece, span in zip(pieces_of(attn, window, dtype, device), spans_of(attn), strict=True)
    ]
    memo = {"live": live_tokens(attn), ("pieces", window, dtype): pieces}
    return replace(attn, memo=memo)


def _cut(piece: Piece, span: Span, attn: AttnInputs, count: int, window: int | None) -> Piece:
    """Keys stand in order of position, those of a tree's nodes last."""
    if span.is_tree:
        assert attn.tree_TP is not None
        num_cut = min(count, span.start + 1 - attn.tree_TP.shape[1])  # nodes stay as they are
    else:
        first = 0 if window is None else max(0, span.start - window + 1)
        num_cut = min(max(count - first, 0), piece.num_keys - 1)
    mask_WK = piece.mask_WK
    if mask_WK is not None:
        mask_WK = mask_WK[:, num_cut:].contiguous()
        if not span.is_tree:  # tokens at positions that are not seen must still see something
            mask_WK[: max(count - span.start, 0)] = 0.0
    return replace(
        piece,
        slot=piece.slot + num_cut,
        num_keys=piece.num_keys - num_cut,
        slots_K=None if piece.slots_K is None else piece.slots_K[num_cut:],
        mask_WK=mask_WK,
    )

"""Block drafters' networks: one pass guesses a whole block of tokens (DFlash, DSpark, DFlash2).

The target's states of a few layers, fused, are the context: each layer's keys and values of a known
position are made of them alone, and kept. A block is the last known token, whose state does not
exist yet, and masks after it; its places see the context and one another. What a place guesses:

- DFlash (arXiv 2602.06036): place i > 0 guesses the token at i; place 0 guesses nothing. - DSpark
  (arXiv 2607.05147): place i guesses the token after i; a Markov head adds what the token before
  makes likely, a confidence head estimates how likely the guess is to be accepted.
- DFlash2: as DFlash, with short convolutions within the block, and a selector that scores pairs of
  neighbours among the best candidates of each place.

A trainer builds a `BlockBody` over tensors of its own (train/recipes/block.py): `context`, `states`
and `scores` work under autograd. Files are read in block_files.py.

Shape letters: T packed positions, R rows, P places of a block, S places that tell something, M
packed nodes, D width, C columns of logits, K rank of a head, M KV heads, H head width, W taps, G
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Attend, Attention
from hunch.layers.block import Block
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part
from hunch.models.build import build_block
from hunch.models.heads.files import NativeLinear, Table
from hunch.models.source import Source
from hunch.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What config.json says of a block drafter, checked."""

    spec: ModelSpec  # its layers; spec.windows: sliding ones
    feature_layers: tuple[int, ...]  # states after this many target layers
    feature_width: int  # of all of them side by side
    num_places: int  # of a block, the last known token included
    mask_token: int | None  # None: the files bring the masks' embedding
    is_shifted: bool  # a place guesses the token after its own (DSpark)
    is_causal: bool = True  # in sliding layers a place sees no later ones; others see all
    markov_rank: int = 0
    markov_type: str = "vanilla"  # or gated, by the place's state
    has_confidence: bool = False
    confidence_sees_token: bool = False
    conv_taps: int = 0
    conv_group: int = 16
    num_columns: int = 0  # of logits, if the vocabulary is reduced; 0: it is not
    selector_rank: int = 0
    selector_top: int = 16
    embed_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens guessed by one pass."""
        return self.num_places if self.is_shifted else self.num_places - 1


class Conv(Part):
    """A convolution over the last few places of a block, before and after a part of a layer.

    Its taps are learned, plus a part that depends on the place's input, the same for each channel
    of a group.
    """

    def __init__(self, base_2WD: Tensor, project: Linear, num_places: int) -> None:
        self.base_2WD, self.project, self.num_places = base_2WD, project, num_places

    def before(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The part's input, and what `after` needs."""
        taps = self.base_2WD.shape[1]
        both_T2WG = self.project(x_TD).view(len(x_TD), 2, taps, -1)
        return self._run(x_TD, both_T2WG[:, 0], self.base_2WD[0]), both_T2WG[:, 1]

    def after(self, y_TD: Tensor, taps_TWG: Tensor) -> Tensor:
        return self._run(y_TD, taps_TWG, self.base_2WD[1])

    def _run(self, x_TD: Tensor, taps_TWG: Tensor, base_WD: Tensor) -> Tensor:
        width = x_TD.shape[1]
        taps_TWD = taps_TWG.repeat_interleave(width // taps_TWG.shape[2], dim=2) + base_WD
        x_RPD = x_TD.view(-1, self.num_places, width)
        taps_RPWD = taps_TWD.view(*x_RPD.shape[:2], -1, width)
        out_RPD = taps_RPWD[:, :, 0] * x_RPD
        for back in range(1, taps_RPWD.shape[2]):
            shifted_RPD = functional.pad(x_RPD[:, :-back], (0, 0, back, 0))
            out_RPD = out_RPD + taps_RPWD[:, :, back] * shifted_RPD
        return out_RPD.reshape(x_TD.shape)


class ConvBlock(Part):
    """A decoder layer with convolutions around its attention and its MLP."""

    def __init__(self, block: Block, attn_conv: Conv, mlp_conv: Conv) -> None:
        self.block, self.attn_conv, self.mlp_conv = block, attn_conv, mlp_conv

    @property
    def attn(self) -> Attention:
        return self.block.attn

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        block = self.block
        assert block.attn_norm is not None
        assert block.mlp_norm is not None
        input_TD, taps = self.attn_conv.before(block.attn_norm(x_TD))
        x_TD = x_TD + self.attn_conv.after(block.attn(input_TD, attend), taps)
        input_TD, taps = self.mlp_conv.before(block.mlp_norm(x_TD))
        return x_TD + self.mlp_conv.after(block.mlp(input_TD), taps)


class MarkovHead(Part):
    """What the token before adds to the logits of a place."""

    def __init__(self, before: Table, after: Linear, gate: Linear | None) -> None:
        self.before, self.after, self.gate = before, after, gate

    def __call__(self, token_M: Tensor, state_MD: Tensor) -> Tensor:
        return self.after(self.latent(token_M, state_MD))

    def latent(self, token_M: Tensor, state_MD: Tensor) -> Tensor:
        token_MK = self.before(token_M)
        if self.gate is None:
            return token_MK
        gate_MK = self.gate(torch.cat((state_MD.to(token_MK.dtype), token_MK), dim=-1))
        return token_MK * torch.sigmoid(gate_MK)


class Selector(Part):
    """Scores of pairs of neighbours, only among the best candidates of each place."""

    def __init__(self, before: Table, after_VK: Tensor, project: Linear, num_top: int) -> None:
        self.before, self.after_VK, self.project = before, after_VK, project
        self.num_top = num_top

    def __call__(
        self, logits_MC: Tensor, token_M: Tensor, state_MD: Tensor, ids_C: Tensor | None
    ) -> Tensor:
        top = logits_MC.topk(min(self.num_top, logits_MC.shape[1]), dim=-1)
        pair_MK = self.before(token_M) * self.project(state_MD)
        id_MB = top.indices if ids_C is None else ids_C[top.indices]
        after_MBK = self.after_VK[id_MB]
        scores_MB = top.values + torch.einsum("mk,mbk->mb", pair_MK, after_MBK).float()
        return torch.full_like(logits_MC, -torch.inf).scatter(1, top.indices, scores_MB)


@dataclass(eq=False, repr=False)
class BlockBody(Part):
    """All learned parts: from states to context, and from a block to its places' guesses."""

    shape: BlockShape
    fc: Linear
    hidden_norm: RMSNorm
    blocks: list[Block | ConvBlock]
    norm: RMSNorm
    markov: MarkovHead | None
    confidence: Linear | None
    selector: Selector | None
    mask_D: Tensor | None

    def context(self, features: Sequence[Tensor]) -> Tensor:
        """The target's states of some positions as context, the input of every layer's
        attention."""
        return self.hidden_norm(self.fc(torch.cat(tuple(features), dim=-1)))

    def context_kv(self, context_TD: Tensor, rotation: Rotation) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of known positions, layer by layer."""
        return [context_heads(block.attn, context_TD, rotation) for block in self.blocks]

    def inputs(self, embed_RD: Tensor, mask_D: Tensor) -> Tensor:
        """Packed places of blocks whose last known tokens have these embeddings."""
        num_masks = self.shape.num_places - 1
        mask_RSD = mask_D.to(embed_RD.dtype).expand(len(embed_RD), num_masks, -1)
        return torch.cat((embed_RD[:, None], mask_RSD), dim=1).flatten(0, 1) * (
            self.shape.embed_scale
        )

    def states(self, x_TD: Tensor, attend: Attend) -> Tensor:
        """States of whole blocks, normed for the output matrix, also of places that guess
        nothing."""
        for block in self.blocks:
            x_TD = block(x_TD, attend)
        return self.norm(x_TD)

    def telling(self, states_TD: Tensor) -> Tensor:
        """The states of the places that guess, RSD."""
        states_RPD = states_TD.view(-1, self.shape.num_places, states_TD.shape[-1])
        return states_RPD if self.shape.is_shifted else states_RPD[:, 1:]

    def scaled(self, logits_MC: Tensor) -> Tensor:
        """Logits, scaled as the files' config says."""
        logits_MC = logits_MC.float()
        if self.shape.output_scale != 1.0:
            logits_MC = logits_MC * self.shape.output_scale
        if self.shape.softcap is not None:
            logits_MC = torch.tanh(logits_MC / self.shape.softcap) * self.shape.softcap
        return logits_MC

    def scores(
        self, logits_MC: Tensor, token_M: Tensor, state_MD: Tensor, ids_C: Tensor | None = None
    ) -> Tensor:
        """Logits of places whose token before is `token_M`."""
        if self.markov is not None:
            # A vocabulary padded to another size than the target's has no use for the rest.
            bias_MC = self.markov(token_M, state_MD).float()[:, : logits_MC.shape[1]]
            missing = logits_MC.shape[1] - bias_MC.shape[1]
            logits_MC = logits_MC + (functional.pad(bias_MC, (0, missing)) if missing else bias_MC)
        if self.selector is not None:
            logits_MC = self.selector(logits_MC, token_M, state_MD, ids_C)
        return logits_MC

    def confidences(self, token_M: Tensor, state_MD: Tensor) -> Tensor | None:
        """Log-odds that the guess of a place is accepted, if the files have a head for it."""
        if self.confidence is None:
            return None
        if self.shape.confidence_sees_token:
            assert self.markov is not None
            token_MK = self.markov.before(token_M)
            state_MD = torch.cat((state_MD, token_MK.to(state_MD.dtype)), dim=-1)
        return self.confidence(state_MD)[:, 0].float()


def build_body(shape: BlockShape, source: Source) -> BlockBody:
    """The network over a source's tensors, under the published names."""
    spec = shape.spec
    width, eps, rank = spec.width, spec.norm_eps, shape.markov_rank
    blocks: list[Block | ConvBlock] = []
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        block = build_block(spec, source, prefix, layer)
        if shape.conv_taps:
            convs = [_conv(shape, source, f"{prefix}{part}_conv") for part in ("attention", "mlp")]
            blocks.append(ConvBlock(block, *convs))
        else:
            blocks.append(block)
    markov = None
    if rank:
        gate = None
        if shape.markov_type == "gated":
            name = "markov_head.gate_proj"
            gate = source.linear((name,), (rank,), width + rank, has_bias=True)
        table = Table(source.take("markov_head.markov_w1.weight", spec.vocab_size, rank))
        size = shape.num_columns or spec.vocab_size
        after = source.linear(("markov_head.markov_w2",), (size,), rank)
        markov = MarkovHead(table, after, gate)
    confidence = None
    if shape.has_confidence:
        size = width + (rank if shape.confidence_sees_token else 0)
        confidence = Linear(
            source.take("confidence_head.proj.weight", 1, size),
            source.take("confidence_head.proj.bias", 1),
        )
    return BlockBody(
        shape,
        fc=source.linear(("fc",), (width,), shape.feature_width),
        hidden_norm=source.rms_norm("hidden_norm", width, eps),
        blocks=blocks,
        norm=source.rms_norm("norm", width, eps),
        markov=markov,
        confidence=confidence,
        selector=_selector(shape, source) if shape.selector_rank else None,
        mask_D=source.take("mask_embedding", width) if shape.mask_token is None else None,
    )


def _conv(shape: BlockShape, source: Source, name: str) -> Conv:
    width, taps = shape.spec.width, shape.conv_taps
    base_2WD = source.take(f"{name}.base_kernel", 2, taps, width)
    size = 2 * taps * (width // shape.conv_group)
    project = source.linear((f"{name}.kernel_projection",), (size,), width)
    return Conv(base_2WD, project, shape.num_places)


def _selector(shape: BlockShape, source: Source) -> Selector:
    size, rank, name = shape.spec.vocab_size, shape.selector_rank, "candidate_selector."
    return Selector(
        Table(source.take(f"{name}predecessor_codebook", size, rank)),
        source.take(f"{name}successor_codebook", size, rank),
        source.linear((f"{name}hidden_projection",), (rank,), shape.spec.width),
        shape.selector_top,
    )


def context_heads(attn: Attention, context_TD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer that are made of the context."""
    k_TMH, v_TMH = context_parts(attn, context_TD)
    return rope(k_TMH, rotation.cos_T1H, rotation.sin_T1H), v_TMH


def context_parts(attn: Attention, context_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The same with keys that are not turned yet."""
    heads, qkv = attn.heads, attn.qkv
    first = heads.num_heads * heads.head_dim
    if isinstance(qkv, NativeLinear):  # its matrix is not cut
        kv_TK = qkv(context_TD)[:, first:]
    else:
        bias_K = None if qkv.bias_N is None else qkv.bias_N[first:]
        kv_TK = functional.linear(context_TD, qkv.weight_NK[first:], bias_K)
    k_TMH, v_TMH = kv_TK.reshape(len(context_TD), -1, heads.head_dim).chunk(2, dim=1)
    if attn.k_norm is not None:
        k_TMH = attn.k_norm(k_TMH)
    return k_TMH, v_TMH

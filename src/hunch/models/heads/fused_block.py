"""A block drafter's pass on a GPU: seven kernels per layer, two products per guessed place.

Where it fits, `BlockNet` hands its parts over to this; the torch code there is the specification.
Weights are shared, not copied.

Shape letters: T packed places, P the same padded where a library wants it, R rows, S places of a
block, M packed nodes, D width, K keys and values of a layer side by side, C columns of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_fused import add_norm, rope_kv
from hunch.kernels.gpu_gemm import gemm
from hunch.kernels.kv_store import KVCache
from hunch.layers.block import Block
from hunch.models.fused import READS, FusedLayers, unknown_to_kernels
from hunch.models.heads.block import BlockBody
from hunch.models.heads.block_net import BlockNet, TiledBlocks
from hunch.models.target import Target

Heads = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]  # weight, bias, norms


class FusedBlocks:
    """`BlockNet.cover_tiled` and `told` by fused kernels."""

    def __init__(self, net: BlockNet, layers: FusedLayers) -> None:
        body = net.body
        self.net, self.layers, self.eps = net, layers, layers.eps
        self.context_norm_D, self.norm_D = body.hidden_norm.weight_D, body.norm.weight_D
        self.fc = body.fc
        self.table_LH = net.rope.table_LH
        self.heads = [_context_heads(block) for block in body.blocks if isinstance(block, Block)]
        self.output_CD: Tensor | None = None if net.lm_head is None else net.lm_head.weight_NK

    def cover(self, features: Sequence[Tensor], attn: AttnInputs, kv: KVCache) -> None:
        """Keep keys and values of known positions; padding is recognised by its slot."""
        joined = features[0] if len(features) == 1 else torch.cat(tuple(features), dim=-1)
        context_TD = joined.new_empty(len(joined), len(self.context_norm_D))
        gemm(joined, self.fc.weight, context_TD, self.fc.bias_N)
        add_norm(context_TD, self.context_norm_D, self.eps, context_TD)
        no_queries = context_TD.new_empty(len(context_TD), 0)
        for layer, (weight_KD, bias_K, norms) in enumerate(self.heads):
            kv_TK = context_TD.new_empty(len(context_TD), len(weight_KD))
            gemm(context_TD, weight_KD, kv_TK, bias_K)
            where = kv.k_LCMH[layer], kv.v_LCMH[layer], attn.pos_T, attn.slot_T
            rope_kv(kv_TK, no_queries, *where, self.table_LH, norms, self.eps)

    def told(self, token_R: Tensor, blocks: TiledBlocks) -> FusedGuess:
        """The pass over blocks that begin with these tokens."""
        net, layers, num_rows = self.net, self.layers, len(token_R)
        size, width = net.shape.num_places, net.spec.width
        x_RSD = net.mask_D.to(net.kv_dtype).expand(num_rows, size, width).clone()
        x_RSD[:, 0] = net.embed(token_R)
        x_TD = x_RSD.flatten(0, 1)
        h_PD = x_TD.new_empty(layers.num_rows(len(x_TD)), width)
        add_norm(x_TD, layers.layers[0].attn_norm, self.eps, h_PD[: len(x_TD)])
        attn = blocks.attn
        attn.memo[READS] = blocks.whole
        _, last_TD = layers.run(x_TD, h_PD, attn, blocks.kv, blocks.tiling, norm=self.norm_D)
        assert last_TD is not None
        # Place after place, so that all rows of one place are contiguous.
        state_SRD = last_TD.view(num_rows, size, width).transpose(0, 1).contiguous()
        state_TD = state_SRD.flatten(0, 1)
        if self.output_CD is None:
            logits_TC = net.output(state_TD)
        else:
            shape = len(state_TD), len(self.output_CD)
            logits_TC = torch.empty(shape, dtype=torch.float32, device=state_TD.device)
            gemm(state_TD, self.output_CD, logits_TC)
        return FusedGuess(self.net.body, state_SRD, logits_TC.view(size, num_rows, -1))


@dataclass(slots=True)
class FusedGuess:
    """The result of one pass, read place by place as tokens are chosen."""

    body: BlockBody
    state_SRD: Tensor
    logits_SRC: Tensor
    _odds_SR: Tensor | None = None  # the part of `odds` that follows from states alone

    @property
    def is_alike(self) -> bool:
        """Whether guesses do not depend on the tokens before them."""
        return self.body.markov is None

    def level(self, depth: int, token_M: Tensor) -> Tensor:
        """Logits of the token at `depth`, given the ones before it: as many for every row."""
        logits_MC = self.logits_SRC[depth]
        if len(token_M) > len(logits_MC):
            logits_MC = logits_MC.repeat_interleave(len(token_M) // len(logits_MC), dim=0)
        markov = self.body.markov
        if markov is None:
            return logits_MC
        scores_MC = torch.empty_like(logits_MC)
        gemm(markov.before(token_M), markov.after.weight, scores_MC, residual_MN=logits_MC)
        return scores_MC

    def odds(self, depth: int, token_M: Tensor) -> Tensor | None:
        """`BlockBody.confidences`, of as many nodes for every row; states of all places at once."""
        head, markov = self.body.confidence, self.body.markov
        if head is None:
            return None
        width, num_rows = self.state_SRD.shape[2], self.state_SRD.shape[1]
        if self._odds_SR is None:
            odds_SR1 = functional.linear(self.state_SRD, head.weight_NK[:, :width], head.bias_N)
            self._odds_SR = odds_SR1[..., 0].float()
        odds_R1 = self._odds_SR[depth, :, None]
        if not self.body.shape.confidence_sees_token:
            return odds_R1.expand(-1, len(token_M) // num_rows).flatten()
        assert markov is not None
        token_MK, weight_K = markov.before(token_M), head.weight_NK[0, width:]
        of_tokens_M = functional.linear(token_MK.to(weight_K.dtype), weight_K)
        return (of_tokens_M.view(num_rows, -1) + odds_R1).flatten()


def _context_heads(block: Block) -> Heads:
    attn = block.attn
    first = attn.heads.num_heads * attn.heads.head_dim
    bias_K = None if attn.qkv.bias_N is None else attn.qkv.bias_N[first:].contiguous()
    norms = None
    if attn.q_norm is not None and attn.k_norm is not None:
        norms = attn.q_norm.weight_D, attn.k_norm.weight_D
    return attn.qkv.weight_NK[first:], bias_K, norms


def build_fused_blocks(net: BlockNet, target: Target) -> FusedBlocks | None:
    """The network by fused kernels, or None where they cannot compute it."""
    body, shape, spec = net.body, net.shape, net.spec
    blocks = [block for block in body.blocks if isinstance(block, Block)]
    markov = body.markov
    num_columns = len(net.ids_C) if net.ids_C is not None else target.spec.vocab_size
    is_plain = (
        not any(unknown_to_kernels(spec, target.dtype).values())
        and len(blocks) == len(body.blocks)  # no convolutions
        and body.selector is None
        and shape.is_shifted
        and all(window is None for window in spec.windows)
        and (shape.embed_scale, shape.output_scale, shape.softcap) == (1.0, 1.0, None)
        and (markov is None or (markov.gate is None and len(markov.after.weight) == num_columns))
    )
    matrices = [body.fc, *(block.attn.qkv for block in blocks)]
    matrices += [] if net.lm_head is None else [net.lm_head]
    if not is_plain or not all(isinstance(one.weight, Tensor) for one in matrices):
        return None
    layers = FusedLayers(blocks, [net.rope.table_LH], spec.norm_eps)
    # A library may add in any order, as drafts are checked.
    layers.is_wide = target.device.type == "cuda" and spec.width >= layers.min_width
    return FusedBlocks(net, layers)

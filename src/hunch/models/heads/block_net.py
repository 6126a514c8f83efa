"""Block drafters beside a target: which places see which, and one pass.

Shape letters: T packed places, R rows, P places of a block, S places that tell something, M packed
nodes, D width, C columns of logits, K keys, N heads, M KV heads, H head width, A = q, k and v heads
side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache, kv_store
from hunch.kernels.rope import Rotation
from hunch.layers.attention import Attend, Heads, split_heads
from hunch.layers.linear import Linear
from hunch.layers.rope import Rope
from hunch.models.heads.block import BlockBody, BlockShape, context_parts
from hunch.models.heads.files import Table
from hunch.models.heads.step import MARGIN, TiledNet, num_positions
from hunch.models.target import Target

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_tiling import Tiling


def seen_from(pos_P: Tensor, pos_K: Tensor, window: int | None, is_causal: bool) -> Tensor | None:
    """Which keys places see, by both their positions; None: all of them."""
    if window is None:
        return None
    back_PK = pos_P[:, None] - pos_K[None, :]
    is_seen_PK = back_PK < window
    if is_causal:
        return is_seen_PK & (back_PK >= 0)
    return is_seen_PK & (back_PK > -window)


class PagedBlocks:
    """Blocks over the context kept in a paged cache; nothing of a block is kept."""

    def __init__(
        self,
        kv: KVCache,
        slots: Sequence[Tensor],  # of each row's context, in order of position
        rotation: Rotation,  # of the packed places
        shape: BlockShape,
    ) -> None:
        self.slots, self.rotation, self.shape = slots, rotation, shape
        self.k, self.v = kv.k_LCMH.unbind(0), kv.v_LCMH.unbind(0)
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, self.rotation)
        size, out_TNH = self.shape.num_places, torch.empty_like(q_TNH)
        for row, slots_K in enumerate(self.slots):
            part = slice(row * size, (row + 1) * size)
            window = heads.window
            if window is not None:
                slots_K = slots_K[-window:]  # no place of the block sees what comes before
            k_KMH = torch.cat((self.k[layer][slots_K], k_TMH[part]))
            v_KMH = torch.cat((self.v[layer][slots_K], v_TMH[part]))
            mask_PK = self._mask(len(slots_K), window, q_TNH.device)
            out_TNH[part] = attend_dense(q_TNH[part], k_KMH, v_KMH, mask_PK, heads)
        return out_TNH

    def _mask(self, num_context: int, window: int | None, device: torch.device) -> Tensor | None:
        if window is None:
            return None
        key = num_context, window
        if key not in self._masks:
            pos_K = torch.arange(num_context + self.shape.num_places, device=device)
            pos_P = pos_K[num_context:]
            is_causal = self.shape.is_causal
            self._masks[key] = seen_from(pos_P, pos_K, window, is_causal)
        return self._masks[key]


class TiledBlocks:
    """Blocks by a GPU's kernels; their keys lie in the slots after the context's, for this pass.

    In layers where places see one another, each reads up to the block's last place. A window that
    slides there begins by the last place too.
    """

    def __init__(
        self, attn: AttnInputs, end_T: Tensor, kv: KVCache, net: BlockNet, tiling: Tiling
    ) -> None:
        from hunch.layers.tiled import Tiled

        self.attn, self.kv, self.tiling = attn, kv, tiling
        self.whole = replace(attn, pos_T=end_T, base_T=end_T + 1, memo={})
        self.is_causal = net.shape.is_causal
        self.by_place = Tiled(attn, kv, net.rope.table_LH, tiling)
        self.by_block = Tiled(attn, kv, net.rope.table_LH, tiling, self.whole)

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        is_causal = heads.window is not None and self.is_causal
        return (self.by_place if is_causal else self.by_block)(qkv_TAH, heads, layer)


def attend_dense(
    q_TNH: Tensor, k_KMH: Tensor, v_KMH: Tensor, is_seen_TK: Tensor | None, heads: Heads
) -> Tensor:
    """What queries read of keys that lie side by side."""
    out_NTH = functional.scaled_dot_product_attention(
        q_TNH.transpose(0, 1)[None],
        k_KMH.transpose(0, 1)[None],
        v_KMH.transpose(0, 1)[None],
        attn_mask=is_seen_TK,
        scale=heads.scale,
        enable_gqa=heads.num_heads != heads.num_kv_heads,
    )[0]
    return out_NTH.transpose(0, 1)


# --- beside a target ------------------------------------------------------------------------------


class Guess(Protocol):
    """The result of one pass, as a device reads it: place by place, as tokens are chosen."""

    @property
    def is_alike(self) -> bool:
        """Whether guesses do not depend on the tokens before them."""

    def level(self, depth: int, token_M: Tensor) -> Tensor:
        """Logits of the token at `depth`, given the ones before it: as many for every row."""

    def odds(self, depth: int, token_M: Tensor) -> Tensor | None:
        """Log-odds that such a token is accepted; None: the files have no head for it."""


class FusedBlocks(Protocol):
    """`BlockNet.cover_tiled` and `told` by fused kernels."""

    def cover(self, features: Sequence[Tensor], attn: AttnInputs, kv: KVCache) -> None: ...

    def told(self, token_R: Tensor, blocks: TiledBlocks) -> Guess: ...


class BlockNet(TiledNet):
    """A block drafter's body with the embedding and output matrix it uses beside its target."""

    matrix_bytes = 0  # of weights held outside of tensors

    def __init__(
        self,
        body: BlockBody,
        target: Target,
        *,
        embed: Table | None,  # None: the target's
        lm_head: Linear | None,
        ids_C: Tensor | None,  # the target's id of each column of logits; None: all of them
    ) -> None:
        shape = body.shape
        assert shape.spec.rope is not None
        self.body, self.shape, self.spec = body, shape, shape.spec
        self.embed = embed or target.embed
        self.lm_head, self.ids_C = lm_head, ids_C
        self.output = target.backend.shared_output(target, lm_head)
        self.feature_layers, self.num_kv_layers = shape.feature_layers, shape.spec.num_layers
        self.kv_dtype: torch.dtype = target.dtype
        spec = shape.spec
        length = max(spec.max_len + MARGIN, num_positions(target))
        self.rope = Rope(shape.spec.rope, spec.head_dim, length, target.device)
        mask_D = body.mask_D
        if mask_D is None:
            mask_1 = torch.tensor([shape.mask_token], device=target.device)
            mask_D = self.embed(mask_1)[0]
        self.mask_D = mask_D
        self.fused: FusedBlocks | None = None  # the same by a GPU's fused kernels
        target.backend.accelerate_blocks(self, target)

    def cover(self, features: Sequence[Tensor], pos_T: Tensor, slot_T: Tensor, kv: KVCache) -> None:
        """Keep the keys and values of known positions, from the target's states of them."""
        rotation = self.rope(pos_T)
        layers = self.body.context_kv(self.body.context(features), rotation)
        for layer, (k_TMH, v_TMH) in enumerate(layers):
            k_CMH, v_CMH = kv.k_LCMH[layer], kv.v_LCMH[layer]
            kv_store(k_TMH.to(k_CMH.dtype), v_TMH.to(v_CMH.dtype), k_CMH, v_CMH, slot_T)

    def cover_tiled(self, features: Sequence[Tensor], attn: AttnInputs, kv: KVCache) -> None:
        """`cover` by a GPU's kernels, which recognise padding by its slot."""
        if self.fused is not None:
            self.fused.cover(features, attn, kv)
            return
        from hunch.kernels.gpu_tiling import Tiling
        from hunch.layers.tiled import Tiled

        context_TD = self.body.context(features)
        tiled = Tiled(attn, kv, self.rope.table_LH, Tiling(None))
        for layer, block in enumerate(self.body.blocks):
            tiled.keep(*context_parts(block.attn, context_TD), layer)

    def guess(
        self, token_R: Tensor, pos_R: Tensor, slots: Sequence[Tensor], kv: KVCache
    ) -> BlockGuess:
        """One pass: the guesses of each row's block, which begins with `token_R` at `pos_R`."""
        size = self.shape.num_places
        pos_T = (pos_R[:, None] + torch.arange(size, device=pos_R.device)).flatten()
        return self.told(token_R, PagedBlocks(kv, slots, self.rope(pos_T), self.shape))

    def told_tiled(self, token_R: Tensor, blocks: TiledBlocks) -> Guess:
        """`told` by a GPU's kernels."""
        if self.fused is not None:
            return self.fused.told(token_R, blocks)
        return self.told(token_R, blocks)

    def told(self, token_R: Tensor, attend: Attend) -> BlockGuess:
        """The pass over blocks that begin with these tokens."""
        body = self.body
        x_TD = body.inputs(self.embed(token_R), self.mask_D)
        state_RSD = body.telling(body.states(x_TD, attend))
        logits_MC = (self.lm_head or self.output)(state_RSD.flatten(0, 1))
        return BlockGuess(self, state_RSD, body.scaled(logits_MC).view(*state_RSD.shape[:2], -1))


@dataclass(slots=True)
class BlockGuess:
    """The result of one pass, for rows in order: read place by place as tokens are chosen."""

    net: BlockNet
    state_RSD: Tensor
    logits_RSC: Tensor  # of places, whatever token is before them

    @property
    def is_alike(self) -> bool:
        """Whether guesses do not depend on the tokens before them."""
        return self.net.body.markov is None and self.net.body.selector is None

    def scores(self, row_M: Tensor, depth: int, token_M: Tensor) -> Tensor:
        """Logits of the token at `depth` of some rows' drafts, given the one before it."""
        net = self.net
        state_MD, logits_MC = self.state_RSD[row_M, depth], self.logits_RSC[row_M, depth]
        return net.body.scores(logits_MC, token_M, state_MD, net.ids_C)

    def level(self, depth: int, token_M: Tensor) -> Tensor:
        """`scores` of every row, of as many nodes each."""
        return self.scores(self._rows(token_M), depth, token_M).contiguous()

    def odds(self, depth: int, token_M: Tensor) -> Tensor | None:
        """`confidences` of every row, of as many nodes each."""
        return self.confidences(self._rows(token_M), depth, token_M)

    def _rows(self, token_M: Tensor) -> Tensor:
        row_M = torch.arange(len(self.state_RSD), device=token_M.device)
        return row_M.repeat_interleave(len(token_M) // len(row_M))

    def confidences(self, row_M: Tensor, depth: int, token_M: Tensor) -> Tensor | None:
        """Log-odds that such a token is accepted; None: the files have no head for it."""
        return self.net.body.confidences(token_M, self.state_RSD[row_M, depth])

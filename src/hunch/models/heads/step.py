"""What EAGLE's and MTP's networks have in common: (hidden state, next token) -> next hidden state.

Shape letters: T packed tokens, D width of the network, C columns of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.native import NativeNetwork
from hunch.layers.attention import Attend, Paged
from hunch.layers.part import Part
from hunch.layers.rope import Rope
from hunch.models.heads.files import Table
from hunch.models.spec import ModelSpec
from hunch.models.target import Target

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_tiling import Tiler, Tiling

MARGIN = 64  # positions past the context that a draft may reach
SHARED_BYTES = 64 * 2**20  # for partial results of rows whose positions a GPU's programs share


def num_positions(target: Target) -> int:
    """Positions that a network beside this target must have, as it continues past its own context
    in captured steps. 0: as many as it has."""
    return target.spec.max_len + MARGIN if target.backend.captures_steps else 0


class TiledNet(Part):
    """A network that attends by a GPU's kernels where its target does."""

    spec: ModelSpec
    rope: Rope
    num_kv_layers: int
    is_capturable = True  # a step needs nothing of the host, so a graph can contain it
    _tiler: Tiler | None = None

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and head width of its cache."""
        return self.num_kv_layers, self.spec.num_kv_heads, self.spec.head_dim

    def tiler(self, attn: AttnInputs) -> Tiler:
        """How a GPU divides attention, for texts as long as the block tables allow."""
        from hunch.kernels.gpu_tiling import Tiler

        max_len = min(len(self.rope.table_LH), attn.table_SB.shape[1] * attn.block_size)
        if self._tiler is None or self._tiler.max_len < max_len:
            spec, device = self.spec, self.rope.table_LH.device
            self._tiler = Tiler.create(
                spec.num_heads, spec.num_kv_heads, spec.value_dim, max_len, device, SHARED_BYTES
            )
        return self._tiler


class FusedStep(Protocol):
    """`StepNet.step_ref` and `logits_ref` by a GPU's fused kernels."""

    def step(
        self, token_T: Tensor, state_TD: Tensor, attn: AttnInputs, kv: KVCache, tiling: Tiling
    ) -> Tensor: ...

    def logits(self, state_TD: Tensor) -> Tensor: ...


class StepNet(TiledNet):
    """At position t it sees the hidden state of t and token t + 1, and predicts token t + 2."""

    feature_layers: tuple[int, ...] = ()  # of the target; () with needs_hidden: its last state
    ids_C: Tensor | None = None  # the target's id of each column of logits; None: all of them
    matrix_bytes = 0  # of weights held outside of tensors
    num_tokens: int | None = None  # drafted per step, by the files; None: they do not say
    is_staged = False  # a layer per drafted token: known positions go through `cover`
    network: NativeNetwork | None = None  # the same on the CPU's own kernels, where they can
    fused: FusedStep | None = None  # and on the GPU's

    def __init__(
        self,
        spec: ModelSpec,
        target: Target,
        embed: Table | None,
        num_kv_layers: int,
        rope_dim: int | None = None,  # where not all of a head is turned
    ) -> None:
        if embed is None and spec.width != target.spec.width:
            raise ModelFormatError(
                f"the head is {spec.width} wide and brings no embedding; the target's is "
                f"{target.spec.width} wide: it is a head for another model"
            )
        assert spec.rope is not None
        self.spec = spec
        self.embed = embed or target.embed
        rope_dim = rope_dim or spec.head_dim
        max_len = max(spec.max_len + MARGIN, num_positions(target))
        self.rope = Rope(spec.rope, rope_dim, max_len, target.device)
        self.num_kv_layers = num_kv_layers
        self.state_width = spec.width  # of what a row keeps between steps
        self.kv_dtype: torch.dtype = target.dtype
        # Beside a target on a GPU's kernels the head attends by the same.
        self.is_tiled = target.backend.captures_steps

    @property
    def needs_hidden(self) -> bool:
        return not self.feature_layers

    def fuse(self, hidden_TD: Tensor | None, features: tuple[Tensor, ...]) -> Tensor:
        """The target's states as the network reads them: the last one, if it needs no others."""
        assert hidden_TD is not None
        return hidden_TD

    def step(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        """The next hidden state; its KV is written."""
        if self.network is not None:
            return self.network.forward(token_T.contiguous(), attn, kv, state_TD=hidden_TD)[0]
        if self.fused is not None:
            return self.fused.step(token_T, hidden_TD, attn, kv, self.tiler(attn).of(attn))
        return self.step_ref(token_T, hidden_TD, attn, kv)

    def cover(
        self,
        token_T: Tensor,
        hidden_TD: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        before: Sequence[Tensor | None],
    ) -> Tensor:
        """`step` over known positions; `before` is what each span's row kept at the one before."""
        raise NotImplementedError

    def attend(self, attn: AttnInputs, kv: KVCache) -> Attend:
        """How tokens see each other over the paged cache."""
        if not self.is_tiled:
            return Paged(attn, kv, self.rope(attn.pos_T))
        from hunch.layers.tiled import Tiled

        return Tiled(attn, kv, self.rope.table_LH, self.tiler(attn).of(attn))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Scores of what follows the token just fed."""
        if self.network is not None:
            return self.network.logits(hidden_TD)
        if self.fused is not None:
            return self.fused.logits(hidden_TD)
        return self.logits_ref(hidden_TD)

    def step_ref(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        """`step` as the paper has it, by torch."""
        raise NotImplementedError

    def logits_ref(self, hidden_TD: Tensor) -> Tensor:
        raise NotImplementedError

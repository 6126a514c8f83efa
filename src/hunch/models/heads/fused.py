"""A head's pass on a GPU: a token and a state joined, then seven kernels per layer.

Where it fits, a network of models/heads hands its parts over to this; the torch code beside them is
the specification. Weights are shared, not copied.

Shape letters: T packed tokens, P the same padded where a library wants it, D width, E = 2D: a token
beside a state, C columns of logits, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_fused import add_norm
from hunch.kernels.gpu_gemm import gemm
from hunch.kernels.gpu_join import join
from hunch.kernels.gpu_tiling import Tiling
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Weight
from hunch.layers.block import Block
from hunch.layers.latent import LatentBlock
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.models.fused import FusedLayers, float_logits, unknown_to_kernels
from hunch.models.heads.files import Table
from hunch.models.heads.step import StepNet

log = logging.getLogger("hunch")


class SharesTables(Protocol):
    """A target on a GPU, of which a head may take the embedding and the output matrix."""

    dtype: torch.dtype
    device: torch.device
    embedding_VD: Tensor

    @property
    def tables(self) -> tuple[Tensor, Weight] | None: ...


@dataclass(eq=False, repr=False)
class FusedHead:
    """`StepNet.step_ref` and `logits_ref` by fused kernels."""

    layers: FusedLayers
    table_VD: Tensor
    project: Linear | None  # None: the first layer attends with token and state as they are
    output_CD: Weight
    norms: tuple[Tensor, Tensor] | None  # of the token and of the state
    final_norm_D: Tensor | None  # of the state a pass leaves
    logits_norm_D: Tensor | None  # of the state before the output matrix
    is_state_first: bool
    is_first_masked: bool  # position 0 has no token
    is_residual_normed: bool  # without a projection: which state the layers add to

    def step(
        self, token_T: Tensor, state_TD: Tensor, attn: AttnInputs, kv: KVCache, tiling: Tiling
    ) -> Tensor:
        (num_tokens, width), eps, layers = state_TD.shape, self.layers.eps, self.layers
        pair_PE = state_TD.new_empty(layers.num_rows(num_tokens), 2 * width)
        x_TD = state_TD.new_empty(num_tokens, width) if self.is_residual_normed else state_TD
        join(
            self.table_VD, token_T, state_TD, self.norms, eps, pair_PE,
            is_state_first=self.is_state_first,
            pos_T=attn.pos_T if self.is_first_masked else None,
            normed_TD=x_TD if self.is_residual_normed else None,
        )  # fmt: skip
        input_PE = pair_PE
        if self.project is not None:
            x_PD = state_TD.new_empty(len(pair_PE), width)
            gemm(pair_PE, self.project.weight, x_PD, self.project.bias_N)
            x_TD, input_PE = x_PD[:num_tokens], x_PD
            first_norm = layers.layers[0].attn_norm
            if first_norm is not None:
                input_PE = state_TD.new_empty(len(pair_PE), width)
                add_norm(x_TD, first_norm, eps, input_PE[:num_tokens])
        # The stream that enters is kept: it may be the caller's state, or the first input itself.
        streams, last_TD = layers.run(
            x_TD, input_PE, attn, kv, tiling, norm=self.final_norm_D, kept=(0,)
        )
        return streams[-1] if last_TD is None else last_TD

    def logits(self, state_TD: Tensor) -> Tensor:
        if self.logits_norm_D is not None:
            normed_TD = state_TD.new_empty(state_TD.shape)
            add_norm(state_TD, self.logits_norm_D, self.layers.eps, normed_TD)
            state_TD = normed_TD
        return float_logits(state_TD, self.output_CD)


def _output_of(target: SharesTables) -> Weight:
    tables = target.tables
    assert tables is not None
    return tables[1]


def build_fused(
    net: StepNet,
    target: SharesTables,
    blocks: Sequence[Block | LatentBlock],
    *,
    project: Linear | None,
    lm_head: Linear | None,  # None: the target's
    final_norm: RMSNorm | None = None,
    logits_norm: RMSNorm | None = None,
    token_norm: RMSNorm | None = None,
    state_norm: RMSNorm | None = None,
    is_state_first: bool = False,
    is_first_masked: bool = False,
    is_residual_normed: bool = False,
) -> FusedHead | None:
    """The network `net` describes, or None where the kernels cannot compute it."""
    spec = net.spec
    problems = unknown_to_kernels(spec, target.dtype)
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        log.warning("the head drafts by torch: fused kernels do not know %s", ", ".join(found))
        return None
    table_VD = net.embed.weight_VD if isinstance(net.embed, Table) else target.embedding_VD
    norms = None
    if token_norm is not None and state_norm is not None:
        norms = token_norm.weight_D, state_norm.weight_D
    output_CD = lm_head.weight if lm_head is not None else _output_of(target)
    layers = FusedLayers(blocks, [net.rope.table_LH], spec.norm_eps)
    # A library may add in any order, as drafts are checked.
    layers.is_wide = target.device.type == "cuda" and spec.width >= layers.min_width
    return FusedHead(
        layers,
        table_VD,
        project=project,
        output_CD=output_CD,
        norms=norms,
        final_norm_D=None if final_norm is None else final_norm.weight_D,
        logits_norm_D=None if logits_norm is None else logits_norm.weight_D,
        is_state_first=is_state_first,
        is_first_masked=is_first_masked,
        is_residual_normed=is_residual_normed,
    )

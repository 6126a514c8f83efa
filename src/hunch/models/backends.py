"""The backends: torch, the CPU's C++ kernels, a GPU's Triton kernels; see `target.Backend`.

They import all that they compute, so a target finds its backend by name (`target.find_backend`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.block_net import BlockNet
from hunch.models.heads.draft_model import cut_decoder, cut_native
from hunch.models.heads.files import NativeLinear
from hunch.models.heads.native import build_network
from hunch.models.heads.step import StepNet, num_positions
from hunch.models.load import load_decoder, reaching
from hunch.models.native import DTYPES, NativeDecoder, is_supported, load_native
from hunch.models.spec import ModelSpec
from hunch.models.target import DraftNet, Target
from hunch.models.weights import Weights

if TYPE_CHECKING:  # needs Triton
    from hunch.models.heads.fused import SharesTables

log = logging.getLogger("hunch")


class TorchBackend:
    """torch's own kernels, on any device; the other backends use them wherever they have none."""

    name = "torch"
    about = "torch, with products and attention of fixed order: exact and slower"
    captures_steps = False
    has_host_kernels = False

    def convert_layer(self, layer: Linear, target: Target) -> tuple[Linear, int]:
        return layer, 0

    def shared_output(self, target: Target, *own: Linear | None) -> Callable[[Tensor], Tensor]:
        return target.logits

    def accelerate(self, net: DraftNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        """Nothing to do: the network's own code runs on torch."""

    def accelerate_blocks(self, net: DraftNet, target: Target) -> None:
        """Nothing to do, as in `accelerate`."""

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        max_len = num_positions(target)
        model = load_decoder(weights, dtype=dtype, device=target.device, max_len=max_len)
        return self.like_target(model)

    def load_cut(
        self, weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
    ) -> Target:
        max_len = num_positions(target)
        model = cut_decoder(weights, reaching(spec, max_len), target, dtype, ids_C)
        model.reach(max_len)
        return self.like_target(model)

    def like_target(self, model: Decoder) -> Target:
        """The draft model on the target's kernels, if they support it."""
        return model


class NativeBackend(TorchBackend):
    """The CPU's own C++ kernels."""

    name = "native"
    about = "the CPU's own kernels"
    has_host_kernels = True

    def convert_layer(self, layer: Linear, target: Target) -> tuple[Linear, int]:
        """Beside a quantised target, a drafter's layers are quantised too."""
        if not NativeLinear.fits(layer.weight_NK):
            return layer, 0
        held = NativeLinear(layer.weight_NK, layer.bias_N, is_rounded=target.is_quantised)
        return held, held.matrix.nbytes

    def accelerate(self, net: DraftNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        assert isinstance(net, StepNet)
        net.network = build_network(net, cast("NativeDecoder", target), blocks, **parts)

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        """Beside a quantised target, in 8 bits at most."""
        if dtype in DTYPES:
            if dtype == "auto" and not weights.metadata and target.is_quantised:
                dtype = "int8"
            model = load_native(weights, dtype=dtype, num_threads=torch.get_num_threads())
            if model is not None:
                return model
        return super().load_draft(weights, target, dtype)

    def load_cut(
        self, weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
    ) -> Target:
        if is_supported(spec):
            return cut_native(weights, spec, cast("NativeDecoder", target), dtype, ids_C)
        return super().load_cut(weights, spec, target, dtype, ids_C)


class TritonBackend(TorchBackend):
    """A GPU's fused Triton kernels."""

    name = "triton"
    about = "the GPU's fused kernels"
    captures_steps = True

    def accelerate(self, net: DraftNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        from hunch.models.heads.fused import build_fused

        assert isinstance(net, StepNet)
        net.fused = build_fused(net, cast("SharesTables", target), blocks, **parts)

    def accelerate_blocks(self, net: DraftNet, target: Target) -> None:
        from hunch.models.heads.fused_block import build_fused_blocks

        assert isinstance(net, BlockNet)
        net.fused = build_fused_blocks(net, target)

    def like_target(self, model: Decoder) -> Target:
        from hunch.models.cuda import CudaDecoder

        try:
            return CudaDecoder(model)
        except UnsupportedModelError as error:
            log.warning("%s: the draft model runs on torch's own kernels", error)
            model.expand()
            return model


TORCH, NATIVE, TRITON = TorchBackend(), NativeBackend(), TritonBackend()

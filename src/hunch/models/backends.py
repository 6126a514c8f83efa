"""What computes a model's passes, and what a drafter beside it may count on.

A backend says as data what it can do, and takes a drafter's parts into its own form. A further kind
of device is a further Backend here: nothing else compares names of kernels.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch

from hunch.errors import UnsupportedModelError
from hunch.layers.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hunch.kernels.quant import Weight
    from hunch.models.decoder import Decoder
    from hunch.models.heads.fused import SharesTables
    from hunch.models.heads.step import StepNet
    from hunch.models.native import NativeDecoder
    from hunch.models.spec import ModelSpec
    from hunch.models.target import Target
    from hunch.models.weights import Weights

log = logging.getLogger("hunch")


class Backend:
    """torch's own kernels, on any device."""

    name = "torch"  # for reports
    about = "torch, with products and attention of fixed order: exact and slower"
    captures_steps = False  # passes ask nothing of the host, so that a whole step can be captured
    has_host_kernels = False  # lookups, and chains of a single row, are one call of C++ each

    def hold(self, layer: Linear, target: Target) -> tuple[Linear, int]:
        """A drafter's layer as it is kept beside this target, and its bytes outside of tensors."""
        return layer, 0

    def output(self, target: Target, *own: Linear | None) -> Callable[[Tensor], Tensor]:
        """The target's scores of a drafter's states, for those of its heads without an `own`."""
        return target.logits

    def accelerate(self, net: StepNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        """Let this backend's kernels compute what `net` describes, where they can.

        `parts` are what stands around the blocks; see `build_network` and `build_fused`.
        """

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        """A whole draft model, in the precision that suits this target."""
        from hunch.models.heads.step import num_positions
        from hunch.models.load import load_decoder

        max_len = num_positions(target)
        model = load_decoder(weights, dtype=dtype, device=target.device, max_len=max_len)
        return self.like_target(model)

    def load_cut(
        self, weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
    ) -> Target:
        """A draft model that shares the target's embedding and output matrix."""
        from hunch.models.heads.draft_model import cut_decoder
        from hunch.models.heads.step import num_positions
        from hunch.models.load import reaching

        max_len = num_positions(target)
        model = cut_decoder(weights, reaching(spec, max_len), target, dtype, ids_C)
        model.reach(max_len)
        return self.like_target(model)

    def like_target(self, model: Decoder) -> Target:
        """A draft model on the target's kernels, where they know it too."""
        return model


def output_of(weight_VD: Weight, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Scores by this output matrix, of a target like `spec`."""
    from hunch.models.decoder import finish_logits

    output = Linear(weight_VD)
    return lambda state_MD: finish_logits(output(state_MD).float(), spec)


class NativeBackend(Backend):
    """The CPU's own C++ kernels."""

    name = "native"
    about = "the CPU's own kernels"
    has_host_kernels = True

    def hold(self, layer: Linear, target: Target) -> tuple[Linear, int]:
        """Beside a quantised target, the products of a drafter are quantised too."""
        from hunch.models.heads.files import NativeLinear

        if not NativeLinear.fits(layer.weight_NK):
            return layer, 0
        held = NativeLinear(layer.weight_NK, layer.bias_N, is_rounded=target.is_quantised)
        return held, held.matrix.nbytes

    def accelerate(self, net: StepNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        from hunch.models.heads.native import build_network

        net.network = build_network(net, cast("NativeDecoder", target), blocks, **parts)

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        """Beside a quantised target, in 8 bits at most."""
        from hunch.models.native import DTYPES, load_native

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
        from hunch.models.heads.draft_model import cut_native
        from hunch.models.native import is_supported

        if is_supported(spec):
            return cut_native(weights, spec, cast("NativeDecoder", target), dtype, ids_C)
        return super().load_cut(weights, spec, target, dtype, ids_C)


class TritonBackend(Backend):
    """A GPU's fused Triton kernels."""

    name = "triton"
    about = "the GPU's fused kernels"
    captures_steps = True

    def accelerate(self, net: StepNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        from hunch.models.heads.fused import build_fused

        net.fused = build_fused(net, cast("SharesTables", target), blocks, **parts)

    def like_target(self, model: Decoder) -> Target:
        from hunch.models import cuda

        try:
            return cuda.CudaDecoder(model)
        except UnsupportedModelError as error:
            log.warning("%s: the draft model runs on torch's own kernels", error)
            model.expand()
            return model


TORCH, NATIVE, TRITON = Backend(), NativeBackend(), TritonBackend()

"""A head's network on the kernels of its target's device."""

from __future__ import annotations

from typing import Any

from hunch.layers.block import Block
from hunch.models.heads.native import build_network
from hunch.models.heads.step import StepNet


def use_kernels(net: StepNet, target: Any, blocks: list[Block], **parts: Any) -> None:
    """Where the kernels can compute what `net` describes, they do; torch does the rest.

    `parts` are what stands around the blocks; see `build_network` and `build_fused`.
    """
    kernels = getattr(target, "kernels", "")
    if kernels == "native":
        net.network = build_network(net, target, blocks, **parts)
    elif kernels == "triton":
        from hunch.models.heads.fused import build_fused  # needs Triton

        net.fused = build_fused(net, target, blocks, **parts)

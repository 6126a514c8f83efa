"""Recurrent layers from a config and a source of tensors: shared by every family that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.delta import DeltaShape
from hunch.layers.norm import RMSNorm
from hunch.layers.recurrent import DeltaBlock, GatedDelta
from hunch.models.build import Names, build_mlp, build_norm
from hunch.models.reading import Config, read_int
from hunch.models.source import Source
from hunch.models.spec import ModelSpec

FULL, LINEAR = "full_attention", "linear_attention"
# What a layer's one product gives, in its order.
PARTS = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")


def read_delta(config: Config, num_layers: int) -> dict[str, Any]:
    """Shape and places of the recurrent layers, as arguments of ModelSpec."""
    types: Any = config.get("layer_types")
    every = read_int(config, "full_attention_interval", 4)
    if types is None:
        types = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    if not isinstance(types, Sequence) or set(types) - {FULL, LINEAR}:
        raise UnsupportedModelError(f"layer_types={types!r}: only {FULL} and {LINEAR} are known")
    if len(types) != num_layers:
        raise ModelFormatError(
            f"layer_types lists {len(types)} layers, num_hidden_layers={num_layers}"
        )
    shape = DeltaShape(
        num_k_heads=read_int(config, "linear_num_key_heads", 16),
        num_v_heads=read_int(config, "linear_num_value_heads", 32),
        k_dim=read_int(config, "linear_key_head_dim", 128),
        v_dim=read_int(config, "linear_value_head_dim", 128),
        num_taps=read_int(config, "linear_conv_kernel_dim", 4),
    )
    if shape.num_v_heads % shape.num_k_heads:
        raise ModelFormatError(
            f"linear_num_value_heads={shape.num_v_heads} is not a multiple of "
            f"linear_num_key_heads={shape.num_k_heads}"
        )
    return {"delta": shape, "is_recurrent": tuple(kind == LINEAR for kind in types)}


def build_delta_block(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names
) -> DeltaBlock:
    """A layer with a gated delta net; arrange.py has taken apart what files fuse."""
    if source.group.size > 1:
        raise UnsupportedModelError(
            "recurrent layers cannot be split over processes yet: leave tensor_parallel_size at 1"
        )
    attn_norm, mlp_norm = (
        build_norm(spec, source, prefix + name) for name in (names.attn_norm, names.mlp_norm)
    )
    assert isinstance(attn_norm, RMSNorm)
    assert isinstance(mlp_norm, RMSNorm)
    delta = _build_delta(spec, source, prefix + names.recurrent, layer)
    mlp = build_mlp(spec, source, prefix, layer, names=names)
    return DeltaBlock(attn_norm, delta, mlp_norm, mlp)


def _build_delta(spec: ModelSpec, source: Source, prefix: str, layer: int) -> GatedDelta:
    shape = spec.delta
    assert shape is not None
    count = shape.num_v_heads
    conv_C1J = source.floats(f"{prefix}conv1d.weight", shape.num_channels, 1, shape.num_taps)
    return GatedDelta(
        source.linear(
            tuple(prefix + name for name in PARTS),
            (shape.num_channels, count, count, shape.value_width),
            spec.width,
        ),
        conv_C1J.flatten(1).t().contiguous() if conv_C1J.numel() else conv_C1J,
        -source.floats(f"{prefix}A_log", count).exp(),
        source.floats(f"{prefix}dt_bias", count),
        source.floats(f"{prefix}norm.weight", shape.v_dim),
        spec.norm_eps,
        source.row_linear(f"{prefix}out_proj", spec.width, shape.value_width, has_bias=False),
        shape,
        spec.place_of(layer),
    )

"""Recurrent layers from a config and a source of tensors: shared by every family that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hunch.kernels.delta import ChannelDeltaShape, DeltaShape, DeltaWeights
from hunch.kernels.lightning import LightningShape, LightningWeights
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.selective import SelectiveShape
from hunch.kernels.short_conv import ConvShape, ConvWeights
from hunch.kernels.ssm import SsmShape
from hunch.layers.attention import Attention
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.layers.recurrent import (
    BothBlock,
    CarriedBlock,
    ChannelDelta,
    GatedDelta,
    HalfBlock,
    Lightning,
    Recurrent,
    RecurrentBlock,
    ShortConv,
)
from hunch.models.build import (
    Names,
    build_attention,
    build_block,
    build_mlp,
    build_norm,
    build_rms_norms,
)
from hunch.models.mamba import as_taps, build_mamba, build_selective
from hunch.models.reading import FULL, LINEAR, Config, check_listed, read_int
from hunch.models.source import Asked, Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import Group, Share, head_spans

TILED = "linear_value_heads_tiled"  # of configs made from GGUF files; see DeltaShape
# The outputs of a layer's single product, in order.
PARTS = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")


def is_of_type(types: Any, other: str, num_layers: int) -> tuple[bool, ...]:
    """Per layer of `layer_types`: whether it is of this type; the others attend."""
    if not isinstance(types, Sequence) or set(types) - {FULL, other}:
        raise UnsupportedModelError(f"layer_types={types!r}: only {FULL} and {other} are known")
    check_listed("layer_types", types, num_layers)
    return tuple(layer_type == other for layer_type in types)


def read_delta(config: Config, num_layers: int) -> dict[str, Any]:
    """Shape and places of the recurrent layers, as arguments of ModelSpec."""
    types: Any = config.get("layer_types")
    every = read_int(config, "full_attention_interval", 4)
    if types is None:
        types = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    is_recurrent = is_of_type(types, LINEAR, num_layers)
    shape = DeltaShape(
        num_k_heads=read_int(config, "linear_num_key_heads", 16),
        num_v_heads=read_int(config, "linear_num_value_heads", 32),
        k_dim=read_int(config, "linear_key_head_dim", 128),
        v_dim=read_int(config, "linear_value_head_dim", 128),
        num_taps=read_int(config, "linear_conv_kernel_dim", 4),
        is_tiled=bool(config.get(TILED)),
    )
    if shape.num_v_heads % shape.num_k_heads:
        raise ModelFormatError(
            f"linear_num_value_heads={shape.num_v_heads} is not a multiple of "
            f"linear_num_key_heads={shape.num_k_heads}"
        )
    return {"recurrence": shape, "is_recurrent": is_recurrent}


def build_recurrent_block(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names
) -> RecurrentBlock | BothBlock:
    """A layer that recurs, and may attend beside it, and then has an MLP or experts."""
    if spec.attends_too:
        block = build_block(spec, source, prefix, layer, names=names, block_class=BothBlock)
        assert isinstance(block, BothBlock)
        block.recurrent = build_recurrent(spec, source, prefix + names.recurrent, layer)
        return block
    attn_norm, mlp_norm = build_rms_norms(spec, source, prefix, names)
    mixer = build_recurrent(spec, source, prefix + names.recurrent, layer)
    mlp = build_mlp(spec, source, prefix, layer, names=names)
    return RecurrentBlock(attn_norm, mixer, mlp_norm, mlp, spec.residual_scale)


def build_carried_block(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names
) -> CarriedBlock:
    """A layer that carries on what its halves read."""
    scales, is_recurrent = spec.carried, spec.is_recurrent[layer]
    attn_norm, mlp_norm = build_rms_norms(spec, source, prefix, names)
    assert scales is not None
    mixer: Recurrent | Attention
    if is_recurrent:
        mixer = build_recurrent(spec, source, prefix + names.recurrent, layer)
    else:
        mixer = build_attention(spec, source, prefix, layer, names=names)
    mlp = build_mlp(spec, source, prefix, layer, names=names)
    return CarriedBlock(
        attn_norm,
        mixer,
        mlp_norm,
        mlp,
        attn_scales=scales.recurrent if is_recurrent else scales.attn,
        mlp_scales=scales.mlp,
    )


def build_half(spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names) -> HalfBlock:
    """A layer with one half alone."""
    norm = build_norm(spec, source, prefix + names.attn_norm)
    assert isinstance(norm, RMSNorm)
    assert spec.residual_scale == 1.0
    if spec.is_recurrent[layer]:
        return HalfBlock(norm, build_recurrent(spec, source, prefix + names.recurrent, layer))
    if spec.has_mixer(layer):
        return HalfBlock(norm, build_attention(spec, source, prefix, layer, names=names))
    return HalfBlock(norm, build_mlp(spec, source, prefix, layer, names=names))


def build_recurrent(spec: ModelSpec, source: Source, prefix: str, layer: int) -> Recurrent:
    """The part of a layer that replaces attention; arrange.py has split what files fuse."""
    shape = spec.recurrence
    if isinstance(shape, DeltaShape) and not shape.is_apart:
        return _build_delta(spec, shape, source, prefix, layer)
    if source.group.size > 1:
        raise ConfigError(
            f"tensor_parallel_size={source.group.size}: the recurrent layers of "
            f"{spec.architecture} are not split over processes; leave it at 1"
        )
    if isinstance(shape, DeltaShape):
        return _build_delta_apart(spec, shape, source, prefix, layer)
    if isinstance(shape, ChannelDeltaShape):
        return _build_channel_delta(spec, shape, source, prefix, layer)
    if isinstance(shape, ConvShape):
        return _build_conv(shape, source, prefix, spec.place_of(layer))
    if isinstance(shape, SelectiveShape):
        return build_selective(spec, shape, source, prefix, spec.place_of(layer))
    if isinstance(shape, LightningShape):
        return _build_lightning(spec, shape, source, prefix, layer)
    assert isinstance(shape, SsmShape)
    return build_mamba(spec, shape, source, prefix, spec.place_of(layer))


def _build_lightning(
    spec: ModelSpec, shape: LightningShape, source: Source, prefix: str, layer: int
) -> Lightning:
    """Lightning attention: later heads forget less, and so do later layers, down to almost
    nothing."""
    width, count = shape.value_width, shape.num_heads
    rate_N = (2.0 ** (-8.0 / count)) ** torch.arange(1, count + 1, device=source.device)
    rate_N = rate_N * (1 - layer / (spec.num_layers - 1 + 1e-5) + 1e-5)
    return Lightning(
        source.linear(
            (f"{prefix}qkv_proj", f"{prefix}output_gate"), (3 * width, width), spec.width
        ),
        LightningWeights(torch.exp(-rate_N)),
        source.row_linear(f"{prefix}out_proj", spec.width, width, has_bias=False),
        shape,
        spec.place_of(layer),
        norm_Z=source.floats(f"{prefix}norm.weight", width),
    )


def _build_conv(shape: ConvShape, source: Source, prefix: str, place: int) -> ShortConv:
    width, taps = shape.width, shape.num_taps
    parts = tuple(f"{prefix}in_proj_{part}" for part in "bxc")
    return ShortConv(
        source.linear(parts, (width,) * 3, width),
        ConvWeights(as_taps(source.floats(f"{prefix}conv.weight", width, 1, taps))),
        source.row_linear(f"{prefix}out_proj", width, width, has_bias=False),
        shape,
        place,
    )


def _build_delta(
    spec: ModelSpec, shape: DeltaShape, source: Source, prefix: str, layer: int
) -> GatedDelta:
    count, width = shape.num_v_heads, shape.value_width
    heads, values, channels = _shares(shape, source.group)
    conv_C1J = source.floats(f"{prefix}conv1d.weight", shape.num_channels, 1, shape.num_taps)
    if conv_C1J.numel():
        conv_C1J = torch.cat([conv_C1J[first:last] for first, last in channels])
    qkv, beta, decay, gate = (f"{prefix}{name}.weight" for name in PARTS)
    some: list[Asked] = [(qkv, (shape.num_channels, spec.width), part) for part in channels]
    some += [(name, (count, spec.width), heads) for name in (beta, decay)]
    some.append((gate, (width, spec.width), values))
    is_whole = source.group.size == 1
    whole = [(qkv, (shape.num_channels, spec.width), None), *some[3:]]
    own = slice(*heads)
    return GatedDelta(
        Linear(source.matrix(whole if is_whole else some, 0)),
        DeltaWeights(
            as_taps(conv_C1J),
            -source.floats(f"{prefix}A_log", count)[own].exp(),
            source.floats(f"{prefix}dt_bias", count)[own],
        ),
        source.row_linear(f"{prefix}out_proj", spec.width, width, has_bias=False, part=values),
        local_delta(shape, source.group),
        spec.place_of(layer),
        norm_D=source.floats(f"{prefix}norm.weight", shape.v_dim),
        eps=spec.norm_eps,
    )


def _build_delta_apart(
    spec: ModelSpec, shape: DeltaShape, source: Source, prefix: str, layer: int
) -> GatedDelta:
    """A gated delta net by OLMo's names, from one matrix for each part."""
    count, keys, values = shape.num_v_heads, shape.key_width, shape.value_width
    sizes = {"q": keys, "k": keys, "v": values, "b": count, "a": count, "g": values}
    return GatedDelta(
        source.linear(
            tuple(f"{prefix}{part}_proj" for part in sizes), tuple(sizes.values()), spec.width
        ),
        DeltaWeights(
            _taps_apart(source, prefix, (keys, keys, values), shape.num_taps),
            -source.floats(f"{prefix}A_log", count).exp(),
            source.floats(f"{prefix}dt_bias", count),
        ),
        source.row_linear(f"{prefix}o_proj", spec.width, values, has_bias=False),
        shape,
        spec.place_of(layer),
        norm_D=source.floats(f"{prefix}o_norm.weight", shape.v_dim),
        eps=spec.norm_eps if shape.read_eps is None else shape.read_eps,
    )


def _taps_apart(source: Source, prefix: str, sizes: Sequence[int], num_taps: int) -> Tensor:
    """Taps of queries, keys and values, as one."""
    each = [
        source.floats(f"{prefix}{part}_conv1d.weight", size, 1, num_taps)
        for part, size in zip("qkv", sizes, strict=True)
    ]
    return as_taps(torch.cat(each))


def _build_channel_delta(
    spec: ModelSpec, shape: ChannelDeltaShape, source: Source, prefix: str, layer: int
) -> ChannelDelta:
    count, rank, width = shape.num_heads, shape.head_dim, shape.value_width
    parts = {"q": width, "k": width, "v": width, "b": count, "f_a": rank, "g_a": rank}
    rate_N = source.floats(f"{prefix}A_log", 1, 1, count, 1).flatten()
    decay, gate = (
        source.linear((f"{prefix}{part}_b_proj",), (width,), rank) for part in ("f", "g")
    )
    return ChannelDelta(
        source.linear(
            tuple(f"{prefix}{part}_proj" for part in parts), tuple(parts.values()), spec.width
        ),
        DeltaWeights(
            _taps_apart(source, prefix, (width,) * 3, shape.num_taps),
            -rate_N.exp(),
            source.floats(f"{prefix}dt_bias", width),
        ),
        source.row_linear(f"{prefix}o_proj", spec.width, width, has_bias=False),
        shape,
        spec.place_of(layer),
        decay,
        gate,
        norm_D=source.floats(f"{prefix}o_norm.weight", rank),
        eps=spec.norm_eps,
    )


def _shares(shape: DeltaShape, group: Group) -> tuple[Share, Share, tuple[Share, ...]]:
    """One rank's share: value heads, their numbers, and channels of queries, keys, values."""
    if group.size > shape.num_k_heads:
        raise ConfigError(
            f"tensor_parallel_size={group.size} is more than the key heads of the model's "
            f"recurrent layers ({shape.num_k_heads})"
        )
    (first, last), per_key = head_spans(shape.num_k_heads, shape.num_k_heads, group)[0], shape.k_dim
    readers, width = shape.num_v_heads // shape.num_k_heads, shape.key_width
    heads = first * readers, last * readers
    values = heads[0] * shape.v_dim, heads[1] * shape.v_dim
    keys = [(start + first * per_key, start + last * per_key) for start in (0, width)]
    return heads, values, (*keys, (2 * width + values[0], 2 * width + values[1]))


def local_recurrence(shape: Recurrence, group: Group) -> Recurrence:
    """The share of a recurrence that one rank of a group has."""
    return local_delta(shape, group) if isinstance(shape, DeltaShape) else shape


def local_delta(shape: DeltaShape, group: Group) -> DeltaShape:
    """One rank's share of a gated delta net."""
    first, last = _shares(shape, group)[0]
    readers = shape.num_v_heads // shape.num_k_heads
    return replace(shape, num_v_heads=last - first, num_k_heads=(last - first) // readers)

"""Layers over several streams, from a spec and a source of tensors."""

from __future__ import annotations

from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.streams import Mixer, ShortCut, SparseMLP, Streams, StreamsBlock, StreamsShape
from hunch.models.build import (
    Names,
    build_attention,
    build_gate,
    build_mlp,
    build_norm,
    refuse_split,
)
from hunch.models.source import Source
from hunch.models.spec import ModelSpec


def build_streams(spec: ModelSpec, source: Source) -> Streams | None:
    """The parts before and after the layers."""
    shape = spec.streams
    if shape is None:
        return None
    num_others = shape.count - 1
    refuse_split(spec, source, "measures all gates of an MLP at once")

    def products(name: str) -> list[Linear]:
        names = [f"model.{name}.{at}" for at in range(num_others)]
        return [source.linear((each,), (spec.width,), spec.width) for each in names]

    spread, join = products("altup_projections"), products("altup_unembed_projections")
    return Streams(spread, join)


def build_streams_block(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names
) -> StreamsBlock:
    """One layer whose tensors are named `prefix` + the family's names."""
    shape, altup = spec.streams, f"{prefix}altup."
    assert shape is not None
    gate = build_gate(spec, source, prefix, names)
    assert gate is not None
    # Files have it even if nothing reads it.
    scale_D = source.take(f"{altup}correct_output_scale", spec.width)
    return StreamsBlock(
        mixer=_build_mixer(spec, source, altup, shape.count),
        active=shape.active,
        attn_norm=build_norm(spec, source, prefix + names.attn_norm),
        attn=build_attention(spec, source, prefix, layer, names=names),
        attn_out_norm=build_norm(spec, source, prefix + names.attn_out_norm),
        short=_build_short(spec, source, f"{prefix}laurel.", shape.short_rank),
        mlp_norm=build_norm(spec, source, prefix + names.mlp_norm),
        mlp=_build_mlp(spec, source, prefix, layer, names, shape),
        mlp_out_norm=build_norm(spec, source, prefix + names.mlp_out_norm),
        inputs=gate,
        scale_D=scale_D if shape.has_scale else None,
    )


def _build_mixer(spec: ModelSpec, source: Source, prefix: str, count: int) -> Mixer:
    router_SD = source.take(f"{prefix}modality_router.weight", count, spec.width)
    return Mixer(
        source.rms_norm(f"{prefix}router_norm", spec.width, spec.norm_eps),
        Linear(router_SD),  # never in few bits
        source.floats(f"{prefix}prediction_coefs.weight", count * count, count),
        source.floats(f"{prefix}correction_coefs.weight", count, count),
    )


def _build_short(spec: ModelSpec, source: Source, prefix: str, rank: int) -> ShortCut:
    return ShortCut(
        source.linear((f"{prefix}linear_left",), (rank,), spec.width),
        source.linear((f"{prefix}linear_right",), (spec.width,), rank),
        source.rms_norm(f"{prefix}post_laurel_norm", spec.width, spec.norm_eps),
    )


def _build_mlp(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names, shape: StreamsShape
) -> GatedMLP:
    mlp = build_mlp(spec, source, prefix, layer, names=names)
    assert isinstance(mlp, GatedMLP)
    share = shape.sparsity[layer]
    return mlp if not share else SparseMLP(mlp.gate_up, mlp.down, mlp.activation, share)

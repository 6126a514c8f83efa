"""A file's recurrent layers in the form of the CPU's own kernels."""

from __future__ import annotations

from typing import Any

from hunch.kernels.delta import ChannelDeltaShape, DeltaShape
from hunch.kernels.lightning import LightningShape
from hunch.kernels.native_structs import RULES, NativePart, RecurrentStruct
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.selective import SelectiveShape
from hunch.kernels.short_conv import ConvShape
from hunch.kernels.ssm import SsmShape
from hunch.models.mamba import as_taps
from hunch.models.native_reader import Reader
from hunch.models.spec import ModelSpec


def knows(shape: Recurrence | None, num_lanes: int) -> bool:
    """Whether the kernels support the recurrence, if there is one: their rows are whole vectors."""
    if shape is None or isinstance(shape, SelectiveShape | LightningShape | ChannelDeltaShape):
        return shape is None
    if isinstance(shape, DeltaShape) and shape.is_apart:
        return False
    widths = [width for width in shape.state[1:] if width]
    if isinstance(shape, SsmShape):
        widths.append(shape.value_width // shape.num_groups)
    return all(width % num_lanes == 0 for width in widths)


def native_recurrent(spec: ModelSpec, reader: Reader, prefix: str, place: int) -> NativePart:
    """One layer; arrange.py has split what files fuse."""
    shape = spec.recurrence
    if isinstance(shape, DeltaShape):
        parts = _delta(shape, reader, prefix)
    elif isinstance(shape, SsmShape):
        parts = _mamba(shape, reader, prefix)
    else:
        assert isinstance(shape, ConvShape)
        parts = _conv(reader, prefix)
    if spec.attends_too:
        parts["out"] = reader.matrix(f"{prefix}out_proj.weight")
    num_heads, k_dim, v_dim = shape.state
    return NativePart(
        RecurrentStruct,
        num_v_heads=num_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        num_taps=shape.num_taps,
        place=place,
        eps=spec.norm_eps,
        **parts,
    )


def _delta(shape: DeltaShape, reader: Reader, prefix: str) -> dict[str, Any]:
    return {
        "rule": RULES.index("delta"),
        "num_k_heads": shape.num_k_heads,
        "is_tiled": shape.is_tiled,
        "channels": reader.matrix(f"{prefix}in_proj_qkv.weight"),
        "beta": reader.floats(f"{prefix}in_proj_b.weight"),
        "decay": reader.floats(f"{prefix}in_proj_a.weight"),
        "gate": reader.matrix(f"{prefix}in_proj_z.weight"),
        "conv": as_taps(reader.tensor(f"{prefix}conv1d.weight")),
        "rate": -reader.tensor(f"{prefix}A_log").exp(),
        "bias": reader.tensor(f"{prefix}dt_bias"),
        "norm": reader.tensor(f"{prefix}norm.weight"),
    }


def _mamba(shape: SsmShape, reader: Reader, prefix: str) -> dict[str, Any]:
    found = {
        "rule": RULES.index("ssm"),
        "num_k_heads": shape.num_groups,
        "is_norm_first": shape.is_norm_first,
        "channels": reader.matrix(f"{prefix}in_proj_xbc.weight"),
        "decay": reader.floats(f"{prefix}in_proj_dt.weight"),
        "gate": reader.matrix(f"{prefix}in_proj_z.weight"),
        "conv": as_taps(reader.tensor(f"{prefix}conv1d.weight")),
        "rate": -reader.tensor(f"{prefix}A_log").exp(),
        "bias": reader.tensor(f"{prefix}dt_bias"),
        "skip": reader.tensor(f"{prefix}D"),
    }
    if shape.has_conv_bias:
        found["conv_bias"] = reader.tensor(f"{prefix}conv1d.bias")
    if shape.has_norm:
        found["norm"] = reader.tensor(f"{prefix}norm.weight")
    return found


def _conv(reader: Reader, prefix: str) -> dict[str, Any]:
    factors = [f"{prefix}in_proj_{part}.weight" for part in "bx"]
    return {
        "rule": RULES.index("conv"),
        "num_k_heads": 1,
        "channels": reader.stack(factors),
        "gate": reader.matrix(f"{prefix}in_proj_c.weight"),
        "conv": as_taps(reader.tensor(f"{prefix}conv.weight")),
    }

"""Mamba layers from a config and a source of tensors: shared by every family that has them.

Shape letters: C channels of the convolution, J its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.selective import SelectiveShape, SelectiveWeights
from hunch.kernels.ssm import SsmShape, SsmWeights
from hunch.layers.recurrent import Mamba, Selective
from hunch.models.reading import FULL, LINEAR, Config, read_int, refuse
from hunch.models.source import Source
from hunch.models.spec import ModelSpec

_OLDER = {"mamba": LINEAR, "mamba2": LINEAR, "attention": FULL}  # names of older files

MAMBA_NAMES = {  # our keys for Mamba 2, and those of families with little else
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}


def read_layer_types(types: Any, num_layers: int, *others: str) -> list[str]:
    """The type of each layer, in the newer of two sets of names; `others` are allowed too."""
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != num_layers:
        raise ModelFormatError(f"layer_types={types!r} does not list {num_layers} layers")
    layer_types = [_OLDER.get(str(layer_type), str(layer_type)) for layer_type in types]
    if strange := sorted(set(layer_types) - {LINEAR, FULL, *others}):
        raise UnsupportedModelError(
            f"layers of type {', '.join(strange)} are not supported beside Mamba 2 layers; only "
            f"{', '.join((LINEAR, FULL, *others))}"
        )
    return layer_types


def is_mamba(layer_types: list[str]) -> tuple[bool, ...]:
    return tuple(layer_type == LINEAR for layer_type in layer_types)


def read_mamba(
    config: Config,
    width: int,
    inner: int | None = None,
    *,
    has_norm: bool = True,
    is_norm_first: bool = False,
) -> SsmShape:
    """The sizes of Mamba 2 layers, by the keys that most families have for them.

    `inner`: numbers of all heads, where the config does not make them a multiple of the width.
    """
    refuse(config, "mamba_proj_bias", False)
    read_limits(config)
    config.get("mamba_chunk_size")  # of how it is trained
    inner = inner or read_int(config, "mamba_expand", 2) * width
    config.get("mamba_expand")
    num_heads = read_int(config, "mamba_n_heads", 128)
    if inner % num_heads:
        raise ModelFormatError(f"mamba_n_heads={num_heads} does not divide {inner}")
    v_dim = inner // num_heads
    given = config.get("mamba_d_head", "auto")
    if given not in ("auto", None, v_dim):
        raise ModelFormatError(f"mamba_d_head={given!r}: {num_heads} heads of {inner} have {v_dim}")
    return SsmShape(
        num_groups=read_int(config, "mamba_n_groups", 1),
        num_heads=num_heads,
        k_dim=read_int(config, "mamba_d_state", 256),
        v_dim=v_dim,
        num_taps=read_int(config, "mamba_d_conv", 4),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        has_norm=has_norm,
        is_norm_first=has_norm and is_norm_first,
    )


def read_limits(config: Config) -> None:
    """Raise for bounds of a step's size that would clip it; how it is initialised does not
    matter."""
    for key in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        config.get(key)
    limit = config.get("time_step_limit")
    # JSON has no infinity; transformers writes {"__float__": "Infinity"}.
    plain = [some.get("__float__") if isinstance(some, dict) else some for some in limit or ()]
    if [str(some).lower() for some in plain] not in ([], ["0.0", "inf"], ["0.0", "infinity"]):
        raise UnsupportedModelError(f"time_step_limit={limit!r} is not supported; only 0 to inf")


def build_mamba(spec: ModelSpec, shape: SsmShape, source: Source, prefix: str, place: int) -> Mamba:
    """A Mamba 2 layer; arrange.py has split its first product."""
    count, channels, width = shape.num_heads, shape.num_channels, shape.value_width
    conv_JC = as_taps(source.floats(f"{prefix}conv1d.weight", channels, 1, shape.num_taps))
    conv_bias_C = torch.zeros(channels, device=source.device)
    if shape.has_conv_bias:
        conv_bias_C = source.floats(f"{prefix}conv1d.bias", channels)
    weights = SsmWeights(
        conv_JC,
        conv_bias_C,
        -source.floats(f"{prefix}A_log", count).exp(),
        source.floats(f"{prefix}dt_bias", count),
        source.floats(f"{prefix}D", count),
    )
    parts = tuple(f"{prefix}in_proj_{part}" for part in ("xbc", "dt", "z"))
    return Mamba(
        source.linear(parts, (channels, count, width), spec.width),
        weights,
        source.row_linear(f"{prefix}out_proj", spec.width, width, has_bias=False),
        shape,
        place,
        norm_Z=source.floats(f"{prefix}norm.weight", width) if shape.has_norm else None,
        eps=spec.norm_eps,
    )


def build_selective(
    spec: ModelSpec, shape: SelectiveShape, source: Source, prefix: str, place: int
) -> Selective:
    """Mamba 1."""
    width, rank, keys = shape.width, shape.rank, shape.k_dim
    rate_DH = source.floats(f"{prefix}A_log", width, keys)
    conv_bias_D = torch.zeros(width, device=source.device)
    if shape.has_conv_bias:
        conv_bias_D = source.floats(f"{prefix}conv1d.bias", width)
    part_norm_X = torch.ones(rank + 2 * keys, device=source.device)
    if shape.has_part_weights:
        sizes = {"dt": rank, "b": keys, "c": keys}
        part_norm_X = torch.cat(
            [source.floats(f"{prefix}{part}_layernorm.weight", n) for part, n in sizes.items()]
        )
    weights = SelectiveWeights(
        as_taps(source.floats(f"{prefix}conv1d.weight", width, 1, shape.num_taps)),
        conv_bias_D,
        source.floats(f"{prefix}x_proj.weight", rank + 2 * keys, width),
        source.floats(f"{prefix}dt_proj.weight", width, rank),
        source.floats(f"{prefix}dt_proj.bias", width),
        -rate_DH.exp().t().contiguous() if rate_DH.numel() else rate_DH,
        source.floats(f"{prefix}D", width),
        part_norm_X,
    )
    has_bias = shape.has_bias
    return Selective(
        source.linear((f"{prefix}in_proj",), (2 * width,), spec.width, has_bias=has_bias),
        weights,
        source.row_linear(f"{prefix}out_proj", spec.width, width, has_bias=has_bias),
        shape,
        place,
    )


def as_taps(conv_C1J: Tensor) -> Tensor:
    """A convolution's weights in the form that recurrences take, JC."""
    return conv_C1J.flatten(1).t().contiguous() if conv_C1J.numel() else conv_C1J

"""A named model's size from its config alone, as `hunch plan` needs it for targets and drafts."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from hunch.bench.roofline import BYTES, Size
from hunch.errors import ConfigError
from hunch.hub.names import find_description
from hunch.models.load import expert_params, tensor_shapes
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.models.weights.configs import unified_config
from hunch.models.weights.json_file import read_json

_NUMBER = re.compile(r"\d+(\.\d*)?[mbt]?", re.IGNORECASE)
KV_ITEM = 2  # bytes of a number in the cache


def size_from(text: str, dtype: str) -> Size:
    """The size of '8B', '135M', or of a model by its name, directory, GGUF file or hub id."""
    if _NUMBER.fullmatch(text):
        return Size.parse(text, dtype)
    if dtype not in BYTES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(BYTES)}")
    found, num_bytes = find_description(text), None
    if found.suffix == ".json":
        config = unified_config(read_json(found))
    else:
        weights = open_weights(found)
        config, num_bytes = weights.config, float(weights.nbytes)
    spec = ModelSpec.from_config({k: v for k, v in config.items() if k != "quantization_config"})
    size = size_of(spec)
    if num_bytes is None or dtype != "bf16":  # weights of a GGUF stay in the file's types
        num_bytes = size.params * BYTES[dtype]
    return replace(size, weight_bytes=num_bytes)


def size_of(spec: ModelSpec, kv_item: int = KV_ITEM) -> Size:
    """The size of a model in 16 bits, with so many bytes for a number in the cache."""
    shapes = tensor_shapes(spec)
    params = float(sum(map(prod, shapes.values())))
    share, asked = 0.0, 1.0
    if spec.experts is not None:
        routing = spec.experts.routing
        share = expert_params(spec, shapes) / params
        asked = routing.num_chosen / routing.num_experts
    kv_bytes = _kv_bytes(spec, kv_item)
    return Size(params, spec.num_layers, kv_bytes, params * BYTES["bf16"], share, asked)


def _kv_bytes(spec: ModelSpec, item: int) -> float:
    """The bytes of a token's KV, in all layers that keep it."""
    scale = 4 * (item == 1)  # codes have one
    if spec.latent is not None:
        width = spec.latent.latent_dim + spec.latent.rope_dim
        return float(len(spec.kv_layers) * (item * width + scale))
    shapes = spec.kv_shapes(spec.num_kv_heads)
    return float(
        sum(2 * layers * heads * (width * item + scale) for layers, heads, width in shapes)
    )

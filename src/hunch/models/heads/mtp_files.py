"""How published files store MTP layers, and DeepSeek's kind of layer: latent attention, experts.

MiMo: model.mtp_layers.i.*, each layer with norms and a projection of its own. Qwen3-Next: mtp.*,
one set of norms and one projection for all of mtp.layers.i. DeepSeek (arXiv 2412.19437):
model.layers.L.*, after the target's L layers; enorm, hnorm, eh_proj.

Shape letters: see layers/latent.py and layers/experts.py; X width of a head's queries and keys, N
outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelError, ModelFormatError, UnsupportedModelError
from hunch.layers.attention import Heads
from hunch.layers.experts import Experts
from hunch.layers.latent import HeadLinear, LatentAttention, LatentBlock, LatentShape
from hunch.layers.mlp import GatedMLP
from hunch.layers.rope import head_order
from hunch.models.arrange import Arranged
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, build_experts, read_deepseek_experts
from hunch.models.heads.files import HeadSource
from hunch.models.latent import NORM_EPS, read_latent
from hunch.models.load import DRAFTING_LAYERS
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Weights
from hunch.registry import MODELS, resolve

MTP_NAMES = Names(experts=ExpertNames(shared="mlp.shared_experts."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The names of one layer's parts, and how it joins its two inputs."""

    token_norm: str
    state_norm: str
    project: str
    norm: str
    layer: str  # prefix of the decoder layer itself
    embed: str = ""
    head: str = ""
    is_state_first: bool = False  # the order in which the projection takes its two inputs
    is_first_masked: bool = False  # the layer's first position has no embedding


def mimo_form(number: int) -> Form:
    prefix = f"model.mtp_layers.{number}."
    return Form(
        token_norm=prefix + "token_layernorm",
        state_norm=prefix + "hidden_layernorm",
        project=prefix + "input_proj",
        norm=prefix + "final_layernorm",
        layer=prefix,
        is_state_first=True,
    )


def qwen_form(number: int) -> Form:
    return Form(
        token_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        norm="mtp.norm",
        layer=f"mtp.layers.{number}.",
    )


def deepseek_form(number: int) -> Form:
    prefix = f"model.layers.{number}."
    return Form(
        token_norm=prefix + "enorm",
        state_norm=prefix + "hnorm",
        project=prefix + "eh_proj",
        norm=prefix + "shared_head.norm",
        layer=prefix,
        embed=prefix + "embed_tokens.weight",
        head=prefix + "shared_head.head.weight",
        is_first_masked=True,
    )


_FORMS = (
    (re.compile(r"model\.mtp_layers\.(\d+)\.input_proj\.weight"), mimo_form),
    (re.compile(r"mtp\.layers\.(\d+)\.input_layernorm\.weight"), qwen_form),
    (re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight"), deepseek_form),
)


def find_forms(source: HeadSource, config: Mapping[str, Any]) -> list[Form]:
    """The layers of a file, first to last."""
    for pattern, form in _FORMS:
        found = (pattern.fullmatch(name) for name in source.names)
        numbers = sorted(int(match[1]) for match in found if match)
        if numbers:
            _check_count(source.where, config, len(numbers))
            return [form(number) for number in numbers]
    raise ModelFormatError(
        f"{source.where}: no MTP layer found; tensors model.mtp_layers.0.input_proj.weight (MiMo), "
        "mtp.layers.0.* (Qwen3-Next) or model.layers.L.eh_proj.weight (DeepSeek) were expected"
    )


def _check_count(where: str, config: Mapping[str, Any], found: int) -> None:
    for key in DRAFTING_LAYERS:
        asked = config.get(key)
        if isinstance(asked, int) and asked > found:
            raise ModelFormatError(
                f"{where}: {key}={asked}, but the files hold {found} MTP layer"
                f"{'s' if found > 1 else ''}; a part of them is missing"
            )


def read_layer(config: Mapping[str, Any], where: str) -> tuple[ModelSpec, LatentShape]:
    """The spec of a layer with latent attention, and the sizes of the latter."""
    try:
        spec = read_latent(config, "head")
        spec.check()
    except ModelError as error:
        raise type(error)(f"{where}: {error}") from None
    assert spec.latent is not None
    return spec, spec.latent


def family_layers(weights: Weights) -> tuple[ModelSpec, Weights] | None:
    """The layers of a target with recurrent ones: those of its kind that attend, arranged alike.

    None: the file is of another family.
    """
    (name, *_) = weights.config.get("architectures") or [""]
    spec = ModelSpec.from_config(weights.config) if name in MODELS else None
    if spec is None or spec.recurrence is None:
        return None
    found = (re.match(r"mtp\.layers\.(\d+)\.", tensor) for tensor in weights.names())
    count = len({match[1] for match in found if match})
    experts = spec.experts and replace(spec.experts, layers=(True,) * count)
    spec = replace(spec, recurrence=None, is_recurrent=(), is_mlp=(), experts=experts)
    spec = replace(spec, num_layers=count, windows=(None,) * count)
    names = replace(resolve(MODELS, name).names, layer="mtp.layers.{}.")
    return spec, Arranged(weights, spec, names)


def build_latent_block(
    spec: ModelSpec,
    shape: LatentShape,
    source: HeadSource,
    config: Mapping[str, Any],
    prefix: str,
    layer: int,
) -> LatentBlock:
    mlp: GatedMLP | Experts
    if f"{prefix}mlp.gate.weight" in source:
        mlp = _experts(spec, source, config, prefix)
    else:
        mlp = _mlp(spec, source, f"{prefix}mlp.", spec.ffn_width)
    return LatentBlock(
        source.rms_norm(f"{prefix}input_layernorm", spec.width, spec.norm_eps),
        _attention(spec, shape, source, f"{prefix}self_attn.", layer),
        source.rms_norm(f"{prefix}post_attention_layernorm", spec.width, spec.norm_eps),
        mlp,
    )


def _attention(
    spec: ModelSpec, shape: LatentShape, source: HeadSource, prefix: str, layer: int
) -> LatentAttention:
    heads, flat, latent = spec.num_heads, shape.flat_dim, shape.latent_dim
    q_sizes = (heads, flat + shape.rope_dim)
    rank, width = shape.q_latent_dim, spec.width
    q_norm = None
    if rank is not None:
        q_norm = source.rms_norm(f"{prefix}q_a_layernorm", rank, NORM_EPS)
    q_name, num_in = (f"{prefix}q_proj", width) if rank is None else (f"{prefix}q_b_proj", rank)
    q_NK = source.take(f"{q_name}.weight", math.prod(q_sizes), num_in)
    q_NK = _apart(q_NK.view(*q_sizes, num_in), shape).flatten(0, 1)
    kv_name = f"{prefix}kv_a_proj_with_mqa"
    kv_NK = source.take(f"{kv_name}.weight", latent + shape.rope_dim, width)
    down, biases = [_apart(kv_NK[None], shape)[0]], []
    if f"{kv_name}.bias" in source:
        kv_bias = source.take(f"{kv_name}.bias", latent + shape.rope_dim)
        biases = [_apart(kv_bias[None, :, None], shape).flatten()]
    if rank is not None:
        down.insert(0, source.take(f"{prefix}q_a_proj.weight", rank, width))
        if biases:
            biases.insert(0, source.take(f"{prefix}q_a_proj.bias", rank))
    up_size = flat + shape.value_dim
    up_NXC = source.take(f"{prefix}kv_b_proj.weight", heads * up_size, latent)
    k_up, v_up = up_NXC.view(heads, up_size, latent).split_with_sizes((flat, shape.value_dim), 1)
    return LatentAttention(
        source.held(torch.cat(down), torch.cat(biases) if biases else None),
        source.held(q_NK),
        q_norm,
        source.rms_norm(f"{prefix}kv_a_layernorm", latent, NORM_EPS),
        HeadLinear(k_up.flatten(0, 1).contiguous()),
        HeadLinear(v_up.flatten(0, 1).contiguous()),
        source.dense(f"{prefix}o_proj", width, heads * shape.value_dim),
        Heads(num_heads=heads, num_kv_heads=1, head_dim=spec.head_dim, scale=shape.scale),
        layer,
    )


def _apart(weight_NXK: Tensor, shape: LatentShape) -> Tensor:
    """Rows of the turned part as the kernels pair them: all first of a pair, then all second."""
    if not shape.is_interleaved:
        return weight_NXK
    flat, tail = weight_NXK.tensor_split([weight_NXK.shape[1] - shape.rope_dim], dim=1)
    return torch.cat((flat, tail[:, 0::2], tail[:, 1::2]), dim=1)


def _mlp(spec: ModelSpec, source: HeadSource, prefix: str, inner: int) -> GatedMLP:
    up = source.linear((f"{prefix}gate_proj", f"{prefix}up_proj"), (inner, inner), spec.width)
    return GatedMLP(up, source.dense(f"{prefix}down_proj", spec.width, inner), spec.activation)


def _experts(
    spec: ModelSpec, source: HeadSource, config: Mapping[str, Any], prefix: str
) -> Experts:
    names = MTP_NAMES.experts
    return build_experts(_with_experts(spec, source, config), source, prefix, names)


def with_experts(
    spec: ModelSpec, source: HeadSource, config: Mapping[str, Any], forms: Sequence[Form]
) -> ModelSpec:
    """The spec with DeepSeek's kind of experts, as GLM's layers have them, where there are any."""
    has_experts = f"{forms[0].layer}mlp.gate.weight" in source
    return _with_experts(spec, source, config) if has_experts else spec


def order_heads(spec: ModelSpec, source: HeadSource, forms: Sequence[Form]) -> None:
    """Have q and k read so that the part of a head that is turned is the kernels' first half."""
    order = None if spec.rope is None else head_order(spec.head_dim, spec.rope.dim, False)
    for form in forms if order is not None else ():
        assert order is not None
        counts = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "q_norm": 1, "k_norm": 1}
        for name, count in counts.items():
            rows = [head * spec.head_dim + row for head in range(count) for row in order]
            for ending in ("weight", "bias"):
                source.row_orders[f"{form.layer}self_attn.{name}.{ending}"] = rows


def _with_experts(spec: ModelSpec, source: HeadSource, config: Mapping[str, Any]) -> ModelSpec:
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise UnsupportedModelError(
            f"{source.where}: scoring_func={config['scoring_func']!r}; experts chosen by sigmoid "
            "scores were expected"
        )
    try:
        experts = read_deepseek_experts(config, 1)
        experts.check()
    except ModelError as error:
        raise type(error)(f"{source.where}: {error}") from None
    return replace(spec, experts=replace(experts, layers=(True,) * spec.num_layers))

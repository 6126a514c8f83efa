"""How published files store MTP layers, and what kinds of layers these are.

MiMo: model.mtp_layers.i.*, each layer with norms and a projection of its own. Qwen3-Next: mtp.*,
one set of norms and one projection for all of mtp.layers.i. DeepSeek (arXiv 2412.19437):
model.layers.L.*, after the target's L layers; enorm, hnorm, eh_proj.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hunch.errors import ModelError, ModelFormatError, UnsupportedModelError
from hunch.layers.experts import ExpertSpec
from hunch.models.arrange import Arranged
from hunch.models.build import LLAMA_NAMES, Names
from hunch.models.experts import ExpertNames, read_deepseek_experts
from hunch.models.heads.files import HeadSource
from hunch.models.keys import read_common
from hunch.models.latent import read_latent
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


def read_layers(
    source: HeadSource, config: Mapping[str, Any], weights: Weights, forms: Sequence[Form]
) -> tuple[ModelSpec, Names]:
    """The spec and the names of the layers: the target's family's where it has recurrent layers."""
    name = next(iter(weights.config.get("architectures") or [""]))
    family = ModelSpec.from_config(weights.config) if name in MODELS else None
    if family is not None and family.recurrence is not None:
        family = replace(family, recurrence=None, is_recurrent=(), is_mlp=())
        return family, resolve(MODELS, name).names
    prefix, attn = forms[0].layer, f"{forms[0].layer}self_attn."
    is_latent = f"{attn}kv_a_proj_with_mqa.weight" in source
    try:
        if is_latent:
            spec = read_latent(config, "head")
        else:
            has_norm = f"{attn}q_norm.weight" in source
            spec = ModelSpec(**read_common(config, "head"), has_qk_norm=has_norm)
        spec.check()
        if f"{prefix}mlp.gate.weight" in source:
            spec = replace(spec, experts=_read_experts(config))
    except ModelError as error:
        raise type(error)(f"{source.where}: {error}") from None
    biased = f"{attn}kv_a_proj_with_mqa.bias" if is_latent else f"{attn}q_proj.bias"
    spec = replace(spec, has_qkv_bias=biased in source, has_out_bias=f"{attn}o_proj.bias" in source)
    is_qwen = f"{prefix}mlp.shared_expert.gate_proj.weight" in source
    return spec, replace(LLAMA_NAMES if is_qwen else MTP_NAMES, roots=("model.",))


def _read_experts(config: Mapping[str, Any]) -> ExpertSpec:
    """DeepSeek's kind of experts, as GLM's layers have them."""
    scoring = config.get("scoring_func", "sigmoid")
    if scoring != "sigmoid":
        raise UnsupportedModelError(
            f"scoring_func={scoring!r}; experts chosen by sigmoid scores were expected"
        )
    experts = read_deepseek_experts(config, 1)
    experts.check()
    return experts


def arranged(
    weights: Weights, spec: ModelSpec, names: Names, forms: Sequence[Form]
) -> tuple[ModelSpec, Weights]:
    """A decoder whose layers all are of this kind, and the file as it takes it."""
    pattern = re.sub(r"\d+", "{}", forms[0].layer)
    count = 1 + int(re.sub(r"\D", "", forms[-1].layer))
    experts = spec.experts and replace(spec.experts, layers=(True,) * count)
    windows = spec.windows[:1] * count
    spec = replace(spec, num_layers=count, windows=windows, experts=experts)
    return spec, Arranged(weights, spec, replace(names, layer=pattern))

"""Where the published file forms keep the parts of MTP layers.

MiMo: model.mtp_layers.i.*, each layer with norms and a projection of its own. Qwen3-Next: mtp.*,
one set of norms and one projection for all of mtp.layers.i. DeepSeek: model.layers.L.*, after the
target's L layers; enorm, hnorm, eh_proj.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hunch.errors import ModelFormatError
from hunch.models.heads.files import HeadSource

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


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
    for key in _COUNTS:
        asked = config.get(key)
        if isinstance(asked, int) and asked > found:
            raise ModelFormatError(
                f"{where}: {key}={asked}, but the files hold {found} MTP layer"
                f"{'s' if found > 1 else ''}; a part of them is missing"
            )

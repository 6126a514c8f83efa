"""Block drafters' files: DFlash, DSpark and DFlash2 as published, and their speculators form.

Keys stand at the top of config.json or under dflash_config (dspark_config). Which of the target's
states are fused: `target_layer_ids` [1, 9] are those after layers 1 and 9 counted from 0, so after
2 and 10 of them; `aux_hidden_state_layer_ids` of the speculators form counts layers passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.heads.block import BlockShape, build_body
from hunch.models.heads.block_net import BlockNet
from hunch.models.heads.files import (
    HeadSource,
    check_hidden,
    check_layers,
    check_vocab,
    number,
    read_config,
    read_geometry,
    read_output,
    read_table,
    tell_unread,
)
from hunch.models.reading import read_windows
from hunch.models.spec import ModelSpec
from hunch.models.target import Target

# Used in training, or following from other keys: files may have them all the same.
_SPARE = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
_MAX_PLACES = 64


def load_block(path: str | Path, target: Target, method: str) -> BlockNet:
    """The network of `path`, checked against the target. `method` decides what files leave open."""
    config, where = read_config(path), str(path)
    layer_config = config
    if "speculators_model_type" in config:
        layer_config = config.get("transformer_layer_config") or {}
    source = HeadSource(path, target, prefixes=("model.",))
    options = {
        **(config.get("dspark_config") or {}),
        **(config.get("dflash_config") or {}),
        **{key: value for key, value in config.items() if value is not None},
    }
    if options.get("projector_type") == "domino" or "gru.weight_ih_l0" in source:
        raise UnsupportedModelError(f"{where}: a Domino head; hunch reads DFlash, DSpark, DFlash2")
    spec = _read_layers(layer_config, options, source)
    check_vocab(where, spec.vocab_size, target.spec.vocab_size)
    lm_head, ids_C = read_output(source, options, spec, target)
    num_columns = len(ids_C) if ids_C is not None and "d2t" in source else 0
    shape = _read_shape(options, spec, source, target, method, num_columns)
    embed = read_table(source, spec)
    if embed is None and spec.width != target.spec.width:
        raise ModelFormatError(
            f"{where}: {spec.width} wide and without an embedding; the target's is "
            f"{target.spec.width} wide: it is a drafter for another model"
        )
    net = BlockNet(build_body(shape, source), target, embed=embed, lm_head=lm_head, ids_C=ids_C)
    net.matrix_bytes = source.matrix_bytes
    tell_unread(source, *_SPARE)
    return net


def _read_layers(
    config: Mapping[str, Any], options: Mapping[str, Any], source: HeadSource
) -> ModelSpec:
    """The geometry of its layers; tensors show which optional parts it has."""
    first = "layers.0.self_attn."
    spec = read_geometry(
        config,
        source.where,
        has_qkv_bias=f"{first}q_proj.bias" in source,
        has_out_bias=f"{first}o_proj.bias" in source,
        has_qk_norm=f"{first}q_norm.weight" in source,
        windows=_windows(config, options, source.where),
    )
    assert spec.rope is not None
    return spec


def _windows(
    config: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> tuple[int | None, ...]:
    num_layers = number(config, "num_hidden_layers", where)
    if options.get("use_swa"):
        return (number(options, "swa_window_size", where),) * num_layers
    if "layer_types" not in config:
        return (None,) * num_layers
    return read_windows(config, num_layers)


def _read_shape(
    options: Mapping[str, Any],
    spec: ModelSpec,
    source: HeadSource,
    target: Target,
    method: str,
    num_columns: int,
) -> BlockShape:
    where = source.where
    layers = feature_layers(options, target, where)
    width = number(options, "target_hidden_size", where, default=target.spec.width)
    check_hidden(where, width, target)
    num_places = number(options, "block_size", where, default=7 if method == "dspark" else None)
    if not 2 <= num_places <= _MAX_PLACES:
        raise ModelFormatError(f"{where}: block_size={num_places} must be from 2 to {_MAX_PLACES}")
    has_selector = "candidate_selector.predecessor_codebook" in source
    is_shifted = options.get("sample_from_anchor", options.get("shift_label"))
    rank, markov_type = 0, str(options.get("markov_head_type", "vanilla"))
    if "markov_head.markov_w1.weight" in source:
        rank = source.shape("markov_head.markov_w1.weight")[1]
        if markov_type not in ("vanilla", "gated"):
            raise UnsupportedModelError(
                f"{where}: markov_head_type={markov_type!r} is not supported; hunch reads "
                "vanilla and gated"
            )
    confidence = "confidence_head.proj.weight"
    seen = source.shape(confidence)[1] - spec.width if confidence in source else 0
    conv = "layers.0.attention_conv.base_kernel"
    softcap = options.get("final_logit_softcapping")
    return BlockShape(
        spec=spec,
        feature_layers=layers,
        feature_width=len(layers) * width,
        num_places=num_places,
        mask_token=_mask_token(options, spec, source, target),
        is_shifted=method == "dspark" if is_shifted is None else bool(is_shifted),
        is_causal=_is_causal(options, method),
        markov_rank=rank,
        markov_type=markov_type,
        has_confidence=confidence in source,
        confidence_sees_token=seen > 0,
        conv_taps=source.shape(conv)[1] if conv in source else 0,
        conv_group=number(options, "conv_group_size", where, default=16),
        num_columns=num_columns,
        selector_rank=(
            source.shape("candidate_selector.predecessor_codebook")[1] if has_selector else 0
        ),
        selector_top=number(options, "selector_top_k", where, default=16),
        embed_scale=float(options.get("input_embedding_scale") or 1.0),
        output_scale=float(options.get("output_multiplier") or 1.0),
        softcap=None if not softcap else float(softcap),
    )


def _is_causal(options: Mapping[str, Any], method: str) -> bool:
    """Whether places of sliding layers see no later ones: yes, unless the files say otherwise."""
    for key in ("causal", "is_causal"):
        if options.get(key) is not None:
            return bool(options[key])
    if options.get("sliding_window_non_causal") is not None:
        return not options["sliding_window_non_causal"]
    return method != "dflash2"


def _mask_token(
    options: Mapping[str, Any], spec: ModelSpec, source: HeadSource, target: Target
) -> int | None:
    if "mask_embedding" in source:
        return None
    has_own = "embed_tokens.weight" in source
    token, size = options.get("mask_token_id"), (spec if has_own else target.spec).vocab_size
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
        raise ModelFormatError(
            f"{source.where}: mask_token_id={token!r} must be a token's id, below {size}"
        )
    return token


def feature_layers(options: Mapping[str, Any], target: Target, where: str) -> tuple[int, ...]:
    """The layers whose states are fused: after this many of the target's layers."""
    given, shift = options.get("target_layer_ids"), 1
    if given is None:
        given, shift = options.get("aux_hidden_state_layer_ids"), 0
    if not isinstance(given, list) or not given:
        raise ModelFormatError(f"{where}: config.json has no target_layer_ids")
    return check_layers(tuple(int(layer) + shift for layer in given), target, where)

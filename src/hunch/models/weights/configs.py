"""A model's config in one form, whatever tool wrote it, with a user's values in place of its
own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hunch.config import json_object, say_once
from hunch.errors import ConfigError
from hunch.models.weights.base import Weights
from hunch.models.weights.wrapped import WRAPPERS, text_inside


def unified_config(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json with the rope settings where readers expect them, whatever tool wrote it.

    Newer files hold `rope_parameters` ({"rope_theta", "rope_type", ...}) and `dtype` in place of
    `rope_theta`, `rope_scaling` and `torch_dtype`. Of files with both, `rope_scaling` counts if it
    is not empty.
    """
    config = dict(raw)
    text = config.pop("text_config", None)
    if isinstance(thinker := config.pop("thinker_config", None), dict):  # beside a model for speech
        text = thinker.get("text_config")
    if isinstance(text, dict) and WRAPPERS & {*(raw.get("architectures") or ())}:
        config = text_inside(config, text)
    elif isinstance(text, dict):  # a model of more than text: the text model is inside
        config = {**config, **text, "architectures": raw.get("architectures")}
        if raw.get("tie_word_embeddings") not in (None, config.get("tie_word_embeddings")):
            del config["tie_word_embeddings"]  # if the two contradict each other, the files decide
    rope = config.pop("rope_parameters", None)
    scaling = config.get("rope_scaling")
    if _is_by_layer(scaling):
        rope = config.pop("rope_scaling")
    elif scaling:
        rope = None
    if _is_by_layer(rope):
        config["rope_parameters"] = rope  # one per kind of layer: its family reads it
    elif isinstance(rope, dict):
        rope = dict(rope)
        if "rope_theta" in rope:
            config["rope_theta"] = rope.pop("rope_theta")
        if (rope.get("rope_type") or rope.get("type") or "default") != "default":
            config["rope_scaling"] = rope
        elif "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling, original = config.get("rope_scaling"), config.get("original_max_position_embeddings")
    if isinstance(scaling, dict) and isinstance(original, int) and _is_stretched(scaling):
        config["rope_scaling"] = {**scaling, "original_max_position_embeddings": original}
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    return config


def _is_by_layer(rope: Any) -> bool:
    """Whether rope settings are nested, by type of layer."""
    return isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())


def _is_stretched(rope: Mapping[str, Any]) -> bool:
    """Whether the rope stretches positions from the context that a model was first trained with.
    Where a config says that beside its rope settings too, transformers takes it from there."""
    rope_type = rope.get("rope_type") or rope.get("type")
    return rope_type in ("llama3", "yarn", "longrope", "su")


_OF_THE_FILES = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


def with_overrides(weights: Weights, text: str) -> Weights:
    """The weights with values of their config replaced by a JSON object's, as if they were its own.

    Where the new rope stretches positions and no other length is given, the context grows with it.
    """
    overrides = json_object("hf_overrides", text)
    if not overrides:
        return weights
    if "max_model_len" in overrides:  # vLLM's examples have it here, where it does nothing
        say_once("hf_overrides: max_model_len has no effect: give it as an argument of its own")
        del overrides["max_model_len"]
    for key in _OF_THE_FILES:
        if key in overrides:
            raise ConfigError(f"hf_overrides: {key} belongs to the files and cannot be replaced")
    given = unified_config(overrides)
    if given.get("architectures") is None:
        given.pop("architectures", None)
    if "rope_parameters" in overrides:
        given.setdefault("rope_scaling", None)
    config = {**weights.config, **given}
    rope, num_positions = given.get("rope_scaling"), config.get("max_position_embeddings")
    if isinstance(rope, dict) and isinstance(num_positions, int):
        rope_type, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if rope_type in ("yarn", "linear") and isinstance(factor, int | float):
            original = rope.get("original_max_position_embeddings") or num_positions
            if rope_type == "yarn":  # readers lengthen what this says
                config["rope_scaling"] = {**rope, "original_max_position_embeddings": original}
            if "max_position_embeddings" not in given:
                num_positions = original if rope_type == "yarn" else round(original * factor)
                config["max_position_embeddings"] = num_positions
    weights.config = config
    return weights


def for_length(weights: Weights, max_len: int | None) -> Weights:
    """The weights, for texts of up to `max_len` tokens.

    A model with two sets of rope factors has one for its original context and one for all of it.
    """
    config = weights.config
    key = "rope_scaling" if isinstance(config.get("rope_scaling"), dict) else "rope_parameters"
    rope: Any = config.get(key)
    changed = rope
    for layer_type, part in rope.items() if _is_by_layer(rope) else ((None, rope),):
        original = _two_sets(config, part)
        if not original:
            continue
        if max_len is not None and max_len <= original:
            short = {**part, "long_factor": part["short_factor"]}
            changed = short if layer_type is None else {**changed, layer_type: short}
        else:
            say_once(
                f"{weights.path} has rope factors for texts of up to {original} tokens, and others "
                f"for up to {_positions(config)}, which are used at every length. "
                f"max_model_len={original} uses the former, as transformers does for short texts"
            )
    if changed is not rope:
        weights.config = {**config, key: changed}
    return weights


def _two_sets(config: Mapping[str, Any], rope: Any) -> int:
    """The context of the first of two sets of rope factors; 0: there is one set, or none."""
    if not isinstance(rope, dict) or not {"short_factor", "long_factor"} <= rope.keys():
        return 0
    beside = config.get("original_max_position_embeddings")  # where Phi's files have it
    original = rope.get("original_max_position_embeddings", beside)
    return original if isinstance(original, int) and original < _positions(config) else 0


def _positions(config: Mapping[str, Any]) -> int:
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) else 0

"""A config.json read key by key: values are checked, and keys that nothing reads may be errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hunch.config import say_once
from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.layers.rope import RopeSpec, stretch
from hunch.registry import unknown

Config = Mapping[str, Any]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # in layer_types
STILL = RopeSpec(rope_type="none")  # heads are not rotated
FROM_GGUF = "from_gguf"  # a config made from a GGUF's metadata: tensors stand as llama.cpp has them

INPUT_BITS = "product_input_bits"  # set for a checkpoint whose products round their inputs

# Keys that do not change the arithmetic of a pass over text: names, tokens, training, generation,
# what a Python object returns, other parts of a model (vision, heads that draft).
_HARMLESS = re.compile(
    r"_.*|.*(token|token_id|token_ids|tokens|token_index|dropout|dropout_prob|pdrop|drop|_version|version)"
    r"|architectures|model_type|auto_map|base_model_name_or_path|name_or_path|license|task_.*"
    r"|torch_dtype|dtype|transformers.*|tokenizer_class|unsloth.*|quantization_config"
    r"|(embedding_)?initializer_range|init_std|init_method|layerdrop|gradient_checkpointing|router_aux_loss_coef"
    r"|output_(attentions|hidden_states|router_logits|past|scores)|return_dict.*|use_cache"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|is_encoder_decoder|is_decoder"
    r"|add_cross_attention|chunk_size_feed_forward|torchscript|tf_legacy_loss|use_bfloat16"
    r"|prefix|pruned_heads|cross_attention_hidden_size|tie_encoder_decoder|prune_heads"
    r"|max_length|min_length|do_sample|temperature|top_k|top_p|num_beams|early_stopping"
    r"|.*_penalty|num_return_sequences|bad_words_ids|begin_suppress.*|suppress_.*|no_repeat_.*"
    r"|summary_.*|attn_implementation|use_flash_attn|cache_implementation|trust_remote_code"
    r"|is_llama_config|max_sequence_length|pad_key_length|validate_runner_input|inference_runner"
    r"|vision_config|audio_config"
    r"|projector_.*|multimodal_projector_bias|spatial_merge_size|vision_feature_.*"
    r"|aux_loss_alpha|seq_aux|ep_size|use_parallel_embedding"
    r"|mm_tokens_per_image|pretraining_tp|from_gguf|cut_from|cut_layers|unit_share|abreast|draft_vocab_size"
    r"|draft_layers|drafts_for"
    r"|num_nextn_predict_layers|mtp_.*|num_mtp_.*|speculators_.*|model_max_length"
    r"|attention_softmax_in_fp32|scale_attention_softmax_in_fp32|reorder_and_upcast_attn"
)
_OFF: tuple[Any, ...] = (None, False, 0, "", (), [], {})
# transformers' version whose settings of every family here are read or known to be harmless.
READ_VERSION = (5, 23)


class Recorded(Mapping[str, Any]):
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self._config.get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return key in self._config

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def unread(self) -> dict[str, Any]:
        """The keys that were not read though they may change the arithmetic."""
        return {
            key: value
            for key, value in self._config.items()
            if key not in self.read and not _HARMLESS.fullmatch(key) and not _is_off(value)
        }


_NONE: Mapping[str, str] = {}


class Defaulted(Mapping[str, Any]):
    """A config with a family's values for what its files leave out. Some of its keys may be `named`
    otherwise in the file."""

    def __init__(self, config: Config, defaults: Config, named: Mapping[str, str] = _NONE) -> None:
        self._config, self._defaults = config, defaults
        self.named = {**_named(defaults), **_named(config), **named}

    def __getitem__(self, key: str) -> Any:
        return self._config[key] if key in self._config else self._defaults[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._config.get(key, self._defaults.get(key, default))

    def __iter__(self) -> Iterator[str]:
        return iter({**self._defaults, **self._config})

    def __len__(self) -> int:
        return len({*self._defaults, *self._config})


def _named(config: Config) -> Mapping[str, str]:
    return config.named if isinstance(config, Defaulted) else _NONE


def refuse_unread(config: Config, extra: Config, where: str) -> None:
    """Raise for settings that hunch does not read.

    If transformers' own code reads the file, in a version that is known here, such keys change
    nothing there either: they are only logged.
    """
    version = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version")))
    is_known = version is not None and (int(version[1]), int(version[2])) <= READ_VERSION
    if is_known and not config.get("auto_map"):
        say_once(
            f"{where} has {shown(extra)}: nothing in transformers reads it, and hunch passes it by"
        )
        return
    raise UnsupportedModelError(
        f"{where} has {shown(extra)}, which hunch does not know and which may change what the "
        "model computes. Where it does not, take it out of config.json or hf_overrides"
    )


def shown(settings: Config) -> str:
    return ", ".join(f"{key}={str(value)[:40]}" for key, value in sorted(settings.items()))


def _is_off(value: Any) -> bool:
    return any(value is off or value == off for off in _OFF)


# Far above any model's sizes. Without them a damaged file would fail deep inside an allocation, or
# after an hour of building layers.
_MOST = {
    "num_hidden_layers": 10_000,
    "n_layer": 10_000,
    "num_attention_heads": 100_000,
    "n_head": 100_000,
    "head_dim": 1 << 20,
}
_MOST_OTHERS = 1 << 28


def read_int(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number of a plausible size."""
    value, key = config.get(key), _named(config).get(key, key)
    if value is None:
        if default is None:
            raise ModelFormatError(f"config.json lacks {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(f"config.json: {key}={value!r} must be a whole number, 1 or more")
    most = _MOST.get(key, _MOST_OTHERS)
    if value > most:
        raise ModelFormatError(f"config.json: {key}={value} is more than any model has ({most})")
    return value


def read_count(config: Config, key: str) -> int:
    """A whole number of a plausible size, or 0, also if it is left out."""
    return read_int(config, key) if config.get(key) else 0


def read_float(config: Config, key: str, default: float | None = None) -> float:
    """A positive number."""
    value, key = config.get(key), _named(config).get(key, key)
    if value is None:
        if default is None:
            raise ModelFormatError(f"config.json lacks {key}")
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0 or not math.isfinite(value):
        raise ModelFormatError(f"config.json: {key}={value!r} must be a number above 0")
    return float(value)


def refuse(config: Config, key: str, *allowed: Any) -> None:
    """Raise for a value of `key` that hunch does not support."""
    value = config.get(key, allowed[0])
    if value is not None and value not in allowed:
        given = " or ".join(repr(value) for value in allowed)
        raise UnsupportedModelError(f"config.json: {key}={value!r} is not supported; only {given}")


def read_rope(config: Config, head_dim: int, given: Any = None) -> RopeSpec:
    """`rope_parameters`, or the older `rope_theta` with `rope_scaling`; or the part `given`."""
    theta, share = config.get("rope_theta"), config.get("partial_rotary_factor")
    config.get("original_max_position_embeddings")  # is among the settings, too
    if given is None:
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if isinstance(given, Mapping) and FULL in given:
            given = given[FULL]  # the family reads the ropes of other layers
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"config.json: rope settings {given!r} must be an object")
    rope = Recorded({"rope_theta": theta, "partial_rotary_factor": share, **given})
    share = read_float(rope, "partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    if share > 1 or dim < 2:
        raise ModelFormatError(f"partial_rotary_factor={share} must be above 0 and at most 1")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    readers: dict[str, Callable[[Config], dict[str, Any]]] = {
        "default": lambda _: {},
        "dynamic": lambda _: {},  # up to max_position_embeddings; a drafter goes on so
        "linear": lambda r: {"factor": read_float(r, "factor")},
        "llama3": _read_llama3,
        "yarn": lambda r: _read_yarn(r, config),
        "longrope": lambda r: _read_longrope(r, config),
        "factors": lambda r: {"factors": _factors(r, "factors")},
        "proportional": lambda r: {
            "factor": read_float(r, "factor", 1.0),
            "num_pairs": int(share * head_dim // 2),
        },
    }
    readers["su"] = readers["longrope"]  # its name in the first Phi-3 files
    if rope_type not in readers:
        raise UnsupportedModelError(f"rope_type {unknown(str(rope_type), readers)}")
    spec = RopeSpec(
        theta=read_float(rope, "rope_theta", 10000.0),
        rope_type={"su": "longrope", "dynamic": "default"}.get(rope_type, str(rope_type)),
        dim=0 if dim == head_dim or rope_type == "proportional" else dim,
        **readers[rope_type](rope),
    )
    if spec.factors and len(spec.factors) != dim // 2:
        raise ModelFormatError(f"{len(spec.factors)} rope factors for {dim} turned numbers")
    for key in ("type", "rope_type", "factor", "original_max_position_embeddings"):
        rope.get(key)  # some files have it for ropes that do not need it
    if extra := rope.unread():
        refuse_unread(config, extra, f"config.json: rope settings of rope_type {rope_type!r}")
    return spec


_PICTURES = ("mrope_section", "mrope_interleaved")  # text has the same position on all axes


def without_pictures(config: Config) -> Config:
    """Rope settings of a model of text and pictures, as they are for text alone."""
    changed: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if isinstance(given, Mapping):
            changed[key] = {
                name: "default" if value == "mrope" else value
                for name, value in given.items()
                if name not in _PICTURES
            }
    return Defaulted(changed, config)


def _read_llama3(rope: Config) -> dict[str, Any]:
    return {
        "factor": read_float(rope, "factor"),
        "low_freq_factor": read_float(rope, "low_freq_factor"),
        "high_freq_factor": read_float(rope, "high_freq_factor"),
        "original_len": read_int(rope, "original_max_position_embeddings"),
    }


def _read_yarn(rope: Config, config: Config) -> dict[str, Any]:
    max_len = read_int(config, "max_position_embeddings", 2048)
    original = read_int(rope, "original_max_position_embeddings", max_len)
    factor = read_float(rope, "factor", max_len / original)
    attention = rope.get("attention_factor")
    if attention is not None:
        attention = read_float(rope, "attention_factor")
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = stretch(factor, float(mscale)) / stretch(factor, float(all_dim))
    is_truncated, whole = bool(rope.get("truncate", True)), config.get("rope_parameters") or {}
    if not is_truncated and any(isinstance(part, Mapping) for part in whole.values()):
        raise UnsupportedModelError(
            "config.json: truncate=false in rope settings by type of layer is not supported: "
            "transformers does not read it there. Take it out for what transformers computes"
        )
    return {
        "factor": factor,
        "original_len": original,
        "attention_factor": attention,
        "beta_fast": read_float(rope, "beta_fast", 32.0),
        "beta_slow": read_float(rope, "beta_slow", 1.0),
        "is_truncated": is_truncated,
    }


def _read_longrope(rope: Config, config: Config) -> dict[str, Any]:
    """One set of factors for the whole context, as a row's angles may not change while it grows."""
    max_len = read_int(config, "max_position_embeddings", 2048)
    beside = config.get("original_max_position_embeddings")  # where Phi's files have it
    original = read_int(rope, "original_max_position_embeddings", beside or max_len)
    factor = read_float(rope, "factor", max_len / original)
    attention = rope.get("attention_factor")
    if attention is not None:
        attention = read_float(rope, "attention_factor")
    elif factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = _factors(rope, "short_factor"), _factors(rope, "long_factor")
    return {
        "factors": long if max_len > original else short,
        "attention_factor": attention or 1.0,
        "original_len": original,
    }


def _factors(rope: Config, key: str) -> tuple[float, ...]:
    values: Any = rope.get(key)
    is_list = isinstance(values, list | tuple) and len(values) > 0
    if not is_list or not all(isinstance(v, int | float) and v > 0 for v in values):
        raise ModelFormatError(f"rope settings: {key} must be a list of numbers above 0")
    return tuple(float(value) for value in values)


def read_local_rope(config: Config, head_dim: int, usual: Config) -> RopeSpec:
    """The rope of layers with a window, which `rope_parameters` may give for these alone."""
    given = config.get("rope_parameters")
    local = given.get(SLIDING) if isinstance(given, Mapping) else None
    return read_rope(config, head_dim, {**usual, **(local or {})})


def check_listed(key: str, listed: Any, num_layers: int) -> None:
    """Raise if a config lists more or fewer layers than it counts, or if it is no list."""
    if not isinstance(listed, list | tuple):
        raise ModelFormatError(f"{key}={listed!r} must list one value per layer")
    if len(listed) != num_layers:
        raise ModelFormatError(f"{key} lists {len(listed)} layers, num_hidden_layers={num_layers}")


def read_windows(
    config: Config, num_layers: int, sees_all: Sequence[bool] = (), is_on: bool = True
) -> tuple[int | None, ...]:
    """Per layer: by `layer_types`, or by which layers have none where files do not list them."""
    given, types = config.get("sliding_window"), config.get("layer_types")
    for layer_type in types or ():
        if layer_type not in (FULL, SLIDING):
            raise UnsupportedModelError(f"layer type {layer_type!r} is not supported")
    if not is_on or given is None:
        return (None,) * num_layers
    types = types or [(SLIDING, FULL)[some] for some in sees_all or (False,) * num_layers]
    window = read_int(config, "sliding_window")
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


def no_layers(config: Config, num_layers: int) -> list[bool]:
    return [False] * num_layers


def last_of(every: int, num_layers: int) -> list[bool]:
    """Per layer: whether it is the last of so many."""
    every = read_int({"sliding_window_pattern": every}, "sliding_window_pattern")
    return [(layer + 1) % every == 0 for layer in range(num_layers)]


def last_of_pattern(config: Config, num_layers: int) -> list[bool]:
    return last_of(read_int(config, "sliding_window_pattern"), num_layers)

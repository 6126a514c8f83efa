"""How a family's config.json differs from Llama's, as data: that is all of most families."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.layers.experts import ExpertSpec
from hunch.models.reading import (
    Config,
    Defaulted,
    read_float,
    read_int,
    read_rope,
    read_windows,
    refuse,
)

ATTN_BIASES = ("has_qkv_bias", "has_out_bias")
BIASES = (*ATTN_BIASES, "has_mlp_bias")
PLAIN_LAYERS = {"norm": "layer", "is_gated": False}  # GPT-2's: layer norms, MLPs without a gate
MAX_POSITIONS = 1 << 20  # of rotary tables: Llama 4 claims ten times as many, 5 GB for each table
_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of a family, as `Decoder.read_config` reads them. Fields are those of ModelSpec."""

    given: dict[str, Any] = field(default_factory=dict)  # values of keys that files leave out
    rope: dict[str, Any] = field(default_factory=dict)  # for files without rope settings
    named: dict[str, str] = field(default_factory=dict)  # Llama's keys, and the family's
    # Keys with one supported value, or several (a tuple; files may leave out the first).
    only: dict[str, Any] = field(default_factory=dict)
    unused: Set[str] = frozenset()  # keys that change nothing in a pass over text
    flags: dict[str, str] = field(default_factory=dict)  # fields, and keys that switch them on
    numbers: dict[str, str] = field(default_factory=dict)  # fields, and keys of their numbers
    fields: dict[str, Any] = field(default_factory=dict)  # the same in all models of the family
    # Functions of the config and its number of layers: which layers have no window where files do
    # not list them (None: the family has no windows, or reads them itself), and the experts.
    sees_all: Callable[[Config, int], Sequence[bool]] | None = None
    experts: Callable[[Config, int], ExpertSpec | None] | None = None
    has_rope: bool = True  # False: positions are learned
    ffn_share: int = 0  # an MLP's width in model widths, if files leave it out
    reads_pictures: bool = False  # some files do: their ropes are read as for text

    def but(self, **changes: Any) -> Keys:
        """The same keys with more entries in the given tables and sets, and other values of the
        rest."""
        for name, more in changes.items():
            if isinstance(more, dict | Set):
                changes[name] = getattr(self, name) | more
        return replace(self, **changes)

    def over(self, config: Config) -> Config:
        """The config under Llama's keys, with defaults filled in; raises for what is not
        supported."""
        first: dict[str, Any] = {}
        for key, values in self.only.items():
            allowed = values if isinstance(values, tuple) else (values,)
            refuse(config, key, *allowed)
            if config.get(key) is None:
                first[key] = allowed[0]
        for ours, theirs in self.named.items():
            if config.get(theirs) is not None:
                first[ours] = config[theirs]
        for key in self.unused:
            config.get(key)
        given = self.given
        if self.rope and not any(config.get(key) for key in _ROPE_KEYS):
            given = {**given, "rope_scaling": self.rope}
        is_theirs = {ours: ours in first or ours not in config for ours in self.named}
        named = {ours: key for ours, key in self.named.items() if is_theirs[ours]}
        return Defaulted(Defaulted(first, config, named), given)

    def read(self, config: Config) -> dict[str, Any]:
        """Fields of a config that `over` has made."""
        flags = {name: bool(config.get(key)) for name, key in self.flags.items()}
        found = {name: key for name, key in self.numbers.items() if config.get(key) is not None}
        numbers = {name: read_float(config, key) for name, key in found.items()}
        layers: dict[str, Any] = {}
        if self.sees_all is not None:
            num_layers = read_int(config, "num_hidden_layers")
            sees_all = self.sees_all(config, num_layers)
            layers["windows"] = read_windows(config, num_layers, sees_all)
        if self.experts is not None:
            layers["experts"] = self.experts(config, read_int(config, "num_hidden_layers"))
        return {**flags, **numbers, **self.fields, **layers}


def read_sizes(config: Config, architecture: str, ffn_share: int = 0) -> dict[str, Any]:
    """The fields of every decoder, as arguments of ModelSpec. Where a config leaves out the width
    of its MLPs, it is so many of the model's."""
    width = read_int(config, "hidden_size")
    num_heads = read_int(config, "num_attention_heads")
    num_layers = read_int(config, "num_hidden_layers")
    return {
        "architecture": architecture,
        "vocab_size": read_int(config, "vocab_size"),
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "ffn_width": read_int(config, "intermediate_size", ffn_share * width or None),
        "max_len": min(read_int(config, "max_position_embeddings", 2048), MAX_POSITIONS),
        "norm_eps": read_float(config, "rms_norm_eps", 1e-6),
        "activation": str(config.get("hidden_act", "silu")),
        "windows": (None,) * num_layers,
        "is_tied": bool(config.get("tie_word_embeddings", False)),
        "dtype": config.get("torch_dtype") or config.get("dtype"),
    }


def read_common(config: Config, architecture: str, ffn_share: int = 0) -> dict[str, Any]:
    """The fields that every family with Llama's keys shares, as arguments of ModelSpec."""
    sizes = read_sizes(config, architecture, ffn_share)
    width, num_heads, max_len = sizes["width"], sizes["num_heads"], sizes["max_len"]
    if config.get("head_dim") is None and width % num_heads:
        raise ModelFormatError(
            f"hidden_size={width} is not a multiple of num_attention_heads={num_heads}"
        )
    head_dim = read_int(config, "head_dim", sizes["head_dim"])
    rope = read_rope(config, head_dim)
    if rope.rope_type == "linear":  # the number may be that of before positions were stretched
        max_len = max(max_len, read_int(config, "max_sequence_length", max_len))
    elif rope.rope_type == "yarn":  # as in vLLM: Qwen3's own number is between the two
        max_len = max(max_len, int(rope.original_len * rope.factor))
    return sizes | {
        "num_kv_heads": read_int(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_len": min(max_len, MAX_POSITIONS),
        "rope": rope,
    }

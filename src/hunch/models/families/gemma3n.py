"""Gemma 3n (text): four streams of which one is computed, a table with a vector of every token for
every layer, and later layers that read the keys and values of earlier ones.

Of files for pictures and sound too, only the text model is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.layers.streams import StreamsShape
from hunch.models.decoder import Decoder
from hunch.models.families.gemma import Gemma2
from hunch.models.families.gemma4 import Gemma4, kv_of
from hunch.models.reading import (
    FULL,
    SLIDING,
    Config,
    Defaulted,
    check_listed,
    last_of,
    read_int,
    read_local_rope,
    read_windows,
)
from hunch.models.spec import ModelSpec, TokenInputs

_PATTERN = 5  # layers to one without a window
_NUM_SPARSE, _SPARSITY = 10, 0.95  # of models with more layers, if files do not have them


class Gemma3n(Decoder):
    """Norms mean w; the scale of scores is in the norms of q and k."""

    names = Gemma2.names
    keys = Gemma4.keys.but(
        given={  # files leave out what does not differ
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "final_logit_softcapping": 30.0,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "rope_theta": 1e6,
        },
        unused={  # of training, pictures and sound
            *("altup_coef_clip", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image")
        },
        fields={"has_layer_scale": False},
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, cls.keys.given)
        num_layers = read_int(config, "num_hidden_layers")
        widths = _of_layers(config, "intermediate_size", num_layers)
        spec = super().read_config(
            Defaulted({"intermediate_size": widths[0]}, config), architecture
        )
        return replace(spec, ffn_widths=widths if len({*widths}) > 1 else ())

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        num_layers, theta = spec.num_layers, config.get("rope_local_base_freq")
        sees_all = last_of(_PATTERN, num_layers)
        usual = [(SLIDING, FULL)[some] for some in sees_all]
        listed = {"layer_types": config.get("layer_types") or usual}
        types = _of_layers(listed, "layer_types", num_layers)
        spec = replace(
            spec,
            embed_scale=float(spec.width) ** 0.5,
            windows=read_windows(Defaulted({"layer_types": types}, config), num_layers),
            kv_of=kv_of(config, types),
            inputs=TokenInputs(
                width=read_int(config, "hidden_size_per_layer_input"),
                vocab_size=read_int(config, "vocab_size_per_layer_input"),
            ),
            streams=_streams(config, num_layers),
        )
        local = read_local_rope(config, spec.head_dim, {"rope_theta": theta or 1e4})
        return spec.with_rope(local, (layer_type == SLIDING for layer_type in types))


def _streams(config: Config, num_layers: int) -> StreamsShape:
    count, active = read_int(config, "altup_num_inputs"), config["altup_active_idx"]
    if active not in range(count):
        raise ModelFormatError(f"altup_active_idx={active!r} is none of {count} streams")
    sparsity = config.get("activation_sparsity_pattern")
    if sparsity is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        shares = (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    else:
        shares = _of_layers(config, "activation_sparsity_pattern", num_layers)
    if not all(isinstance(share, int | float) and 0 <= share < 1 for share in shares):
        raise ModelFormatError(f"activation_sparsity_pattern={sparsity!r}: shares of 0 to 1")
    return StreamsShape(
        count=count,
        active=active,
        has_scale=bool(config.get("altup_correct_scale")),
        short_rank=read_int(config, "laurel_rank"),
        sparsity=tuple(map(float, shares)),
    )


def _of_layers(config: Config, key: str, num_layers: int) -> tuple[Any, ...]:
    """A value for each layer, where a file may have one for all."""
    value = config.get(key)
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * num_layers
    check_listed(key, values, num_layers)
    return values

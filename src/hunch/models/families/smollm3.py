"""SmolLM3: Llama, but every fourth layer does not turn its heads."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.layers.rope import RopeSpec
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, read_int, read_windows
from hunch.models.spec import ModelSpec


class SmolLM3(Llama):
    """Where the config switches windows on, the layers that are not turned have one."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        config.get("max_window_layers")  # layer_types says it
        is_on = bool(config.get("use_sliding_window", False))
        return replace(
            spec,
            is_tied=bool(config.get("tie_word_embeddings", True)),
            more_ropes=(RopeSpec(kind="none"),),
            rope_of=tuple(int(not turn) for turn in read_turns(config, spec.num_layers)),
            windows=read_windows(config, spec.num_layers, is_on=is_on),
        )


def read_turns(config: Config, num_layers: int) -> list[int]:
    """Per layer: whether it turns its heads."""
    every = read_int(config, "no_rope_layer_interval", 4)
    turns: list[int] = config.get("no_rope_layers") or []  # 1 where a layer does turn them
    if not turns:
        turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if len(turns) != num_layers:
        raise ModelFormatError(
            f"no_rope_layers lists {len(turns)} layers, num_hidden_layers={num_layers}"
        )
    return turns

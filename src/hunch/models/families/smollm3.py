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
        every = read_int(config, "no_rope_layer_interval", 4)
        # A list of what its name denies: 1 where a layer turns its heads.
        turns = config.get("no_rope_layers")
        if turns is None:
            turns = [int((layer + 1) % every != 0) for layer in range(spec.num_layers)]
        if len(turns) != spec.num_layers:
            raise ModelFormatError(
                f"no_rope_layers lists {len(turns)} layers, num_hidden_layers={spec.num_layers}"
            )
        is_on = bool(config.get("use_sliding_window", False))
        return replace(
            spec,
            is_tied=bool(config.get("tie_word_embeddings", True)),
            more_ropes=(RopeSpec(kind="none"),),
            rope_of=tuple(int(not is_turned) for is_turned in turns),
            windows=read_windows(config, spec.num_layers, is_on=is_on),
        )

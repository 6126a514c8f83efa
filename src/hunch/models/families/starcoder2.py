"""StarCoder2: Llama's attention with layer norms, a plain MLP and biases."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, gpt_layers, read_float, read_windows, refuse
from hunch.models.spec import ModelSpec, read_common


class Starcoder2(Decoder):
    """All layers have the same window, where the config names one."""

    names = Names(up="mlp.c_fc", down="mlp.c_proj")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "mlp_type", "default")
        refuse(config, "norm_type", "layer_norm")
        for key in ("activation_function", "layer_norm_epsilon"):
            config.get(key)  # of an older form; hidden_act and norm_epsilon say it
        common = read_common(config, architecture)
        common |= {
            "norm_eps": read_float(config, "norm_epsilon", 1e-5),
            "activation": str(config.get("hidden_act", "gelu_pytorch_tanh")),
            "windows": read_windows(config, common["num_layers"]),
            "is_tied": bool(config.get("tie_word_embeddings", True)),
        }
        return ModelSpec(**common, **gpt_layers(bool(config.get("use_bias", True))))

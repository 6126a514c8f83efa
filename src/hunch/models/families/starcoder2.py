"""StarCoder2: Llama's attention with layer norms, a plain MLP and biases."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import no_layers


class Starcoder2(Decoder):
    """All layers have the same window, where the config names one."""

    names = Names(up="mlp.c_fc", down="mlp.c_proj")
    keys = Keys(
        given={
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        numbers={"norm_eps": "norm_epsilon"},
        only={"mlp_type": "default", "norm_type": "layer_norm"},
        unused={"activation_function", "layer_norm_epsilon"},  # of an older form, said elsewhere
        flags=dict.fromkeys(BIASES, "use_bias"),
        fields=PLAIN_LAYERS,
        sees_all=no_layers,
    )

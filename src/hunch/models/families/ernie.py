"""ERNIE 4.5, dense and with experts: Llama whose rotary pairs are neighbours."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_experts
from hunch.models.keys import BIASES, Keys
from hunch.models.reading import Config, read_float, read_int
from hunch.models.spec import ModelSpec

_LEAST_SUM = 1e-9  # of the chosen experts' weights: a lower floor never matters


class Ernie(Decoder):
    """ERNIE 4.5 (dense): rotary pairs are neighbours; biases everywhere or nowhere."""

    keys = Keys(
        given={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        only={"compression_ratio": 1.0},
        flags=dict.fromkeys(BIASES, "use_bias"),
        fields={"is_rope_interleaved": True},
    )


class ErnieMoe(Ernie):
    """Experts chosen by a softmax with a bias, and shared ones, in the layers the config names."""

    names = Names(
        experts=ExpertNames(
            shared="mlp.shared_experts.", choice_bias="mlp.moe_statics.e_score_correction_bias"
        )
    )
    keys = Ernie.keys.but(
        given={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_num_shared_experts": 2},
        named={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        only={"use_bias": False, "moe_gate": "topk", "moe_use_aux_free": True},
        unused={"moe_capacity"},  # of training
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
        if not isinstance(first, int) or not isinstance(last, int):
            raise UnsupportedModelError("experts of pictures are not supported")
        last, step = last % spec.num_layers, read_int(config, "moe_layer_interval", 1)
        if read_float(config, "moe_norm_min", 1e-12) > _LEAST_SUM:
            raise UnsupportedModelError(f"moe_norm_min={config['moe_norm_min']} is not supported")
        width = read_int(config, "moe_intermediate_size")
        num_shared = config.get("moe_num_shared_experts") or 0
        experts = read_experts(
            config,
            width,
            ((i + 1) % step == 0 and first <= i <= last for i in range(spec.num_layers)),
            shared_width=int(num_shared) * width,
            is_normed=True,
            has_choice_bias=True,
        )
        return replace(spec, experts=experts)

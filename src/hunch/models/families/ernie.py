"""ERNIE 4.5, dense and with experts: Llama that turns neighbours."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_count
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.spec import ModelSpec

_LEAST_SUM = 1e-9  # of weights of chosen experts: a floor below it never counts
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0}


class Ernie(Llama):
    """ERNIE 4.5 (dense): pairs that are turned are neighbours; biases everywhere or nowhere."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "compression_ratio", 1.0)
        has_bias = bool(config.get("use_bias", False))
        return replace(
            super().read_config(Defaulted(config, _DEFAULTS), architecture),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=has_bias,
            is_rope_interleaved=True,
            is_tied=bool(config.get("tie_word_embeddings", True)),
        )


class ErnieMoe(Ernie):
    """Experts chosen by a softmax with a bias, and shared ones, in the layers the config names."""

    names = Names(
        experts=ExpertNames(
            shared="mlp.shared_experts.", choice_bias="mlp.moe_statics.e_score_correction_bias"
        )
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "use_bias", False)
        refuse(config, "moe_gate", "topk")
        refuse(config, "moe_use_aux_free", True)
        config.get("moe_capacity")  # of training
        spec = super().read_config(config, architecture)
        first = config.get("moe_layer_start_index", 1)
        last = config.get("moe_layer_end_index", -1)
        if not isinstance(first, int) or not isinstance(last, int):
            raise UnsupportedModelError("experts of pictures are not supported")
        last, step = last % spec.num_layers, read_int(config, "moe_layer_interval", 1)
        routing = Routing(
            num_experts=read_count(config, "moe_num_experts", "num_experts"),
            num_chosen=read_count(config, "moe_k", "num_experts_per_tok"),
            is_normed=True,
        )
        if read_float(config, "moe_norm_min", 1e-12) > _LEAST_SUM:
            raise UnsupportedModelError(f"moe_norm_min={config['moe_norm_min']} is not supported")
        width = read_int(config, "moe_intermediate_size")
        num_shared = config.get("moe_num_shared_experts", 2) or 0
        experts = ExpertSpec(
            routing=routing,
            width=width,
            layers=tuple(
                (layer + 1) % step == 0 and first <= layer <= last
                for layer in range(spec.num_layers)
            ),
            has_choice_bias=True,
            shared_width=int(num_shared) * width,
        )
        return replace(spec, experts=experts)

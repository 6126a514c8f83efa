"""HunYuan 1 (dense, and with experts): Llama that norms q and k after they were turned."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.spec import ModelSpec


class HunYuan(Llama):
    """Ropes of type "dynamic" with an `alpha` have another theta, at every length."""

    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "use_qk_norm", True)
        refuse(config, "use_cla", False)
        refuse(config, "mlp_bias", False)
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(key) or {})
        is_dynamic = (given.get("rope_type") or given.get("type")) == "dynamic"
        alpha = given.get("alpha") if is_dynamic else None
        if alpha:  # nothing else of it counts
            given = {name: given[name] for name in given if name == "rope_theta"}
        config = Defaulted({key: given}, Defaulted(config, {"rms_norm_eps": 1e-5}))
        spec = super().read_config(config, architecture)
        refuse(config, "attention_head_dim", spec.head_dim)
        assert spec.rope is not None
        rope = replace(spec.rope, attention_factor=1.0)  # any other would be normed away
        if alpha:
            stretch = read_float({"alpha": alpha}, "alpha")
            size = spec.head_dim
            rope = replace(rope, theta=rope.theta * stretch ** (size / (size - 2)))
        return replace(spec, rope=rope, has_qk_norm=True, is_qk_norm_late=True)


class HunYuanMoe(HunYuan):
    """Softmax over all experts, whose weights add up to one; an MLP beside them."""

    names = replace(
        HunYuan.names, experts=ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        spec = super().read_config(config, architecture)
        for key, value in (
            ("moe_intermediate_size", spec.ffn_width),
            ("num_shared_expert", 1),
            ("moe_layer_num_skipped", 0),
        ):
            found = config.get(key)
            if found is not None and {*(found if isinstance(found, list) else [found])} != {value}:
                raise UnsupportedModelError(f"config.json: {key}={found} is not supported yet")
        routing = Routing(
            num_experts=_same(config, "num_experts"),
            num_chosen=_same(config, "moe_topk"),
            is_normed=True,
        )
        experts = ExpertSpec(
            routing=routing,
            width=spec.ffn_width,
            layers=(True,) * spec.num_layers,
            shared_width=spec.ffn_width,
        )
        return replace(spec, experts=experts)


def _same(config: Config, key: str) -> int:
    """A number that files may list for every layer."""
    found = config.get(key)
    if isinstance(found, list):
        if len({*found}) != 1:
            raise UnsupportedModelError(f"config.json: {key}={found}, which differs by layer")
        found = found[0]
    return read_int({key: found}, key, 1)

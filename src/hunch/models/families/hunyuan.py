"""HunYuan 1 (dense, and with experts): Llama that norms q and k after rotating them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, read_experts
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, Defaulted, read_float, refuse
from hunch.models.spec import ModelSpec


class HunYuan(Llama):
    """Ropes of type "dynamic" with an `alpha` have another theta, at every length."""

    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5},
        only={"use_qk_norm": True, "use_cla": False, "mlp_bias": False},
        fields={"has_qk_norm": True, "is_qk_norm_late": True},
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(key) or {})
        is_dynamic = (given.get("rope_type") or given.get("type")) == "dynamic"
        alpha = given.get("alpha") if is_dynamic else None
        if alpha:  # nothing else of it matters
            given = {name: given[name] for name in given if name == "rope_theta"}
        spec = super().read_config(Defaulted({key: given}, config), architecture)
        refuse(config, "attention_head_dim", spec.head_dim)
        assert spec.rope is not None
        if alpha:
            stretch = read_float({"alpha": alpha}, "alpha")
            theta = spec.rope.theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
            spec = replace(spec, rope=replace(spec.rope, theta=theta))
        return spec.normed_after_turns()


class HunYuanMoe(HunYuan):
    """Softmax over all experts, whose weights add up to one; an MLP beside them."""

    names = replace(
        HunYuan.names, experts=ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")
    )

    keys = HunYuan.keys.but(
        given={"num_experts": 1, "num_experts_per_tok": 1},
        named={"num_experts_per_tok": "moe_topk"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        for key, value in (
            ("moe_intermediate_size", spec.ffn_width),
            ("num_shared_expert", 1),
            ("moe_layer_num_skipped", 0),
        ):
            found = config.get(key)
            if found is not None and {*(found if isinstance(found, list) else [found])} != {value}:
                raise UnsupportedModelError(f"config.json: {key}={found} is not supported yet")
        same = {key: _same(config, key) for key in ("num_experts", "num_experts_per_tok")}
        layers, width = (True,) * spec.num_layers, spec.ffn_width
        experts = read_experts(same, width, layers, shared_width=width, is_normed=True)
        return replace(spec, experts=experts)


def _same(config: Config, key: str) -> Any:
    """A number that files may list for every layer."""
    found = config.get(key)
    if isinstance(found, list):
        if len({*found}) != 1:
            raise UnsupportedModelError(f"config.json: {key}={found}, which differs by layer")
        return found[0]
    return found

"""MLPs of squares without a gate: AFM, Jais 2, nanochat, and Nemotron (3, 4, Minitron)."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.families.llama import Llama
from hunch.models.reading import FROM_GGUF, Config, Defaulted, read_float, refuse
from hunch.models.spec import ModelSpec


class Arcee(Llama):
    """AFM-4.5B: Llama's layers with an MLP that has no gate."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"hidden_act": "relu2", "rms_norm_eps": 1e-5})
        return replace(super().read_config(config, architecture), is_gated=False)


class Jais2(Arcee):
    """Layer norms, and biases everywhere."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"attention_bias": True, "mlp_bias": True})
        return replace(
            super().read_config(config, architecture),
            norm="layer",
            norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        )


class Nemotron(Arcee):
    """Layer norms of 1 + w; half of each head is turned."""

    turns_part = True

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"partial_rotary_factor": 0.5})
        return replace(
            super().read_config(config, architecture),
            norm="layer",
            norm_eps=read_float(config, "norm_eps", 1e-5),
            is_norm_shifted=not config.get(FROM_GGUF, False),
        )


class NanoChat(Arcee):
    """Norms without weights: of the stream, the embedding and the heads of q and k. Heads are
    turned the other way, which is turning them with their second halves negated.

    transformers turns heads before it norms them: a turn does not change what the norm divides by.
    """

    names = Names(q_norm="", k_norm="", up="mlp.fc1", down="mlp.fc2")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "attention_bias", False)
        given = {"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0}
        config = Defaulted(config, given)
        spec = super().read_config(config, architecture)
        assert spec.rope is not None
        half = spec.head_dim // 2
        heads = {cls.names.q: spec.num_heads, cls.names.k: spec.num_kv_heads}
        return replace(
            spec,
            rope=replace(spec.rope, attention_factor=1.0),  # any other would be normed away
            has_norm_weight=False,
            has_embed_norm=True,
            has_qk_norm=True,
            logits_cap=read_float(config, "final_logit_softcapping"),
            row_factors=tuple(
                (name, ((half, 1.0), (half, -1.0)) * count) for name, count in heads.items()
            ),
        )

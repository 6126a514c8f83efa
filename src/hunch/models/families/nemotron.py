"""MLPs of squared ReLU without a gate: AFM, Jais 2, nanochat, and Nemotron (3, 4, Minitron)."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.families.llama import Llama
from hunch.models.reading import Config
from hunch.models.spec import ModelSpec


class Arcee(Llama):
    """AFM-4.5B: Llama's layers with an MLP that has no gate."""

    keys = Llama.keys.but(
        given={"hidden_act": "relu2", "rms_norm_eps": 1e-5}, fields={"is_gated": False}
    )


class Jais2(Arcee):
    """Layer norms, and biases everywhere."""

    keys = Arcee.keys.but(
        given={"attention_bias": True, "mlp_bias": True, "layer_norm_eps": 1e-5},
        numbers={"norm_eps": "layer_norm_eps"},
        fields={"norm": "layer"},
    )


class Nemotron(Arcee):
    """Layer norms of 1 + w; half of each head is rotated."""

    turns_part = True
    keys = Arcee.keys.but(
        given={"partial_rotary_factor": 0.5, "norm_eps": 1e-5},
        numbers={"norm_eps": "norm_eps"},
        fields={"norm": "layer", "is_norm_shifted": True},
    )


class NanoChat(Arcee):
    """Norms without weights: of the stream, the embedding and the heads of q and k. Heads are
    rotated the other way, as if their second halves were negated.
    """

    names = Names(q_norm="", k_norm="", up="mlp.fc1", down="mlp.fc2")
    keys = Arcee.keys.but(
        given={"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0},
        only={"attention_bias": False},
        numbers={"logits_cap": "final_logit_softcapping"},
        fields={"has_norm_weight": False, "has_embed_norm": True, "has_qk_norm": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        half = spec.head_dim // 2
        heads = {cls.names.q: spec.num_heads, cls.names.k: spec.num_kv_heads}
        return replace(
            spec.normed_after_turns(),
            row_factors=tuple(
                (name, ((half, 1.0), (half, -1.0)) * count) for name, count in heads.items()
            ),
        )

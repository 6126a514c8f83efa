"""EAGLE-3: a head over the target's states that learns on its own outputs, several steps deep.

Shape letters: T tokens of a pack, M positions that teach, D width, E = 2 * D, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.models.build import build_block
from hunch.models.decoder import Decoder
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.cut import read
from hunch.train.student import (
    PackLoss,
    Recipe,
    StepInputs,
    Student,
    Walk,
    check_target,
    layer_config,
)
from hunch.train.unroll import Unrolled
from hunch.train.vocab import Columns

FIRST = "midlayer."
_SHAPES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Options:
    """train eagle3 KEY=VALUE..."""

    layers: int = 1  # of the head
    unroll: int = 5  # steps in which it reads its own states
    features: str = ""  # "2,15,27": after how many target layers; empty: low, middle and high
    loss: str = "ce"


class Eagle3Student(Student):
    """(state of t, token t + 1) -> state of t + 1, from which token t + 2 is guessed."""

    spec: ModelSpec

    def __init__(
        self, options: Eagle3Options, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        if options.layers < 1 or options.unroll < 1:
            raise ConfigError("eagle3: layers and unroll must be 1 or more")
        self.options, self.num_walks, self.config = options, options.unroll, weights.config
        self.feature_layers = read_features(options.features, target.spec.num_layers)
        count = options.layers
        self.spec = replace(
            target.spec,
            num_layers=count,
            windows=(None,) * count,
            has_qkv_bias=False,
            has_out_bias=False,
            has_mlp_bias=False,
            has_qk_norm=False,
        )
        self.head_CD = target.head.weight_NK[columns.ids_C].contiguous()
        self.start(self._begin(weights))

    def _begin(self, weights: Weights) -> dict[str, Tensor]:
        """Start from the target's own layers, if shapes allow it; the token's half starts small."""
        spec, names, generator = self.spec, self.target.names, torch.Generator().manual_seed(1)
        width, last = spec.width, self.target.spec.num_layers - 1

        def taken(name: str, layer: int) -> Tensor:
            return read(weights, names.layer.format(layer) + name)

        fc = torch.randn(width, len(self.feature_layers) * width, generator=generator) * 0.02
        fc[:, -width:] += torch.eye(width)
        found = {
            "fc.weight": fc,
            "norm.weight": read(weights, f"{names.final_norm}.weight"),
            f"{FIRST}hidden_norm.weight": taken("input_layernorm.weight", last),
            f"{FIRST}input_layernorm.weight": taken("input_layernorm.weight", 0),
        }
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}." if layer else FIRST
            origin = last - (spec.num_layers - 1 - layer)
            for name in (*_SHAPES, "self_attn.o_proj"):
                matrix = taken(f"{name}.weight", origin)
                if not layer and name in _SHAPES:
                    matrix = torch.cat((taken(f"{name}.weight", 0), matrix), dim=1) * 0.7
                found[f"{prefix}{name}.weight"] = matrix
            for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
                found[f"{prefix}{name}.weight"] = taken(f"{name}.weight", origin)
            norms = ["post_attention_layernorm", *(["input_layernorm"] if layer else [])]
            for name in norms:
                found[f"{prefix}{name}.weight"] = taken(f"{name}.weight", origin)
        return found

    def loss_on(self, given: StepInputs) -> PackLoss:
        """A draft is begun after every token; its state stays in the place of that token."""
        spec, source, pack = self.spec, self.source(), given.pack
        assert self.target.rope is not None
        attend = Unrolled(pack, self.target.rope, spec.max_len)
        width = 2 * spec.width
        first = build_block(spec, source, FIRST, 0, input_width=width, has_attn_norm=False)
        others = [
            build_block(spec, source, f"layers.{layer}.", layer)
            for layer in range(1, spec.num_layers)
        ]
        norm = source.rms_norm("norm", spec.width, spec.norm_eps)
        token_TD = source.rms_norm(f"{FIRST}input_layernorm", spec.width, spec.norm_eps)(
            self.target.embed(pack.ids_T)
        )
        hidden_norm = source.rms_norm(f"{FIRST}hidden_norm", spec.width, spec.norm_eps)
        features = given.states.features
        fc = source.linear(("fc",), (spec.width,), len(features) * spec.width)
        hidden_TD = fc(torch.cat(features, dim=-1))
        walk = Walk(given, self.options.loss)
        for step in range(self.options.unroll):
            attend.to(step)
            token_TD = token_TD.roll(-1, dims=0)
            input_TE = torch.cat((token_TD, hidden_norm(hidden_TD)), dim=-1)
            hidden_TD = first.mix(hidden_TD, input_TE, attend)
            for block in others:
                hidden_TD = block(hidden_TD, attend)
            walk.teach(norm(walk.taught(hidden_TD, step + 1)), step + 1, self.head_CD)
        return walk.result()

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.spec
        ids_C = self.columns.ids_C.sort().values.cpu()
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layer_config(spec, self.config),
            "draft_vocab_size": len(ids_C),
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
        }
        tensors = self.values()
        tensors["d2t"] = self.columns.offsets()
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, ids_C, True)
        tensors["lm_head.weight"] = self.target.head.weight_NK[ids_C.to(self.target.device)]
        return config, tensors


def read_features(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers whose states it reads, by default low, middle and high."""
    if not text:
        return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"features={text!r} must be numbers with commas") from None
    if not layers or not 0 <= min(layers) <= max(layers) <= num_layers:
        raise ConfigError(f"features={text!r} must be from 0 to the target's {num_layers} layers")
    return layers


def _check(options: Eagle3Options, spec: ModelSpec) -> None:
    check_target(spec, "eagle3")
    read_features(options.features, spec.num_layers)


RECIPE = Recipe(options=Eagle3Options, student=Eagle3Student, check=_check, has_few_columns=True)

"""MLP speculator: small stages that each take the token before and guess one further.

Shape letters: M positions that teach, D width, I inner width, C columns, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.files import Table
from hunch.models.heads.mlp import EPS, BiasedNorm, MlpNet
from hunch.models.weights import Weights
from hunch.train.student import Fan, PackLoss, Recipe, StepInputs, Student
from hunch.train.vocab import Columns

_EMB, _HEAD = "speculator.emb.0.weight", "speculator.head.0.weight"
_LN, _PROJ = "speculator.ln.0", "speculator.proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpOptions:
    """train mlp KEY=VALUE..."""

    stages: int = 4
    inner: int = 192  # width of the stages
    loss: str = "ce"


class MlpStudent(Student):
    """Stages share their weights (tie_weights), but for the first projection."""

    needs_hidden = True

    plain = (_EMB, _HEAD)

    def __init__(
        self, options: MlpOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        if options.stages < 1 or options.inner < 1:
            raise ConfigError("mlp: stages and inner must be 1 or more")
        self.options = options
        width, inner = target.spec.width, options.inner
        generator = torch.Generator().manual_seed(2)
        # Start from the widest directions of the target's own tables, which know the tokens.
        head_VI = _squeeze(target.head.weight_NK.float(), inner)
        tensors = {
            _EMB: _squeeze(target.embedding_VD.float(), inner),
            _HEAD: head_VI[columns.ids_C.cpu()],
            f"{_LN}.weight": torch.ones(inner),
            f"{_LN}.bias": torch.zeros(inner),
            f"{_PROJ}.0.weight": torch.randn(inner, width, generator=generator) * width**-0.5,
        }
        if options.stages > 1:
            noise = torch.randn(inner, inner, generator=generator) * inner**-0.5
            tensors[f"{_PROJ}.1.weight"] = noise
        self.start(tensors)

    def loss_on(self, given: StepInputs) -> PackLoss:
        source, inner = self.source(), self.options.inner
        width = self.target.spec.width
        norm = BiasedNorm(
            source.take(f"{_LN}.weight", inner), source.take(f"{_LN}.bias", inner), EPS
        )
        proj = [Linear(source.take(f"{_PROJ}.0.weight", inner, width))]
        if self.options.stages > 1:
            later = Linear(source.take(f"{_PROJ}.1.weight", inner, inner))
            proj += [later] * (self.options.stages - 1)
        count = self.options.stages
        embed = Table(source.take(_EMB, self.target.spec.vocab_size, inner))
        head_CI = source.take(_HEAD, len(self.columns), inner)
        net = MlpNet([], proj, [norm] * count, [], inner, True)
        fan = Fan(given, self.options.loss)
        state_MI = net.start(given.states.hidden_TD.index_select(0, fan.start_M))
        for stage in range(count):
            # As MlpNet.step, but for its logits: they are made where they teach.
            embedded_MI = embed(fan.tokens())
            state_MI = torch.add(proj[stage](state_MI), embedded_MI, alpha=net.emb_scale)
            state_MI = functional.gelu(norm(state_MI))
            fan.teach(state_MI, head_CI)
        return fan.result()

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec, count = self.target.spec, self.options.stages
        config: dict[str, Any] = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": spec.width,
            "inner_dim": self.options.inner,
            "n_predict": count,
            "vocab_size": spec.vocab_size,
            "top_k_tokens_per_head": [max(4 - stage, 1) for stage in range(count)],
            "n_candidates": 4,
            "tie_weights": True,
            "scale_input": True,
        }
        tensors = self.values()
        ids_C = self.columns.ids_C
        if len(ids_C) < spec.vocab_size:  # the published form has no map of tokens
            config["truncated_vocab_size"] = len(ids_C)
            return config, {**tensors, "token_map": ids_C.cpu()}
        tensors[_HEAD] = tensors[_HEAD][self.columns.column_V]
        return config, tensors


def _squeeze(matrix_VD: Tensor, inner: int) -> Tensor:
    """The matrix along its widest directions, scaled like a newly initialised embedding."""
    count = min(inner, matrix_VD.shape[1])
    _, vectors = torch.linalg.eigh(matrix_VD.t().cpu() @ matrix_VD.cpu())
    out_VI = torch.zeros(len(matrix_VD), inner)
    out_VI[:, :count] = matrix_VD.cpu() @ vectors[:, -count:]
    scale = float(inner**-0.5 / out_VI.std())
    return out_VI * scale


RECIPE = Recipe(options=MlpOptions, student=MlpStudent)

"""MLP speculator: small stages that each take the token before and guess one further.

Shape letters: R starts of guesses, D width, I inner width, C columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.heads.mlp import EPS, MlpNet, TargetTable
from hunch.models.heads.parts import BiasedNorm, Table
from hunch.models.source import Source
from hunch.models.weights import Weights
from hunch.train.fused import NONE, FusedStudent, check_features
from hunch.train.states import Thoughts
from hunch.train.student import Fan, Lesson, Recipe, narrow
from hunch.train.vocab import Columns

_EMB, _HEAD = "speculator.emb.0.weight", "speculator.head.0.weight"
_EMB_FACTOR, _HEAD_FACTOR = "speculator.emb.0.factor.weight", "speculator.head.0.factor.weight"
_LN, _PROJ = "speculator.ln.0", "speculator.proj"

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpOptions:
    """train mlp KEY=VALUE..."""

    stages: int = 4
    inner: int = 192  # width of the stages
    share_tables: bool = False  # the target's tables behind matrices that learn; needs the target
    features: str = NONE  # further layers of the target whose states are added: "2,15,29"
    loss: str = "ce"
    share: float = 1.0  # of each batch's texts it learns from


class MlpStudent(FusedStudent):
    """Stages share their weights (tie_weights), but for the first projection."""

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
        if options.share_tables:
            size = float(target.embedding_VD.float().std()) * (width * inner) ** 0.5
            tables = {
                _EMB_FACTOR: torch.randn(inner, width, generator=generator) / size,
                _HEAD_FACTOR: torch.randn(width, inner, generator=generator) * inner**-0.5,
            }
        else:
            # Widest directions of the target's own: a start that already knows the tokens.
            head_VI = _squeeze(target.head.weight_NK.float(), inner)
            tables = {
                _EMB: _squeeze(target.embedding_VD.float(), inner),
                _HEAD: head_VI[columns.ids_C.cpu()],
            }
        tensors = {
            **tables,
            f"{_LN}.weight": torch.ones(inner),
            f"{_LN}.bias": torch.zeros(inner),
            f"{_PROJ}.0.weight": torch.randn(inner, width, generator=generator) * width**-0.5,
        }
        if options.stages > 1:
            noise = torch.randn(inner, inner, generator=generator) * inner**-0.5
            tensors[f"{_PROJ}.1.weight"] = noise
        self.head_CD = target.head.weight_NK[columns.ids_C]
        self.start({**tensors, **self.take_features(options.features)})

    def lesson(self, thoughts: Thoughts, *, is_test: bool = False) -> Lesson:
        t = narrow(thoughts, 1.0 if is_test else self.options.share, len(self.columns))
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
        embed, speak, head_C = self._tables(source)
        net = MlpNet([], proj, [norm] * count, [], inner, True)
        state_TD = self.states(t)
        fan = Fan(t, self.options.loss, is_test=is_test)
        state_RI = net.start(state_TD[fan.start_R])
        for stage in range(count):
            # As MlpNet.step, but for its logits: they are made where they teach.
            embedded_RI = embed(fan.tokens())
            state_RI = torch.add(proj[stage](state_RI), embedded_RI, alpha=net.emb_scale)
            state_RI = functional.gelu(norm(state_RI))
            kept = fan.teach(speak(state_RI), head_C)
            state_RI = state_RI[kept]
        return fan.lesson()

    def _tables(self, source: Source) -> tuple[Call, Call, Tensor]:
        """The embedding, what stands before the output matrix, and that matrix."""
        inner, spec = self.options.inner, self.target.spec
        if self.options.share_tables:
            factor = Linear(source.take(_EMB_FACTOR, inner, spec.width))
            before = Linear(source.take(_HEAD_FACTOR, spec.width, inner))
            return TargetTable(self.target, factor), before, self.head_CD
        head_CI = source.take(_HEAD, len(self.columns), inner)
        return Table(source.take(_EMB, spec.vocab_size, inner)), _same, head_CI

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
        config.update(self.feature_config())
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        ids_C = self.columns.ids_C
        if self.options.share_tables:
            config["shared_tables"] = True
        if (
            self.options.share_tables or len(ids_C) < spec.vocab_size
        ):  # the published form has no map of tokens
            config["truncated_vocab_size"] = len(ids_C)
            return config, {**tensors, "token_map": ids_C.cpu()}
        tensors[_HEAD] = tensors[_HEAD][self.columns.column_V]
        return config, tensors


def _same(state_RI: Tensor) -> Tensor:
    return state_RI


def _squeeze(matrix_VD: Tensor, inner: int) -> Tensor:
    """The matrix in its widest directions, about as large as a fresh embedding would be."""
    count = min(inner, matrix_VD.shape[1])
    _, vectors = torch.linalg.eigh(matrix_VD.t().cpu() @ matrix_VD.cpu())
    out_VI = torch.zeros(len(matrix_VD), inner)
    out_VI[:, :count] = matrix_VD.cpu() @ vectors[:, -count:]
    scale = float(inner**-0.5 / out_VI.std())
    return out_VI * scale


RECIPE = Recipe(options=MlpOptions, student=MlpStudent, check=check_features)

"""The backend of a target over ranks; decides whether draft models are on rank 0 or over ranks.

Shape letters: T packed tokens, C tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hunch.config import ModelConfig
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs
from hunch.models.decoder import output_of
from hunch.models.spec import ModelSpec
from hunch.models.target import Backend, Target
from hunch.models.weights import Weights
from hunch.parallel.part import Layout

log = logging.getLogger("hunch")

TIMED = 5  # passes of which a time is measured


class SplitModel(Target, Protocol):
    """A target, or a draft model, over ranks."""

    config: ModelConfig

    def load_draft(self, path: Path, config: ModelConfig, num_ranks: int) -> SplitModel:
        """Load another model over the first of the same ranks."""

    def sum_seconds(self) -> float:
        """The time to add up a row of states over the ranks."""

    def drop(self) -> None:
        """Let all ranks release the model."""


class SplitBackend:
    """The ranks' kernels; drafters are on rank 0 alone, unless draft models are split too."""

    captures_steps = False

    def __init__(self, inner: Backend, layout: Layout, draft_ranks: int | None = 1) -> None:
        self.inner, self.layout, self.draft_ranks = inner, layout, draft_ranks
        stages = f" in {layout.num_stages} stages" if layout.num_stages > 1 else ""
        self.name = f"{inner.name} on {layout.size} ranks{stages}"
        self.about = inner.about
        self.has_host_kernels = inner.has_host_kernels
        self.convert_layer, self.accelerate = inner.convert_layer, inner.accelerate
        self.accelerate_blocks = inner.accelerate_blocks

    def shared_output(self, target: Target, *own: Any) -> Callable[[Tensor], Tensor]:
        """The output for drafters: in captured steps by rank 0 alone, as it cannot send orders
        there."""
        if not self.captures_steps or (own and None not in own):
            return target.logits
        assert target.tables is not None
        return output_of(target.tables[1], target.spec)

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        if self.draft_ranks is None:
            return self._fastest_draft(weights, cast(SplitModel, target), dtype)
        if self.draft_ranks == 1:
            return self.inner.load_draft(weights, target, dtype)
        return self._split_draft(weights, cast(SplitModel, target), dtype, self.draft_ranks)

    def _fastest_draft(self, weights: Weights, target: SplitModel, dtype: str) -> Target:
        """The draft model whole on rank 0 or over all ranks: what takes less time, as measured now.

        Where steps are captured it is whole, as they cannot hold drafts of several ranks. Over
        ranks it is loaded only where the sums leave time to be saved.
        """
        whole, count = self.inner.load_draft(weights, target, dtype), self.layout.num_ranks
        if self.captures_steps or count == 1 or not hasattr(target, "sum_seconds"):
            return whole
        seconds, sums = pass_seconds(whole), (2 * whole.spec.num_layers + 1) * target.sum_seconds()
        if seconds / count + sums > seconds:
            log.info("the draft model is whole on rank 0: %.2g s a pass, sums %.2g", seconds, sums)
            return whole
        split = self._split_draft(weights, target, dtype, count)
        split_seconds = pass_seconds(split)
        log.info("the draft model: %.2g s a pass, over ranks %.2g", seconds, split_seconds)
        if split_seconds >= seconds:
            split.drop()
            return whole
        return split

    def _split_draft(
        self, weights: Weights, target: SplitModel, dtype: str, num_ranks: int
    ) -> SplitModel:
        if dtype == "auto" and not weights.metadata and target.is_quantised:
            dtype = "int8"
        config = ModelConfig(
            model=str(weights.path),
            dtype=dtype,
            device=target.device.type,
            threads=target.config.threads,
            kernels=target.config.kernels,
        )
        return target.load_draft(Path(weights.path), config, num_ranks)

    def load_cut(
        self, weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
    ) -> Target:
        if self.draft_ranks is not None and self.draft_ranks > 1:
            raise ConfigError(
                f"{weights.path} shares tables with its target and drafts on one rank: give "
                "speculative_draft_tensor_parallel_size=1"
            )
        return self.inner.load_cut(weights, spec, target, dtype, ids_C)


def pass_seconds(model: Target) -> float:
    """The time of a pass over one token, and of its logits."""
    kv, device, took = model.new_kv(1), model.device, []
    none_1 = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(1 + TIMED):
        attn = AttnInputs.first(1, device=device)
        began = perf_counter()
        hidden = model.forward(none_1, attn, kv)
        model.logits(hidden.last_TD).argmax(-1).tolist()  # waits for a device
        took.append(perf_counter() - began)
    return sorted(took[1:])[TIMED // 2]

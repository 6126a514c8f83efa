"""A draft model on a device: its passes are captured with the step, and no token meets the host.

Every draft begins with the last tokens of the row, so that whatever the target accepted of the
draft before has the model's KV; then one pass per level. A tree keeps the `width` likeliest paths
at each level, and always the path of first children, as the target is likeliest to take it.

Shape letters: R rows of the step, W nodes of a level, T packed tokens (R times W), C columns of the
model's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.drafting.pace import TREE, StepShape, chains_of, levels_after
from hunch.drafting.watch import AcceptanceWatch
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.kernels.gpu_draft import known_inputs, new_inputs
from hunch.kernels.gpu_grow import grow_level
from hunch.kernels.gpu_step import RowState, StepRows
from hunch.sampling.state import SamplingState


@dataclass(slots=True)
class DeviceDraft:
    """Drafts chains (width 1) or trees of `num_levels` levels."""

    name: str
    model: Any  # a CudaDecoder
    kv: KVCache
    group: int  # of its KV, in computed_GX
    sampling: SamplingState
    ids_C: Tensor | None  # the target's id of each column; None: the same
    num_levels: int
    width: int
    max_len: int  # the longest text it can follow
    is_adaptive: bool = True
    margin: float = 0.0
    is_guided: bool = False
    watch: AcceptanceWatch | None = None
    feature_layers: tuple[int, ...] = ()
    _tilings: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def network(self) -> DeviceDraft:
        return self

    @property
    def num_nodes(self) -> int:
        return self.num_levels * self.width

    def depth(self, source: int) -> int:
        return self.num_levels if source == TREE else 0

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        if self.width == 1:
            return chains_of(self.num_levels, is_adaptive=self.is_adaptive)
        whole = StepShape(self.num_nodes, TREE)
        return (StepShape(0), whole) if self.is_adaptive else (whole,)

    @property
    def num_again(self) -> int:
        """Tokens processed anew: of a chain only the last node lacks KV, a tree's moved."""
        return 2 if self.width == 1 else self.num_levels + 1

    def works(self, source: int) -> bool:
        return source > 0

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def can_follow(self, rows: Rows) -> bool:
        return bool((rows.end_X[rows.ids_R] <= self.max_len).all())

    def needs_host(self, rows: Rows) -> bool:
        return not self.can_follow(rows)

    def is_ready(self, rows: Rows) -> np.ndarray:
        return np.asarray(rows.end_X.numpy()[rows.ids_R.numpy()] <= self.max_len)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.name

    def draft(
        self, state: RowState, step: StepRows, hidden: Any, kind: int, source: int = 0
    ) -> None:
        num_levels = self.num_levels
        if self.width == 1:
            num_levels = levels_after(step.path_RK.shape[1], num_levels)
        self.grow(state, step, kind, num_levels, self.num_again)

    def grow(
        self, state: RowState, step: StepRows, kind: int, num_levels: int, again: int
    ) -> None:  # fmt: skip
        """So many levels, after the last `again` known tokens were processed anew."""
        num_rows, width = len(step.ids_R), self.width
        ids_T, attn = self._inputs(state, num_rows, again, 0)
        known_inputs(state, step, ids_T, attn)
        hidden_TD = self.model.forward(ids_T, attn, self.kv).last_TD[again - 1 :: again]
        row_T = attn.seq_T[again - 1 :: again]
        chances_RW = torch.empty(num_rows, width, dtype=torch.float32, device=ids_T.device)
        for level in range(num_levels):
            is_last = level + 1 == num_levels
            most = 0 if width == 1 else self.num_levels
            following = None if is_last else self._inputs(state, num_rows, width, most)
            grow_level(
                state, step, self.model.logits(hidden_TD), chances_RW, self.sampling, depth=level,
                num_nodes=self.num_nodes, kind=kind, row_T=row_T, ids_C=self.ids_C,
                following=following,
            )  # fmt: skip
            if following is None:
                return
            ids_T, attn = following
            hidden_TD, row_T = self.model.forward(ids_T, attn, self.kv).last_TD, attn.seq_T

    # --- passes -----------------------------------------------------------------------------------

    def _inputs(
        self, state: RowState, num_rows: int, width: int, depth: int
    ) -> tuple[Tensor, AttnInputs]:
        num_tokens = num_rows * width
        ids_T, attn = new_inputs(state, num_tokens, depth)
        key = num_rows, width
        if key not in self._tilings:  # made before a capture, as it comes from the host
            spans = tuple(Span(r * width, (r + 1) * width, r, 0, 1) for r in range(num_rows))
            self._tilings[key] = self.model.tiling(spans, num_tokens)
        attn.memo["tiling"] = self._tilings[key]
        return ids_T, attn

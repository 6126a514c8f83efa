"""A draft model on a device: its passes are captured with the step, and no token meets the host.

Every draft begins with the last tokens of the row, so that whatever the target accepted of the
draft before has the model's KV; then one pass per level. A tree keeps the `width` likeliest paths
at each level.

Shape letters: R rows of the step, W nodes of a level, T packed tokens (R times W), C columns of the
model's logits, P tree depth, B best children.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.kernels.gpu_draft import add_nodes, level_inputs
from hunch.kernels.gpu_sampling import choose
from hunch.kernels.gpu_spec import Cells, StepRows
from hunch.sampling.state import SamplingState
from hunch.spec.pace import Gait

KEEP = 1e3  # more than any log of a chance takes away


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
    margin: float = 0.0
    _tilings: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def network(self) -> DeviceDraft:
        return self

    @property
    def num_nodes(self) -> int:
        return self.num_levels * self.width

    def depth(self, way: int) -> int:
        return 0 if self.width == 1 else self.num_levels

    @property
    def gaits(self) -> tuple[Gait, ...]:
        return (Gait(self.num_nodes),)

    @property
    def num_again(self) -> int:
        """Tokens processed anew: of a chain only the last node lacks KV, a tree's moved."""
        return 2 if self.width == 1 else self.num_levels + 1

    def writes_kv(self, way: int) -> bool:
        return True

    def can_follow(self, rows: Rows) -> bool:
        return bool((rows.end_X[rows.ids_R] <= self.max_len).all())

    def needs_host(self, rows: Rows) -> bool:
        return not self.can_follow(rows)

    def is_ready(self, rows: Rows) -> bool:
        ids_R = rows.ids_R
        known_R, have_R = rows.known_X[ids_R], rows.computed_GX[self.group, ids_R]
        return bool((have_R >= known_R - 1).all()) and self.can_follow(rows)

    def drafted_by(self, way: int, matched: int) -> str:
        return self.name

    def draft(self, cells: Cells, step: StepRows, kind: int, way: int = 0) -> None:
        self.grow(cells, step, kind, self.num_levels, self.num_again)

    def grow(
        self, cells: Cells, step: StepRows, kind: int, num_levels: int, again: int
    ) -> None:  # fmt: skip
        """So many levels, after the last `again` known tokens were processed anew."""
        num_rows = len(step.ids_R)
        ids_T, attn = self._inputs(cells, num_rows, again, 0)
        level_inputs(cells, step, ids_T, attn)
        hidden_TD = self.model.forward(ids_T, attn, self.kv).last_TD[again - 1 :: again]
        row_R, pos_R = attn.seq_T[again - 1 :: again], attn.pos_T[again - 1 :: again] + 1
        grow = self._grow_chain if self.width == 1 else self._grow_tree
        logits_RC = self.model.logits(hidden_TD.contiguous())
        grow(cells, step, logits_RC, row_R.contiguous(), pos_R, kind, num_levels)

    # --- chains -----------------------------------------------------------------------------------

    def _grow_chain(
        self, cells: Cells, step: StepRows, logits_RC: Tensor, row_R: Tensor, pos_R: Tensor,
        kind: int, num_levels: int,
    ) -> None:  # fmt: skip
        num_rows = len(row_R)
        for level in range(num_levels):
            token_R = self._choose(logits_RC, row_R, pos_R + level, kind)
            parent_R = torch.full_like(token_R, level - 1)
            add_nodes(cells, step, token_R, parent_R, level, self.num_nodes)
            if level + 1 < num_levels:
                ids_T, attn = self._inputs(cells, num_rows, 1, 0)
                level_inputs(cells, step, ids_T, attn, first_node=level, depth=level + 1)
                hidden_TD = self.model.forward(ids_T, attn, self.kv).last_TD
                logits_RC = self.model.logits(hidden_TD)

    def _choose(self, logits_RC: Tensor, row_R: Tensor, pos_R: Tensor, kind: int) -> Tensor:
        state = self.sampling
        return choose(
            logits_RC, row_R, pos_R, state.temperature_X, state.top_k_X, state.top_p_X,
            state.log_min_p_X, state.seed_X, state.sample_X, is_sampled=kind > 0,
            is_filtered=kind > 1, ids_V=self.ids_C,
        )  # fmt: skip

    # --- trees ------------------------------------------------------------------------------------

    def _grow_tree(
        self, cells: Cells, step: StepRows, logits_RC: Tensor, row_R: Tensor, pos_R: Tensor,
        kind: int, num_levels: int,
    ) -> None:  # fmt: skip
        num_rows, width = len(row_R), self.width
        row_T, pos_T = row_R.repeat_interleave(width), pos_R.repeat_interleave(width)
        token_RB, value_RB = self._best(logits_RC, row_R, pos_R, kind)
        parent_RB = torch.full_like(token_RB, -1)
        for level in range(num_levels):
            first = level * width
            add_nodes(cells, step, token_RB.flatten(), parent_RB.flatten(), first, self.num_nodes)
            if level + 1 == num_levels:
                return
            ids_T, attn = self._inputs(cells, num_rows, width, self.num_levels)
            level_inputs(cells, step, ids_T, attn, first_node=first, depth=level + 1)
            hidden_TD = self.model.forward(ids_T, attn, self.kv).last_TD
            logits_TC = self.model.logits(hidden_TD)
            token_TB, gain_TB = self._best(logits_TC, row_T, pos_T + level + 1, kind)
            # Of all children of the level, the likeliest paths go on; the path of first children
            # always does, as the target is likeliest to take it.
            value_RWB = value_RB[:, :, None] + gain_TB.view(num_rows, width, width)
            value_RWB[:, 0, 0] += KEEP
            value_RB, best_RB = value_RWB.flatten(1).topk(width, dim=1)
            value_RB[:, 0] -= KEEP
            token_RB = token_TB.view(num_rows, -1).gather(1, best_RB)
            parent_RB = first + best_RB // width

    def _best(
        self, logits_TC: Tensor, row_T: Tensor, pos_T: Tensor, kind: int
    ) -> tuple[Tensor, Tensor]:
        """The best children of each row by perturbed score, and the logs of their chances."""
        if kind == 0:
            score_TC = logits_TC
        else:
            score_TC = self.sampling.scores(logits_TC, row_T, pos_T, self.ids_C)
        best_TB = score_TC.topk(self.width, dim=1).indices
        chance_TC = score_TC.log_softmax(-1)
        token_TB = best_TB if self.ids_C is None else self.ids_C[best_TB]
        return token_TB, chance_TC.gather(1, best_TB)

    # --- passes -----------------------------------------------------------------------------------

    def _inputs(
        self, cells: Cells, num_rows: int, width: int, depth: int
    ) -> tuple[Tensor, AttnInputs]:
        num_tokens = num_rows * width
        packed_5T = torch.empty(5, num_tokens, dtype=torch.int64, device=cells.flat.device)
        attn = AttnInputs(
            pos_T=packed_5T[1],
            slot_T=packed_5T[2],
            seq_T=packed_5T[3],
            table_SB=cells.table_XB,
            base_T=packed_5T[4],
            tree_TP=packed_5T.new_empty(num_tokens, depth) if depth else None,
            block_size=cells.block_size,
        )
        key = num_rows, width
        if key not in self._tilings:  # made before a capture, as it comes from the host
            spans = tuple(Span(r * width, (r + 1) * width, r, 0, 1) for r in range(num_rows))
            self._tilings[key] = self.model.tiling(spans, num_tokens)
        attn.memo["tiling"] = self._tilings[key]
        return packed_5T[0], attn

"""A head that continues the target's states, on a device: chains, drafted within the step.

Every draft begins with the tokens that the step committed, beside the target's states of the same
pass: so all that is known has the head's KV, and the state behind the last of them is drafted from.
Then one pass of the head per level, each with its own state before it.

Shape letters: R rows of the step, W tokens of a row in the target's pass, T packed tokens (R times
W), D width, C columns of the head's logits, L positions of the rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.drafting.pace import StepShape, chains_of, levels_after
from hunch.drafting.watch import AcceptanceWatch
from hunch.drafting.window import covered
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.kernels.gpu_attention import Tiling
from hunch.kernels.gpu_draft import committed_inputs, new_inputs
from hunch.kernels.gpu_grow import grow_level
from hunch.kernels.gpu_step import RowState, StepRows
from hunch.models.decoder import Hidden
from hunch.models.heads.step import StepNet
from hunch.sampling.state import SamplingState

PROMPTS = (1, 12, 16, 40, 64, 100, 256, 300, 512, 700)  # one of every kind kernels are compiled for


@dataclass(slots=True)
class DeviceFeature:
    """Drafts chains of `num_levels` tokens.

    Of what it has not seen, tokens alone tell it nothing: prompts are covered by the host's
    drafter, which has the target's states, and a row with a hole in its KV stays with the host.
    """

    name: str
    net: StepNet
    kv: KVCache
    group: int  # of its KV, in computed_GX
    sampling: SamplingState
    num_levels: int
    max_len: int  # the longest text it can follow
    watch: AcceptanceWatch
    is_adaptive: bool = True
    margin: float = 0.0
    is_guided: bool = False
    network: None = None  # nobody can read rows to it
    _ids_C: Tensor | None = None  # the target's id of each column of logits
    _tilings: dict[tuple[int, int], Tiling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids_C, device = self.net.ids_C, self.kv.k_LCMH.device
        self._ids_C = None if ids_C is None else ids_C.to(device)

    @property
    def num_nodes(self) -> int:
        return self.num_levels

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.net.feature_layers

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return chains_of(self.num_levels, is_adaptive=self.is_adaptive)

    def depth(self, source: int) -> int:
        return 0

    def works(self, source: int) -> bool:
        return True

    def writes_kv(self, source: int) -> bool:
        return True

    def can_follow(self, rows: Rows) -> bool:
        return bool((rows.end_X[rows.ids_R] <= self.max_len).all())

    def needs_host(self, rows: Rows) -> bool:
        return True

    def is_ready(self, rows: Rows) -> np.ndarray:
        return covered(rows, self.group, self.max_len)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.name

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        num_rows, net = len(step.ids_R), self.net
        width = len(hidden.last_TD) // num_rows
        if not self._tilings and state.flat.is_cuda:
            self._warm_up(state)
        ids_T, attn = self._inputs(state, num_rows, width)
        last_R = ids_T.new_empty(num_rows)
        committed_inputs(state, step, ids_T, attn, last_R)
        fused_TD = net.fuse(hidden.last_TD, hidden.features)
        state_RD = net.step(ids_T, fused_TD, attn, self.kv).index_select(0, last_R)
        if not source:
            return
        row_R, num_levels = attn.seq_T[::width], levels_after(width, self.num_levels)
        chances_R1 = torch.empty(num_rows, 1, dtype=torch.float32, device=ids_T.device)
        for level in range(num_levels):
            is_last = level + 1 == num_levels
            following = None if is_last else self._inputs(state, num_rows, 1)
            grow_level(
                state, step, net.logits(state_RD), chances_R1, self.sampling, depth=level,
                num_nodes=self.num_nodes, kind=kind, row_T=row_R, ids_C=self._ids_C,
                following=following, is_ahead=True,
            )  # fmt: skip
            if following is None:
                return
            ids_R, attn = following
            state_RD = net.step(ids_R, state_RD, attn, self.kv)

    def _warm_up(self, state: RowState) -> None:
        """Kernels that cover prompts are compiled now: at their first use somebody would wait."""
        for count in PROMPTS:
            zero_T = state.flat.new_zeros(count)
            attn = AttnInputs(
                pos_T=zero_T,
                slot_T=zero_T - 1,  # nothing is written
                seq_T=zero_T,
                table_SB=state.table_XB,
                base_T=zero_T + 1,
                tree_TP=None,
                block_size=state.block_size,
                spans=(Span(0, count, 0, 0, count),),
            )
            size, dtype = (count, self.net.spec.width), self.net.kv_dtype
            state_TD = torch.zeros(size, dtype=dtype, device=zero_T.device)
            self.net.step(zero_T, state_TD, attn, self.kv)

    def _inputs(self, state: RowState, num_rows: int, width: int) -> tuple[Tensor, AttnInputs]:
        ids_T, attn = new_inputs(state, num_rows * width)
        key = num_rows, width
        if key not in self._tilings:  # made before a capture, as it comes from the host
            spans = tuple(Span(r * width, (r + 1) * width, r, 0, 1) for r in range(num_rows))
            self._tilings[key] = self.net.tiler(attn).tiling(spans, num_rows * width)
        attn.memo["tiling"] = self._tilings[key]
        return ids_T, attn

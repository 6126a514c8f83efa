"""Drafters that continue the target's own hidden states (EAGLE, MTP): one network step per level.

Shape letters: R rows of this step, X rows of the engine, T packed tokens, D width, C columns, W
tokens of a row in the target's pass.

At position t the network sees the target's state of t and token t + 1. So once the target has
decided L tokens, the network can compute positions 0 .. L - 2, and the last of them predicts token
L. Drafted nodes use the network's own states; the next step overwrites their KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, KVShape, Needs, Rows, TargetStep
from hunch.drafting.base import DrafterContext
from hunch.drafting.following import DeviceFollower, StateFollower, joined, on_path
from hunch.drafting.grow import grow
from hunch.drafting.native_chain import ChainDrafts
from hunch.drafting.options import GrowOptions
from hunch.drafting.step_shapes import DraftSource
from hunch.drafting.token_chooser import Array, TokenChooser
from hunch.drafting.tree_shape import Level
from hunch.drafting.window import Parts, RowArrays
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs, row_spans
from hunch.kernels.step import RowState, StepRows
from hunch.models.heads.step import MARGIN, StepNet
from hunch.models.target import Hidden
from hunch.types import GroupInfo

PROMPTS = (1, 12, 16, 40, 64, 100, 256, 300, 512, 700)  # one of every kind kernels are compiled for


class FeatureDrafter(StateFollower):
    """Computes its KV from the target's states, and drafts with its own."""

    net: StepNet

    def __init__(
        self, name: str, net: StepNet, options: GrowOptions, context: DrafterContext
    ) -> None:
        shape = options.shape(context, default=net.num_tokens)
        if shape.depth > MARGIN:
            raise ConfigError(f"{name}: drafts of depth {shape.depth}; at most {MARGIN}")
        super().__init__(name, shape, options, context, net.spec.max_len)
        self.net = net
        # The network's state at each row's last computed position, which drafts start from.
        self.state_XD = torch.zeros(
            context.max_rows, net.state_width, dtype=net.kv_dtype, device=context.device
        )
        self.chains: ChainDrafts | None = None  # the fast way for steps of one row
        if net.network is not None and ChainDrafts.fit(self.shape, context):
            temperature = self.draft_temperature
            self.chains = ChainDrafts(
                net.network, context, self.window, temperature=temperature, ids_C=net.ids_C
            )
        self.needs = Needs(
            max_nodes=self.shape.num_nodes,
            feature_layers=net.feature_layers,
            hidden=net.needs_hidden,
            kv=KVShape.of([net.kv_shape], net.kv_dtype),
            # With captured steps, the host drafts for a row with a hole to its end.
            group=GroupInfo(name=name, sees_next=True, has_no_holes=context.is_fused),
            weight_bytes=net.weight_bytes + net.matrix_bytes,
        )

    @property
    def device_form(self) -> type[DeviceFollower]:
        return DeviceFeature

    def cover(self, step: TargetStep, parts: Parts, source: list[Array]) -> None:
        rows, net = step.rows, self.net
        tokens_XL = self.host.read(rows).tokens_XL
        next_T = joined([tokens_XL[row, a + 1 : b + 1] for row, a, b in parts])
        hidden_TD, features = self.picked(step, source)
        attn = self.window.spans(rows, parts)
        token_T, fused_TD, kv = self.put(next_T), net.fuse(hidden_TD, features), self.window.kv
        if net.is_staged:
            covered_X, state_XD = self.covered_X, self.state_XD
            before = [state_XD[row] if covered_X[row] == a + 1 else None for row, a, _ in parts]
            state_TD = net.cover(token_T, fused_TD, attn, kv, before)
        else:
            state_TD = net.step(token_T, fused_TD, attn, kv)
        if len(parts) == 1:
            self.state_XD[parts[0][0]] = state_TD[-1]
        else:
            ends = np.cumsum([b - a for _, a, b in parts]) - 1
            row_P = np.array([row for row, _, _ in parts])
            self.state_XD[self.put(row_P)] = state_TD[self.put(ends)]
        self.covered(rows, parts)

    def propose(self, rows: Rows) -> Draft:
        arrays = self.host.read(rows)
        ids_R = arrays.ids_R
        if self.chains is not None and self.chains.takes(arrays.ids):
            return self._propose_one(self.chains, rows, arrays)
        known_R = arrays.known_X[ids_R]
        is_ready_R = self.covered_X[ids_R] == known_R
        limit_R = np.where(is_ready_R, arrays.max_draft_X[ids_R], 0)
        state_MD = self.state_XD[torch.from_numpy(ids_R)]
        return self._grow(rows, ids_R, state_MD, known_R, limit_R)

    def _propose_one(self, chains: ChainDrafts, rows: Rows, arrays: RowArrays) -> Draft:
        row = arrays.ids[0]
        known, limit = int(arrays.known_X[row]), 0
        if self.covered_X[row] == known:
            limit = min(int(arrays.max_draft_X[row]), self.shape.depth)
        state_1D = self.state_XD[row : row + 1]
        return chains.draft(rows, arrays, known - 1, known, limit, state_1D)[0]

    def _grow(
        self,
        rows: Rows,
        ids_R: Array,
        state_MD: Tensor,
        known_R: Array,
        limit_R: Array,
    ) -> Draft:
        net = self.net
        inputs = self.window.levels(rows, ids_R, known_R - 1, self.shape)

        def feed(level: Level) -> Tensor:
            nonlocal state_MD
            if len(level.place_M) > 1 or len(state_MD) > 1:
                state_MD = state_MD[self.put(level.parent_M)]
            token_M = self.put(level.token_M)
            state_MD = net.step(token_M, state_MD, inputs(level), self.window.kv)
            return net.logits(state_MD)

        chooser = TokenChooser(self.context, rows, net.ids_C, self.draft_temperature)
        draft, _ = grow(net.logits(state_MD), feed, chooser, limit_R, self.shape)
        return draft


@dataclass(kw_only=True)
class DeviceFeature(DeviceFollower):
    """Chains, or trees of `num_levels` levels, drafted within the step.

    Every draft begins with a pass over the tokens that the step committed, with the target's states
    of the same step: so all known tokens have the head's KV. The state of the last of them starts
    the draft. Then there is one pass of the head per level, each node with its parent's state. A
    tree keeps nodes as a draft model's tree does.
    """

    net: StepNet

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_draft import committed_inputs

        num_rows, net = len(step.ids_R), self.net
        if not self.tilings and state.flat.is_cuda:
            self._warm_up(state)
        states, size = (hidden.last_TD, *hidden.features), step.num_nodes + 1
        if self.level_size > 1 or source >= DraftSource.TREE:
            states, size = on_path(states, step, self.longest_path)
        ids_T, attn = self._inputs(state, num_rows, size)
        last_R = ids_T.new_empty(num_rows)
        committed_inputs(state, step, ids_T, attn, last_R)
        fused_TD = net.fuse(states[0], states[1:])
        state_TD = net.step(ids_T, fused_TD, attn, self.kv).index_select(0, last_R)
        if not source:
            return
        row_R, num_levels = attn.seq_T[::size], self.levels(source, step.num_nodes)
        depth = self.num_levels if self.level_size > 1 else 0

        def feed(level: int, ids_T: Tensor, attn: AttnInputs) -> tuple[Tensor, Tensor]:
            nonlocal state_TD
            if self.level_size > 1:
                state_TD = state_TD.index_select(0, self._parents(state, row_R, level))
            state_TD = net.step(ids_T, state_TD, attn, self.kv)
            return net.logits(state_TD), attn.seq_T

        self.grow_levels(
            state, step, self.sampling, net.logits(state_TD), row_R, num_levels,
            ids_C=self._ids_C, inputs=partial(self._inputs, state, num_rows, self.width, depth),
            feed=feed, sees_next=True,
        )  # fmt: skip

    def _parents(self, state: RowState, row_R: Tensor, level: int) -> Tensor:
        """For the nodes of this level that get children: their parents' places in the last pass."""
        num_rows, first = len(row_R), level * self.level_size
        place_RW = state.parents_XG[:, first : first + self.width].index_select(0, row_R)
        if not level:
            return torch.arange(num_rows, device=row_R.device).repeat_interleave(self.width)
        place_RW = (place_RW - (first - self.level_size)).clamp(0, self.width - 1)
        first_R1 = self.width * torch.arange(num_rows, device=row_R.device)[:, None]
        return (first_R1 + place_RW).flatten()

    def _warm_up(self, state: RowState) -> None:
        """Compile the kernels for prompts now, so that no request has to wait for that."""
        for count in PROMPTS:
            zero_T = state.flat.new_zeros(count)
            attn = AttnInputs.nobody(zero_T, state.table_XB, state.block_size)
            size, dtype = (count, self.net.spec.width), self.net.kv_dtype
            state_TD = torch.zeros(size, dtype=dtype, device=zero_T.device)
            self.net.step(zero_T, state_TD, attn, self.kv)

    def _inputs(
        self, state: RowState, num_rows: int, width: int, depth: int = 0
    ) -> tuple[Tensor, AttnInputs]:
        from hunch.kernels.gpu_draft import new_inputs

        ids_T, attn = new_inputs(state, num_rows * width, depth)
        key = num_rows, width
        if key not in self.tilings:
            tiler, num_tokens = self.net.tiler(attn), num_rows * width
            self.tilings[key] = tiler.tiling(row_spans(num_rows, width), num_tokens)
        attn.memo["tiling"] = self.tilings[key]
        return ids_T, attn

"""Block drafters (DFlash, DSpark, DFlash2): one pass of a small network guesses a block of tokens.

The network reads the target's states of all known tokens, kept as keys and values of its own, and
guesses the token at each of the next places. A chain takes one token per place; a tree
(`tree=dynamic`) takes the likeliest paths through the places, best first, after DDTree (arXiv
2604.12989). Either way the network runs once. The methods differ in their networks alone
(models/heads/block.py).

Shape letters: R rows of this step, Q those of them that are drafted for, X rows of the engine, M
packed nodes, C columns of logits; on a device T packed nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft, KVShape, Needs, Rows, TargetStep
from hunch.drafting.base import DrafterContext, Options
from hunch.drafting.best_first import BestFirst, grow_on_device
from hunch.drafting.following import DeviceFollower, StateFollower, on_path
from hunch.drafting.grow import grow
from hunch.drafting.options import GrowOptions, need_path
from hunch.drafting.step_shapes import DraftSource, levels_after
from hunch.drafting.token_chooser import Array, TokenChooser
from hunch.drafting.tree_shape import Level
from hunch.drafting.trees import side_by_side
from hunch.drafting.window import Parts
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs, row_spans
from hunch.kernels.kv_store import slots_at
from hunch.kernels.step import RowState, StepRows
from hunch.models.heads.block_files import load_block
from hunch.models.heads.block_net import BlockGuess, BlockNet, TiledBlocks
from hunch.models.swap import copy_network
from hunch.models.target import Hidden
from hunch.types import GroupInfo

if TYPE_CHECKING:
    from hunch.kernels.gpu_tiling import Tiling  # these need Triton, which a CPU may not have


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions(GrowOptions):
    """Options of `dspark:PATH[:KEY=VALUE]...` and of the other block methods."""

    adapt: bool = False  # keep learning from answers while serving


class BlockDrafter(StateFollower):
    """NAME:PATH[:KEY=VALUE]..."""

    method: str
    net: BlockNet

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.path, self.context = need_path(self.method, path), context
        self.net = net = self.load_network(self.path)
        given = read_options(BlockOptions, options, self.method)
        if given.width is not None:
            raise ConfigError(f"{self.method}: width has no effect: one pass tells every place")
        most = net.shape.num_tokens
        shape = given.shape(context, default=most, max_depth=most)
        if shape.is_dynamic:  # a node more with children costs no pass
            shape = replace(shape, width=shape.num_nodes)
        super().__init__(self.method, shape, given, context, net.spec.max_len)
        self.needs = Needs(
            max_nodes=shape.num_nodes,
            feature_layers=net.feature_layers,
            kv=KVShape.of([net.kv_shape], net.kv_dtype),
            # A position's KV depends on the target's state there, and not on the next token.
            group=GroupInfo(name=self.method, has_no_holes=context.is_fused),
            weight_bytes=net.weight_bytes + net.matrix_bytes,
        )

    def load_network(self, path: str) -> BlockNet:
        return load_block(path, self.context.target, self.method)

    def take_network(self, network: BlockNet) -> None:
        """Replace the network. KV computed by the old one stays: guesses may get a little worse."""
        if self.context.device.type == "cpu":
            self.net = network
        else:
            copy_network(self.net, network)

    @property
    def device_form(self) -> type[DeviceFollower]:
        return DeviceBlock

    def cover(self, step: TargetStep, parts: Parts, source: list[Array]) -> None:
        _, features = self.picked(step, source)
        attn = self.window.spans(step.rows, parts)
        self.net.cover(features, attn.pos_T, attn.slot_T, self.window.kv)
        self.covered(step.rows, parts)

    def propose(self, rows: Rows) -> Draft:
        arrays = self.host.read(rows)
        ids_R = arrays.ids_R
        known_R = arrays.known_X[ids_R]
        is_ready_R = self.covered_X[ids_R] == known_R
        limit_R = np.where(is_ready_R, arrays.max_draft_X[ids_R], 0)
        place_Q = np.flatnonzero(limit_R > 0)
        if not len(place_Q):
            return Draft.empty(len(ids_R), self.context.device)
        ids_Q = ids_R[place_Q]
        some = rows if len(ids_Q) == len(ids_R) else replace(rows, ids_R=rows.ids_R[place_Q])
        draft = self._draft(some, ids_Q, self._guess(rows, ids_Q), limit_R[place_Q])
        if some is rows:
            return draft
        return side_by_side(len(ids_R), [(place_Q.tolist(), draft)])

    def _guess(self, rows: Rows, ids_Q: Array) -> BlockGuess:
        """The network's pass over each row's block, which starts with the last known token."""
        arrays, window = self.host.read(rows), self.window
        last_Q, first_Q = arrays.known_X[ids_Q] - 1, window.first_X[ids_Q]
        token_Q = self.put(arrays.tokens_XL[ids_Q, last_Q])
        slots = []
        for row, first, last in zip(ids_Q, first_Q, last_Q, strict=True):
            pos_K = np.arange(first, last)
            slots.append(self.put(window.slots(rows, np.full(len(pos_K), row), pos_K)))
        return self.net.guess(token_Q, self.put(last_Q - first_Q), slots, window.kv)

    def _draft(self, rows: Rows, ids_Q: Array, guess: BlockGuess, limit_Q: Array) -> Draft:
        arrays = self.host.read(rows)
        last_Q = arrays.tokens_XL[ids_Q, arrays.known_X[ids_Q] - 1]
        token_Q = self.put(last_Q)
        everyone_Q = torch.arange(len(ids_Q), device=token_Q.device)

        def feed(level: Level) -> Tensor:
            depth = level.path_MP.shape[1]
            return guess.scores(self.put(level.place_M), depth, self.put(level.token_M))

        chooser = TokenChooser(self.context, rows, self.net.ids_C, self.draft_temperature)
        logits_QC = guess.scores(everyone_Q, 0, token_Q)
        if self.shape.is_dynamic and not chooser.wants_q:

            def odds(place_M: Array, depth: int, token_M: Array) -> Tensor | None:
                return guess.confidences(self.put(place_M), depth, self.put(token_M))

            tree = BestFirst(
                self.context, chooser, limit_Q, self.shape, odds=odds, is_adaptive=self.is_adaptive
            )
            return tree.grow(*chooser.with_rules(logits_QC, feed), last_Q)
        return grow(logits_QC, feed, chooser, limit_Q, self.shape)[0]


@dataclass(kw_only=True)
class DeviceBlock(DeviceFollower):
    """Drafts within the step: KV of the committed tokens, one pass, then tokens place by place.

    A chain takes one token per place, a tree the likeliest paths, best first.
    """

    is_best_first: ClassVar[bool] = True

    net: BlockNet

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_draft import committed_inputs, new_inputs

        net, num_rows, is_tree = self.net, len(step.ids_R), source >= DraftSource.TREE
        features, size = hidden.features, step.num_nodes + 1
        if is_tree:
            features, size = on_path(features, step, self.longest_path)
        ids_T, attn = new_inputs(state, num_rows * size)
        last_R = ids_T.new_empty(num_rows)
        committed_inputs(state, step, ids_T, attn, last_R)
        net.cover_tiled(features, attn, self.kv)
        if source <= 0:
            return
        row_R, token_R = attn.seq_T[::size], ids_T.index_select(0, last_R)
        guess = net.told_tiled(token_R, self._blocks(state, step, row_R))
        if is_tree and self.tree_nodes:

            def level(
                depth: int, token_T: Tensor, up_T: Tensor | None
            ) -> tuple[Tensor, Tensor | None]:
                # Where places tell the same after all tokens, a row needs one line of logits.
                logits_TC = guess.level(depth, token_R if guess.is_alike else token_T)
                return logits_TC, guess.odds(depth, token_T)

            ids_C = self._ids_C
            grow_on_device(self, state, step, level, token_R, self.sampling, ids_C=ids_C)
            return
        num_levels = self.num_levels if is_tree else levels_after(step.num_nodes, self.num_levels)
        self.grow_levels(
            state, step, self.sampling, guess.level(0, token_R), row_R, num_levels,
            ids_C=self._ids_C, inputs=partial(new_inputs, state, num_rows),
            feed=lambda level, token_R, _: (guess.level(level + 1, token_R), row_R),
        )  # fmt: skip

    def _blocks(self, state: RowState, step: StepRows, row_R: Tensor) -> TiledBlocks:
        """Inputs of each row's block, from its last known token to its last free position."""
        num_places, block_size = self.net.shape.num_places, state.block_size
        place_P = torch.arange(num_places, device=row_R.device)
        known_R1 = state.known_X[row_R][:, None]
        left_R1 = state.end_X[row_R][:, None] - known_R1 - 1  # there are no slots past the end
        max_draft_R1 = torch.minimum(step.max_draft_R[:, None], left_R1).clamp(min=0)
        is_live_RP = (step.num_checked_R[:, None] >= 0) & (place_P <= max_draft_R1)
        pos_RP = torch.where(is_live_RP, known_R1 - 1 + place_P, 0)
        slot_RP = slots_at(state.table_XB, row_R[:, None], pos_RP, state.block_size)
        end_RP = pos_RP.amax(1, keepdim=True).expand_as(pos_RP)
        pos_T = pos_RP.flatten()
        attn = AttnInputs(
            pos_T=pos_T,
            slot_T=torch.where(is_live_RP, slot_RP, -1).flatten(),
            seq_T=row_R.repeat_interleave(num_places),
            table_SB=state.table_XB,
            base_T=pos_T + 1,
            tree_TP=None,
            block_size=block_size,
        )
        tiling = self._tiling(attn, len(row_R))
        return TiledBlocks(attn, end_RP.flatten().contiguous(), self.kv, self.net, tiling)

    def _tiling(self, attn: AttnInputs, num_rows: int) -> Tiling:
        key = num_rows, size = num_rows, self.net.shape.num_places
        if key not in self.tilings:
            spans = row_spans(num_rows, size, size)
            self.tilings[key] = self.net.tiler(attn).tiling(spans, num_rows * size)
        return self.tilings[key]


class DflashDrafter(BlockDrafter):
    """DFlash: each place of a block predicts its own token."""

    method = "dflash"


class DsparkDrafter(BlockDrafter):
    """DSpark: each place predicts the next token, with a Markov head and a confidence head."""

    method = "dspark"


class Dflash2Drafter(BlockDrafter):
    """DFlash2: DFlash with convolutions within the block and a selector of neighbours."""

    method = "dflash2"

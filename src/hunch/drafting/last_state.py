"""Base of drafters that start from the target's last hidden state alone (Medusa, MLP).

They keep no KV. On the host, `observe` keeps each row's last state and `propose` grows a draft from
it. On a device the state behind the last committed token is there when the step drafts.

Shape letters: X rows of the engine, R rows of this step, T packed nodes, D width, C columns of
logits.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.best_first import BestFirst, grow_on_device
from hunch.drafting.following import on_path
from hunch.drafting.grow import grow
from hunch.drafting.options import GrowOptions, can_capture, device_shape
from hunch.drafting.step_shapes import DraftSource, levels_after
from hunch.drafting.token_chooser import Array, Feed, TokenChooser
from hunch.drafting.tree_shape import TreeShape
from hunch.drafting.window import host
from hunch.kernels.best_first import RankedLevel
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden

# Yields the logits of each level. The tokens of the level before are sent to it, and in trees the
# place of each one's parent among the tokens of the level before that.
Guesses = Generator[Tensor, tuple[Tensor, Tensor | None], None]


class LastStateDrafter:
    """A subclass says how its network computes levels from a state."""

    name: str
    net: Any  # its network

    def __init__(
        self,
        options: GrowOptions,
        context: DrafterContext,
        ids_C: Tensor | None,  # the target's id of each column of logits; None: all of them
        shape: TreeShape | None,  # None: its trees are all alike and of this `size`
        size: tuple[int, int] | None = None,  # their depth and number of nodes
    ) -> None:
        self.options, self.context, self.shape = options, context, shape
        self.is_adaptive, self.ids_C = options.adaptive, ids_C
        if shape is not None:
            size = shape.depth, shape.num_nodes
        assert size is not None
        self.depth, max_nodes = size
        weight_bytes = self.net.weight_bytes + self.net.matrix_bytes
        self.needs = Needs(max_nodes=max_nodes, hidden=True, weight_bytes=weight_bytes)
        self.state_XD: Tensor | None = None  # made in the first step, when the width is known
        self.known_X = np.full(context.max_rows, -1)  # known length the state belongs to

    def start(self, state_RD: Tensor, token_R: Tensor) -> tuple[Tensor, Feed]:
        """Logits of the first level, and a function for those of each further level."""
        raise NotImplementedError

    def guesses(self, state_RD: Tensor, token_R: Tensor) -> Guesses:
        """The same on a device, without the host. If the tokens before a level make no difference
        to it, it is one line per row."""
        raise NotImplementedError

    def ranked(self) -> tuple[RankedLevel, ...]:
        """The levels of its trees, if those have one shape."""
        return ()

    def on_device(self) -> DeviceDrafter | None:
        """The device form, for drafts that a graph can hold."""
        context, shape = self.context, self.shape
        if not can_capture(context, self.options.draft_temperature):
            return None
        levels: tuple[RankedLevel, ...] = ()
        sizes: dict[str, Any] = {"num_levels": self.depth}
        if shape is not None:
            only_chains = context.only_chains
            sizes = device_shape(
                shape, only_chains=only_chains, is_best_first=DeviceLastState.is_best_first
            )
        elif not context.only_chains:
            levels = self.ranked()
            widest = max(len(level.rank_N) for level in levels)
            sizes |= {"num_nodes": self.needs.max_nodes, "level_size": widest}
        return DeviceLastState(
            name=self.name,
            is_adaptive=self.options.adaptive,
            method=self,
            ids_C=None if self.ids_C is None else self.ids_C.to(self.context.device),
            levels_of_trees=levels,
            **sizes,
        )

    def observe(self, step: TargetStep) -> None:
        """Keep the state of each row's last token."""
        assert step.hidden_TD is not None
        ids_R = host(step.rows.ids_R)
        last_R = host(step.offset_R) + host(step.stop_R) - host(step.start_R) - 1
        device = step.hidden_TD.device
        state_RD = step.hidden_TD[torch.from_numpy(last_R).to(device)]
        if self.state_XD is None:
            self.state_XD = state_RD.new_zeros(self.context.max_rows, state_RD.shape[1])
        self.state_XD[torch.from_numpy(ids_R).to(device)] = state_RD
        self.known_X[ids_R] = host(step.stop_R) + 1

    def propose(self, rows: Rows) -> Draft:
        assert self.state_XD is not None, "observe comes before propose"
        ids_R, device = host(rows.ids_R), self.state_XD.device
        known_R = host(rows.known_X)[ids_R]
        is_ready_R = self.known_X[ids_R] == known_R
        limit_R = np.where(is_ready_R, host(rows.max_draft_X)[ids_R], 0)
        state_RD = self.state_XD[torch.from_numpy(ids_R).to(device)]
        token_R = torch.from_numpy(host(rows.tokens_XL)[ids_R, known_R - 1]).to(device)
        chooser = TokenChooser(self.context, rows, self.ids_C, self.options.draft_temperature)
        return self.draft(state_RD, token_R, chooser, limit_R)

    def draft(
        self, state_RD: Tensor, token_R: Tensor, chooser: TokenChooser, limit_R: Array
    ) -> Draft:
        """A draft per row from its state and its last token, at most limit_R nodes each."""
        assert self.shape is not None
        logits_RC, feed = self.start(state_RD, token_R)
        if not self.shape.is_dynamic or chooser.wants_q:
            return grow(logits_RC, feed, chooser, limit_R, self.shape)[0]
        tree = BestFirst(self.context, chooser, limit_R, self.shape, most=self.shape.width)
        return tree.grow(*chooser.with_rules(logits_RC, feed), host(token_R))

    def forget(self, rows: list[int]) -> None:
        self.known_X[rows] = -1


@dataclass(kw_only=True)
class DeviceLastState(DeviceDrafter):
    """Chains and trees drafted within the step."""

    is_best_first: ClassVar[bool] = True

    method: LastStateDrafter
    ids_C: Tensor | None  # the target's id of each column; None: the same
    levels_of_trees: tuple[RankedLevel, ...] = ()  # if they have one shape

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_draft import committed_inputs, new_inputs

        num_rows, sampling = len(step.ids_R), self.method.context.sampling
        state_TD, size = hidden.last_TD, step.num_nodes + 1
        has_trees = self.tree_nodes > 0 or len(self.levels_of_trees) > 0
        is_tree = has_trees and source >= DraftSource.TREE
        if source >= DraftSource.TREE:
            (state_TD,), size = on_path((state_TD,), step, self.longest_path)
        ids_T, attn = new_inputs(state, num_rows * size)
        last_R = ids_T.new_empty(num_rows)
        committed_inputs(state, step, ids_T, attn, last_R)
        token_R = ids_T.index_select(0, last_R)
        guesses = self.method.guesses(state_TD.index_select(0, last_R), token_R)
        if is_tree and self.levels_of_trees:
            self._take_ranks(state, step, guesses, token_R)
        elif is_tree:

            def level(depth: int, token_T: Tensor, up_T: Tensor | None) -> tuple[Tensor, None]:
                logits_TC = guesses.send((token_T, up_T)) if depth else next(guesses)
                return logits_TC.float(), None

            ids_C = self.ids_C
            grow_on_device(self, state, step, level, token_R, sampling, ids_C=ids_C)
        else:
            row_R, num_levels = attn.seq_T[::size], self.num_levels
            if self.level_size == 1:
                num_levels = levels_after(step.num_nodes, num_levels)
            self.grow_levels(
                state, step, sampling, next(guesses).float(), row_R, num_levels,
                ids_C=self.ids_C, inputs=partial(new_inputs, state, num_rows),
                feed=lambda _, token_R, __: (guesses.send((token_R, None)).float(), row_R),
            )  # fmt: skip

    def _take_ranks(
        self, state: RowState, step: StepRows, guesses: Guesses, token_R: Tensor
    ) -> None:
        """Fill the trees of one shape; their networks do not look at tokens."""
        from hunch.kernels.gpu_best_first import ranked

        for level in self.levels_of_trees[: self.num_levels]:
            logits_RC = guesses.send((token_R, None)) if level.depth else next(guesses)
            ranked(
                state, step, logits_RC.float().contiguous(), self.method.context.sampling, level,
                self.ids_C,
            )  # fmt: skip

"""Drafters whose networks read the target's states, and compute KV of their own from them.

A position is *covered* when the network's KV of it is computed.

Shape letters: R rows of this step, X rows of the engine, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.options import GrowOptions, can_capture, device_shape
from hunch.drafting.token_chooser import Array
from hunch.drafting.tree_shape import TreeShape
from hunch.drafting.window import MAX_PASS, KvWindow, Parts, RowArrays, put
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import StepRows
from hunch.sampling.state import SamplingState
from hunch.types import Request

FUSED_PASS = 4096  # tokens covered in one pass on a GPU


class StateFollower:
    """Covers the positions that the target has computed; a subclass says how."""

    net: Any  # its network

    def __init__(
        self,
        name: str,
        shape: TreeShape,
        options: GrowOptions,
        context: DrafterContext,
        trained_len: int,
    ) -> None:
        self.name, self.shape, self.context = name, shape, context
        self.draft_temperature, self.is_adaptive = options.draft_temperature, options.adaptive
        self.max_len, self.trained_len = options.window, trained_len
        self.window = KvWindow(context, min(options.window or trained_len, trained_len))
        self.host = RowArrays()
        self.is_on_device = False  # the device drafts, except for rows whose KV has a hole
        self.covered_X = np.full(context.max_rows, -1)  # known length up to which all is covered

    def on_device(self) -> DeviceDrafter | None:
        """The device form, for drafts that a graph can hold; a subclass says which class."""
        context, net = self.context, self.net
        can_be_held = net.is_capturable and can_capture(context, self.draft_temperature)
        if context.kv is None or not can_be_held:
            return None
        self.is_on_device = True
        self.window.limit = context.max_len  # a step goes on past the trained context
        return self.device_form(
            name=self.name,
            net=net,
            layers=net.feature_layers,
            kv=context.kv,
            group=context.group,
            sampling=context.sampling,
            trained_len=self.trained_len if self.trained_len < context.max_len else None,
            max_len=self.max_len,
            is_adaptive=self.is_adaptive,
            **device_shape(
                self.shape,
                only_chains=context.only_chains,
                is_best_first=self.device_form.is_best_first,
            ),
        )

    @property
    def device_form(self) -> type[DeviceFollower]:
        raise NotImplementedError

    def cover(self, step: TargetStep, parts: Parts, source: list[Array]) -> None:
        """Cover positions given as (row, start, stop); `source`: packed places of their states."""
        raise NotImplementedError

    def covered(self, rows: Rows, parts: Parts) -> None:
        """These positions are covered now."""
        for row, _, stop in parts:
            self.window.mark_valid(rows, row, stop)
            self.covered_X[row] = stop + 1

    def picked(
        self, step: TargetStep, source: list[Array]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The target's last states and features of these packed positions."""
        index_T = joined(source)
        hidden_TD, features = step.hidden_TD, step.features
        count = len(hidden_TD if hidden_TD is not None else features[0])
        if len(index_T) != count or (index_T != np.arange(count)).any():
            index = self.put(index_T)
            hidden_TD = None if hidden_TD is None else hidden_TD[index]
            features = tuple(feature_TD[index] for feature_TD in features)
        return hidden_TD, features

    def observe(self, step: TargetStep) -> None:
        """Cover the positions the target just processed, as far as the window needs them."""
        rows = step.rows
        arrays = self.host.read(rows)
        self.window.add_new(rows, arrays.ids_R)
        is_caught_up = repeat(True) if step.is_caught_up_R is None else step.is_caught_up_R.tolist()
        columns = step.start_R.tolist(), step.stop_R.tolist(), step.offset_R.tolist()
        parts: Parts = []
        source: list[Array] = []  # the packed place of each position's state
        for row, start, stop, offset, may_draft in zip(
            arrays.ids, *columns, is_caught_up, strict=False
        ):
            known = int(arrays.known_X[row])
            stop = min(stop, known - 1)
            is_idle = (may_draft and arrays.max_draft_X[row] == 0) or _is_off(rows.request(row))
            if stop <= start or (is_idle and not self.is_on_device):
                continue  # it will not draft for the row: a hole is cheaper
            total = max(known, int(rows.prompt_X[row]))
            begin = self.window.resume_from(rows, row, start, stop, total)
            if begin >= stop:
                continue
            parts.append((row, begin, stop))
            # A window starts at a block's edge, where there may be no state: it takes the first.
            source.append(offset + np.maximum(np.arange(begin, stop) - start, 0))
        for first in _cuts(parts, FUSED_PASS if self.context.is_fused else MAX_PASS):
            self.cover(step, parts[first], source[first])

    def forget(self, rows: list[int]) -> None:
        self.window.drop(rows)
        self.covered_X[rows] = -1

    def put(self, array: Array) -> Tensor:
        return put(np.ascontiguousarray(array), self.context.device)


@dataclass(kw_only=True)
class DeviceFollower(DeviceDrafter):
    """The device form: each step covers the positions that it committed.

    Such a network needs the target's states, not only tokens. So the host has prompts covered, by
    a pass that reads their states on the device, and it drafts for rows with a hole in their KV.
    """

    net: Any
    layers: tuple[int, ...]  # of the target, whose states it reads
    kv: KVCache
    group: int  # of its KV, in computed_GX
    sampling: SamplingState
    _ids_C: Tensor | None = None  # the target's id of each column of logits

    def __post_init__(self) -> None:
        super().__post_init__()
        ids_C = self.net.ids_C
        self._ids_C = None if ids_C is None else ids_C.to(self.kv.k_LCMH.device)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.layers

    def runs_in(self, source: int) -> bool:
        return True

    def writes_kv(self, source: int) -> bool:
        return True

    @property
    def host_observes(self) -> bool:
        return True

    @property
    def needed_group(self) -> int:
        return self.group


def joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _is_off(request: Request | None) -> bool:
    return request is not None and request.params.speculation.mode == "off"


def _cuts(parts: Parts, most: int) -> list[slice]:
    """Slices of the parts, for passes of a bounded size; a part is not divided."""
    cuts: list[slice] = []
    first = size = 0
    for at, (_, start, stop) in enumerate(parts):
        if size and size + stop - start > most:
            cuts.append(slice(first, at))
            first, size = at, 0
        size += stop - start
    if parts:
        cuts.append(slice(first, len(parts)))
    return cuts


def on_path(
    features: tuple[Tensor, ...], step: StepRows, longest_path: int = 0
) -> tuple[tuple[Tensor, ...], int]:
    """The states of the nodes that a step accepted from its trees, in order, as for a chain.

    Also how many there are for each row.
    longest_path: most tokens in a row of what drafts, but for predictions; 0: all nodes.
    """
    num_rows, size = step.path_RK.shape
    most = size
    if longest_path and step.methods is None:
        most = min(most, longest_path + 1)
    node_RK = step.path_RK[:, : most - 1].clamp(-1, size - 2) + 1  # after the last known token
    place_RK = torch.cat((node_RK.new_zeros(num_rows, 1), node_RK), dim=1)
    first_R1 = size * torch.arange(num_rows, device=node_RK.device)[:, None]
    index_T = (first_R1 + place_RK).flatten()
    return tuple(feature_TD.index_select(0, index_T) for feature_TD in features), most

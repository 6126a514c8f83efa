"""Drafters that continue the target's own hidden states (EAGLE, MTP): one network step per level.

Shape letters: R rows of this step, X rows of the engine, T packed tokens, D width, C columns, W
tokens of a row in the target's pass.

At position t the network sees the target's state of t and token t + 1, so once the target has
decided L tokens the network can cover positions 0 .. L - 2, and what it says there is about token
L. Drafted nodes are fed with the network's own states; their KV is overwritten by the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, KVShape, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.choosing import Array, Level, TokenChooser
from hunch.drafting.costs import levels_after
from hunch.drafting.grow import grow
from hunch.drafting.last_state import can_capture
from hunch.drafting.native_chain import ChainDrafts, RowArrays
from hunch.drafting.options import GrowOptions
from hunch.drafting.watch import AcceptanceWatch
from hunch.drafting.window import MAX_PASS, KvWindow, covered, host
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.models.decoder import Hidden
from hunch.models.heads.step import MARGIN, StepNet
from hunch.sampling.state import SamplingState
from hunch.types import GroupInfo

if TYPE_CHECKING:
    from hunch.kernels.gpu_attention import Tiling  # these need Triton, which a CPU may not have
    from hunch.kernels.gpu_step import RowState, StepRows

FUSED_PASS = 4096  # tokens covered at once where launches are what takes time
PROMPTS = (1, 12, 16, 40, 64, 100, 256, 300, 512, 700)  # one of every kind kernels are compiled for


class FeatureDrafter:
    """Observes with the target's states, proposes with its own."""

    def __init__(
        self, name: str, net: StepNet, options: GrowOptions, context: DrafterContext
    ) -> None:
        self.name, self.net, self.context = name, net, context
        self.draft_temperature, self.is_adaptive = options.draft_temperature, options.adaptive
        self.shape = options.shape(context, default=net.num_tokens or 5)
        if self.shape.depth > MARGIN:
            raise ConfigError(f"{name}: drafts of depth {self.shape.depth}; at most {MARGIN}")
        limit = min(options.window or net.spec.max_len, net.spec.max_len)
        self.window = KvWindow(context, limit)
        # The network's state at each row's last covered position, ready to be drafted from.
        self.state_XD = torch.zeros(
            context.max_rows, net.state_width, dtype=net.kv_dtype, device=context.device
        )
        self.host = RowArrays()
        self.chains: ChainDrafts | None = None  # the short way for steps of one row
        if net.network is not None and ChainDrafts.fit(self.shape, context):
            temperature = self.draft_temperature
            self.chains = ChainDrafts(
                net.network, context, self.window, temperature=temperature, ids_C=net.ids_C
            )
        self.is_on_device = False  # drafts are made there, but for rows whose KV has a hole
        self.covered_X = np.full(context.max_rows, -1)  # known length that state belongs to
        self.guessed: dict[int, tuple[int, int]] = {}  # row -> (known length, nodes) of its draft
        self.watch = AcceptanceWatch(
            name,
            "check that the head was trained for this target and chat template, or train one "
            "(hunch train eagle3)",
        )
        self.needs = Needs(
            max_nodes=self.shape.num_nodes,
            feature_layers=net.feature_layers,
            hidden=net.needs_hidden,
            kv=KVShape(
                num_layers=net.num_kv_layers,
                num_kv_heads=net.spec.num_kv_heads,
                head_dim=net.spec.head_dim,
                dtype=net.kv_dtype,
            ),
            # Where steps are captured, a row with a hole stays with the host to its end.
            group=GroupInfo(name=name, is_ahead=True, is_whole=context.is_fused),
            weight_bytes=net.weight_bytes + net.matrix_bytes,
        )

    def on_device(self) -> DeviceDrafter | None:
        """Chains of networks that a graph can hold."""
        context, shape, net = self.context, self.shape, self.net
        if context.kv is None or not net.is_capturable:
            return None
        if not can_capture(context, shape, self.draft_temperature):
            return None
        self.is_on_device = True
        return DeviceFeature(
            name=self.name,
            net=net,
            kv=context.kv,
            group=context.group,
            sampling=context.sampling,
            num_levels=shape.depth,
            max_len=self.window.limit,
            watch=self.watch,
            is_adaptive=self.is_adaptive,
        )

    def observe(self, step: TargetStep) -> None:
        """Cover the positions the target just processed, as far as the window needs them."""
        rows = step.rows
        arrays = self.host.read(rows)
        self.window.add_new(rows, arrays.ids_R)
        known_X, prompt_X = arrays.known_X, host(rows.prompt_X)
        max_draft_X = arrays.max_draft_X
        is_caught_up_R = host(step.is_caught_up_R) if step.is_caught_up_R is not None else None
        columns = zip(
            arrays.ids,
            host(step.start_R).tolist(),
            host(step.known_R).tolist(),
            host(step.offset_R).tolist(),
            strict=True,
        )
        parts: list[tuple[int, int, int]] = []
        source: list[Array] = []  # the packed state behind each position
        for place, (row, start, stop, offset) in enumerate(columns):
            known = int(known_X[row])
            self._count(row, known)
            stop = min(stop, known - 1)
            is_caught_up = is_caught_up_R is None or bool(is_caught_up_R[place])
            is_idle = (is_caught_up and max_draft_X[row] == 0) or _is_off(rows, row)
            if stop <= start or (is_idle and not self.is_on_device):
                continue  # it will not be drafted from: leaving a hole is cheaper than covering it
            total = max(known, int(prompt_X[row]))
            begin = self.window.resume_from(rows, row, start, stop, total)
            if begin >= stop:
                continue
            parts.append((row, begin, stop))
            # A window that starts at a block's edge before `start` borrows the first state there.
            source.append(offset + np.maximum(np.arange(begin, stop) - start, 0))
        for first in _cuts(parts, FUSED_PASS if self.context.is_fused else MAX_PASS):
            self._cover(step, parts[first], source[first])

    def _count(self, row: int, known: int) -> None:
        before = self.guessed.pop(row, None)
        if before is not None:
            length, num_nodes = before
            self.watch.count(min(self.shape.depth, num_nodes), min(known - length - 1, num_nodes))

    def _cover(
        self, step: TargetStep, parts: list[tuple[int, int, int]], source: list[Array]
    ) -> None:
        rows, net = step.rows, self.net
        tokens_XL = self.host.read(rows).tokens_XL
        next_T = _joined([tokens_XL[row, a + 1 : b + 1] for row, a, b in parts])
        index_T = _joined(source)
        hidden_TD, features = step.hidden_TD, step.features
        count = len(hidden_TD if hidden_TD is not None else features[0])
        if len(index_T) != count or (index_T != np.arange(count)).any():
            index = self._put(index_T)
            hidden_TD = None if hidden_TD is None else hidden_TD[index]
            features = tuple(feature_TD[index] for feature_TD in features)
        attn = self.window.spans(rows, parts)
        token_T, fused_TD, kv = self._put(next_T), net.fuse(hidden_TD, features), self.window.kv
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
            row_P = [row for row, _, _ in parts]
            self.state_XD[torch.tensor(row_P)] = state_TD[torch.from_numpy(ends)]
        for row, _, stop in parts:
            self.window.mark_valid(rows, row, stop)
            self.covered_X[row] = stop + 1

    def propose(self, rows: Rows) -> Draft:
        arrays = self.host.read(rows)
        ids_R = arrays.ids_R
        if self.chains is not None and self.chains.takes(arrays.ids):
            return self._propose_one(self.chains, rows, arrays)
        known_R = arrays.known_X[ids_R]
        is_ready_R = self.covered_X[ids_R] == known_R
        limit_R = np.where(is_ready_R, arrays.max_draft_X[ids_R], 0)
        state_MD = self.state_XD[torch.from_numpy(ids_R)]
        draft = self._grow(rows, ids_R, state_MD, known_R, limit_R)
        counts = draft.num_nodes_R.tolist()
        for row, known, count in zip(ids_R.tolist(), known_R.tolist(), counts, strict=True):
            if count:
                self.guessed[row] = (known, count)
        return draft

    def _propose_one(self, chains: ChainDrafts, rows: Rows, arrays: RowArrays) -> Draft:
        row = arrays.ids[0]
        known, limit = int(arrays.known_X[row]), 0
        if self.covered_X[row] == known:
            limit = min(int(arrays.max_draft_X[row]), self.shape.depth)
        state_1D = self.state_XD[row : row + 1]
        draft, tokens = chains.draft(rows, arrays, known - 1, known, limit, state_1D)
        if tokens:
            self.guessed[row] = (known, len(tokens))
        return draft

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
                state_MD = state_MD[self._put(level.parent_M)]
            token_M = self._put(level.token_M)
            state_MD = net.step(token_M, state_MD, inputs(level), self.window.kv)
            return net.logits(state_MD)

        chooser = TokenChooser(self.context, rows, net.ids_C, self.draft_temperature)
        draft, _ = grow(net.logits(state_MD), feed, chooser, limit_R, self.shape)
        return draft

    def forget(self, rows: list[int]) -> None:
        self.window.drop(rows)
        self.covered_X[rows] = -1
        for row in rows:
            self.guessed.pop(row, None)

    def _put(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.context.device)


@dataclass(kw_only=True)
class DeviceFeature(DeviceDrafter):
    """Chains of `num_levels` tokens, drafted within the step.

    Every draft begins with the tokens that the step committed, beside the target's states of the
    same pass: so all that is known has the head's KV, and the state behind the last of them is
    drafted from. Then one pass of the head per level, each with its own state before it.

    Tokens alone tell the head nothing: prompts are covered by the host's drafter, which has the
    target's states, and a row with a hole in its KV stays with the host.
    """

    net: StepNet
    kv: KVCache
    group: int  # of its KV, in computed_GX
    sampling: SamplingState
    max_len: int  # the longest text it can follow
    _ids_C: Tensor | None = None  # the target's id of each column of logits
    _tilings: dict[tuple[int, int], Tiling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        ids_C, device = self.net.ids_C, self.kv.k_LCMH.device
        self._ids_C = None if ids_C is None else ids_C.to(device)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.net.feature_layers

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

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        from hunch.kernels.gpu_draft import committed_inputs
        from hunch.kernels.gpu_grow import grow_level

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
        from hunch.kernels.gpu_draft import new_inputs

        ids_T, attn = new_inputs(state, num_rows * width)
        key = num_rows, width
        if key not in self._tilings:  # made before a capture, as it comes from the host
            spans = tuple(Span(r * width, (r + 1) * width, r, 0, 1) for r in range(num_rows))
            self._tilings[key] = self.net.tiler(attn).tiling(spans, num_rows * width)
        attn.memo["tiling"] = self._tilings[key]
        return ids_T, attn


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _is_off(rows: Rows, row: int) -> bool:
    request = rows.requests[row] if rows.requests else None
    return request is not None and request.params.speculation.mode == "off"


def _cuts(parts: list[tuple[int, int, int]], most: int) -> list[slice]:
    """Slices of the parts that make passes of a bounded size; a part stays whole."""
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

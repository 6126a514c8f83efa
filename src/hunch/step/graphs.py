"""CUDA graphs: passes and whole steps captured once per size and replayed; nobody else knows them.

Where there is no GPU (Triton's interpreter, in tests) a graph simply runs its body.

Shape letters: R rows of the step, N nodes of a step's draft, K tokens one step can commit (N + 1),
T packed tokens, P tree depth, X rows of the engine, B blocks of a table, V vocabulary, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.drafting.base import DeviceDrafter
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.kernels.gpu_attention import Tiling, programs_for, tiles_of
from hunch.kernels.gpu_sampling import choose
from hunch.kernels.gpu_step import FIRST, RowState, StepRows, commit, compact, pack
from hunch.kernels.gpu_transfer import deliver
from hunch.models.decoder import Hidden
from hunch.sampling.state import FILTERED, SAMPLED, SamplingState
from hunch.step.batch import Batch
from hunch.step.collector import without_collector
from hunch.step.delivery import Delivery

MAX_PASS = 2048  # tokens of the largest captured pass; beyond, launching is not what takes time
SPARE_TILES = 16  # sequences whose last tile may be partly filled
TIMED = 5  # replays behind a graph's cost


class Graph:
    """A body with fixed buffers: run once to compile, captured, then replayed."""

    def __init__(self, body: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self._body, self._graph = body, None
        self.outputs = body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            # To collect a graph of an engine that is gone would end a capture.
            with without_collector(), torch.cuda.graph(self._graph, pool=pool):
                self.outputs = body()

    def replay(self) -> Any:
        if self._graph is None:
            self.outputs = self._body()
        else:
            self._graph.replay()
        return self.outputs


def seconds_of(graph: Graph, device: torch.device) -> float:
    """What replaying this takes on the device, as noise only ever adds; 0 where there is none."""
    if device.type != "cuda":
        return 0.0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]  # type: ignore[no-untyped-call]
    graph.replay()  # warms caches
    for event in events:
        event.record()
        if event is not events[-1]:
            graph.replay()
    events[-1].synchronize()
    return float(min(first.elapsed_time(last) for first, last in pairwise(events))) / 1e3


def new_pool(device: torch.device) -> Any:
    """Memory that all graphs share: one of them runs at a time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


# --- passes that the host packed ------------------------------------------------------------------


class PassGraphs:
    """The target's forward over a packed batch, padded to a few sizes."""

    def __init__(
        self,
        target: Any,
        kv: KVCache,
        layers: tuple[int, ...],
        size_XB: tuple[int, int],
        block_size: int,
        pool: Any,
    ) -> None:
        self.target, self.kv, self.layers, self.pool = target, kv, layers, pool
        self.block_size = block_size
        self.device: torch.device = target.device
        self.table_XB = torch.zeros(size_XB, dtype=torch.int64, device=self.device)
        self._passes: dict[tuple[int, int], tuple[Graph, Tensor, AttnInputs]] = {}

    def forward(self, batch: Batch) -> Any:
        """Hidden states of the batch's tokens; what stands after them is padding."""
        num_tokens, attn = len(batch.ids_T), batch.attn
        size = max(16, 1 << (num_tokens - 1).bit_length())
        if size > 256:
            size = -(-num_tokens // 256) * 256
        tiles_I2 = tiles_of(attn.spans, self._block(size)) if size <= MAX_PASS else None
        if tiles_I2 is None or len(tiles_I2) > self._max_tiles(size):
            batch = batch.to(self.device)
            return self.target.forward(batch.ids_T, batch.attn, self.kv, self.layers)
        tree_TP = attn.tree_TP
        depth = 0 if tree_TP is None else 1 << (tree_TP.shape[1] - 1).bit_length()
        self.prepare(size, depth)
        graph, packed_5T, held = self._passes[size, depth]
        columns = np.empty((5, size), dtype=np.int64)
        columns[:, num_tokens:] = [[0], [0], [-1], [0], [1]]
        for line, tensor in enumerate((batch.ids_T, attn.pos_T, attn.slot_T, attn.seq_T)):
            columns[line, :num_tokens] = tensor.numpy()
        columns[4, :num_tokens] = attn.base_T.numpy()
        packed_5T.copy_(torch.from_numpy(columns))
        rows, blocks = attn.table_SB.shape
        self.table_XB[:rows, :blocks].copy_(attn.table_SB)
        tiles = held.memo["tiling"].tiles_I2
        tiles[: len(tiles_I2)].copy_(tiles_I2)
        tiles[len(tiles_I2) :].zero_()
        if tree_TP is not None and held.tree_TP is not None:
            held.tree_TP[:num_tokens, : tree_TP.shape[1]].copy_(tree_TP)
        return graph.replay()

    def prepare(self, size: int, depth: int = 0) -> None:
        """Capture a pass of this size, unless it is there."""
        if (size, depth) not in self._passes:
            self._passes[size, depth] = self._capture(size, depth)

    def _block(self, size: int) -> int:
        """Tokens of an attention tile."""
        group = self.target.spec.num_heads // self.target.spec.num_kv_heads
        return 4 if size <= 64 else max(4, 64 // (1 << (group - 1).bit_length()))

    def _max_tiles(self, size: int) -> int:
        return min(size, -(-size // self._block(size)) + SPARE_TILES)

    def _capture(self, size: int, depth: int) -> tuple[Graph, Tensor, AttnInputs]:
        packed_5T = torch.zeros(5, size, dtype=torch.int64, device=self.device)
        packed_5T[2] = -1
        tree_TP = packed_5T.new_zeros(size, depth) if depth else None
        num_tiles, target = self._max_tiles(size), self.target
        is_shared = size <= target.workspace.max_tokens
        programs = programs_for(num_tiles, target.spec.num_kv_heads, target.spec.max_len)
        attn = AttnInputs(
            pos_T=packed_5T[1],
            slot_T=packed_5T[2],
            seq_T=packed_5T[3],
            table_SB=self.table_XB,
            base_T=packed_5T[4],
            tree_TP=tree_TP,
            block_size=self.block_size,
        )
        attn.memo["tiling"] = Tiling(
            torch.zeros(num_tiles, 2, dtype=torch.int32, device=self.device),
            self._block(size),
            programs if is_shared else 1,
            target.workspace,
        )

        def body() -> Any:
            return target.forward(packed_5T[0], attn, self.kv, self.layers)

        return Graph(body, self.device, self.pool), packed_5T, attn


# --- steps that need no host ----------------------------------------------------------------------


@dataclass(slots=True)
class StepGraph:
    """A step of so many rows and nodes: the target's pass, verify, commit, propose, deliver."""

    graph: Graph
    num_rows: int
    num_nodes: int
    source: int  # in which it drafts
    seconds: float  # on the device
    draft_seconds: float  # of these, for drafting

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs:
    """Whole steps by (rows, nodes, kind of sampling, source of drafting)."""

    def __init__(
        self,
        target: Any,
        kv: KVCache,
        sampling: SamplingState,
        drafter: DeviceDrafter | None,
        state: RowState,
        inputs_3R: Tensor,
        block_size: int,
        drafts_at: Callable[[int], bool],  # whether steps of so many rows draft
        pool: Any,
    ) -> None:
        self.target, self.kv, self.sampling, self.drafter = target, kv, sampling, drafter
        self.drafts_at = drafts_at
        self.state, self.inputs_3R = state, inputs_3R
        self.block_size, self.pool = block_size, pool
        self.device: torch.device = target.device
        self.num_guesses = 0 if drafter is None else drafter.num_nodes
        self.layers = () if drafter is None else drafter.feature_layers
        # What the host reads after a step: those of all sizes share.
        room = inputs_3R.shape[1] * (FIRST + 1 + 2 * self.num_guesses)
        self.results = torch.zeros(room, dtype=torch.int64, device=self.device)
        self.delivery = Delivery(room, self.device)
        self._buffers: dict[tuple[int, int, int], tuple[Tensor, StepRows, AttnInputs]] = {}
        self._steps: dict[tuple[int, int, int, int], StepGraph] = {}

    def step(self, num_rows: int, num_nodes: int, asks: int, source: int = 0) -> StepGraph:
        """The step for up to so many rows, captured now if it is the first of its size."""
        key = bucket(num_rows), num_nodes, kind_of(asks), source
        if key not in self._steps:
            waiting_3R = self.inputs_3R.clone()
            self._steps[key] = self._capture(*key)
            self.inputs_3R.copy_(waiting_3R)
        return self._steps[key]

    def num_columns(self, num_nodes: int) -> int:
        """Of the result of a step with so many nodes."""
        return FIRST + num_nodes + 1 + self.num_guesses

    def _capture(self, num_rows: int, num_nodes: int, kind: int, source: int) -> StepGraph:
        self.inputs_3R.fill_(-1)  # nobody there: running a body to compile it changes nothing
        drafter, target = self.drafter, self.target
        if drafter is None or not (self.drafts_at(num_rows) and drafter.works(source)):
            drafter = None
        depth = drafter.depth(source) if drafter is not None and num_nodes else 0
        size = num_rows, num_nodes, depth
        if size not in self._buffers:
            self._buffers[size] = self._new_buffers(*size)
        ids_T, rows, attn = self._buffers[size]

        def draft(hidden: Hidden) -> None:
            if drafter is not None:
                drafter.draft(self.state, rows, hidden, kind, source)

        def body() -> None:
            pack(self.state, rows, num_nodes, ids_T, attn)
            hidden = target.forward(ids_T, attn, self.kv, self.layers)
            choice_M = self._choose(target.logits(hidden.last_TD), attn, kind)
            commit(self.state, rows, choice_M, num_nodes)
            if attn.tree_TP is not None:
                compact(self.kv, rows, attn.slot_T)
            draft(hidden)
            deliver(self.state, rows, self.delivery.slots_QW)

        graph = Graph(body, self.device, self.pool)
        seconds, draft_seconds = seconds_of(graph, self.device), 0.0
        if drafter is not None:
            alone = Graph(partial(draft, self._states(len(ids_T))), self.device, self.pool)
            draft_seconds = seconds_of(alone, self.device)
        return StepGraph(graph, num_rows, num_nodes, source, seconds, draft_seconds)

    def _states(self, num_tokens: int) -> Hidden:
        """Any will do to time what is made of them."""
        size = num_tokens, self.target.spec.width
        state_TD = torch.zeros(size, dtype=self.target.dtype, device=self.device)
        return Hidden(state_TD, (state_TD,) * len(self.layers))

    def _choose(self, logits_MV: Tensor, attn: AttnInputs, kind: int) -> Tensor:
        state = self.sampling
        return choose(
            logits_MV,
            attn.seq_T,
            attn.pos_T + 1 if kind else attn.pos_T,
            state.temperature_X,
            state.top_k_X,
            state.top_p_X,
            state.log_min_p_X,
            state.seed_X,
            state.sample_X,
            is_sampled=kind > 0,
            is_filtered=kind > 1,
        )

    def _new_buffers(
        self, num_rows: int, num_nodes: int, depth: int
    ) -> tuple[Tensor, StepRows, AttnInputs]:
        """A step's packed tokens, its rows and what attention needs."""
        num_k, num_columns = num_nodes + 1, self.num_columns(num_nodes)
        packed_5T = torch.zeros(5, num_rows * num_k, dtype=torch.int64, device=self.device)
        rows = StepRows(
            ids_R=self.inputs_3R[0, :num_rows],
            allowed_R=self.inputs_3R[1, :num_rows],
            room_R=self.inputs_3R[2, :num_rows],
            count_R=packed_5T.new_zeros(num_rows),
            path_RK=packed_5T.new_zeros(num_rows, num_k),
            result_RC=self.results[: num_rows * num_columns].view(num_rows, num_columns),
        )
        spans = tuple(Span(r * num_k, (r + 1) * num_k, r, 0, 1) for r in range(num_rows))
        attn = AttnInputs(
            pos_T=packed_5T[1],
            slot_T=packed_5T[2],
            seq_T=packed_5T[3],
            table_SB=self.state.table_XB,
            base_T=packed_5T[4],
            tree_TP=packed_5T.new_zeros(num_rows * num_k, depth) if depth else None,
            block_size=self.block_size,
        )
        attn.memo["tiling"] = self.target.tiling(spans, num_rows * num_k)
        return packed_5T[0], rows, attn


def bucket(num_rows: int) -> int:
    """The next size a step is captured for: few, as each takes a moment to capture."""
    return 1 << (num_rows - 1).bit_length()


def kind_of(asks: int) -> int:
    """Greedy, sampled, or sampled with filters."""
    return 0 if not asks & SAMPLED else 2 if asks & FILTERED else 1

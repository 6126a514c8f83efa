"""The device's kernels in plain Python, and a target that runs them on a CPU: no Triton, no GPU.

They are the references of `kernels.gpu_step`, `gpu_lookup`, `gpu_draft` and `gpu_grow`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hunch.drafting.ngram import NgramText
from hunch.kernels.attention import AttnInputs, KVCache, Span, attention_ref
from hunch.kernels.gpu_attention import Tiling, Workspace
from hunch.kernels.gpu_lookup import BY_TABLE, NUM_ASKED, DevicePhrases
from hunch.kernels.gpu_step import (
    CHECKED,
    DRAFTED,
    FIRST,
    KNOWN,
    MATCHED,
    REASON,
    TOKENS,
    RowState,
    StepRows,
)
from hunch.kernels.kv_store import kv_store_ref
from hunch.kernels.lookup import MAX_MATCH
from hunch.kernels.process import count_committed_ref, draft_paths_ref, process_ref
from hunch.kernels.rope import rotation
from hunch.layers.attention import Heads, split_heads
from hunch.models.backends import TRITON
from hunch.models.decoder import Decoder, Hidden
from hunch.sampling.logprobs import best_dense, logprobs_at
from hunch.sampling.state import SamplingState


def slot_of(state: RowState, row: int, pos: int) -> int:
    size = state.block_size
    return int(state.table_XB[row, pos // size]) * size + pos % size


def pack(state: RowState, step: StepRows, num_nodes: int, ids_T: Tensor, attn: AttnInputs) -> None:
    state.clock_2[0] += int(step.ids_R[0] >= 0)
    for r, row in enumerate(step.ids_R.tolist()):
        first = r * (num_nodes + 1)
        here = slice(first, first + num_nodes + 1)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        if row < 0 or state.is_done_X[row]:
            step.count_R[r] = -1
            continue
        known = int(state.known_X[row])
        count = min(int(state.count_X[row]), int(step.allowed_R[r]), num_nodes)
        step.count_R[r] = count
        for place in range(count + 1):
            at, node = first + place, place - 1
            token = state.draft_XG[row, node] if place else state.tokens_XL[row, known - 1]
            ids_T[at] = token
            path = path_of(state, row, node)
            attn.pos_T[at] = known - 1 + len(path)
            attn.slot_T[at] = slot_of(state, row, known - 1 + place)
            attn.base_T[at] = int(attn.pos_T[at]) + 1
            if attn.tree_TP is not None:
                attn.base_T[at] = known
                for depth, above in enumerate(path):
                    attn.tree_TP[at, depth] = slot_of(state, row, known + above)


def path_of(state: RowState, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(state.parents_XG[row, node])
    return path


def commit(state: RowState, step: StepRows, choice_M: Tensor, num_nodes: int) -> None:
    for r, row in enumerate(step.ids_R.tolist()):
        line, checked = step.result_RC[r], int(step.count_R[r])
        line[: FIRST + num_nodes + 1] = 0
        if checked < 0:
            continue
        known, end, node, count = int(state.known_X[row]), int(state.end_X[row]), -1, 0
        stops = set(state.stop_XS[row].tolist()) - {-1}
        while True:
            token = int(choice_M[r * (num_nodes + 1) + 1 + node])
            state.tokens_XL[row, known + count] = token
            line[FIRST + count] = token
            found = -1
            for child in range(checked):
                if int(state.parents_XG[row, child]) == node:
                    found = child if int(state.draft_XG[row, child]) == token else found
            step.path_RK[r, count] = found
            count += 1
            reason = 1 if token in stops else 2 if known + count >= end else 0
            node = found
            if found < 0 or reason:
                break
        line[TOKENS], line[REASON], line[CHECKED], line[KNOWN] = (
            count,
            reason,
            checked,
            known + count,
        )
        state.known_X[row] = known + count
        state.is_done_X[row] = int(reason > 0)
        state.count_X[row] = 0


def compact(kv: KVCache, step: StepRows, slot_T: Tensor) -> None:
    num_k = step.path_RK.shape[1]
    for r in range(len(step.ids_R)):
        for i in range(int(step.result_RC[r, TOKENS]) - 1):
            node = int(step.path_RK[r, i])
            source, target = slot_T[r * num_k + 1 + node], slot_T[r * num_k + 1 + i]
            kv.k_LCMH[:, target] = kv.k_LCMH[:, source]
            kv.v_LCMH[:, target] = kv.v_LCMH[:, source]


def lookup(
    state: RowState,
    step: StepRows,
    num_nodes: int,
    min_match: int,
    max_match: int,
    sure: int = 0,
    phrases: DevicePhrases | None = None,
) -> None:
    for r, row in enumerate(step.ids_R.tolist()):
        if int(step.count_R[r]) < 0 or state.is_done_X[row]:
            continue
        known = int(state.known_X[row])
        text = NgramText(min_match, max_match)
        text.extend(state.tokens_XL[row, :known].tolist())
        matched, place = text.find()
        guesses = list(text.tokens)
        for i in range(num_nodes if matched else 0):
            guesses.append(guesses[place + i])
        guesses = guesses[known:]
        if phrases is not None:
            guesses, matched = told(phrases, text.tokens, guesses, matched, num_nodes)
        room = min(int(step.room_R[r]), max(int(state.end_X[row]) - known - 1, 0))
        count = min(len(guesses), room)
        step.result_RC[r, MATCHED] = matched
        first = step.guesses_at(num_nodes)
        step.result_RC[r, first : first + num_nodes] = -1
        for node, token in enumerate(guesses):
            step.result_RC[r, first + node] = token
        if matched < sure:
            continue
        for node, token in enumerate(guesses):
            state.draft_XG[row, node], state.parents_XG[row, node] = token, node - 1
        state.count_X[row], step.result_RC[r, DRAFTED] = count, count


def told(
    phrases: DevicePhrases, text: list[int], own: list[int], matched: int, num_nodes: int
) -> tuple[list[int], int]:
    """The own text's guesses until the table knows better, then the table's; what to call it."""
    needed, guesses = phrases.needed.tolist(), list(own)
    length = matched
    for i in range(min(num_nodes, NUM_ASKED)):
        entry = phrases.table.find([*text, *guesses[:i]])
        if entry is not None and entry[1] >= needed[length] and entry[0] not in guesses[i : i + 1]:
            guesses[i:] = [entry[0]]
            length, matched = 0, BY_TABLE if i == 0 else matched
        elif length:
            length = min(length + 1, MAX_MATCH)
        else:
            break
    return guesses, matched


def update(state: RowState, inputs_3R: Tensor, buffer_W: Tensor, num_changes: int) -> None:
    num_inputs, buffer_W = inputs_3R.numel(), buffer_W.to(inputs_3R.device)
    inputs_3R.copy_(buffer_W[:num_inputs].view(3, -1))
    places, values = buffer_W[num_inputs:].view(2, num_changes)
    state.flat[places] = values


def deliver(state: RowState, step: StepRows, slots_QW: Tensor) -> None:
    if step.ids_R[0] >= 0:
        line_W = slots_QW[int(state.clock_2[0]) % len(slots_QW)]
        line_W[-1] = 0
        line_W[: step.result_RC.numel()] = step.result_RC.flatten()


def committed_inputs(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, last_R: Tensor
) -> None:
    width = len(ids_T) // len(step.ids_R)
    for r, row in enumerate(step.ids_R.tolist()):
        here = slice(r * width, (r + 1) * width)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        count = int(step.result_RC[r, TOKENS]) if int(step.count_R[r]) >= 0 else 0
        last_R[r] = r * width + max(count - 1, 0)
        for place in range(count):
            at, where = r * width + place, int(state.known_X[row]) - count + place
            ids_T[at] = state.tokens_XL[row, where]
            attn.pos_T[at], attn.base_T[at] = where - 1, where
            attn.slot_T[at] = slot_of(state, row, where - 1)


def level_inputs(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, *, first_node: int = 0,
    depth: int = 0, is_ahead: bool = False,
) -> None:  # fmt: skip
    width = len(ids_T) // len(step.ids_R)
    for r, row in enumerate(step.ids_R.tolist()):
        here = slice(r * width, (r + 1) * width)
        ids_T[here], attn.pos_T[here], attn.base_T[here] = 0, 0, 1
        attn.slot_T[here], attn.seq_T[here] = -1, max(row, 0)
        if int(step.count_R[r]) < 0 or (depth and state.is_done_X[row]):
            continue
        known = int(state.known_X[row])
        room = min(int(step.room_R[r]), int(state.end_X[row]) - known)
        for place in range(width):
            at, node = r * width + place, first_node + place
            where = known - is_ahead + node if depth else known - width + place
            if where < 0 or (depth and node >= room):
                continue
            ids_T[at] = state.draft_XG[row, node] if depth else state.tokens_XL[row, where]
            attn.pos_T[at] = known - is_ahead + depth - 1 if depth else where
            attn.base_T[at] = int(attn.pos_T[at]) + 1
            attn.slot_T[at] = slot_of(state, row, where)
            if depth and attn.tree_TP is not None:
                attn.base_T[at] = known - is_ahead
                for i, above in enumerate(path_of(state, row, node)):
                    attn.tree_TP[at, i] = slot_of(state, row, known - is_ahead + above)


def add_nodes(
    state: RowState,
    step: StepRows,
    token_T: Tensor,
    parent_T: Tensor,
    first_node: int,
    num_nodes: int,
) -> None:
    width = len(token_T) // len(step.ids_R)
    for r, row in enumerate(step.ids_R.tolist()):
        if int(step.count_R[r]) < 0 or state.is_done_X[row]:
            continue
        here = slice(r * width, (r + 1) * width)
        nodes = slice(first_node, first_node + width)
        state.draft_XG[row, nodes], state.parents_XG[row, nodes] = token_T[here], parent_T[here]
        left = max(int(state.end_X[row]) - int(state.known_X[row]) - 1, 0)
        count = min(int(step.room_R[r]), left, first_node + width)
        state.count_X[row] = count
        step.result_RC[r, MATCHED], step.result_RC[r, DRAFTED] = 1, count
        first_guess = step.guesses_at(num_nodes)
        guesses = step.result_RC[r, first_guess : first_guess + num_nodes]
        guesses[nodes] = token_T[here]


def grow_level(
    state: RowState, step: StepRows, logits_TC: Tensor, chances_RW: Tensor, asked: Any, *,
    depth: int, num_nodes: int, kind: int, row_T: Tensor, ids_C: Tensor | None,
    following: tuple[Tensor, AttnInputs] | None, is_ahead: bool = False,
) -> None:  # fmt: skip
    num_rows, width = chances_RW.shape
    first = depth * width
    pos_T = state.known_X[row_T] + depth
    if step.has_rules:
        path_TP = row_T.new_full((len(row_T), depth), -1)
        count_R = row_T.new_full((num_rows,), depth * width)
        first_node = (depth - 1) * width if depth else -1
        nodes = step.ids_R, count_R, state.draft_XG, state.parents_XG
        draft_paths_ref(*nodes, first_node, path_TP)
        tables = asked.processors.tables
        logits_TC = process_ref(logits_TC, row_T, pos_T, path_TP, tables, ids_C=ids_C)
    score_TC = asked.scores(logits_TC, row_T, pos_T, ids_C) if kind else logits_TC
    column_TW = score_TC.sort(dim=1, descending=True, stable=True).indices[:, :width]
    token_TW = column_TW if ids_C is None else ids_C[column_TW]
    value_RNW = score_TC.log_softmax(-1).gather(1, column_TW).view(num_rows, -1, width)
    if depth:
        value_RNW = value_RNW + chances_RW[:, :, None]
    # Of all children of the level, the likeliest paths go on; that of first children always does.
    order = value_RNW.flatten(1).clone()
    order[:, 0] = torch.inf
    best_RW = order.sort(dim=1, descending=True, stable=True).indices[:, :width]
    chances_RW.copy_(value_RNW.flatten(1).gather(1, best_RW))
    token_RW = token_TW.reshape(num_rows, -1).gather(1, best_RW)
    parent_RW = first - width + best_RW // width if depth else torch.full_like(best_RW, -1)
    add_nodes(state, step, token_RW.flatten(), parent_RW.flatten(), first, num_nodes)
    if following is not None:
        where = {"first_node": first, "depth": depth + 1, "is_ahead": is_ahead}
        level_inputs(state, step, *following, **where)


class Chooser:
    """`gpu_sampling.choose` by the rules of the host."""

    def __init__(self) -> None:
        self.state: SamplingState | None = None

    def __call__(
        self, logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, *columns: Any, **how: Any
    ) -> Tensor:
        if not how["is_sampled"]:
            best_M = torch.from_numpy(logits_MV.numpy().argmax(1))
            return best_M if how.get("ids_V") is None else how["ids_V"][best_M]
        assert self.state is not None
        return self.state.draw(logits_MV, row_M, pos_M, how.get("ids_V"))


class PlainTiled:
    """`layers.tiled.Tiled` by torch, as its specification has it."""

    def __init__(self, attn: AttnInputs, kv: KVCache, table_LH: Tensor, tiling: Tiling) -> None:
        self.attn, self.kv, self.table_LH = attn, kv, table_LH

    def __call__(self, qkv_TAH: Tensor, heads: Heads, layer: int) -> Tensor:
        attn, k_CMH, v_CMH = self.attn, self.kv.k_LCMH[layer], self.kv.v_LCMH[layer]
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, rotation(self.table_LH, attn.pos_T))
        kv_store_ref(k_TMH, v_TMH, k_CMH, v_CMH, attn.slot_T)
        return attention_ref(q_TNH, k_CMH, v_CMH, attn, heads.scale, heads.window)


class PlainTarget:
    """A decoder of torch's kernels with what a runner of graphs asks of its target."""

    backend, is_quantised = TRITON, False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.spec = decoder, decoder.spec
        self.device, self.dtype, self.kv_dtype = decoder.device, decoder.dtype, decoder.kv_dtype
        self.kv_shape, self.new_kv = decoder.kv_shape, decoder.new_kv
        self.embed, self.weight_bytes = decoder.embed, decoder.weight_bytes
        self.tables, self.output_rows = decoder.tables, decoder.output_rows
        nothing = torch.empty(0)
        self.workspace = Workspace(nothing, nothing, nothing, 64, 1)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Row by row, as torch's products depend on the number of rows."""
        rows = [self.decoder.logits(hidden_MD[m : m + 1]) for m in range(len(hidden_MD))]
        return torch.cat(rows) if rows else self.decoder.logits(hidden_MD)

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        return Tiling(None)

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, layers: tuple[int, ...] = ()
    ) -> Hidden:
        """Token by token: each reads its own keys, so padding and neighbours do not matter."""
        live = (attn.slot_T >= 0).nonzero()[:, 0].tolist()
        hidden_TD = torch.zeros(len(ids_T), self.spec.width)
        features = tuple(torch.zeros(len(ids_T), self.spec.width) for _ in layers)
        # Ancestors stand before their descendants, so their keys are there in time.
        for t in live:
            here = slice(t, t + 1)
            is_tree = attn.tree_TP is not None and bool(attn.base_T[t] <= attn.pos_T[t])
            one = AttnInputs(
                pos_T=attn.pos_T[here],
                slot_T=attn.slot_T[here],
                seq_T=attn.seq_T[here],
                table_SB=attn.table_SB,
                base_T=attn.base_T[here],
                tree_TP=attn.tree_TP[here] if is_tree and attn.tree_TP is not None else None,
                block_size=attn.block_size,
                spans=(
                    Span(0, 1, int(attn.seq_T[t]), int(attn.pos_T[t]), int(not is_tree), is_tree),
                ),
            )
            out = self.decoder.forward(ids_T[here], one, kv, layers)
            hidden_TD[t] = out.last_TD[0]
            for feature_TD, found_TD in zip(features, out.features, strict=True):
                feature_TD[t] = found_TD[0]
        return Hidden(hidden_TD, features)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """From here on, a CPU's LLM runs captured steps with these kernels."""
    import hunch.kernels.gpu_draft
    import hunch.kernels.gpu_grow
    import hunch.kernels.gpu_lookup
    import hunch.layers.tiled
    import hunch.llm
    import hunch.models.cuda
    import hunch.step.runner
    import hunch.step.step_extras
    import hunch.step.step_graphs
    import hunch.step.upload
    from hunch.models.load import load_decoder
    from hunch.models.weights import open_weights

    chooser = Chooser()
    made = hunch.step.runner.Runner.__init__

    def remember(runner: Any, **parts: Any) -> None:
        chooser.state = parts["sampling"]
        made(runner, **parts)

    def load(config: Any, files: Any, device: torch.device) -> PlainTarget:
        return PlainTarget(load_decoder(open_weights(files), dtype="float32", device=device))

    patch.setattr(hunch.step.runner.Runner, "__init__", remember)
    patch.setattr(hunch.llm, "_load_target", load)
    patch.setattr(hunch.models.cuda, "CudaDecoder", PlainTarget)
    for name, kernel in (
        ("pack", pack),
        ("commit", commit),
        ("compact", compact),
        ("deliver", deliver),
    ):
        patch.setattr(hunch.step.step_graphs, name, kernel)
    patch.setattr(hunch.step.step_graphs, "choose", chooser)
    patch.setattr(hunch.step.step_graphs, "process", process)
    patch.setattr(hunch.step.step_graphs, "count_committed", count_committed_ref)
    patch.setattr(hunch.step.step_extras, "scores", scores)
    patch.setattr(hunch.step.step_extras, "draft_paths", draft_paths_ref)
    patch.setattr(hunch.step.upload, "update", update)
    patch.setattr(hunch.kernels.gpu_lookup, "lookup", lookup)
    patch.setattr(hunch.kernels.gpu_draft, "known_inputs", level_inputs)
    patch.setattr(hunch.kernels.gpu_draft, "committed_inputs", committed_inputs)
    patch.setattr(hunch.kernels.gpu_grow, "grow_level", grow_level)
    patch.setattr(hunch.layers.tiled, "Tiled", PlainTiled)


def scores(
    logits_MV: Tensor, at_S: Tensor, token_S: Tensor, num_best: int, ids_SC: Tensor,
    logprob_SC: Tensor, rank_S: Tensor,
) -> None:  # fmt: skip
    for s, (at, token) in enumerate(zip(at_S.tolist(), token_S.tolist(), strict=True)):
        if at >= 0:
            (entries,) = logprobs_at(logits_MV[at : at + 1], [token], 0)
            best = best_dense(logits_MV[at : at + 1].float(), num_best)[0] if num_best else []
            ids_SC[s] = torch.tensor([token, *map(int, best)])
            rank_S[s] = entries[token].rank
            for place, one in enumerate(ids_SC[s].tolist()):
                (entries,) = logprobs_at(logits_MV[at : at + 1], [one], 0)
                logprob_SC[s, place] = entries[one].logprob


def process(
    logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor, tables: Any, *masks: Any
) -> Tensor:
    return process_ref(logits_MV, row_M, pos_M, path_MP, tables, *masks)


def lead_by_host(runner: Any) -> None:
    """From here on, the host leads every step of this runner."""
    runner.captured = runner.host.elsewhere = None

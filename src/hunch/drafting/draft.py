"""Draft model: a smaller model of the same vocabulary guesses, token by token or as a tree.

Shape letters: R rows of this step, T packed tokens, D width, V vocabulary, N nodes, P path.
Papers: arXiv 2211.17192, 2302.01318.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft, KVShape, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext
from hunch.drafting.grow import grow
from hunch.drafting.judge import Array, Judge, Level
from hunch.drafting.native_chain import ChainDrafts, HostRows
from hunch.drafting.options import GrowOptions, need_path
from hunch.drafting.reads import MAX_SHARE, byte_share
from hunch.drafting.watch import AcceptanceWatch, comes_with_hunch
from hunch.drafting.window import MAX_PASS, KvWindow, host
from hunch.errors import UnsupportedModelError
from hunch.models.heads.cut import is_cut, load_cut
from hunch.models.heads.vocab import Columns, compare, read_vocab
from hunch.models.load import load_decoder
from hunch.models.native import DTYPES as NATIVE_DTYPES
from hunch.models.native import load_native
from hunch.models.weights import Weights, open_weights
from hunch.types import GroupInfo

log = logging.getLogger("hunch")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions(GrowOptions):
    """draft:PATH[:KEY=VALUE]..."""

    cross_vocab: bool = False  # draft over the tokens two vocabularies have in common
    dtype: str = "auto"


@dataclass(slots=True)
class Pending:
    """The draft a row waits with: node i says tokens[i] and was processed as numbers[i]."""

    base: int  # position of the first node
    tokens: list[int]
    parents: list[int]
    numbers: list[int]


class DraftModelDrafter:
    """Catches up with the row's tokens in one pass, then drafts on from its own KV."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        path = need_path("draft", path)
        self.options = read_options(DraftOptions, options, "draft")
        self.context = context
        weights = open_weights(path)
        self.shape = self.options.shape(context)
        self.model, self.columns = _load(weights, path, self.options, context)
        if not comes_with_hunch(path):
            _warn_of_cost(byte_share(weights, context.target))
        limit = min(self.options.window or self.model.spec.max_len, self.model.spec.max_len)
        self.window = KvWindow(context, max(limit - self.shape.depth, 1))
        self.watch = AcceptanceWatch(
            f"draft:{path}",
            "choose a draft of the same family, or train one for this target (hunch train draft)",
        )
        self.watch.spare(path)
        self.pending: dict[int, Pending] = {}
        self.host = HostRows()
        self.chains = self._native_chains()
        num_layers, num_kv_heads, head_dim = self.model.kv_shape()
        self.needs = Needs(
            max_nodes=self.shape.num_nodes,
            kv=KVShape(
                num_layers=num_layers,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=self.model.kv_dtype,
            ),
            group=GroupInfo(name="draft"),
            weight_bytes=self.model.weight_bytes,
        )

    def _native_chains(self) -> ChainDrafts | None:
        """The short way for steps of one row, where the kernels can draft by themselves."""
        network, columns = getattr(self.model, "network", None), self.columns
        is_mapped = columns.pick_C is not None or columns.draft_id_V is not None
        if network is None or is_mapped or not ChainDrafts.fit(self.shape, self.context):
            return None
        return ChainDrafts(
            network,
            self.context,
            self.window,
            temperature=self.options.draft_temperature,
            ids_C=columns.ids_C,
            num_columns=columns.num_columns,
        )

    def on_device(self) -> DeviceDrafter | None:
        """Chains, and trees as wide as they have room for at every level."""
        context, shape, columns = self.context, self.shape, self.columns
        is_mapped = columns.pick_C is not None or columns.draft_id_V is not None
        if is_mapped or shape.is_fixed or shape.min_confidence > 0 or context.kv is None:
            return None
        if context.wants_q or self.options.draft_temperature is not None:
            return None
        if getattr(self.model, "kernels", "") != "triton":
            return None
        from hunch.drafting.device_draft import DeviceDraft

        return DeviceDraft(
            name="draft",
            model=self.model,
            kv=context.kv,
            group=context.group,
            sampling=context.sampling,
            ids_C=columns.ids_C,
            num_levels=shape.depth,
            width=max(shape.num_nodes // shape.depth, 1),
            max_len=self.window.limit,
            watch=self.watch,
            is_adaptive=self.options.adaptive,
        )

    def observe(self, step: TargetStep) -> None:
        """Keep the KV of drafted nodes whose tokens the target chose too."""
        if not self.pending:
            return
        arrays = self.host.read(step.rows)
        for row in arrays.ids:
            pending = self.pending.pop(row, None)
            if pending is not None:
                known = int(arrays.known_X[row])
                decided = arrays.tokens_XL[row, pending.base : known].tolist()
                self._settle(step.rows, row, pending, decided)

    def _settle(self, rows: Rows, row: int, pending: Pending, decided: list[int]) -> None:
        path: list[int] = []
        node, num_accepted = -1, 0
        for token in decided[:-1]:  # the last one is the target's own: it is always processed anew
            node = _child(pending, node, token)
            if node < 0:
                break
            num_accepted += 1
            if pending.numbers[node] < 0:
                break
            path.append(pending.numbers[node])
        self.watch.count(min(self.shape.depth, len(pending.tokens)), num_accepted)
        if path != list(range(len(path))):
            row_P = np.full(len(path), row)
            self.window.move(
                self.window.slots(rows, row_P, pending.base + np.array(path)),
                self.window.slots(rows, row_P, pending.base + np.arange(len(path))),
            )
        self.window.settle(rows, row, pending.base + len(path))

    def propose(self, rows: Rows) -> Draft:
        arrays = self.host.read(rows)
        ids_R = arrays.ids_R
        self.window.meet(rows, ids_R)
        if self.chains is not None and len(ids_R) == 1:
            draft = self._propose_one(self.chains, rows, arrays)
            if draft is not None:
                return draft
        hidden_RD = self._catch_up(rows, ids_R)
        known_R = host(rows.known_X)[ids_R]
        limit_R = host(rows.max_draft_X)[ids_R]
        judge = Judge(self.context, rows, self.columns.ids_C, self.options.draft_temperature)
        inputs = self.window.levels(rows, ids_R, known_R, self.shape)

        def feed(level: Level) -> Tensor:
            token_M = self.columns.to_draft(self.window.put(level.token_M))
            hidden = self.model.forward(token_M, inputs(level), self.window.kv)
            return self.columns.fit(self.model.logits(hidden.last_TD))

        logits_RV = self.columns.fit(self.model.logits(hidden_RD))
        draft, number_RN = grow(logits_RV, feed, judge, limit_R, self.shape)
        self._remember(ids_R, known_R, draft, number_RN)
        return draft

    def _propose_one(self, chains: ChainDrafts, rows: Rows, arrays: HostRows) -> Draft | None:
        """All of it in one call; None where there is too much to catch up with."""
        row = arrays.ids[0]
        known = int(arrays.known_X[row])
        start = min(self.window.resume(rows, row, known), known - 1)
        if known - start > MAX_PASS:
            return None
        limit = min(int(arrays.max_draft_X[row]), self.shape.depth)
        draft, tokens = chains.draft(rows, arrays, start, known, limit)
        if tokens:
            self.window.settle(rows, row, known)
            numbers = list(range(limit))
            parents = [number - 1 for number in numbers]
            self.pending[row] = Pending(known, tokens, parents, [*numbers[:-1], -1])
        return draft

    def _catch_up(self, rows: Rows, ids_R: Array) -> Tensor:
        """Process what the model has not seen yet; the state at each row's last token."""
        tokens_XL, known_X = host(rows.tokens_XL), host(rows.known_X)
        parts: list[tuple[int, int, int]] = []
        for row in ids_R.tolist():
            stop = int(known_X[row])
            parts.append((row, min(self.window.resume(rows, row, stop), stop - 1), stop))
        last: list[Tensor] = []
        for some in _passes(parts):
            pieces = [tokens_XL[row, start:stop] for row, start, stop in some]
            ids_T = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            attn = self.window.spans(rows, some)
            token_T = self.columns.to_draft(self.window.put(ids_T))
            hidden_TD = self.model.forward(token_T, attn, self.window.kv).last_TD
            end = -1
            for row, start, stop in some:
                end += stop - start
                if stop == known_X[row]:
                    last.append(hidden_TD[end : end + 1])
        for row, _, stop in parts:
            self.window.settle(rows, row, stop)
        return last[0] if len(last) == 1 else torch.cat(last)

    def _remember(self, ids_R: Array, known_R: Array, draft: Draft, number_RN: Array) -> None:
        tokens, parents = draft.tokens_RN.tolist(), draft.parents_RN.tolist()
        numbers, counts = number_RN.tolist(), draft.num_nodes_R.tolist()
        for place, (row, known) in enumerate(zip(ids_R.tolist(), known_R.tolist(), strict=True)):
            count = counts[place]
            if count:
                self.pending[row] = Pending(
                    known, tokens[place][:count], parents[place][:count], numbers[place][:count]
                )

    def forget(self, rows: list[int]) -> None:
        self.window.drop(rows)
        for row in rows:
            self.pending.pop(row, None)


def _load(
    weights: Weights, path: str, options: DraftOptions, context: DrafterContext
) -> tuple[Any, Columns]:
    """The model, and how its logits become the target's."""
    if is_cut(weights):
        model, ids_C = load_cut(weights, context.target, options.dtype, context.device)
        if model.spec.vocab_size != context.vocab_size:
            compare(None, model.spec.vocab_size, None, context.vocab_size, path)  # raises
        model = _like_target(model, context)
        return model, Columns(context.vocab_size if ids_C is None else len(ids_C), ids_C)
    model = _load_whole(weights, options.dtype, context)
    size, vocab = model.spec.vocab_size, read_vocab(weights)
    columns = compare(vocab, size, context.vocab, context.vocab_size, path, options.cross_vocab)
    return _like_target(model, context), columns.to(context.device)


def _like_target(model: Any, context: DrafterContext) -> Any:
    """On the target's fused kernels, where it has some and they know this model too."""
    if getattr(context.target, "kernels", "") != "triton":
        return model
    from hunch.models.cuda import CudaDecoder

    try:
        return CudaDecoder(model)
    except UnsupportedModelError as error:
        log.warning("%s: the draft model runs on torch's own kernels", error)
        return model


def _load_whole(weights: Weights, dtype: str, context: DrafterContext) -> Any:
    """On the target's kind of kernels; beside a quantised target, in 8 bits at most."""
    target = context.target
    if getattr(target, "kernels", "") == "native" and dtype in NATIVE_DTYPES:
        if dtype == "auto" and not weights.metadata and target.kv_dtype != torch.float32:
            dtype = "int8"
        model = load_native(weights, dtype=dtype, num_threads=torch.get_num_threads())
        if model is not None:
            return model
    return load_decoder(weights, dtype=dtype, device=context.device)


def _child(pending: Pending, parent: int, token: int) -> int:
    for node in range(parent + 1, len(pending.tokens)):
        if pending.parents[node] == parent and pending.tokens[node] == token:
            return node
    return -1


def _passes(parts: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The parts cut into passes of a bounded size, in order."""
    passes: list[list[tuple[int, int, int]]] = [[]]
    room = MAX_PASS
    for row, start, stop in parts:
        while start < stop:
            if room == 0:
                passes.append([])
                room = MAX_PASS
            end = min(stop, start + room)
            passes[-1].append((row, start, end))
            room -= end - start
            start = end
    return passes


def _warn_of_cost(share: float) -> None:
    if share > MAX_SHARE:
        log.warning(
            "the draft model reads %.0f%% of the bytes the target reads per token; above %.0f%% "
            "drafting rarely saves time: choose a smaller draft",
            100 * share,
            100 * MAX_SHARE,
        )

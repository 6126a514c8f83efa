"""Draft model: a smaller model of the same vocabulary guesses, token by token or as a tree.

Shape letters: R rows of this step, T packed tokens, D width, V vocabulary, N nodes, P path, W nodes
of a level, C columns of the model's logits.
Papers: arXiv 2211.17192, 2302.01318.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft, KVShape, Needs, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext, Options, comes_with_hunch
from hunch.drafting.grow import grow
from hunch.drafting.native_chain import ChainDrafts
from hunch.drafting.options import GrowOptions, can_capture, device_shape, need_path
from hunch.drafting.step_shapes import levels_after
from hunch.drafting.token_chooser import Array, TokenChooser, second_choices
from hunch.drafting.tree_shape import Level
from hunch.drafting.trees import accepted_path, nodes_of
from hunch.drafting.window import MAX_PASS, KvWindow, Parts, RowArrays, in_passes
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs, row_spans
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import RowState, StepRows
from hunch.models.heads.draft_model import MAX_SHARE, byte_share, load_draft_model
from hunch.models.heads.step import MARGIN
from hunch.models.heads.vocabulary import Columns, renumbered
from hunch.models.load_target import with_kv
from hunch.models.spec import ModelSpec
from hunch.models.swap import copy_network
from hunch.models.target import Hidden, Target
from hunch.models.weights import open_weights
from hunch.sampling.state import SamplingState
from hunch.types import GroupInfo

if TYPE_CHECKING:
    from hunch.models.cuda import CudaDecoder

log = logging.getLogger("hunch")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions(GrowOptions):
    """draft:PATH[:KEY=VALUE]..."""

    cross_vocab: bool = False  # draft over the tokens two vocabularies have in common
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of its keys and values; or fp8, int8
    adapt: bool = False  # keep learning from answers while serving


@dataclass(slots=True)
class WaitingDraft:
    """A row's waiting draft: node i is tokens[i] and was processed as number numbers[i]."""

    base: int  # position of the first node
    tokens: list[int]
    parents: list[int]
    numbers: list[int]


class DraftModelDrafter:
    """Catches up on the row's tokens in one pass, then drafts from its own KV."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        path = need_path("draft", path)
        self.options = read_options(DraftOptions, options, "draft")
        self.context, self.is_adaptive, self.path = context, self.options.adaptive, path
        weights = open_weights(path)
        self.trained_len = ModelSpec.from_config(weights.config).max_len
        self.shape = self.options.shape(context)
        self.model, self.columns = self.load_network(path)
        self.ids_C = self.columns.ids_C
        if not comes_with_hunch(path):
            _warn_of_cost(byte_share(weights, context.target))
        limit = min(self.options.window or self.trained_len, self.trained_len)
        self.window = KvWindow(context, max(limit - self.shape.depth, 1))
        longest = self.window.most(context.block_size) + self.shape.depth
        if longest > self.trained_len and not context.is_fused:  # else it goes on past its context
            raise ConfigError(
                f"{path}: a context of {self.trained_len} tokens is too short for a draft model "
                f"with block_size={context.block_size}; give a smaller one, or fewer num_nodes"
            )
        self.waiting: dict[int, WaitingDraft] = {}
        self.host = RowArrays()
        self.chains = self._native_chains()
        self.needs = Needs(
            max_nodes=self.shape.num_nodes,
            kv=KVShape.of(
                self.model.kv_shapes(), self.model.kv_dtype, self.model.spec.latent is not None
            ),
            group=GroupInfo(name="draft"),
            weight_bytes=self.model.weight_bytes,
        )

    def load_network(self, path: str) -> tuple[Target, Columns]:
        """The model of these files, and how columns of its logits map to the target's tokens."""
        vocab = self.context.vocab
        model, columns = load_draft_model(
            open_weights(path),
            self.context.target,
            None if vocab is None else vocab(),
            dtype=self.options.dtype,
            is_crossed=self.options.cross_vocab,
        )
        if self.options.cross_vocab and self.context.load_codec is not None:
            begin = self.context.load_codec(path).encode("")
            columns = replace(columns, begin_id=begin[0] if begin else None)
        return renumbered(with_kv(model, self.options.kv_dtype), columns), columns

    def take_network(self, network: tuple[Target, Columns]) -> None:
        """Replace the network. KV computed by the old one stays: guesses may get a little worse."""
        if self.context.device.type != "cpu":
            copy_network(self.model, network[0])
            return
        self.model, self.columns = network
        self.chains = self._native_chains()

    def _native_chains(self) -> ChainDrafts | None:
        """The fast way for steps of one row, where the kernels draft a whole chain in one call."""
        network, columns = getattr(self.model, "network", None), self.columns
        if network is None or columns.is_mapped or not ChainDrafts.fit(self.shape, self.context):
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
        """Device form: chains, and trees whose levels are all of one size."""
        context, shape = self.context, self.shape
        if context.kv is None or not self.model.backend.captures_steps:
            return None
        if not can_capture(context, self.options.draft_temperature):
            return None
        is_limited = self.options.window is not None or self.model.spec.rope is None
        is_limited |= shape.depth > MARGIN
        return DeviceDraftModel(
            name="draft",
            model=cast("CudaDecoder", self.model),
            kv=context.kv,
            sampling=context.sampling,
            ids_C=self.ids_C,
            trained_len=self.trained_len if self.trained_len < context.max_len else None,
            max_len=self.window.limit if is_limited else None,
            is_adaptive=self.options.adaptive,
            **device_shape(shape, only_chains=context.only_chains),
        )

    def observe(self, step: TargetStep) -> None:
        """Keep the KV of drafted nodes that the target accepted."""
        if not self.waiting:
            return
        arrays = self.host.read(step.rows)
        for row in arrays.ids:
            waiting = self.waiting.pop(row, None)
            if waiting is not None:
                known = int(arrays.known_X[row])
                decided = arrays.tokens_XL[row, waiting.base : known].tolist()
                self._keep_accepted(step.rows, row, waiting, decided)

    def _keep_accepted(
        self, rows: Rows, row: int, waiting: WaitingDraft, decided: list[int]
    ) -> None:
        path: list[int] = []
        # The last token is the target's own, and has no KV here.
        for node in accepted_path(waiting.tokens, waiting.parents, decided[:-1]):
            if waiting.numbers[node] < 0:
                break
            path.append(waiting.numbers[node])
        if path != list(range(len(path))):
            row_P = np.full(len(path), row)
            self.window.kv.compact(
                self.window.slots(rows, row_P, waiting.base + np.array(path)),
                self.window.slots(rows, row_P, waiting.base + np.arange(len(path))),
            )
        self.window.mark_valid(rows, row, waiting.base + len(path))

    def propose(self, rows: Rows) -> Draft:
        arrays = self.host.read(rows)
        ids_R = arrays.ids_R
        self.window.add_new(rows, ids_R)
        if self.chains is not None and self.chains.takes(arrays.ids):
            draft = self._propose_one(self.chains, rows, arrays)
            if draft is not None:
                return draft
        hidden_RD = self._catch_up(rows, arrays)
        known_R, limit_R = arrays.known_X[ids_R], arrays.max_draft_X[ids_R]
        chooser = TokenChooser(self.context, rows, self.ids_C, self.options.draft_temperature)
        inputs = self.window.levels(rows, ids_R, known_R, self.shape)

        def feed(level: Level) -> Tensor:
            token_M = self.window.put(level.token_M)
            hidden = self.model.forward(token_M, inputs(level), self.window.kv)
            return self.model.logits(hidden.last_TD)

        logits_RV = self.model.logits(hidden_RD)
        draft, number_RN = grow(logits_RV, feed, chooser, limit_R, self.shape)
        self._remember(ids_R, known_R, draft, number_RN)
        return draft

    def _propose_one(self, chains: ChainDrafts, rows: Rows, arrays: RowArrays) -> Draft | None:
        """Draft in one call of the kernels; None: there is too much to catch up on."""
        row = arrays.ids[0]
        known = int(arrays.known_X[row])
        start = min(self.window.resume(rows, row, known), known - 1)
        if known - start > MAX_PASS:
            return None
        limit = min(int(arrays.max_draft_X[row]), self.shape.depth)
        draft, tokens = chains.draft(rows, arrays, start, known, limit)
        if tokens:
            self.window.mark_valid(rows, row, known)
            numbers = list(range(limit))
            parents = [number - 1 for number in numbers]
            self.waiting[row] = WaitingDraft(known, tokens, parents, [*numbers[:-1], -1])
        return draft

    def _catch_up(self, rows: Rows, arrays: RowArrays) -> Tensor:
        """Process tokens that the model has not seen; returns the state of each row's last one."""
        tokens_XL, known_X = arrays.tokens_XL, arrays.known_X
        parts: Parts = []
        for row in arrays.ids:
            stop = int(known_X[row])
            parts.append((row, min(self.window.resume(rows, row, stop), stop - 1), stop))
        last: list[Tensor] = []
        for some in in_passes(parts):
            pieces = [tokens_XL[row, start:stop] for row, start, stop in some]
            ids_T = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            attn = self.window.spans(rows, some)
            token_T = self.window.put(ids_T)
            hidden_TD = self.model.forward(token_T, attn, self.window.kv).last_TD
            end = -1
            for row, start, stop in some:
                end += stop - start
                if stop == known_X[row]:
                    last.append(hidden_TD[end : end + 1])
        for row, _, stop in parts:
            self.window.mark_valid(rows, row, stop)
        return last[0] if len(last) == 1 else torch.cat(last)

    def second_choices(self, rows: Rows, num_nodes: list[int]) -> list[list[tuple[int, float]]]:
        """Per row and node of its draft: the second best token there, and the log of the chance
        that the target agrees with all nodes before it and then chooses that token."""
        known_X, tokens_XL = rows.known_X.tolist(), rows.tokens_XL.numpy()
        pairs = zip(rows.ids_R.tolist(), num_nodes, strict=True)
        parts = [(row, known_X[row] - 1, known_X[row] - 1 + count) for row, count in pairs]
        ids_T = np.concatenate([tokens_XL[row, start:stop] for row, start, stop in parts])
        attn = self.window.spans(rows, parts)
        hidden_TD = self.model.forward(self.window.put(ids_T), attn, self.window.kv).last_TD
        chooser = TokenChooser(self.context, rows, self.ids_C, self.options.draft_temperature)
        return second_choices(self.model.logits(hidden_TD), chooser, num_nodes)

    def _remember(self, ids_R: Array, known_R: Array, draft: Draft, number_RN: Array) -> None:
        columns = ids_R.tolist(), known_R.tolist(), nodes_of(draft), number_RN.tolist()
        for row, known, (tokens, parents), numbers in zip(*columns, strict=True):
            if tokens:
                self.waiting[row] = WaitingDraft(known, tokens, parents, numbers[: len(tokens)])

    def forget(self, rows: list[int]) -> None:
        self.window.drop(rows)
        for row in rows:
            self.waiting.pop(row, None)


@dataclass(kw_only=True)
class DeviceDraftModel(DeviceDrafter):
    """Chains, or trees of `num_levels` levels, drafted within the step.

    Every draft begins with a pass over the last tokens of the row, so that all that the target
    accepted has the model's KV; then there is one pass per level. A tree keeps the `level_size`
    likeliest paths at each level, and always the path of first children, which the target is
    likeliest to take; the first `width` nodes of a level get children. In the end the `tree_nodes`
    likeliest of all are kept.
    """

    model: CudaDecoder
    kv: KVCache
    sampling: SamplingState
    ids_C: Tensor | None  # the target's id of each column; None: the same

    @property
    def draft_model(self) -> DeviceDraftModel:
        return self

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        num_levels = self.num_levels
        num_again = num_levels + 1  # nodes of a tree had other slots
        if self.level_size == 1:  # the last node of a chain has no KV
            num_levels, num_again = levels_after(step.num_nodes, num_levels), 2
        elif self.tree_nodes:
            num_levels = self.levels(source, step.num_nodes)
        self.grow(state, step, num_levels, num_again)

    def grow(self, state: RowState, step: StepRows, num_levels: int, num_again: int) -> None:
        """Draft `num_levels` levels, after a pass over the last `num_again` known tokens."""
        from hunch.kernels.gpu_draft import known_inputs

        num_rows, depth = len(step.ids_R), 0 if self.level_size == 1 else self.num_levels
        ids_T, attn = self._inputs(state, num_rows, num_again, 0)
        known_inputs(state, step, ids_T, attn)
        self.grow_levels(
            state, step, self.sampling, self._scores(ids_T, attn, num_again),
            attn.seq_T[num_again - 1 :: num_again], num_levels, ids_C=self.ids_C,
            inputs=partial(self._inputs, state, num_rows, self.width, depth),
            feed=lambda _, ids_T, attn: (self._scores(ids_T, attn), attn.seq_T),
        )  # fmt: skip

    def _scores(self, ids_T: Tensor, attn: AttnInputs, every: int = 1) -> Tensor:
        """Scores after every so many of these tokens."""
        hidden_TD = self.model.forward(ids_T, attn, self.kv).last_TD
        return self.model.logits(hidden_TD[every - 1 :: every])

    def _inputs(
        self, state: RowState, num_rows: int, width: int, depth: int
    ) -> tuple[Tensor, AttnInputs]:
        from hunch.kernels.gpu_draft import new_inputs

        num_tokens = num_rows * width
        ids_T, attn = new_inputs(state, num_tokens, depth)
        key = num_rows, width
        if key not in self.tilings:
            self.tilings[key] = self.model.tiling(row_spans(num_rows, width), num_tokens)
        attn.memo["tiling"] = self.tilings[key]
        return ids_T, attn


def _warn_of_cost(share: float) -> None:
    if share > MAX_SHARE:
        log.warning(
            "the draft model reads %.0f%% of the bytes the target reads per token; above %.0f%% "
            "drafting rarely saves time: choose a smaller draft",
            100 * share,
            100 * MAX_SHARE,
        )

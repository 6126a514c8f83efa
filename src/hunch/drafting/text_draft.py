"""A draft model with any tokenizer: it continues the text, and its words are tokenized again.

`draft` needs the target's vocabulary, or drafts over the tokens that both have (cross_vocab). Here
the models need nothing in common but the language: the row's text is tokenized for the draft model,
it drafts a few tokens greedily, and their text is tokenized for the target. After the string-level
method of arXiv 2502.05202; the verifier compares tokens as always, so the text is the target's,
greedy or sampled.

Its tokens have other positions than the target's, so it has KV of its own: a range of slots per
row, for as many rows as there is room.

Shape letters: T packed tokens, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafting.base import DrafterContext, Options
from hunch.drafting.options import at_least_one, need_path
from hunch.errors import ConfigError
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.files import check_drafts
from hunch.models.target import Target
from hunch.models.weights import open_weights
from hunch.types import TextCodec

BROKEN = "\ufffd"  # in place of a character with missing bytes
OVERLAP = 4  # known tokens that are tokenized again with the guess, as they may join
BLOCK = 16
MAX_PASS = 512  # tokens one catching-up pass takes


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Options of `text`."""

    num_nodes: int = 5  # tokens of the target, drafted per step
    draft_tokens: int | None = None  # of the draft model, per step; None: num_nodes + 1
    window: int = 2048  # tokens that the draft model sees
    max_rows: int = 16  # requests it drafts for at once
    adaptive: bool = True  # fewer tokens, or none, if they do not pay
    dtype: str = "auto"

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", "window", "max_rows", "draft_tokens", method="text")


@dataclass(slots=True)
class Followed:
    """One row: its range of slots, and the tokens whose KV is there."""

    place: int
    ids: list[int] = field(default_factory=list)


class TextDrafter:
    """A chain per row, from a draft model that reads and writes text."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        path = need_path("text", path)
        self.options = read_options(TextOptions, options, "text")
        if context.codec is None or context.load_codec is None:
            raise ConfigError("text: the target has no tokenizer, so there is no text to continue")
        self.context, self.codec, self.is_adaptive = context, context.codec, self.options.adaptive
        self.shape = None  # its chains are not grown level by level
        self.own: TextCodec = context.load_codec(path)
        weights = open_weights(path)
        check_drafts(weights)
        self.model: Target = context.target.backend.load_draft(
            weights, context.target, self.options.dtype
        )
        margin = self._num_own + 1
        limit = min(self.options.window, self.model.spec.max_len - margin)
        if limit < 1:
            raise ConfigError(
                f"text: {self._num_own} tokens per step do not fit the draft model's context of "
                f"{self.model.spec.max_len}; give fewer draft_tokens"
            )
        self.limit, self.stride = limit, -(-(limit + margin) // BLOCK) * BLOCK
        num_rows = min(self.options.max_rows, context.max_rows)
        self.kv: KVCache = self.model.new_kv(num_rows * self.stride)
        self.free = list(range(num_rows))
        per_row = self.stride // BLOCK
        self.table_SB = torch.arange(num_rows * per_row, device=context.device).view(num_rows, -1)
        self.rows: dict[int, Followed] = {}
        self.needs = Needs(max_nodes=self.options.num_nodes, weight_bytes=self.model.weight_bytes)

    @property
    def _num_own(self) -> int:
        return self.options.draft_tokens or self.options.num_nodes + 1

    def observe(self, step: TargetStep) -> None:
        """Nothing to do: `propose` reads the text."""

    def propose(self, rows: Rows) -> Draft:
        known_X, max_draft_X = rows.known_X.tolist(), rows.max_draft_X.tolist()
        chains: list[list[int]] = []
        for row in rows.ids_R.tolist():
            limit = min(max_draft_X[row], self.options.num_nodes)
            if limit and row not in self.rows and self.free:
                self.rows[row] = Followed(self.free.pop())
            state = self.rows.get(row) if limit else None
            tokens = rows.tokens_XL[row, : known_X[row]].tolist() if state is not None else []
            chains.append([] if state is None else self._guess(state, tokens)[:limit])
        return Draft.chains(chains, self.context.device)

    def _guess(self, state: Followed, tokens: list[int]) -> list[int]:
        """The target's tokens for the text that the draft model continues with."""
        text = self.codec.decode(tokens, skip_special_tokens=False)
        if not text or text.endswith(BROKEN):
            return []
        ids = self.own.encode(text)  # none, if no token of its own spells any of it
        drafted_text = self._continue(state, ids) if ids else ""
        if not drafted_text:
            return []
        # Together with the last known tokens, as a drafted token may join them.
        tail = tokens[-OVERLAP:]
        before = self.codec.decode(tail, skip_special_tokens=False)
        together = self.codec.encode(before + drafted_text, add_special_tokens=False)
        if together[: len(tail)] == tail:
            return together[len(tail) :]
        return self.codec.encode(drafted_text, add_special_tokens=False)

    def _continue(self, state: Followed, ids: list[int]) -> str:
        """The text that the draft model continues its tokens `ids` with, greedily."""
        if len(ids) > self.limit:
            ids = self._recent(state, ids)
        same = 0
        for ours, theirs in zip(state.ids, ids, strict=False):
            if ours != theirs:
                break
            same += 1
        same = min(same, len(ids) - 1)  # the last one is processed again, for its logits
        logits_1V = self._read(state.place, ids[same:], same)
        drafted: list[int] = []
        for _ in range(self._num_own):
            token = int(logits_1V.argmax())
            if token in self.own.eos_ids:
                break
            drafted.append(token)
            if len(drafted) < self._num_own:
                logits_1V = self._read(state.place, [token], len(ids) + len(drafted) - 1)
        state.ids = ids + drafted[:-1]  # the last one was not processed
        before = self.own.decode(ids, skip_special_tokens=False)
        whole = self.own.decode(ids + drafted, skip_special_tokens=False)
        drafted_text = whole[len(before) :] if whole.startswith(before) else ""
        return drafted_text.partition(BROKEN)[0]

    def _recent(self, state: Followed, ids: list[int]) -> list[int]:
        """The end of a long text, cut at the same place as before while that fits."""
        if state.ids:
            first = state.ids[0]
            for start in range(max(len(ids) - self.limit, 0), len(ids) - self.limit // 2):
                if ids[start] == first and ids[start : start + 8] == state.ids[:8]:
                    return ids[start:]
        return ids[-(self.limit // 2 or 1) :]

    @torch.inference_mode()
    def _read(self, place: int, ids: list[int], start: int) -> torch.Tensor:
        """Process these tokens of a row, from position `start` on; returns the last logits."""
        hidden_1D = None
        for first in range(0, len(ids), MAX_PASS):
            part = ids[first : first + MAX_PASS]
            begin = start + first
            pos_T = torch.arange(begin, begin + len(part), device=self.context.device)
            attn = AttnInputs(
                pos_T=pos_T,
                slot_T=place * self.stride + pos_T,
                seq_T=torch.full_like(pos_T, place),
                table_SB=self.table_SB,
                base_T=pos_T + 1,
                tree_TP=None,
                block_size=BLOCK,
                spans=(Span(0, len(part), place, begin, len(part)),),
            )
            ids_T = torch.tensor(part, device=self.context.device)
            hidden_1D = self.model.forward(ids_T, attn, self.kv).last_TD[-1:]
        assert hidden_1D is not None, "the last token is always read"
        return self.model.logits(hidden_1D)[0]

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            state = self.rows.pop(row, None)
            if state is not None:
                self.free.append(state.place)

"""Suffix lookup: continue the longest match of the text's end, as far as that pays.

Every place where the last tokens occurred before is a *witness* of what comes next. The longest
match wins; its length, the number of witnesses and whether they agree decide how likely its guesses
are. Witnesses are in the request's own prompt and output and, with shared=true, in recent outputs
of other requests. A phrase table, if the target has one, guesses where it is right more often: it
holds what this target often writes after a few tokens, whatever the request.

Shape letters: X rows of the engine, L longest sequence, N nodes, R rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hunch.config import read_options
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext, Options
from hunch.drafting.lookup import Chances, DeviceLookup, LookupDrafter, LookupRow
from hunch.drafting.options import at_least_one
from hunch.drafting.policy import best_count
from hunch.drafting.shared_answers import DeviceShared, SharedAnswers, Store
from hunch.drafting.trees import Node, ReusedDraft, best_first
from hunch.drafting.window import NewTokens
from hunch.errors import ConfigError
from hunch.kernels.guided import GuidedLookup
from hunch.kernels.lookup import (
    DIFFER,
    LENGTHS,
    MAX_MATCH,
    MIN_CHANCE,
    NUM_GUESS_TYPES,
    PRIOR_ODDS,
    PRIORS,
    SECOND,
    SuffixText,
)
from hunch.kernels.native_lookup import NativeLookup
from hunch.kernels.phrases import PhraseTable, read_phrases
from hunch.kernels.successor_trees import Chain

if TYPE_CHECKING:
    from hunch.kernels.gpu_lookup import DevicePhrases  # needs Triton, which a CPU may not have

SECOND_SHARE = 3  # one node of so many follows another match, in trees of captured steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Options of `suffix`."""

    num_nodes: int = 16  # most nodes drafted per step
    tree: bool = False  # two guesses where witnesses differ
    shared: bool = False  # search recent outputs of other requests too
    shared_tokens: int = 200_000  # how many of their tokens are kept
    adaptive: bool = True  # fewer nodes if they do not pay
    margin: float = 0.0  # share by which drafting must beat plain decoding
    phrases: str = "auto"  # a phrase table's directory; auto: this target's, or common words; off
    adapt: bool = False  # keep counting phrases of answers while serving

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", "shared_tokens", method="suffix")
        if self.adapt and (self.tree or self.shared):
            raise ConfigError("suffix: adapt=true goes with neither tree=true nor shared=true")


class Witness:
    """The witnesses of a node: the match, its places, and the guesses that led to the node."""

    __slots__ = ("first_type", "length", "path", "places", "tokens")

    def __init__(
        self, tokens: list[int], length: int, places: list[int], path: list[int], first_type: int
    ) -> None:
        self.tokens, self.length, self.places, self.path = tokens, length, places, path
        self.first_type = first_type

    def followers(self) -> dict[int, list[int]]:
        """Token -> the places after it; the most recent witness's token first."""
        out: dict[int, list[int]] = {}
        tokens, end = self.tokens, len(self.tokens)
        for place in self.places:
            # A match that reaches the end of the text continues with the guesses themselves.
            token = tokens[place] if place < end else self.path[place - end]
            if token < 0:
                continue
            if token in out:
                out[token].append(place + 1)
            else:
                out[token] = [place + 1]
        return out

    def after(self, token: int, places: list[int]) -> Witness:
        length = min(self.length + 1, MAX_MATCH)
        return Witness(self.tokens, length, places, [*self.path, token], self.first_type)


class SuffixDrafter(LookupDrafter):
    """A chain or a small tree per row, cut where nodes no longer pay."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        self.config = read_options(SuffixConfig, options, "suffix")
        priors = {
            source * NUM_GUESS_TYPES + record * 8 + length: chance
            for source in (0, 1)  # own text, shared store
            for record, chances in enumerate(PRIORS)
            for length, chance in enumerate(chances)
        }
        super().__init__(
            max_nodes=self.config.num_nodes,
            chances=Chances(priors),
            context=context,
            margin=self.config.margin,
            is_adaptive=self.config.adaptive,
        )
        self.store = Store(self.config.shared_tokens) if self.config.shared else None
        self.answers: SharedAnswers | None = None  # on a device, in place of the store
        self.is_alone_on_device = self.config.shared or self.config.tree
        self.guide: Guide | None = None  # drafts chains from the request's own text
        self.table: PhraseTable | None = None
        self.own_table: PhraseTable | None = None  # the same, if it was counted for this target
        self.device_phrases: DevicePhrases | None = None
        if not (self.config.tree or self.config.shared):
            # In place of `auto`, llm.py puts the directory of the target's table, if it has one.
            if (folder := self.config.phrases) == "auto":
                self.table = _common_phrases(context)
            elif folder != "off":
                self.table = self.own_table = read_phrases(Path(folder), context.vocab_size)
            self.guide = Guide(PRIOR_ODDS, self.table, self.config.num_nodes, context)

    def take_phrases(self, table: PhraseTable) -> None:
        """Use a new table, with phrases that were counted since the start."""
        assert self.guide is not None, "texts of other requests and trees ask no table"
        self.guide.take(table := table if self.table is None else self.table.with_more(table))
        if self.device_phrases is not None:  # it has room, because of `adapt`
            self.device_phrases.take(table)

    def on_device(self) -> DeviceDrafter | None:
        """Device form: the longest match, and the table or other answers; in a tree, two matches.

        None: trees that search other answers too.
        """
        has_trees, device = self.config.tree and not self.context.only_chains, self.context.device
        if has_trees and self.config.shared:
            return None
        if self.config.shared:
            self.answers = SharedAnswers(self.config.shared_tokens, device)
            return DeviceShared(
                name="suffix",
                num_nodes=self.config.num_nodes,
                margin=self.margin,
                is_adaptive=self.config.adaptive,
                texts=self.answers.texts,
            )
        from hunch.kernels.gpu_lookup import DevicePhrases

        if self.config.adapt:
            self.device_phrases = DevicePhrases.with_room(self.table, device)
        elif self.table is not None:
            self.device_phrases = DevicePhrases.of(self.table, device)
        return DeviceLookup(
            name="suffix",
            min_match=1,
            max_match=MAX_MATCH,
            num_nodes=self.config.num_nodes,
            margin=self.margin,
            is_adaptive=self.config.adaptive,
            phrases=self.device_phrases,
            is_common=self.own_table is None and not self.config.adapt,
            num_second=self.config.num_nodes // SECOND_SHARE if has_trees else 0,
        )

    def observe(self, step: TargetStep) -> None:
        if self.answers is not None:
            self.answers.note(step.rows)
        elif self.guide is None:
            super().observe(step)
        else:
            self.guide.follow(step.rows, self.guide.host.read(step.rows).ids)

    def follow(self, rows: Rows, ids: list[int]) -> None:
        if self.guide is None:
            super().follow(rows, ids)
        else:
            self.guide.follow(rows, ids)

    def look(self, row: int) -> list[Node]:
        if self.answers is not None and self.answers.rows is not None:
            self.follow(self.answers.rows, [row])  # few rows are drafted for here
        if self.guide is None:
            return super().look(row)
        tokens, chances = self.guide.guess(row, self.config.num_nodes)
        return list(map(Node, tokens, range(-1, len(tokens)), chances))

    def propose(self, rows: Rows) -> Draft:
        if self.guide is None or len((host := self.guide.host.read(rows)).ids) != 1:
            return super().propose(rows)
        (row,) = host.ids
        return self.guide.draft(row, int(host.max_draft_X[row]), self._count)

    def chain(self, row: int, limit: int) -> Chain:
        assert self.guide is not None, "others draft by themselves"
        return self.guide.chain(row, limit)

    def _count(self, chances: list[float]) -> int:
        """How many nodes of a step's only row to check."""
        if not self.is_adaptive:
            return len(chances)
        return best_count(chances, self.context.cost, self.margin)

    def new_text(self) -> SuffixText:
        return SuffixText()

    def guess(self, row: LookupRow) -> list[Node]:
        root, width = self._root(row), None if self.config.tree else 1
        if root is None:
            return []

        def expand(witness: Witness) -> Iterator[tuple[int, float, int, Witness]]:
            return islice(self._children(witness, row.term), width)

        return best_first(root, expand, self.config.num_nodes, MIN_CHANCE)

    def _root(self, row: LookupRow) -> Witness | None:
        assert isinstance(row.text, SuffixText)
        tail = row.text.tokens[-MAX_MATCH:]
        length, places = row.text.find(tail)
        source, first_type = row.text, 0
        if self.store is not None:
            further, further_places, other = self.store.find(tail)
            if further > length:
                length, places, source, first_type = further, further_places, other, NUM_GUESS_TYPES
        if not length:
            return None
        return Witness(source.tokens, length, places, [], first_type)

    def _children(self, witness: Witness, term: float) -> Iterator[tuple[int, float, int, Witness]]:
        followers = witness.followers()
        record = DIFFER if len(followers) > 1 else min(len(witness.places), 4) - 1
        for token, places in followers.items():
            guess_type = witness.first_type + record * 8 + LENGTHS[witness.length]
            chance = self.chances.of(guess_type, term)
            yield token, chance, guess_type, witness.after(token, places)
            if record == SECOND:
                return
            record = SECOND

    def forget(self, rows: list[int]) -> None:
        if self.answers is not None:
            self.answers.forget(rows)
        elif self.store is not None:
            for row in rows:
                state = self.rows.get(row)
                if state is not None and len(state.text.tokens) > state.num_prompt:
                    self.store.add(state.text.tokens[state.num_prompt :])
        if self.guide is not None:
            for row in rows:
                self.guide.forget(row)
        super().forget(rows)

    def clear(self) -> None:
        """Forget other requests' answers."""
        if self.answers is not None:
            self.answers.clear()
        if self.store is not None:
            self.store = Store(self.config.shared_tokens)


def _common_phrases(context: DrafterContext) -> PhraseTable | None:
    """What often follows in common texts, for targets without a table of their own."""
    entries = context.common_successors()
    return PhraseTable.of_successors(entries, context.vocab_size) if len(entries) else None


class Guide:
    """Chains for rows, by the C++ kernels if the target uses them."""

    def __init__(
        self,
        own_odds: Sequence[float],
        table: PhraseTable | None,
        num_nodes: int,
        context: DrafterContext,
    ) -> None:
        self.num_nodes, self.device = num_nodes, context.device
        self._is_host = context.device.type == "cpu"
        self.host = NewTokens()
        self._drafts: dict[tuple[int, int], ReusedDraft] = {}  # by row and length
        self.native: NativeLookup | None = None
        self.plain: GuidedLookup | None = None
        self._own_odds, self._max_rows = own_odds, context.max_rows
        self._is_native = context.target.backend.has_host_kernels
        self.take(table)

    def take(self, table: PhraseTable | None) -> None:
        """Use this table from now on; all rows are indexed again."""
        self.host.forget_all()
        if self._is_native:
            self.native = NativeLookup(self._own_odds, table, self._max_rows, self.num_nodes)
        else:
            self.plain = GuidedLookup(self._own_odds, table)

    def follow(self, rows: Rows, ids: list[int]) -> None:
        """Index the new tokens of these rows."""
        for row, first, end in self.host.take(rows, ids):
            if self.native is not None:
                self.native.follow(row, self.host.address(row, first), end - first)
            elif self.plain is not None:
                self.plain.follow(row, self.host.tokens_XL[row, first:end].tolist())

    def guess(self, row: int, limit: int) -> tuple[list[int], list[float]]:
        """Tokens that may follow, and the chances of the paths to them, which fall."""
        if self.native is None:
            assert self.plain is not None
            return self.plain.guess(row, min(limit, self.num_nodes))
        tokens_N, chance_N = self.chain(row, limit)
        return tokens_N.tolist(), chance_N.tolist()

    def chain(self, row: int, limit: int) -> Chain:
        """The same as arrays, which the next guess may overwrite."""
        if self.native is None:
            tokens, chances = self.guess(row, limit)
            return np.array(tokens, np.int64), np.array(chances, np.float64)
        count = self.native.guess(row, limit)
        return self.native.tokens_N[:count], self.native.chance_N[:count]

    def draft(self, row: int, limit: int, count_of: Callable[[list[float]], int]) -> Draft:
        """The draft of a step's only row; `count_of` chances gives its number of nodes.

        It is valid until the next draft of the row.
        """
        tokens_N, chance_N = self.chain(row, limit)
        count = count_of(chance_N.tolist())
        reused = self._drafts.get((row, count))
        if reused is None:
            reused = self._drafts[row, count] = ReusedDraft(count)
        reused.tokens_N[:] = tokens_N[:count]
        return reused.draft if self._is_host else reused.draft.to(self.device)

    def forget(self, row: int) -> None:
        self.host.forget(row)
        if self.native is not None:
            self.native.forget(row)
        elif self.plain is not None:
            self.plain.forget(row)

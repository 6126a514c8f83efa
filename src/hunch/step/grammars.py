"""Rows that follow a grammar: masks for their drafted nodes, and drafts that fit it.

Shape letters: M the roots and nodes of a step, N nodes of a draft, V vocabulary, W words and B
bytes of a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hunch.step.batch import Part
from hunch.step.rows import NOTHING, Nodes
from hunch.types import RowStart

if TYPE_CHECKING:  # the grammar engine is an extra; a matcher comes with its request
    from hunch.grammar.matcher import Matcher


class RowGrammars:
    """The matchers of the rows; each stands after its row's committed tokens."""

    def __init__(self) -> None:
        self.matchers: dict[int, Matcher] = {}

    def start(self, start: RowStart) -> None:
        request = start.request
        self.matchers.pop(start.row, None)
        if request.grammar is not None:
            matcher = self.matchers[start.row] = request.grammar.matcher()
            output = start.tokens[len(request.prompt_ids) :]
            taken = matcher.consume(output)
            assert taken == len(output), "what was committed follows the grammar"

    def leave(self, row: int) -> None:
        self.matchers.pop(row, None)

    def masks(self, parts: list[Part], vocab_size: int) -> Tensor | None:
        """What may follow every root and node; None where no row follows a grammar."""
        if not self.matchers:
            return None
        counts = [1 + part.num_nodes for part in parts]
        mask_MW = np.zeros((sum(counts), -(-vocab_size // 32)), dtype=np.int32)
        first, is_any = 0, False
        for part, count in zip(parts, counts, strict=True):
            matcher, here_MW = self.matchers.get(part.row), mask_MW[first : first + count]
            if matcher is None:
                here_MW.fill(-1)
            else:
                is_any = True
                matcher.fill(part.tokens_N.tolist(), part.parents_N.tolist(), here_MW)
            first += count
        if not is_any:
            return None
        bits_MB = mask_MW.view(np.uint8)
        mask_MV = np.unpackbits(bits_MB, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(mask_MV.view(np.bool_))

    def fill(
        self,
        rows: Sequence[int],
        drafts: Mapping[int, tuple[list[int], list[int]]],  # tokens and parents, by row
        counts: Sequence[int],
        num_k: int,
        can_wait: Collection[int],
        void: Collection[int],  # rows whose choice will not count
        mask_MW: np.ndarray,
        is_masked_M: np.ndarray,
    ) -> set[int]:
        """The same as words of bits, for a captured step of rows with `num_k` masks each.

        Of each row's draft so many nodes are checked. A mask that nobody fills in allows nothing.
        Returns rows without a mask: of those that can wait, where it would take long and most
        tokens may follow. Their choices have to be asked about afterwards.
        """
        from hunch.grammar.masks import Job, fill_all

        jobs, matchers, unmasked = [], self.matchers, set[int]()
        for place, row in enumerate(rows):
            matcher, first = matchers.get(row), place * num_k
            if matcher is None or row in void:
                continue
            if row in can_wait and matcher.can_be_asked_later:
                unmasked.add(row)
                continue
            tokens: list[int] = []
            parents: list[int] = []
            if num_k > 1:
                mask_MW[first + 1 : first + num_k] = 0
                count = min(counts[place], num_k - 1)
                if count and row in drafts:
                    tokens, parents = (some[:count] for some in drafts[row])
            jobs.append(Job(matcher, tokens, parents, first))
            is_masked_M[first : first + num_k] = True
        fill_all(jobs, mask_MW)
        return unmasked

    def commit(self, row: int, tokens: list[int]) -> tuple[int, str | None]:
        """How many of the tokens follow the grammar; if not all, why it cannot go on."""
        matcher = self.matchers.get(row)
        if matcher is None:
            return len(tokens), None
        taken = matcher.consume(tokens)
        return taken, None if taken == len(tokens) else matcher.problem()

    def fit(self, row: int, nodes: Nodes | None, max_nodes: int) -> Nodes | None:
        """The row's draft without what the grammar forbids, with what it forces at its ends.

        Nodes that were drawn stay: leaving one out for its value would bias who weighs the draws.
        """
        matcher = self.matchers.get(row)
        if matcher is None:
            return nodes
        return _Fit(matcher, nodes or NOTHING, max_nodes).nodes()


class _Fit:
    """A draft in the making: the drafter's nodes that fit, in their order, then forced ones."""

    def __init__(self, matcher: Matcher, nodes: Nodes, max_nodes: int) -> None:
        self.matcher, self.old, self.max_nodes = matcher, nodes, max_nodes
        self.tokens = nodes.tokens_N.tolist()
        self.is_sampled = (
            [False] * len(self.tokens)
            if nodes.is_sampled_N is None
            else nodes.is_sampled_N.tolist()
        )
        self.children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(nodes.parents_N.tolist()):
            self.children[parent + 1].append(node)
        self.kept: list[int] = []
        self.forced: list[tuple[int, list[int]]] = []  # after which kept node, which tokens

    def nodes(self) -> Nodes | None:
        self._visit(-1)
        self.kept.sort()  # parents stood before their children
        place = {node: number for number, node in enumerate(self.kept)} | {-1: -1}
        tokens = [self.tokens[node] for node in self.kept]
        parents = [place[int(self.old.parents_N[node])] for node in self.kept]
        for node, forced in self.forced:
            parent = place[node]
            for token in forced[: self.max_nodes - len(tokens)]:
                parents.append(parent)
                parent = len(tokens)
                tokens.append(token)
        if not tokens:
            return None
        q_NV, is_sampled_N = self._draws(len(tokens))
        return self.old._replace(
            tokens_N=np.array(tokens, dtype=np.int64),
            parents_N=np.array(parents, dtype=np.int64),
            q_NV=q_NV,
            is_sampled_N=is_sampled_N,
        )

    def _visit(self, node: int) -> None:
        """Below a node the matcher stands at."""
        is_leaf = True
        for child in self.children[node + 1]:
            token = self.tokens[child]
            if self.matcher.branch(token):
                self.kept.append(child)
                self._visit(child)
                self.matcher.back(1)
            elif self.is_sampled[child] or (
                token in self.matcher.grammar.eos_ids and self.matcher.may_end()
            ):
                self._keep_all(child)
            else:
                continue
            is_leaf = False
        if is_leaf:
            forced = self.matcher.forced(self.max_nodes)
            if forced:
                self.forced.append((node, forced))

    def _keep_all(self, node: int) -> None:
        self.kept.append(node)
        for child in self.children[node + 1]:
            self._keep_all(child)

    def _draws(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        q_NV, is_sampled_N = self.old.q_NV, self.old.is_sampled_N
        if q_NV is None or is_sampled_N is None:
            return None, None
        index_N = torch.tensor(self.kept, dtype=torch.int64)
        more = count - len(self.kept)
        return (
            torch.cat([q_NV[index_N], q_NV.new_zeros(more, q_NV.shape[1])]),
            torch.cat([is_sampled_N[index_N], torch.zeros(more, dtype=torch.bool)]),
        )

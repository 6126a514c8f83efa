"""Rows that follow a grammar: masks for their drafted nodes, and drafts that fit it.

Shape letters: M the roots and nodes of a step, N nodes of a draft, V vocabulary, W words and B
bytes of a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hunch.step.batch import RowPart
from hunch.step.rows import NOTHING, Nodes
from hunch.types import RowStart

if TYPE_CHECKING:  # the grammar engine is an extra; a matcher comes with its request
    from hunch.grammar.masks import Job
    from hunch.grammar.matcher import Matcher


@cache
def _masks() -> ModuleType:
    """Imported with the first grammar, once: an import statement takes as long as three masks."""
    from hunch.grammar import masks

    return masks


GRAMMAR = "grammar"  # who guessed, where a draft holds forced tokens alone

# Tokens for which a row's drafted nodes are not checked: at the start, and after checking them did
# not pay.
PAUSE = 8
HOPE = 0.25  # tokens per step that checking is assumed to gain until it was tried
RATE = 0.25  # weight of the newest step in the mean


class _NodeGain:
    """Whether checking drafted nodes pays for a row that chooses before its grammar is asked.

    Such nodes have no masks, and a refused choice costs another pass. Refusals are common at the
    start, while the model does not know the form that the grammar wants, and rare later.
    """

    def __init__(self) -> None:
        self.num_left = PAUSE  # tokens before nodes are checked
        self._mean = HOPE  # tokens that a step gains over a plain one

    def note(self, num_tokens: int) -> None:
        """A step committed this many tokens; 0: it followed a refused choice."""
        if self.num_left:
            self.num_left = max(self.num_left - num_tokens, 0)
            return
        self._mean += RATE * (num_tokens - 1 - self._mean)
        if self._mean < 0.0:
            self.num_left, self._mean = PAUSE, HOPE


class RowGrammars:
    """The matchers of the rows; each has consumed its row's committed tokens.

    In captured steps some rows choose first: when the host receives their tokens, it asks the
    grammar, and tokens that it refuses are taken back. Such a row has a mask for the first choice
    of a step or none at all, and no masks for drafted nodes.
    """

    def __init__(self) -> None:
        self.matchers: dict[int, Matcher] = {}
        self._asked_later: dict[int, _NodeGain] = {}  # rows that choose first

    def start(self, start: RowStart) -> None:
        request = start.request
        self.leave(start.row)
        if request.grammar is not None:
            matcher = self.matchers[start.row] = request.grammar.matcher()
            output = start.tokens[len(request.prompt_ids) :]
            taken = matcher.consume(output)
            assert taken == len(output), "what was committed follows the grammar"

    def leave(self, row: int) -> None:
        self.matchers.pop(row, None)
        self._asked_later.pop(row, None)

    def ask_later(self, row: int) -> bool:
        """Let the row choose first; False: its grammar must be asked before each choice."""
        if self.matchers[row].grammar.budget is not None:
            return False
        self._asked_later[row] = _NodeGain()
        return True

    def max_checked(self, row: int, num_nodes: int) -> int:
        """How many of the row's drafted nodes are worth checking in the next step."""
        gain = self._asked_later.get(row)
        return num_nodes if gain is None or not gain.num_left else 0

    def masks(self, parts: list[RowPart], vocab_size: int) -> Tensor | None:
        """The tokens that may follow each root and node; None: no row has a grammar."""
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
        refused_rows: Collection[int],  # rows whose choices will be dropped
        mask_MW: np.ndarray,
        is_masked_M: np.ndarray,
        *,
        is_first: bool = False,  # after prompts: a refused token could not be taken back
    ) -> dict[int, int]:
        """Write the masks of a captured step as words of bits, `num_k` masks per row.

        `counts`: how many nodes of each row's draft are checked. The masks of further nodes allow
        nothing; rows without a grammar have no masks. Returns how many masks each row has that
        chooses first: one, or none where a refusal is unlikely (`Matcher.can_wait`).
        """
        masks = _masks()
        jobs: list[Job] = []
        num_masked: dict[int, int] = {}
        for place, row in enumerate(rows):
            matcher = self.matchers.get(row)
            if matcher is None or row in refused_rows:
                continue
            first = place * num_k
            if row in self._asked_later:
                if not is_first and matcher.can_wait():
                    num_masked[row] = 0
                else:
                    num_masked[row] = 1
                    jobs.append(masks.Job(matcher, [], [], first))
                    is_masked_M[first] = True
                continue
            mask_MW[first + 1 : first + num_k] = 0
            count = min(counts[place], num_k - 1)
            tokens, parents = (some[:count] for some in drafts.get(row, ([], [])))
            jobs.append(masks.Job(matcher, tokens, parents, first))
            is_masked_M[first : first + num_k] = True
        if jobs:
            masks.fill_all(jobs, mask_MW)
        return num_masked

    def commit(self, row: int, tokens: list[int]) -> tuple[int, str | None]:
        """Consume tokens; returns how many the grammar takes and, if not all, why it refuses."""
        matcher = self.matchers.get(row)
        if matcher is None:
            return len(tokens), None
        taken = matcher.consume(tokens)
        return taken, None if taken == len(tokens) else matcher.problem()

    def consume(
        self, row: int, tokens: list[int], num_masked: int | None
    ) -> tuple[int, str | None]:
        """Consume a row's tokens of a captured step; returns how many the grammar takes.

        `num_masked`: how many of the tokens had masks, for a row that chooses first. If one of
        these is refused, the second value says why the row cannot go on.
        """
        matcher, count = self.matchers.get(row), len(tokens)
        if matcher is None:
            return count, None
        if num_masked is None or num_masked > count:
            num_masked = count
        taken = matcher.consume_chosen(tokens, num_masked)
        if taken < num_masked:
            return taken, matcher.problem()
        if row in self._asked_later:
            self._asked_later[row].note(taken)
        return taken, None

    def fit(self, row: int, nodes: Nodes | None, max_nodes: int) -> Nodes | None:
        """The row's draft without forbidden nodes, and with forced tokens added at its ends.

        Drawn nodes stay: leaving one out because of its value would bias verifiers that use q.
        """
        matcher = self.matchers.get(row)
        if matcher is None:
            return nodes
        return _Fit(matcher, nodes or NOTHING, max_nodes).nodes()


@dataclass(slots=True)
class _Place:
    """A node on the way through a draft (-1: the root)."""

    node: int
    children: list[int]  # those that are still to be looked at
    is_leaf: bool = True  # so far none of them was kept


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
        self.forced: list[tuple[int, list[int]]] = []  # kept nodes, and the tokens after each

    def nodes(self) -> Nodes | None:
        self._visit()
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
            method=self.old.method if self.kept else GRAMMAR,
        )

    def _visit(self) -> None:
        """Go to every node that the grammar allows; the matcher consumes the path to it.

        By a stack: a draft may be longer than calls may be deep.
        """
        path = [_Place(-1, self.children[0])]
        while path:
            at = path[-1]
            if not at.children:
                forced = self.matcher.forced(self.max_nodes) if at.is_leaf else []
                if forced:
                    self.forced.append((at.node, forced))
                path.pop()
                if path:
                    self.matcher.back(1)
                continue
            child = at.children.pop(0)
            token = self.tokens[child]
            if self.matcher.branch(token):
                self.kept.append(child)
                path.append(_Place(child, self.children[child + 1]))
            elif self.is_sampled[child] or (
                token in self.matcher.grammar.eos_ids and self.matcher.may_end()
            ):
                self._keep_all(child)
            else:
                continue
            at.is_leaf = False

    def _keep_all(self, node: int) -> None:
        """Keep a node and all below it."""
        todo = [node]
        while todo:
            self.kept.append(node := todo.pop())
            todo += self.children[node + 1]

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

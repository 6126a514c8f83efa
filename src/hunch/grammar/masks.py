"""Masks of many sequences at once, made by one thread or by several.

Most masks take a few microseconds, less than waking another thread. If much of the vocabulary may
follow, as inside strings of a bounded length, they can take a hundred times as long. Then several
threads make them, unless there are no free cores: both ways are timed all along.

Shape letters: M the roots and nodes of a step's sequences, W words of a mask, J jobs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from hunch.grammar.matcher import BITS, Matcher, Words

THREADS = (1, 2, 4, 8)
WAKE = 35e-6  # seconds that each thread adds, measured on the host of an H200
MIN_SHARED = 150e-6  # seconds of masks below which no thread is woken
AGAIN = 32  # every 32nd call makes masks in the other way, to time it
RATE, MAX_RISE = 0.25, 4.0  # weight of the newest masks in the mean, and the most they raise it
CHEAP = 10e-6  # seconds of a mask


class Job(NamedTuple):
    """A sequence whose masks are wanted: what may follow it and every node of its draft."""

    matcher: Matcher
    tokens: list[int]
    parents: list[int]
    first: int  # the mask of its root; those of its nodes follow


def fill_all(jobs: Sequence[Job], mask_MW: Words) -> None:
    """`Matcher.fill` for many sequences, by several cores at once.

    Masks of nodes must be zero; those of roots may hold anything.
    """
    roots: list[Job] = []
    drafts: list[Job] = []
    for job in jobs:
        matcher, tokens, parents, first = job
        if not matcher.is_free:
            mask_MW[first] = 0
            matcher.fill(tokens, parents, mask_MW[first : first + 1 + len(tokens)])
        elif tokens:
            drafts.append(job)
        elif (only := matcher.only_token()) is not None:
            _allow(only, mask_MW[first])
        else:
            roots.append(job)
    if roots:
        _fill_roots(roots, mask_MW)
    if drafts:
        _fill_drafts(drafts, mask_MW)
    for matcher, tokens, _, first in (*roots, *drafts):
        if matcher.recover():
            mask_MW[first : first + 1 + len(tokens)] = 0  # after an error nothing is allowed


def _fill_roots(jobs: list[Job], mask_MW: Words) -> None:
    """Write what may follow each sequence to its mask."""
    found_MW, size = mask_MW, jobs[0].matcher.grammar.num_words
    if size != mask_MW.shape[1]:  # the grammar engine's masks have another length
        found_MW = np.zeros((len(mask_MW), size), dtype=np.int32)
    roots = [(job.matcher.parser, job.first) for job in jobs]
    work, began = _COSTS.root * len(roots), perf_counter()
    if _COSTS.shares(work):
        executor = _COSTS.executor(_COSTS.count(len(roots), work))
        fill_next_token_bitmask_par(executor, roots, found_MW)
        _COSTS.shared(work, perf_counter() - began)
    else:
        address, num_bytes = found_MW.ctypes.data, found_MW.strides[0]
        for parser, row in roots:
            parser.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        _COSTS.root = _moved(_COSTS.root, perf_counter() - began, len(roots))
    if found_MW is not mask_MW:
        for job in jobs:
            _put(found_MW[job.first], mask_MW[job.first])


def _fill_drafts(jobs: list[Job], mask_MW: Words) -> None:
    """`_fill_roots` for sequences with drafts, and their nodes.

    The grammar engine takes chains: a tree is one chain per leaf, each with a matcher of its own.
    Branches share their first nodes, so each chain has rows of its own, which are then copied.
    """
    chains = [chain for job in jobs for chain in _chains(job)]
    size, begins = jobs[0].matcher.grammar.num_words, [chain.first for chain in chains]
    num_masks, found_MW = len(chains) + sum(len(chain.nodes) for chain in chains), mask_MW
    is_apart = len(chains) > len(jobs) or size != mask_MW.shape[1]
    if is_apart:
        begins = list(accumulate((1 + len(chain.nodes) for chain in chains), initial=0))[:-1]
        found_MW = np.zeros((num_masks, size), dtype=np.int32)
    drafts = [(one.parser, at, one.tokens) for one, at in zip(chains, begins, strict=True)]
    count, began = _COSTS.count(len(chains), _COSTS.node * num_masks), perf_counter()
    fill_next_token_bitmask_par_with_draft_tokens(_COSTS.executor(count), drafts, found_MW)
    seconds = perf_counter() - began - WAKE * count
    _COSTS.node = _moved(_COSTS.node, max(seconds, 0.0) * count, num_masks)
    if is_apart:
        for job in jobs:
            mask_MW[job.first] = 0
    for chain, at in zip(chains, begins, strict=True):
        if chain.parser.is_error():  # then nothing is allowed
            found_MW[at : at + 1 + len(chain.nodes)] = 0
        elif is_apart:
            for row, node in enumerate((-1, *chain.nodes), start=at):
                _put(found_MW[row], mask_MW[chain.first + 1 + node])


def _allow(token: int, mask_W: Words) -> None:
    """Allow this token and no other."""
    mask_W[:] = 0
    if token >> 5 < len(mask_W):
        mask_W[token >> 5] = BITS[token & 31]


def _put(found_W: Words, mask_W: Words) -> None:
    """Copy a mask that may be longer or shorter; nothing past the vocabulary is allowed."""
    size = min(len(found_W), len(mask_W))
    mask_W[:size], mask_W[size:] = found_W[:size], 0


class _Costs:
    """The recent seconds of masks, and how many threads are worth waking for them."""

    def __init__(self) -> None:
        self._executors: dict[int, LLExecutor] = {}
        self.root = self.node = CHEAP  # seconds of a mask by one thread, without a draft and with
        self._share = 0.6  # seconds of several threads per second of one
        self._num_asked = 0

    def executor(self, count: int) -> LLExecutor:
        if count not in self._executors:
            self._executors[count] = LLExecutor(num_threads=count)
        return self._executors[count]

    def shares(self, work: float) -> bool:
        """Whether several threads make masks that would take one `work` seconds."""
        self._num_asked += 1
        is_worth = self._share < 0.9
        if self._num_asked % AGAIN == 0:
            is_worth = not is_worth
        return work > MIN_SHARED and is_worth

    def shared(self, work: float, seconds: float) -> None:
        """Several threads made them in `seconds`."""
        self._share += RATE * (min(seconds / work, 2.0) - self._share)

    def count(self, num_chains: int, work: float) -> int:
        """How many threads are worth waking; one alone would take `work` seconds."""
        most = min(os.cpu_count() or 1, num_chains)
        counts = [count for count in THREADS if count <= most]
        return min(counts, key=lambda count: work / count + WAKE * count)


def _moved(mean: float, seconds: float, num_masks: int) -> float:
    """The new mean. Its rise is bounded: first masks take long, and threads may wait for cores."""
    if not num_masks:
        return mean
    newest = min(seconds / num_masks, MAX_RISE * max(mean, CHEAP))
    return max(mean + RATE * (newest - mean), 1e-7)


_COSTS = _Costs()


class _Chain(NamedTuple):
    """One path of a draft, from the root to a leaf."""

    parser: LLMatcher
    nodes: list[int]
    tokens: list[int]
    first: int


def _chains(job: Job) -> list[_Chain]:
    leaves = sorted(set(range(len(job.tokens))) - set(job.parents))
    chains: list[_Chain] = []
    for leaf in leaves:
        nodes: list[int] = []
        node = leaf
        while node >= 0:
            nodes.insert(0, node)
            node = job.parents[node]
        parser = job.matcher.parser if not chains else job.matcher.parser.deep_copy()
        chains.append(_Chain(parser, nodes, [job.tokens[node] for node in nodes], job.first))
    return chains

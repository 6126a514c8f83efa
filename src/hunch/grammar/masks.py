"""The masks of many sequences at once: who makes them, and where they are put.

Shape letters: M the roots and nodes of a step's sequences, W words of a mask.
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

from hunch.grammar.matcher import Matcher, Words

# Most masks take a few microseconds, and waking threads longer: on the host of an H200, 16 of them
# 103 us by one thread, 114 by two, 186 by four, 264 by eight. Inside strings of a bounded length
# they take thirty times as long. So as many threads are asked as masks of late were worth waking.
THREADS = (1, 2, 4, 8)
WAKE = 35e-6  # seconds that each thread adds
ALONE = 32  # every so often one thread makes the masks: only so is it known what one takes
RATE, MAX_RISE = 0.5, 3.0  # of the newest masks, in what one is thought to take
CHEAP = 10e-6  # seconds of a mask


class Job(NamedTuple):
    """A sequence whose masks are wanted: what may follow it and every node of its draft."""

    matcher: Matcher
    tokens: list[int]
    parents: list[int]
    first: int  # the row of the mask that is its root's; its nodes' follow


def fill_all(jobs: Sequence[Job], mask_MW: Words) -> None:
    """`Matcher.fill` for many sequences, by several cores at once.

    Rows of nodes come all zero; those of roots may hold anything.
    """
    roots: list[tuple[LLMatcher, int]] = []
    drafts: list[Job] = []
    is_whole = True  # the engine's masks are as long as ours
    for job in jobs:
        matcher, tokens, _, first = job
        if not matcher.is_free:
            mask_MW[first] = 0
            matcher.fill(tokens, job.parents, mask_MW[first : first + 1 + len(tokens)])
        elif tokens:
            drafts.append(job)
        else:
            is_whole &= matcher.grammar.num_words == mask_MW.shape[1]
            roots.append((matcher.place, first))
    if drafts:
        _read_drafts(drafts, mask_MW)
    if not roots:
        return
    found_MW = mask_MW
    if not is_whole:
        size = max(job.matcher.grammar.num_words for job in jobs)
        found_MW = np.zeros((len(mask_MW), size), dtype=np.int32)
    _read_roots(roots, found_MW)
    for job in jobs:
        if not job.tokens and job.matcher.place.is_error():
            found_MW[job.first] = 0  # a mask that cannot be told allows nothing
            job.matcher.recover()
    if not is_whole:
        for _, at in roots:
            _put(found_MW[at], mask_MW[at])


def _read_roots(roots: list[tuple[LLMatcher, int]], mask_MW: Words) -> None:
    """What may follow each sequence, into its row of the mask."""
    executor, began = _THREADS.of(len(roots)), perf_counter()
    if executor is not None:
        fill_next_token_bitmask_par(executor, roots, mask_MW)
    else:
        where, size = mask_MW.ctypes.data, mask_MW.strides[0]
        for place, at in roots:
            place.unsafe_compute_mask_ptr(where + at * size, size)
    _THREADS.took(len(roots), perf_counter() - began)


def _read_drafts(jobs: list[Job], mask_MW: Words) -> None:
    """The same of sequences with drafts, and of their nodes.

    The engine reads chains: a tree is read as one chain per leaf, each by a matcher of its own.
    Branches share their first nodes, so each is read into rows of its own, then put in place.
    """
    chains = [chain for job in jobs for chain in _chains(job)]
    begins = list(accumulate((1 + len(chain.nodes) for chain in chains), initial=0))
    size = jobs[0].matcher.grammar.num_words
    found_MW = np.zeros((begins.pop(), size), dtype=np.int32)
    drafts = [(one.place, at, one.tokens) for one, at in zip(chains, begins, strict=True)]
    executor, began = _THREADS.of(len(chains)) or _THREADS.one, perf_counter()
    fill_next_token_bitmask_par_with_draft_tokens(executor, drafts, found_MW)
    _THREADS.took(len(chains), perf_counter() - began)
    for job in jobs:
        mask_MW[job.first] = 0
    for chain, at in zip(chains, begins, strict=True):
        if not chain.place.is_error():
            for row, node in enumerate((-1, *chain.nodes), start=at):
                _put(found_MW[row], mask_MW[chain.first + 1 + node])
    for job in jobs:
        job.matcher.recover()


def _put(found_W: Words, mask_W: Words) -> None:
    """One that may be longer or shorter: nothing past the vocabulary is allowed."""
    size = min(len(found_W), len(mask_W))
    mask_W[:size], mask_W[size:] = found_W[:size], 0


class _Threads:
    """Who makes masks: the thread that asks where they are cheap, else as many as are worth it."""

    def __init__(self) -> None:
        self._executors: dict[int, LLExecutor] = {}
        self._count = 1
        self._num_asked = 0
        self._seconds = 0.0  # that a chain's masks took of late, by one thread

    @property
    def one(self) -> LLExecutor:
        return self._executor(1)

    def of(self, num_chains: int) -> LLExecutor | None:
        """For so many chains; None: nobody else."""
        most, work = min(os.cpu_count() or 1, num_chains), self._seconds * num_chains
        self._num_asked += 1
        self._count = 1
        if work > 2 * WAKE and self._num_asked % ALONE:
            waking = {count: WAKE * count * (count > 1) for count in THREADS if count <= most}
            self._count = min(waking, key=lambda count: work / count + waking[count])
        return None if self._count == 1 else self._executor(self._count)

    def _executor(self, count: int) -> LLExecutor:
        if count not in self._executors:
            self._executors[count] = LLExecutor(num_threads=count)
        return self._executors[count]

    def took(self, num_chains: int, seconds: float) -> None:
        """The last masks took so long."""
        if self._count == 1:
            # A grammar's first masks take long once; a thread may have to wait for a core.
            most = MAX_RISE * max(self._seconds, CHEAP)
            self._seconds += RATE * (min(seconds / num_chains, most) - self._seconds)


_THREADS = _Threads()


class _Chain(NamedTuple):
    """One path of a draft, from the root to a leaf."""

    place: LLMatcher
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
        place = job.matcher.place if not chains else job.matcher.place.deep_copy()
        chains.append(_Chain(place, nodes, [job.tokens[node] for node in nodes], job.first))
    return chains

"""The masks of many sequences at once: who makes them, and where they are put.

Most masks take a few microseconds, less than waking another thread. Where much of the vocabulary
may follow, as inside strings of a bounded length, they can take a hundred times as long. So the
caller makes the short ones itself, and other threads meanwhile make the rest.

Shape letters: M the roots and nodes of a step's sequences, W words of a mask.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

THREADS = (1, 2, 4, 8)
WAKE = 35e-6  # seconds that each thread adds, measured on the host of an H200
ALONE = 250e-6  # seconds of short masks that the caller makes itself
EVERY = 16  # word of a mask that is looked at: wide masks allow something in most of them
RATE, MAX_RISE = 0.25, 4.0  # of the newest masks, in what one is thought to take
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
    short: list[Job] = []  # masks that the caller makes
    long: list[Job] = []
    drafts: list[Job] = []
    for job in jobs:
        matcher, tokens, _, first = job
        if not matcher.is_free:
            mask_MW[first] = 0
            matcher.fill(tokens, job.parents, mask_MW[first : first + 1 + len(tokens)])
        elif tokens:
            drafts.append(job)
        else:
            (long if matcher.is_wide else short).append(job)
    if short or long:
        num_kept = _COSTS.num_kept(len(short))
        _fill_roots(short[:num_kept], short[num_kept:] + long, mask_MW)
    if drafts:
        _fill_drafts(drafts, mask_MW)
    size = mask_MW.shape[1]
    is_wide_M = 2 * np.count_nonzero(mask_MW[:, ::EVERY], axis=1) > -(-size // EVERY)
    for job in jobs:
        job.matcher.is_wide = bool(is_wide_M[job.first])
        job.matcher.recover()


def _fill_roots(short: list[Job], long: list[Job], mask_MW: Words) -> None:
    """What may follow each sequence, into its row of the mask."""
    found_MW, size = mask_MW, (short or long)[0].matcher.grammar.num_words
    if size != mask_MW.shape[1]:  # the engine's masks are not as long as ours
        found_MW = np.zeros((len(mask_MW), size), dtype=np.int32)
    if long and short and _COSTS.is_worth_waking(len(long)):
        others = _COSTS.helper.submit(_fill_long, long, found_MW)
        _fill_short(short, found_MW)
        others.result()
    else:
        _fill_short(short, found_MW)
        _fill_long(long, found_MW)
    for matcher, _, _, first in (*short, *long):
        if matcher.place.is_error():
            found_MW[first] = 0  # a mask that cannot be told allows nothing
        if found_MW is not mask_MW:
            _put(found_MW[first], mask_MW[first])


def _fill_short(jobs: list[Job], mask_MW: Words) -> None:
    """By this thread, one after another."""
    where, size, began = mask_MW.ctypes.data, mask_MW.strides[0], perf_counter()
    for matcher, _, _, first in jobs:
        matcher.place.unsafe_compute_mask_ptr(where + first * size, size)
    if jobs:
        _COSTS.short = _moved(_COSTS.short, (perf_counter() - began) / len(jobs))


def _fill_long(jobs: list[Job], mask_MW: Words) -> None:
    """By other threads, at the same time."""
    if jobs:
        roots, count = [(job.matcher.place, job.first) for job in jobs], _COSTS.count(len(jobs))
        executor, began = _COSTS.executor(count), perf_counter()
        fill_next_token_bitmask_par(executor, roots, mask_MW)
        _COSTS.took(perf_counter() - began, count, len(jobs))


def _fill_drafts(jobs: list[Job], mask_MW: Words) -> None:
    """The same of sequences with drafts, and of their nodes.

    The engine reads chains: a tree is read as one chain per leaf, each by a matcher of its own.
    Branches share their first nodes, so each is read into rows of its own, then put in place.
    """
    chains = [chain for job in jobs for chain in _chains(job)]
    size, begins = jobs[0].matcher.grammar.num_words, [chain.first for chain in chains]
    num_masks, found_MW = len(chains) + sum(len(chain.nodes) for chain in chains), mask_MW
    is_apart = len(chains) > len(jobs) or size != mask_MW.shape[1]
    if is_apart:
        begins = list(accumulate((1 + len(chain.nodes) for chain in chains), initial=0))[:-1]
        found_MW = np.zeros((num_masks, size), dtype=np.int32)
    drafts = [(one.place, at, one.tokens) for one, at in zip(chains, begins, strict=True)]
    count = _COSTS.count(len(chains), num_masks)
    executor, began = _COSTS.executor(count), perf_counter()
    fill_next_token_bitmask_par_with_draft_tokens(executor, drafts, found_MW)
    _COSTS.took(perf_counter() - began, count, num_masks)
    if is_apart:
        for job in jobs:
            mask_MW[job.first] = 0
    for chain, at in zip(chains, begins, strict=True):
        if chain.place.is_error():  # a mask that cannot be told allows nothing
            found_MW[at : at + 1 + len(chain.nodes)] = 0
        elif is_apart:
            for row, node in enumerate((-1, *chain.nodes), start=at):
                _put(found_MW[row], mask_MW[chain.first + 1 + node])


def _put(found_W: Words, mask_W: Words) -> None:
    """One that may be longer or shorter: nothing past the vocabulary is allowed."""
    size = min(len(found_W), len(mask_W))
    mask_W[:size], mask_W[size:] = found_W[:size], 0


class _Costs:
    """What masks took of late, and how many threads are worth waking for them."""

    def __init__(self) -> None:
        self._executors: dict[int, LLExecutor] = {}
        self._helper: ThreadPoolExecutor | None = None
        self.short = self.long = CHEAP  # seconds of a mask, by one thread

    @property
    def helper(self) -> ThreadPoolExecutor:
        """A thread that waits for the others, while the caller has work of its own."""
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="hunch-masks")
        return self._helper

    def executor(self, count: int) -> LLExecutor:
        if count not in self._executors:
            self._executors[count] = LLExecutor(num_threads=count)
        return self._executors[count]

    def num_kept(self, num_short: int) -> int:
        """How many short masks the caller makes itself."""
        return min(num_short, max(1, int(ALONE / self.short)))

    def is_worth_waking(self, num_long: int) -> bool:
        return self.long * num_long > 2 * WAKE

    def count(self, num_chains: int, num_masks: int | None = None) -> int:
        """Threads for so many chains, with so many masks in all."""
        most, work = min(os.cpu_count() or 1, num_chains), self.long * (num_masks or num_chains)
        counts = [count for count in THREADS if count <= most]
        return min(counts, key=lambda count: work / count + WAKE * count)

    def took(self, seconds: float, count: int, num_masks: int) -> None:
        """So many threads made so many long masks."""
        self.long = _moved(self.long, (seconds - WAKE * count) * count / num_masks)


def _moved(mean: float, newest: float) -> float:
    """A grammar's first masks take long once; a thread may have to wait for a core."""
    newest = min(max(newest, 1e-6), MAX_RISE * max(mean, CHEAP))
    return mean + RATE * (newest - mean)


_COSTS = _Costs()


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

"""Recent answers of other requests, for `suffix:shared=true`: on the host, and on a device.

In captured steps the host only notes which requests are in which rows. When one leaves, its answer
is copied to the device, where the rows of later steps look it up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.kernels.lookup import MAX_MATCH, SuffixText
from hunch.kernels.shared_texts import SharedTexts
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden
from hunch.types import Request


class Store:
    """Recent outputs in two halves; when the younger is full, the older is dropped at once."""

    def __init__(self, max_tokens: int) -> None:
        self._half = max(1, max_tokens // 2)
        self.young, self.old = SuffixText(), SuffixText()

    def add(self, tokens: list[int]) -> None:
        if len(self.young.tokens) + len(tokens) > self._half:
            self.young, self.old = SuffixText(), self.young
        self.young.extend([*tokens[-self._half + 1 :], -1])  # -1: no match crosses the end

    def find(self, tail: list[int]) -> tuple[int, list[int], SuffixText]:
        length, places = self.young.find(tail)
        older, older_places = self.old.find(tail)
        if older > length:
            return older, older_places, self.old
        return length, places, self.young


class SharedAnswers:
    """Copies the answers of requests that leave to a device."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.texts = SharedTexts.create(max(num_tokens, 2), device)
        self._first = 0  # the oldest place, which the next answer is written to
        self._requests: dict[int, Request] = {}  # by row
        self.rows: Rows | None = None  # as last seen

    def note(self, rows: Rows) -> None:
        """See which requests are in these rows."""
        self.rows = rows
        for row in rows.ids_R.tolist():
            request = rows.request(row)
            if request is not None:
                self._requests[row] = request

    def forget(self, ids: list[int]) -> None:
        """Keep the answers of requests that left these rows."""
        for row in ids:
            request, rows = self._requests.get(row), self.rows
            if request is None or rows is None:
                continue
            if rows.requests and rows.requests[row] is request:
                continue  # captured steps take the row over: its answer goes on
            del self._requests[row]
            first, last = int(rows.prompt_X[row]), int(rows.known_X[row])
            answer: list[int] = rows.tokens_XL[row, first:last].tolist()
            if len(answer) > 1:
                self._first = self.texts.add(answer, self._first)

    def clear(self) -> None:
        self.forget(list(self._requests))  # those that left their rows and were not yet kept
        self.texts.clear()


@dataclass(kw_only=True)
class DeviceShared(DeviceDrafter):
    """Guesses what followed the longest match of a row's end, in its own text or in answers."""

    texts: SharedTexts

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_lookup import lookup
        from hunch.kernels.gpu_recall import recall

        lookup(state, step, self.num_nodes, 1, MAX_MATCH)
        recall(state, step, self.num_nodes, self.texts)

    @property
    def host_observes(self) -> bool:
        """It sees requests begin and end."""
        return True

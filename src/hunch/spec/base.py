"""The one interface a drafting method implements, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.kernels.attention import KVCache
from hunch.sampling.state import SamplingState
from hunch.spec.cost import CostCurve


class Drafter(Protocol):
    """Guesses ahead. It can only save time: the target decides every token."""

    needs: Needs

    def observe(self, step: TargetStep) -> None:
        """What the target just committed: tokens, features, slots."""

    def propose(self, rows: Rows) -> Draft:
        """A tree per row of rows.ids_R, at most rows.max_draft_X nodes each; zero nodes is fine."""

    def forget(self, rows: list[int]) -> None:
        """Requests that left these rows; another may enter them next."""


@runtime_checkable
class Clears(Protocol):
    """A drafter that keeps something of requests that left."""

    def clear(self) -> None:
        """Drop it."""


@dataclass(slots=True)
class DrafterContext:
    """What a drafter is built with: `Method(options: dict[str, str], path, context)`.

    `kv` is set after construction and before the first observe, for a drafter whose needs name one.
    """

    target: Any  # the target Decoder
    sampling: SamplingState  # parameters of every row, and the target's noise
    cost: CostCurve  # what a pass costs on this machine, by packed tokens
    device: torch.device
    max_rows: int
    max_len: int
    vocab_size: int
    wants_q: bool = (
        False  # the verifier weighs draws: use noise of your own, say what you drew from
    )
    vocab: dict[str, int] | None = None  # the target's tokens, for comparing vocabularies
    kv: KVCache | None = None
    group: int = 0  # index of its KV group in computed_GX

"""Values on a device that target, verifier and drafter give each other.

Shape letters: X rows of the engine, R rows of this step, L longest sequence, N nodes of a draft,
K tokens one step can commit (longest path + 1), G KV groups, B blocks of a table, T packed tokens,
D width, V vocabulary, M tokens that were checked, C likeliest tokens after each. Token ids,
positions and slots are int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hunch.types import GroupInfo, Request


@dataclass(slots=True)
class Draft:
    """A tree of guesses per row. A chain is a tree of width one; zero nodes is plain decoding.

    Nodes are in topological order: parents come before children. No two children of one parent have
    the same token.
    """

    tokens_RN: Tensor
    parents_RN: Tensor  # index of the parent node in the same row; -1: the row's last known token
    num_nodes_R: Tensor  # nodes past this are padding
    q_RNV: Tensor | None = None  # the distribution a node was drawn from, if the verifier uses it
    is_sampled_RN: Tensor | None = None  # whether it was drawn from q; else it was chosen
    methods: Sequence[str] | None = None  # the method of each row, if several are loaded
    # Each row's tokens and parents as arrays, if the drafter has them; the tokens may change when
    # it drafts for the row again.
    arrays: Sequence[tuple[np.ndarray, np.ndarray]] | None = None

    def to(self, device: torch.device) -> Draft:
        """The same draft on a device."""
        if device.type == self.tokens_RN.device.type:
            return self
        return Draft(
            _sent(self.tokens_RN, device),
            _sent(self.parents_RN, device),
            _sent(self.num_nodes_R, device),
            None if self.q_RNV is None else self.q_RNV.to(device),
            None if self.is_sampled_RN is None else self.is_sampled_RN.to(device),
            self.methods,
        )

    @staticmethod
    def empty(num_rows: int, device: torch.device | str = "cpu") -> Draft:
        nothing = torch.empty(num_rows, 0, dtype=torch.int64, device=device)
        return Draft(nothing, nothing, torch.zeros(num_rows, dtype=torch.int64, device=device))

    @staticmethod
    def chains(chains: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """A chain per row, padded to the longest."""
        num_nodes = max(map(len, chains), default=0)
        tokens = [chain + [0] * (num_nodes - len(chain)) for chain in chains]
        tokens_RN = torch.tensor(tokens, dtype=torch.int64, device=device)
        parents_RN = torch.arange(-1, num_nodes - 1, device=device).expand(len(chains), num_nodes)
        num_nodes_R = torch.tensor([len(c) for c in chains], device=device)
        return Draft(tokens_RN.reshape(len(chains), num_nodes), parents_RN, num_nodes_R)


@dataclass(slots=True)
class Verdict:
    """What the target decided about a draft: `num_tokens` = accepted nodes + 1 (the bonus)."""

    tokens_RK: Tensor  # the tokens to commit, padded
    num_tokens_R: Tensor
    path_RK: Tensor  # the accepted node behind each committed token; -1 for the bonus and padding


@dataclass(slots=True)
class Rows:
    """Per-request state that persists from step to step; `ids_R` names the rows of this step.

    For drafters it is in the host's memory.
    Tokens at positions below known_X are known; KV of group g is written below computed_GX[g].
    Position p has slot table[p // block_size] * block_size + p % block_size.
    """

    ids_R: Tensor
    tokens_XL: Tensor
    known_X: Tensor
    prompt_X: Tensor  # prompt length
    end_X: Tensor  # known length at which max_tokens is reached
    computed_GX: Tensor
    table_XB: Tensor  # block ids
    max_draft_X: Tensor  # most nodes the row may draft now (0: plain), never past its end
    block_size: int
    requests: Sequence[Request | None] = ()  # of each of the X rows; None: free, or just finished

    def request(self, row: int) -> Request | None:
        return self.requests[row] if self.requests else None

    def to(self, device: torch.device) -> Rows:
        """The same with rows and lengths on a device, for a verifier there."""
        if device.type == self.ids_R.device.type:
            return self
        return replace(self, ids_R=_sent(self.ids_R, device), known_X=_sent(self.known_X, device))


@dataclass(slots=True)
class TargetStep:
    """What the target just did for `rows`: known tokens processed, then some committed.

    Row r processed positions [start_R[r], stop_R[r]) with states of each, packed row after row,
    those of row r from offset_R[r] on. Rejected nodes are not among them. Tokens up to
    known_X[row], the bonus included, are in rows.tokens_XL.
    """

    rows: Rows
    start_R: Tensor
    stop_R: Tensor  # known length without the bonus
    offset_R: Tensor
    hidden_TD: Tensor | None  # states after the final norm; None: the drafter needs none
    features: tuple[Tensor, ...] = ()  # outputs after Needs.feature_layers, each TD
    # The row committed a token and may draft; None: the drafter needs no states.
    is_caught_up_R: Tensor | None = None
    # Roots and nodes, rejected ones too; and the target's `Needs.top` best tokens after each.
    checked_M: Tensor | None = None
    top_MC: Tensor | None = None  # best first

    @staticmethod
    def without_states(rows: Rows) -> TargetStep:
        """For a drafter that needs no states: the columns that locate them are empty."""
        nowhere = torch.empty(0, dtype=torch.int64)
        return TargetStep(rows, nowhere, nowhere, nowhere, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Storage of one KV group."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_shared: bool = False  # keys serve as values
    others: KVShape | None = None  # storage of the last layers, if their heads have another shape

    @staticmethod
    def of(
        shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, is_shared: bool = False
    ) -> KVShape:
        """From (layers, KV heads, head width) of each shape that a model has."""
        (num_layers, num_kv_heads, head_dim), *rest = shapes
        return KVShape(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            is_shared=is_shared,
            others=KVShape.of(rest, dtype, is_shared) if rest else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a drafter needs from the runner, as data: the runner never looks at its name."""

    max_nodes: int  # most nodes one draft may have
    feature_layers: tuple[int, ...] = ()  # outputs after this many target layers (0: embeddings)
    hidden: bool = False  # the target's last hidden state, after the final norm
    top: int = 0  # how many of the target's best tokens after each checked token
    kv: KVShape | None = None  # a KV group of its own; None: it keeps no KV
    group: GroupInfo | None = None  # that group's name and properties
    weight_bytes: int = 0  # of the drafter's weights
    methods: Mapping[str, int] = field(default_factory=dict)  # of several: name -> its most nodes


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. Only copies to the host wait for the device."""
    return tensor.to(device, non_blocking=device.type != "cpu")

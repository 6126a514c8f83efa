"""Protocols: what a target offers, by whatever kernels, and what its backend offers drafters.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Weight
from hunch.kernels.recurrence import StatesShape
from hunch.layers.linear import Linear
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.parallel.group import Exchange
from hunch.registry import BACKENDS, resolve

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_tiling import Tiler, Tiling


@dataclass(slots=True)
class Hidden:
    """The states of a pass, for every packed token."""

    last_TD: Tensor  # after the final norm
    # The residual stream (of several, the first) after each layer that was asked for; each TD.
    features: tuple[Tensor, ...] = ()


class DraftNet(Protocol):
    """A drafter's network, for whose parts a backend may have kernels."""

    spec: ModelSpec


class Backend(Protocol):
    """A set of kernels: its properties, and what it does for drafters beside a target that uses it.

    Passes are not here: each backend has a `Target` of its own, which names it (`Target.backend`).
    Another kind of device needs both, and a line in `registry.BACKENDS`.
    """

    name: str  # for reports
    about: str  # the same in words
    captures_steps: bool  # passes ask nothing of the host, so that a whole step can be captured
    has_host_kernels: bool  # lookups, and chains of a single row, are one call of C++ each

    def convert_layer(self, layer: Linear, target: Target) -> tuple[Linear, int]:
        """A drafter's layer in the form that the kernels read, and its bytes outside of tensors."""

    def shared_output(self, target: Target, *own: Linear | None) -> Callable[[Tensor], Tensor]:
        """A function from a drafter's states to logits, by the target's output matrix.

        own: the output matrices of the drafter's heads; None: the head uses the target's.
        """

    def accelerate(self, net: DraftNet, target: Target, blocks: list[Any], **parts: Any) -> None:
        """Let the kernels compute a network that drafts token by token, if they can.

        parts: its layers before and after `blocks`; see `build_network` and `build_fused`.
        """

    def accelerate_blocks(self, net: DraftNet, target: Target) -> None:
        """Let the kernels compute a network that drafts a whole block of tokens, if they can."""

    def load_draft(self, weights: Weights, target: Target, dtype: str) -> Target:
        """A draft model with all its weights, in the precision that suits this target."""

    def load_cut(
        self, weights: Weights, spec: ModelSpec, target: Target, dtype: str, ids_C: Tensor | None
    ) -> Target:
        """A draft model that shares the target's embedding and output matrix.

        ids_C: the target's tokens that it can draft; None: all.
        """


@cache
def find_backend(name: str) -> Backend:
    """The backend of this name in the registry.

    A target names its backend and does not import it, as the backend imports targets.
    """
    found: Backend = resolve(BACKENDS, name)
    return found


class Target(Protocol):
    """A model that checks drafts, or a draft model. It is given its KV cache and positions."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def backend(self) -> Backend:
        """The backend whose kernels compute its passes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its hidden states."""

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are held in fewer than 16 bits; a drafter beside it is, too."""

    @property
    def activation_bits(self) -> int | None:
        """Bits that its products round activations to; None: they are not rounded."""

    @property
    def tables(self) -> tuple[Tensor, Weight] | None:
        """Embedding and output matrix; None: the kernels have them in a layout of their own."""

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """One pass: writes each token's KV and returns its hidden state."""

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """A pass that starts from the residual stream of earlier layers instead of token ids."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token of the vocabulary, after each of these hidden states."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """Token embeddings."""

    def output_rows(self, ids_C: Tensor) -> Tensor:
        """Rows of the output matrix, [C, D]."""

    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head width of the cache on this device, for each shape of heads."""

    def states_of(self, num_rows: int, max_nodes: int) -> StatesShape | None:
        """What recurrent layers keep on this device; None: the model has none."""

    def new_kv(self, num_slots: int, num_rows: int = 1) -> KVCache:
        """An empty cache of this many slots, with states of this many rows."""


@runtime_checkable
class FusedTarget(Protocol):
    """What captured passes and steps ask of a target."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tiler(self) -> Tiler:
        """Divides the attention of a pass among a GPU's programs."""

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        """How the attention of a pass over these spans is divided."""

    @property
    def timing(self) -> AbstractContextManager[object]:
        """A context for timing steps without rows: padding then does as much work as tokens."""

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden: ...

    def logits(self, hidden_MD: Tensor) -> Tensor: ...


@runtime_checkable
class SaysExchanges(Protocol):
    """One rank's part of a target, which knows what its passes exchange with the other ranks."""

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """All exchanges of a pass over this many tokens, in order."""

    def logit_exchange(self, num_rows: int) -> Exchange:
        """The exchange of `logits` of this many states."""


@dataclass(slots=True)
class BegunPass:
    """A pass that other processes have been told to begin; this process has not done its part."""

    ids_T: Tensor
    attn: AttnInputs
    kv: KVCache
    feature_layers: tuple[int, ...]


@runtime_checkable
class OverProcesses(Protocol):
    """What a target whose parts are in several processes offers in addition."""

    @property
    def max_under_way(self) -> int:
        """Passes that may be under way at once; they must be of different rows."""

    @property
    def most_kv_layers(self) -> int:
        """The most layers whose KV one process keeps."""

    def begin(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> BegunPass:
        """Let the other processes begin a pass. Passes are finished in the order they begin in."""

    def finish(self, begun: BegunPass) -> Hidden:
        """Do this process's part of a begun pass; returns its states."""

    def with_draft_size(self, size: int | None) -> Target:
        """The same target, whose draft models are split over this many ranks.

        None: over the number of ranks that takes the least time.
        """

    def check_alive(self) -> None:
        """Raise if a process has ended: results must not be used then."""

    def check_step(self) -> None:
        """The same, and raise if a process ran out of memory in a pass since the last call."""

    def undo(self) -> None:
        """A step has failed: forget what its pass has written, on all processes."""

    def close(self) -> None:
        """End the other processes."""


@runtime_checkable
class HoldsKV(Protocol):
    """A target whose kernels can read keys and values of another precision than its own."""

    def hold_kv(self, dtype: torch.dtype) -> None:
        """Keep keys and values in this precision; called before a cache is made."""

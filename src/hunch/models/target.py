"""What a target model offers, whatever computes it, and loading one on the best kernels there are.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary, C tokens.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.config import KV_DTYPES, ModelConfig
from hunch.errors import ConfigError, UnsupportedModelError
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Weight
from hunch.kernels.recurrence import StatesShape
from hunch.models.backends import Backend
from hunch.models.decoder import Decoder, Hidden
from hunch.models.load import dtype_of, load_decoder
from hunch.models.native import DTYPES, activation_bits, load_native, not_native
from hunch.models.spec import ModelSpec
from hunch.models.stage import WHOLE, Stage
from hunch.models.weights import Weights, for_length
from hunch.models.weights.adapter import AdaptedWeights
from hunch.parallel.group import SINGLE, Exchange, Group

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_tiling import Tiler, Tiling

log = logging.getLogger("hunch")


class Target(Protocol):
    """A model that checks drafts, or drafts itself. Its KV and positions come in."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def backend(self) -> Backend:
        """What computes its passes."""

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
        """Embedding and output matrix; None where the kernels hold them in a layout of theirs."""

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """One pass: writes each token's KV and returns its hidden state."""

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """The same where other layers stand before these, and left a residual stream."""

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token after each given hidden state."""

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
    """What captured passes and steps ask of a target: its kernels take buffers that stay."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tiler(self) -> Tiler:
        """Shares out attention over the tokens of a pass."""

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        """How a pass over these spans shares it out."""

    @property
    def timing(self) -> AbstractContextManager[object]:
        """Around runs that are timed with nobody in them."""

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden: ...

    def logits(self, hidden_MD: Tensor) -> Tensor: ...


@runtime_checkable
class SaysExchanges(Protocol):
    """A part of a target that knows what its passes exchange with the other parts."""

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """In a pass over so many tokens, in its order."""

    def logit_exchange(self, num_rows: int) -> Exchange:
        """In `logits` of so many states."""


@dataclass(slots=True)
class BegunPass:
    """A pass that other processes are at, or have done."""

    ids_T: Tensor
    attn: AttnInputs
    kv: KVCache
    feature_layers: tuple[int, ...]


@runtime_checkable
class OverProcesses(Protocol):
    """What a target whose parts are in several processes offers beside."""

    @property
    def max_under_way(self) -> int:
        """Passes that may be under way at once; they must be of different rows."""

    @property
    def most_kv_layers(self) -> int:
        """Layers whose KV one process keeps, at most."""

    def begin(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> BegunPass:
        """Let the other processes begin with a pass; `finish` takes passes up in the same order."""

    def finish(self, begun: BegunPass) -> Hidden:
        """The states after a pass."""

    def with_draft_size(self, size: int | None) -> Target:
        """The same target, beside which draft models are split over this many ranks.

        None: over as many as take the least time.
        """

    def check_alive(self) -> None:
        """Raise where a process is gone: results must not be used then."""

    def check_step(self) -> None:
        """The same, and raise where one ran out of memory in a pass since the last call."""

    def undo(self) -> None:
        """A step has failed: forget what its pass has written, on all processes."""

    def close(self) -> None:
        """End the other processes."""


@runtime_checkable
class HoldsKV(Protocol):
    """A target whose kernels read keys and values of another precision than its own."""

    def hold_kv(self, dtype: torch.dtype) -> None:
        """Hold them so, before a cache is made."""


def exactness(target: Target) -> str:
    """Whether a row's bits depend on nothing but the row, and what sees to it."""
    is_exact = not isinstance(target, Decoder) or target.is_exact  # torch's alone may not be
    how = f"{target.backend.name}: {target.backend.about}"
    return f"bit for bit ({how})" if is_exact else "no (torch: sums go by the number of rows)"


def pick_device(device: str) -> str:
    """cpu or cuda, where a user may have said auto."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use device='cpu'")
    return device


def load_target(
    model: ModelConfig,
    weights: Weights,
    device: torch.device,
    group: Group = SINGLE,
    stage: Stage = WHOLE,
) -> Target:
    """The model of `weights`, as the config wants it held; by torch where there are no kernels.

    Each rank of a group loads its part, and each stage of a pipeline its layers.
    """
    weights = for_length(weights, model.max_model_len)
    dtype = dtype_of(model, weights)
    if model.lora is not None:
        weights = AdaptedWeights(weights, model.lora)
    is_native = model.kernels == "auto" and dtype in DTYPES
    if device.type == "cpu" and is_native:
        bits = activation_bits(ModelSpec.from_config(weights.config), model.activation_bits)
        target = load_native(
            weights,
            dtype=dtype,
            num_threads=model.threads,
            bits=bits,
            group=group,
            stage=stage,
        )
        if target is not None:
            return with_kv(target, model.kv_cache_dtype)
        if problems := not_native(ModelSpec.from_config(weights.config)):
            words = ", ".join(problems)
            log.warning("the CPU's kernels do not know %s: torch computes, exactly, slower", words)
    elif device.type == "cpu" and model.kernels == "auto":
        log.warning("the CPU's kernels do not compute in %s: torch does, slower", dtype)
    decoder = load_decoder(weights, dtype=dtype, device=device, group=group, stage=stage)
    if device.type == "cpu":
        decoder.expand()
    if device.type == "cuda" and model.kernels == "auto":
        from hunch.models.cuda import CudaDecoder  # needs Triton

        try:
            return with_kv(CudaDecoder(decoder), model.kv_cache_dtype)
        except UnsupportedModelError as error:
            log.warning("%s: using torch's own kernels, slowly, so that text stays exact", error)
            decoder.expand()
    if device.type == "cuda":
        decoder.make_exact()
    return with_kv(decoder, model.kv_cache_dtype)


def with_kv(target: Target, kv_dtype: str) -> Target:
    """The model with keys and values held as a user wants it: rounded once, when written."""
    if kv_dtype == "auto":
        return target
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype={kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if not isinstance(target, HoldsKV) or target.spec.latent is not None:
        raise ConfigError(
            f"KV in {kv_dtype}: not for latent attention, nor for a draft model that is split "
            "over processes; leave it out for this model"
        )
    target.hold_kv(torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn)
    return target

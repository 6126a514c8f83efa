"""The gated delta rule: what a recurrent layer remembers of a row, folded in token by token.

A row's state holds known tokens alone. Drafted nodes are folded into a copy that is dropped. Their
inputs stay in a ring, and the next pass first folds in those of the accepted nodes. So a rejected
node leaves no trace, and there is one state per row, not one per node. Every token is folded in by
itself, in order: chunks and drafts do not change a bit.

Shape letters: T packed tokens, S sequences of the step, X rows of the engine, L recurrent layers,
G places of the ring, C channels of the convolution, I = C + 2N inputs of a token, K key heads,
N value heads, H width of a key, D width of a value, J taps of the convolution.
Paper: arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import sigmoid
from hunch.kernels.attention import AttnInputs, Span, spans_of

NORM_EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """The sizes of a gated delta net."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_taps: int  # tokens that the convolution sees, its own included
    is_tiled: bool = False  # value head n has key head n % K; else n // (N / K)

    @property
    def key_width(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def value_width(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def num_inputs(self) -> int:
        """Inputs per token: the channels, then what beta and decay come from, per value head."""
        return self.num_channels + 2 * self.num_v_heads


@dataclass(frozen=True, slots=True)
class StatesShape:
    """How much recurrent layers keep."""

    delta: DeltaShape
    num_layers: int
    num_rows: int
    max_nodes: int  # of a draft

    @property
    def states(self) -> tuple[int, ...]:
        delta = self.delta
        return self.num_layers, self.num_rows, delta.num_v_heads, delta.k_dim, delta.v_dim

    @property
    def inputs(self) -> tuple[int, ...]:
        """The ring has room for a draft and for what its first node's convolution sees."""
        num_places = 1 << (self.max_nodes + self.delta.num_taps - 1).bit_length()
        return self.num_layers, self.num_rows, num_places, self.delta.num_inputs

    def num_bytes(self, dtype: torch.dtype) -> int:
        return 4 * prod(self.states) + dtype.itemsize * prod(self.inputs)


@dataclass(slots=True)
class DeltaWeights:
    """What a layer folds tokens in with; float32."""

    conv_JC: Tensor  # the tap of the token itself is the last
    rate_N: Tensor  # below zero: how fast a head forgets
    bias_N: Tensor  # added to what the decay comes from


@dataclass(slots=True)
class RowStates:
    """What recurrent layers remember of each row; a row that begins at position 0 begins anew."""

    state_LXNHD: Tensor  # float32
    inputs_LXGI: Tensor  # of position p in place p % G, as the layer's product gave them
    folded_LX: Tensor  # tokens of the row that the state holds
    on_copy: list[Callable[[int, int], None]] = field(default_factory=list)

    def copy(self, source: int, target: int) -> None:
        """Let a row remember what another one does."""
        for tensor in (self.state_LXNHD, self.inputs_LXGI, self.folded_LX):
            tensor[:, target] = tensor[:, source]
        for tell in self.on_copy:
            tell(source, target)

    def is_ahead(self, row: int, num_computed: int) -> bool:
        """Whether a step that failed has left states with more tokens than were computed.

        Then the step cannot be repeated: the row has to begin again, at position 0.
        """
        return num_computed > 0 and bool((self.folded_LX[:, row] > num_computed).any())

    @staticmethod
    def create(
        shape: StatesShape | None,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> RowStates | None:
        """Inputs are of the model's precision."""
        if shape is None:
            return None
        num_rows = shape.num_layers, shape.num_rows
        return RowStates(
            zeros(shape.states, dtype=torch.float32, device=device),
            zeros(shape.inputs, dtype=dtype, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


def split_inputs(shape: DeltaShape, x_I: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Channels, then what beta and what the decay come from."""
    sizes = (shape.num_channels, shape.num_v_heads, shape.num_v_heads)
    channels, beta, decay = x_I.split_with_sizes(sizes, -1)
    return channels, beta, decay


def fold(
    shape: DeltaShape, weights: DeltaWeights, window_JI: Tensor, state_NHD: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: the state after it, and what it reads there, ND. The window ends with it."""
    channels_JC, _, _ = split_inputs(shape, window_JI)
    _, beta_N, decay_N = split_inputs(shape, window_JI[-1])
    mixed_C = channels_JC[0] * weights.conv_JC[0]
    for tap in range(1, shape.num_taps):
        mixed_C = mixed_C + channels_JC[tap] * weights.conv_JC[tap]
    mixed_C = mixed_C * sigmoid(mixed_C)
    q, k, v = mixed_C.split_with_sizes((shape.key_width, shape.key_width, shape.value_width))
    q_KH, k_KH = q.view(-1, shape.k_dim), k.view(-1, shape.k_dim)
    q_KH = q_KH * torch.rsqrt((q_KH * q_KH).sum(-1, keepdim=True) + NORM_EPS)
    k_KH = k_KH * torch.rsqrt((k_KH * k_KH).sum(-1, keepdim=True) + NORM_EPS)
    head_N = torch.arange(shape.num_v_heads, device=q_KH.device)
    group = shape.num_v_heads // shape.num_k_heads
    head_N = head_N % shape.num_k_heads if shape.is_tiled else head_N // group
    q_NH1 = (q_KH * shape.k_dim**-0.5)[head_N][:, :, None]
    k_NH1 = k_KH[head_N][:, :, None]
    v_ND = v.view(-1, shape.v_dim)
    decay_N = torch.exp(weights.rate_N * functional.softplus(decay_N + weights.bias_N))
    state_NHD = state_NHD * decay_N[:, None, None]
    seen_ND = (state_NHD * k_NH1).sum(1)
    new_ND = (v_ND - seen_ND) * sigmoid(beta_N)[:, None]
    state_NHD = state_NHD + k_NH1 * new_ND[:, None]
    return state_NHD, (state_NHD * q_NH1).sum(1)


def recur(
    inputs_TI: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
    states: RowStates,
    layer: int,
    attn: AttnInputs,
) -> Tensor:
    """The specification, and torch's form of it: what each token reads, TND, in float32.

    Rows' states go on to the last known token of the step; nodes after it are read and not kept.
    """
    size = (len(inputs_TI), shape.num_v_heads, shape.v_dim)
    out_TND = inputs_TI.new_zeros(size, dtype=torch.float32)
    for span, row in _live(attn):
        ring_GI, known = states.inputs_LXGI[layer, row], span.start + span.num_known
        folded = int(states.folded_LX[layer, row]) if span.start else 0
        assert folded <= span.start, "the row's state is ahead of it"
        first, num_before = folded - shape.num_taps + 1, span.start - folded + shape.num_taps - 1
        before_P = torch.arange(first, span.start, device=ring_GI.device)
        x_BI = ring_GI[before_P % len(ring_GI)].masked_fill_(before_P[:, None] < 0, 0)
        assert num_before <= len(ring_GI), "the ring is too short for the draft"
        x_WI = torch.cat((x_BI, inputs_TI[span.first : span.last])).float()
        state_NHD = states.state_LXNHD[layer, row].clone()
        if not span.start:
            state_NHD.zero_()
        states.folded_LX[layer, row] = known  # before the state: see `RowStates.is_ahead`
        for place in range(span.last - span.first + span.start - folded):
            window_JI = x_WI[place : place + shape.num_taps].clone()  # begins where others do
            state_NHD, read_ND = fold(shape, weights, window_JI, state_NHD)
            pos = folded + place
            if pos >= span.start:
                out_TND[span.first + pos - span.start] = read_ND
            if pos == known - 1:
                states.state_LXNHD[layer, row] = state_NHD
        num_kept = min(span.last - span.first, len(ring_GI))
        last = span.start + span.last - span.first
        kept_P = torch.arange(last - num_kept, last, device=ring_GI.device) % len(ring_GI)
        ring_GI[kept_P] = inputs_TI[span.last - num_kept : span.last].to(ring_GI.dtype)
    return out_TND


def sequences_of(attn: AttnInputs) -> list[tuple[int, int, int, int]]:
    """Per sequence: its first packed token, its last, how many are known, the engine's row."""
    return [(span.first, span.last, span.num_known, row) for span, row in _live(attn)]


def _live(attn: AttnInputs) -> Iterator[tuple[Span, int]]:
    """The step's sequences and the engine's rows they are."""
    for span in spans_of(attn):
        assert not span.is_tree, "recurrent layers check chains"
        if span.last > span.first and int(attn.slot_T[span.first]) >= 0:
            yield span, span.seq if attn.row_S is None else int(attn.row_S[span.seq])


def recur_texts(inputs_BLI: Tensor, shape: DeltaShape, weights: DeltaWeights) -> Tensor:
    """Whole texts side by side, each from its beginning: what every token reads, [B, L, N, D]."""
    num_texts, length, _ = inputs_BLI.shape
    before = inputs_BLI.new_zeros(num_texts, shape.num_taps - 1, shape.num_inputs)
    x_BPI = torch.cat((before, inputs_BLI), dim=1).float()
    state = x_BPI.new_zeros(num_texts, shape.num_v_heads, shape.k_dim, shape.v_dim)
    fold_all = torch.vmap(partial(fold, shape, weights))
    found = []
    for pos in range(length):
        state, read_BND = fold_all(x_BPI[:, pos : pos + shape.num_taps], state)
        found.append(read_BND)
    return torch.stack(found, dim=1)

"""What drafters ask of the C++ kernels: a whole chain in one call, the best few tokens of each row.

Shape letters: M rows, C columns of logits, B best ones, D width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hunch.kernels.kv_store import KVCache
from hunch.kernels.native import NativeNetwork
from hunch.kernels.native_library import F32, I64, POINTER, library, team
from hunch.kernels.native_structs import PassStruct, address_of, fields, kv_places


class _Choice(ctypes.Structure):
    _fields_ = (
        ("temperature", F32),
        ("top_k", I64),
        ("top_p", ctypes.c_double),
        ("log_min_p", F32),
        *fields(I64, "seed", "sample_index", "position", "stream"),
    )


class _Chain(ctypes.Structure):
    _fields_ = (
        ("step", PassStruct),
        *fields(POINTER, "hidden", "known"),
        ("num_known", I64),
        *fields(POINTER, "slots", "ids"),
        *fields(I64, "num_columns", "first_pos", "num_tokens"),
        ("choice", _Choice),
        ("tokens", POINTER),
    )


class NativeChain:
    """Drafts chains of one row: known tokens first, then a choice, its KV, the next choice, ...

    It keeps what does not change from step to step, as the caller counts microseconds.
    """

    def __init__(
        self,
        network: NativeNetwork,
        ids_C: Tensor | None,  # the token of each column of logits; None: all of them
        num_columns: int | None = None,  # logits past these are padding
    ) -> None:
        self._network, self._ids_C = network, ids_C
        self._seq = I64()
        self._chain = _Chain(ids=address_of(ids_C), num_columns=num_columns or network.num_out)
        self._chain.step.seq = ctypes.addressof(self._seq)
        self._choice, self._at = self._chain.choice, ctypes.addressof(self._chain)  # within it
        self._placed: tuple[KVCache, Tensor] | None = None

    def place(self, kv: KVCache, table_SB: Tensor, block_size: int) -> None:
        """Where keys and values are; call it again when any of these changes."""
        assert table_SB.stride(1) == 1
        step = self._chain.step
        step.place(kv_places(kv, self._network.kv_dtype))
        step.table, step.table_stride = table_SB.data_ptr(), table_SB.stride(0)
        step.block_size = block_size
        self._placed = (kv, table_SB)  # alive as long as the kernels point at them

    def choose_by(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        log_min_p: float,
        seed: int,
        sample_index: int,
        stream: int = 0,
    ) -> None:
        """How tokens are chosen; names as in sampling/state.py."""
        self._chain.choice = _Choice(
            temperature, top_k, top_p, log_min_p, seed, sample_index, 0, stream
        )

    def run(
        self,
        row: int,  # of the table
        *,
        state_1D: Tensor | None = None,  # the last one; None: there are tokens to process
        known: int = 0,  # where those tokens are
        num_known: int = 0,
        slots: int,  # where those of positions from first_pos on are; the last node's not needed
        first_pos: int,
        position: int,  # of the first token drafted, as the noise counts
        num_tokens: int,
        out: int,  # where the drafted tokens go
    ) -> None:
        """Tokens and slots are int64, given by their addresses: asking arrays for them is dear."""
        chain, network = self._chain, self._network
        self._seq.value = row
        if state_1D is not None:
            state_1D = state_1D.to(torch.float32).contiguous()
            chain.hidden = state_1D.data_ptr()
        else:
            chain.hidden = None
        chain.known, chain.num_known, chain.slots = known, num_known, slots
        chain.first_pos, chain.num_tokens, chain.tokens = first_pos, num_tokens, out
        self._choice.position = position
        network.reach(first_pos + num_known + num_tokens)
        bad = library().hunch_draft_chain(network.handle, network.team, self._at)
        assert bad < 0, f"node {bad}: token id or position out of range"


def best(
    logits_MC: Tensor,
    temperature_M: Tensor,
    top_k_M: Tensor,
    top_p_M: Tensor,
    log_min_p_M: Tensor,
    seed_M: Tensor,
    index_M: Tensor,
    pos_M: Tensor,
    num_best: int,
    ids_C: Tensor | None = None,
    stream: int = 0,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens that `native_sampling.choose` compares, best first, and the logs of their shares.

    The first is what `choose` gives. Noise goes to the likeliest alone, so shares are among those;
    greedy rows share out all tokens.
    """
    assert logits_MC.dtype == torch.float32
    assert logits_MC.stride(1) == 1
    columns = (temperature_M, top_k_M, top_p_M, log_min_p_M, seed_M, index_M, pos_M)
    columns = tuple(column.contiguous() for column in columns)
    num_rows, size = logits_MC.shape
    token_MB = torch.empty(num_rows, num_best, dtype=torch.int64)
    gain_MB = torch.empty(num_rows, num_best)
    library().hunch_best(
        team(num_threads), logits_MC.data_ptr(), *(column.data_ptr() for column in columns),
        address_of(ids_C), token_MB.data_ptr(), gain_MB.data_ptr(), num_best, num_rows, size,
        logits_MC.stride(0), stream,
    )  # fmt: skip
    return token_MB, gain_MB

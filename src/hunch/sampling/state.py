"""Per-row sampling parameters, and the one rule by which every token is chosen.

token = argmax(processed logits / T + gumbel(seed, sample index, position)), in float32, ties to the
lowest id; T = 0 takes the argmax of the processed logits without noise. The position is that of the
token being chosen, so nothing but the request and the logits enters a choice.

Shape letters: X rows of the engine, R rows of the step, M rows of logits, V vocabulary, C columns
of a drafter's logits, P longest path, K tokens of a step.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.kernels import native_library, native_sampling
from hunch.kernels.noise import (
    DRAFT,
    MAX_GUMBEL,
    MIN_GUMBEL,
    TARGET,
    gumbel,
    gumbel_at,
    gumbel_row,
    stream_at,
)
from hunch.kernels.step import Draws
from hunch.sampling.dense import DeviceProcessors, put
from hunch.sampling.filters import filter_ref, keep
from hunch.sampling.processors import HostProcessors, needs_history
from hunch.types import Request

GREEDY_BELOW = 1e-5  # as in vLLM: a smaller temperature is 0
SAMPLED, FILTERED, HISTORY = 1, 2, 4  # flags of a row: what its request needs

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class SamplingState:
    """Parameters of every row; choices for any rows of logits."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        dense: bool | None = None,  # work in tensors only; None: yes, except on a CPU
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_dense = self.device.type != "cpu" if dense is None else dense

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_rows,), value, dtype=dtype, device=self.device)

        self.temperature_X = column(0, torch.float32)
        self.top_k_X = column(0, torch.int64)
        self.top_p_X = column(1, torch.float64)
        self.log_min_p_X = column(-math.inf, torch.float32)
        self.seed_X = column(0, torch.int64)
        self.sample_X = column(0, torch.int64)
        # What each row of `columns_X` holds: on a GPU, every value that is set is a launch.
        self._held: list[tuple[float, ...]] = [(0.0, 0, 1.0, -math.inf, 0, 0)] * max_rows
        self.copies: list[SamplingState] = []  # on other devices, for drafters there
        self.flags_X = np.zeros(max_rows, np.int64)  # flags of the rows in use, on the host
        self.processors: HostProcessors | DeviceProcessors = (
            DeviceProcessors(max_rows, vocab_size, self.device)
            if self.is_dense
            else HostProcessors(vocab_size)
        )

    # --- rows come and go ---------------------------------------------------------------------

    def start(self, row: int, request: Request, tokens: list[int]) -> None:
        """A request enters a row; `tokens` is its prompt and the output so far."""
        params = request.params
        is_sampled, held = params.temperature >= GREEDY_BELOW, self._held[row]
        values = 0.0, *held[1:]  # a greedy row has temperature 0, and the rest is not read
        if is_sampled:
            top_k = params.top_k if params.top_k < self.vocab_size else 0
            log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
            filters = params.temperature, top_k, params.top_p, log_min_p
            values = *filters, request.seed, request.sample_index
        for column_X, value, before in zip(self.columns_X, values, held, strict=True):
            if value != before:
                put(column_X, row, value)
        self._held[row] = values
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        flags = (SAMPLED | FILTERED * is_filtered) if is_sampled else 0
        if needs_history(request):
            flags |= HISTORY
            self.processors.start(row, request, tokens[len(request.prompt_ids) :])
        self.flags_X[row] = flags
        for copy in self.copies:
            copy.start(row, request, tokens)

    def commit(self, rows: list[int], tokens: list[list[int]]) -> None:
        """Tokens that became output, per row.

        Without memory for its own counts nothing has changed but the copies, which only draft.
        """
        for copy in self.copies:
            copy.commit(rows, tokens)
        if np.bitwise_or.reduce(self.flags_X[rows], initial=0) & HISTORY:
            self.processors.commit(rows, tokens)

    def leave(self, row: int) -> None:
        flags, self.flags_X[row] = int(self.flags_X[row]), 0
        if flags & HISTORY:
            self.processors.leave(row)
        for copy in self.copies:
            copy.leave(row)

    def is_plain(self, row_M: Tensor) -> bool:
        """Whether all rows are greedy without processors, so that a choice is an argmax."""
        return self._flags(row_M) == 0

    def is_greedy(self, row: int) -> bool:
        return not self.flags_X[row] & SAMPLED

    def has_rules(self, row: int) -> bool:
        """Whether the row has rules, besides temperature and filters."""
        return bool(self.flags_X[row] & HISTORY)

    def draws(self, row_R: npt.NDArray[np.int64]) -> Draws:
        """How tokens of these rows are drawn, from what the host knows."""
        flags = int(np.bitwise_or.reduce(self.flags_X[row_R], initial=0))
        if not flags & SAMPLED:
            return Draws.GREEDY
        return Draws.FILTERED if flags & FILTERED else Draws.SAMPLED

    def _flags(self, row_M: Tensor) -> int:
        # Reading row_M from a device would wait for it; there all rows in use count.
        flags = self.flags_X if self.is_dense else self.flags_X[row_M.numpy()]
        return int(np.bitwise_or.reduce(flags, initial=0))

    # --- choices ------------------------------------------------------------------------------

    def process(
        self, logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor,
        mask_MV: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Processed logits / T in float32, -inf for removed tokens; for T = 0 nothing is filtered.

        path_MP holds the drafted tokens from the root to the node, the node included, then -1;
        mask_MV is False where a grammar forbids a token.
        """
        x_MV = self._with_history(logits_MV, row_M, pos_M, path_MP, mask_MV)
        return self.filtered(x_MV, row_M)

    def choose(
        self, logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor,
        mask_MV: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The target's token after each node."""
        flags = self._flags(row_M)
        if flags & HISTORY or mask_MV is not None:
            logits_MV = self._with_history(logits_MV, row_M, pos_M, path_MP, mask_MV)
        if not flags & SAMPLED:
            return argmax(logits_MV)
        if self.is_dense:
            return self._draw_dense(logits_MV, row_M, pos_M)
        return self._draw_rows(logits_MV, row_M, pos_M)

    def apply_rules(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor,
        ids_C: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply the rows' rules to a drafter's logits, as they will be applied to the target's.

        ids_C: the target's token of each column, if the drafter's vocabulary is a part of it. If no
        token of that part is allowed, logits stay as they are: any guess would be wrong.
        """
        if not self._flags(row_M) & HISTORY:
            return logits_MC
        x_MC = logits_MC.to(torch.float32, copy=True)
        self.processors.apply(x_MC, row_M, pos_M, path_MP, ids_C)
        is_lost_M1 = x_MC.amax(1, keepdim=True) == -torch.inf
        return torch.where(is_lost_M1, logits_MC.float(), x_MC)

    def draw(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, ids_C: Tensor | None = None
    ) -> Tensor:
        """A drafter's guess: the target's noise, temperature and filters (`apply_rules` before)."""
        if not self._flags(row_M) & SAMPLED:
            best_M = argmax(logits_MC)
            return best_M if ids_C is None else ids_C[best_M]
        if not self.is_dense and (ids_C is None or native_library.is_available()):
            return self._draw_rows(logits_MC, row_M, pos_M, ids_C)
        return self._draw_dense(logits_MC, row_M, pos_M, ids_C)

    def _draw_dense(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, ids_C: Tensor | None = None
    ) -> Tensor:
        """`draw` without the host; on a GPU by the kernels that captured steps use."""
        if logits_MC.device.type != "cuda":
            best_M = argmax(self.scores(logits_MC, row_M, pos_M, ids_C))
            return best_M if ids_C is None else ids_C[best_M]
        from hunch.kernels.gpu_sampling import choose

        is_filtered = bool(self._flags(row_M) & FILTERED)
        row_M, pos_M = row_M.to(self.device), pos_M.to(self.device)
        x_MC, asked = logits_MC.float().contiguous(), self.columns_X
        return choose(x_MC, row_M, pos_M, *asked, is_filtered=is_filtered, ids_V=ids_C)

    @property
    def filters_X(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature and filters of the rows, in the order the kernels take."""
        return self.temperature_X, self.top_k_X, self.top_p_X, self.log_min_p_X

    @property
    def columns_X(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Temperature, filters and the keys of noise, in the order the kernels take."""
        return *self.filters_X, self.seed_X, self.sample_X

    def columns(self, row_M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`columns_X` of each of these rows."""
        temperature_M, top_k_M, top_p_M, log_min_p_M, *key = (c[row_M] for c in self.columns_X)
        return temperature_M, top_k_M, top_p_M, log_min_p_M, key[0], key[1]

    def scores(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, ids_C: Tensor | None = None
    ) -> Tensor:
        """The scores of which `draw` takes the best; a tree's children are the best few."""
        z_MC = self.filtered(logits_MC, row_M)
        if not self._flags(row_M) & SAMPLED:
            return z_MC
        key = self.seed_X[row_M], self.sample_X[row_M], pos_M, TARGET
        if ids_C is None:
            noise_MC = gumbel(*key, self.vocab_size)
        else:
            noise_MC = gumbel_at(*key, ids_C.expand(z_MC.shape))
        is_sampled_M1 = self.temperature_X[row_M, None] > 0
        return torch.where(is_sampled_M1, z_MC + noise_MC, z_MC)

    def draw_own(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, depth: int, num: int = 1,
        ids_C: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A drafter's own draw of `num` different tokens [M, num], for verifiers that use q.

        Its noise is a stream of its own per depth. Also what was drawn from, over the target's
        vocabulary [M, V], and whether anything was drawn [M]: greedy rows choose their best.
        """
        z_MC = self.filtered(logits_MC, row_M)
        q_MC = z_MC.softmax(-1)
        is_sampled_M = self.temperature_X[row_M] > 0
        key = self.seed_X[row_M], self.sample_X[row_M], pos_M, stream_at(DRAFT, depth)
        noise_MC = gumbel(*key, z_MC.shape[1])
        top_MB = torch.where(is_sampled_M[:, None], z_MC + noise_MC, z_MC).topk(num, -1).indices
        if ids_C is None:
            return top_MB, q_MC, is_sampled_M
        q_MV = q_MC.new_zeros(len(q_MC), self.vocab_size).index_copy_(1, ids_C, q_MC)
        return ids_C[top_MB], q_MV, is_sampled_M

    def _with_history(
        self,
        logits_MV: Tensor,
        row_M: Tensor,
        pos_M: Tensor,
        path_MP: Tensor,
        mask_MV: Tensor | None,
    ) -> Tensor:
        x_MV = logits_MV.to(torch.float32, copy=True)
        if mask_MV is not None:
            x_MV.masked_fill_(~mask_MV, -torch.inf)
        if self._flags(row_M) & HISTORY:
            self.processors.apply(x_MV, row_M, pos_M, path_MP)
        return x_MV

    def filtered(self, logits_MV: Tensor, row_M: Tensor) -> Tensor:
        """Logits / T without what the rows' filters remove; no history."""
        flags, x_MV = self._flags(row_M), logits_MV.float()
        if not flags & SAMPLED:
            return x_MV
        temperature_M1 = self.temperature_X[row_M, None]
        z_MV = x_MV / torch.where(temperature_M1 > 0, temperature_M1, 1.0)
        if not flags & FILTERED:
            return z_MV
        if x_MV.device.type == "cuda":  # by the kernels that choices are made with
            from hunch.kernels.gpu_scores import filtered

            return filtered(x_MV.contiguous(), row_M.to(self.device), *self.filters_X)
        if self.is_dense:
            is_greedy_M = temperature_M1[:, 0] == 0
            return filter_ref(
                z_MV,
                torch.where(is_greedy_M, 0, self.top_k_X[row_M]),
                torch.where(is_greedy_M, 1.0, self.top_p_X[row_M]),
                torch.where(is_greedy_M, -torch.inf, self.log_min_p_X[row_M]),
            )
        z = z_MV.numpy()
        for m, row in enumerate(row_M.tolist()):
            if self.flags_X[row] & FILTERED:
                self._filter(z[m], row)
        return z_MV

    def _filter(self, z_V: Floats, row: int) -> None:
        """Remove what the row's filters do not keep, in place."""
        kept = self._keep(z_V, row)
        values = z_V[kept]
        z_V.fill(-np.inf)
        z_V[kept] = values

    def _keep(self, z_V: Floats, row: int) -> npt.NDArray[np.int64]:
        top_k, top_p = int(self.top_k_X[row]), float(self.top_p_X[row])
        return keep(z_V, top_k, top_p, float(self.log_min_p_X[row]))

    def choose_row(
        self, logits_V: Floats, row: int, pos: int, path: list[int], mask_V: Mask | None = None
    ) -> int:
        """`choose` for one node on a CPU: noise only for the tokens that can still win."""
        return self._draw_row(self._history_row(logits_V, row, pos, path, mask_V), row, pos)

    def process_row(
        self, logits_V: Floats, row: int, pos: int, path: list[int], mask_V: Mask | None = None
    ) -> Floats:
        """`process` for one node on a CPU."""
        flags = int(self.flags_X[row])
        x_V = self._history_row(logits_V, row, pos, path, mask_V)
        if not flags & SAMPLED:
            return x_V
        z_V: Floats = x_V / self.temperature_X.numpy()[row]
        if flags & FILTERED:
            self._filter(z_V, row)
        return z_V

    def _history_row(
        self, logits_V: Floats, row: int, pos: int, path: list[int], mask_V: Mask | None
    ) -> Floats:
        is_ruled = bool(self.flags_X[row] & HISTORY)
        if is_ruled or mask_V is not None:
            logits_V = logits_V.copy()
            if mask_V is not None:
                logits_V[~mask_V] = -np.inf
            if is_ruled:
                assert isinstance(self.processors, HostProcessors)
                self.processors.rules[row].apply(logits_V, pos, path)
        return logits_V

    def _draw_rows(
        self, logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, ids_C: Tensor | None = None
    ) -> Tensor:
        if native_library.is_available():
            asked = self.columns(row_M)
            return native_sampling.choose(logits_MV.float(), *asked, pos_M, TARGET, ids_C=ids_C)
        x, rows, places = logits_MV.float().numpy(), row_M.tolist(), pos_M.tolist()
        columns = zip(x, rows, places, strict=True)
        return torch.tensor([self._draw_row(x_V, row, pos) for x_V, row, pos in columns])

    def _draw_row(self, logits_V: Floats, row: int, pos: int) -> int:
        flags = int(self.flags_X[row])
        if not flags & SAMPLED:
            return int(logits_V.argmax())
        if native_library.is_available():
            temperature, k, p, log_min_p, seed, index = (c[row].item() for c in self.columns_X)
            asked = temperature, int(k), p, log_min_p, int(seed), int(index)
            return native_sampling.choose_row(np.ascontiguousarray(logits_V), *asked, pos, TARGET)
        z_V = logits_V / self.temperature_X.numpy()[row]
        if flags & FILTERED:
            ids = self._keep(z_V, row)
        else:  # the rest would lose to the best token, whatever their noise and its
            ids = np.flatnonzero(z_V + MAX_GUMBEL >= z_V.max() + MIN_GUMBEL)
        key = int(self.seed_X[row]), int(self.sample_X[row]), pos, TARGET
        is_many = len(ids) * 4 > len(z_V)  # a Philox call serves four neighbours
        noise = gumbel_row(*key, len(z_V))[ids] if is_many else gumbel_row(*key, ids)
        return int(ids[(z_V[ids] + noise).argmax()])  # ids ascend: ties go to the lowest


def argmax(x_MV: Tensor) -> Tensor:
    """The best token of each row, the lowest id among equals."""
    if x_MV.device.type != "cpu":  # torch's does not say which of equals it takes there
        from hunch.kernels.gpu_sampling import argmax as gpu_argmax

        return gpu_argmax(x_MV.contiguous())
    return torch.from_numpy(x_MV.float().numpy().argmax(axis=1))  # vectorised there, not in torch

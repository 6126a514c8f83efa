"""How drafters with networks choose tokens: as the target would, or by noise of their own.

Shape letters: R rows of this step, C columns of a network's logits, B best ones, V vocabulary, M
packed nodes, P depth so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.drafting.base import DrafterContext
from hunch.drafting.tree_shape import Level
from hunch.drafting.window import host
from hunch.kernels.native_draft import best
from hunch.kernels.native_library import is_available
from hunch.kernels.noise import TARGET, gumbel_at

Array = np.ndarray
NEAR = 128  # likeliest tokens that get the target's noise on a CPU


@dataclass(slots=True)
class Children:
    """Children of nodes: best first, or in the order they were drawn."""

    token_MB: Array
    gain_M: Array  # log of a confidence, which does not depend on the drawn tokens
    q_MV: Tensor | None = None  # what they were drawn from; None: chosen
    is_sampled_M: Array | None = None


class TokenChooser:
    """Chooses tokens for the rows of one step, with the target's parameters and noise.

    `ids_C`: the target's token of each column, if the network's vocabulary is a part of it. If the
    verifier uses q, chains are drawn with noise of their own, and dynamic trees are chosen without
    noise: a node that is kept because of its value was not drawn from q.
    """

    def __init__(
        self,
        context: DrafterContext,
        rows: Rows,
        ids_C: Tensor | None,
        temperature: float | None = None,  # instead of the row's, unless that is 0
    ) -> None:
        self.sampling, self.device, self.wants_q = context.sampling, context.device, context.wants_q
        self.ids_C, self.temperature = ids_C, temperature
        self.ids_R = host(rows.ids_R)
        self.known_R = host(rows.known_X)[self.ids_R]
        self._row_1 = rows.ids_R[:1]

    def with_rules(self, logits_RC: Tensor, feed: Feed) -> tuple[Tensor, Feed]:
        """The first logits and a feed, with the rows' rules applied as for the target."""
        if not any(map(self.sampling.has_rules, self.ids_R.tolist())):
            return logits_RC, feed
        path_MP = np.empty((len(self.ids_R), 0), dtype=np.int64)  # tokens, of the level before

        def ruled(level: Level) -> Tensor:
            nonlocal path_MP
            path_MP = np.concatenate([path_MP[level.parent_M], level.token_M[:, None]], axis=1)
            return self._ruled(feed(level), level.place_M, path_MP)

        return self._ruled(logits_RC, np.arange(len(self.ids_R)), path_MP), ruled

    def _ruled(self, logits_MC: Tensor, place_M: Array, path_MP: Array) -> Tensor:
        row_M, pos_M = self._where(place_M, path_MP.shape[1])
        path = torch.from_numpy(path_MP).to(self.device)
        return self.sampling.apply_rules(logits_MC, row_M, pos_M, path, self.ids_C)

    def draw(self, logits_MC: Tensor, place_M: Array, depth: int) -> Array:
        """The token the target would choose if these were its logits."""
        row_M, pos_M = self._where(place_M, depth)
        return host(self.sampling.draw(self._heated(logits_MC, row_M), row_M, pos_M, self.ids_C))

    def best(
        self, logits_MC: Tensor, place_M: Array, depth: int, num_best: int
    ) -> tuple[Array, Array]:
        """The likeliest tokens, best first, and the logs of their confidences."""
        row_M, pos_M = self._where(place_M, depth)
        logits_MC = self._heated(logits_MC, row_M)
        if self.wants_q:
            scores_MC = self.sampling.filtered(logits_MC, row_M)
        elif not self.sampling.is_dense:
            if is_available():
                asked = self.sampling.columns(row_M)
                found = best(logits_MC.float(), *asked, pos_M, num_best, self.ids_C, TARGET)
                return found[0].numpy(), found[1].double().numpy()
            if not self.sampling.is_plain(row_M):
                return self._best_near(logits_MC, row_M, pos_M, place_M, num_best)
            scores_MC = logits_MC.float()
        else:
            scores_MC = self.sampling.scores(logits_MC, row_M, pos_M, self.ids_C)
        top = scores_MC.topk(num_best, dim=-1)
        gain_MB = top.values - scores_MC.logsumexp(-1, keepdim=True)
        token_MB = top.indices if self.ids_C is None else self.ids_C[top.indices]
        # Despite rounding, a child must not be worth more than its parent.
        return host(token_MB), np.minimum(host(gain_MB.double()), 0.0)

    def _best_near(
        self, logits_MC: Tensor, row_M: Tensor, pos_M: Tensor, place_M: Array, num_best: int
    ) -> tuple[Array, Array]:
        """`best` on a CPU, with noise for the likeliest tokens alone, as noise is slow there.

        For the first node of each row, the best child must be exactly the token that the target
        would choose.
        """
        sampling = self.sampling
        near = sampling.filtered(logits_MC, row_M).topk(
            min(max(NEAR, num_best), logits_MC.shape[1]), dim=-1
        )
        token_MB = near.indices if self.ids_C is None else self.ids_C[near.indices]
        noise_MB = gumbel_at(
            sampling.seed_X[row_M], sampling.sample_X[row_M], pos_M, TARGET, token_MB
        )
        is_sampled_M1 = sampling.temperature_X[row_M, None] > 0
        scores_MB = torch.where(is_sampled_M1, near.values + noise_MB, near.values).double()
        top = scores_MB.topk(min(num_best, scores_MB.shape[1]), dim=-1)
        gain_MB = (top.values - scores_MB.logsumexp(-1, keepdim=True)).clamp_(max=0.0).numpy()
        best_MB = token_MB.gather(1, top.indices).numpy()
        first_R = np.flatnonzero(np.diff(place_M, prepend=-1))
        at_R = torch.from_numpy(first_R)
        token_R = sampling.draw(logits_MC[at_R], row_M[at_R], pos_M[at_R], self.ids_C).numpy()
        for first, token in zip(first_R.tolist(), token_R.tolist(), strict=True):
            if best_MB[first, 0] != token:  # it was further down, or not among the likeliest
                others = [t for t in best_MB[first].tolist() if t != token]
                best_MB[first] = [token, *others][: best_MB.shape[1]]
        return best_MB, gain_MB

    def children(self, logits_MC: Tensor, place_M: Array, depth: int, num: int) -> Children:
        """`num` children of each node; drawn, if the verifier uses q."""
        if not self.wants_q:
            token_MB, gain_MB = self.best(logits_MC, place_M, depth, num)
            return Children(token_MB, gain_MB[:, 0])
        row_M, pos_M = self._where(place_M, depth)
        drawn_MB, q_MV, is_sampled_M = self.sampling.draw_own(
            self._heated(logits_MC, row_M), row_M, pos_M, depth, num, self.ids_C
        )
        gain_M = host(q_MV.amax(-1).double().log())
        return Children(host(drawn_MB), gain_M, q_MV, host(is_sampled_M))

    def _heated(self, logits_MC: Tensor, row_M: Tensor) -> Tensor:
        """Logits that, divided by the row's temperature, have the drafter's temperature."""
        if self.temperature is None:
            return logits_MC
        row_T_M1 = self.sampling.temperature_X[row_M, None]
        return logits_MC.float() * torch.where(row_T_M1 > 0, row_T_M1 / self.temperature, 1.0)

    def _where(self, place_M: Array, depth: int) -> tuple[Tensor, Tensor]:
        if len(self.ids_R) == len(place_M) == 1:
            return self._row_1, torch.from_numpy(self.known_R + depth).to(self.device)
        row_M = torch.from_numpy(self.ids_R[place_M])
        pos_M = torch.from_numpy(self.known_R[place_M] + depth)
        return row_M.to(self.device), pos_M.to(self.device)


Feed = Callable[[Level], Tensor]  # processes nodes, returns the logits after each


def second_choices(
    logits_TC: Tensor, chooser: TokenChooser, num_nodes: list[int]
) -> list[list[tuple[int, float]]]:
    """Per row and node of its chain: the second best token there, and the log of the confidence
    in all nodes before it and in that token. Logits are packed, row after row."""
    found, first = [], 0
    for place, count in enumerate(num_nodes):
        seconds, value = [], 0.0
        for depth in range(count):
            logits_1C = logits_TC[first + depth : first + depth + 1]
            (tokens,), (gains,) = chooser.best(logits_1C, np.array([place]), depth, 2)
            seconds.append((int(tokens[1]), value + float(gains[1])))
            value += float(gains[0])
        found.append(seconds)
        first += count
    return found

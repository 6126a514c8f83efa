"""A drafter's world without a target: rows of known tokens, committed step by step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from hunch.config import SpecConfig
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import DrafterContext
from hunch.drafting.costs import CostCurve
from hunch.models.backends import TORCH
from hunch.registry import DRAFTERS, resolve

MAX_LEN = 4096


class Desk:
    """Rows of token lists in front of one drafter; the text to come is known beforehand."""

    def __init__(self, spec: str, curve: dict[int, float] | None = None, max_rows: int = 4) -> None:
        self.cost = CostCurve()
        for num_tokens, seconds in (curve or {1: 1.0, 64: 1.1}).items():
            self.cost.record(num_tokens, seconds)
        config = SpecConfig.parse(spec)
        context = DrafterContext(
            target=SimpleNamespace(backend=TORCH, spec=SimpleNamespace(recurrence=None)),
            sampling=None, cost=self.cost, device=torch.device("cpu"),
            max_rows=max_rows, max_len=MAX_LEN, vocab_size=1000,
        )  # fmt: skip
        self.drafter: Any = resolve(DRAFTERS, config.method)(config.options, None, context)
        zeros = torch.zeros(max_rows, dtype=torch.int64)
        self.rows = Rows(
            ids_R=torch.tensor([0]), tokens_XL=torch.zeros(max_rows, MAX_LEN, dtype=torch.int64),
            known_X=zeros.clone(), prompt_X=zeros.clone(), end_X=zeros + MAX_LEN,
            computed_GX=zeros[None].clone(), table_XB=zeros[:, None].clone(),
            max_draft_X=zeros + 64, block_size=16,
        )  # fmt: skip

    def commit(self, row: int, tokens: list[int], *, is_prompt: bool = False) -> None:
        known = int(self.rows.known_X[row])
        self.rows.tokens_XL[row, known : known + len(tokens)] = torch.tensor(tokens)
        self.rows.known_X[row] = known + len(tokens)
        if is_prompt:
            self.rows.prompt_X[row] = known + len(tokens)
        self.rows = replace(self.rows, ids_R=torch.tensor([row]))
        known_R = self.rows.known_X[self.rows.ids_R]
        start_R = torch.tensor([known])
        self.drafter.observe(TargetStep(self.rows, start_R, known_R - 1, start_R * 0, None))

    def propose(self, *rows: int) -> Draft:
        self.rows = replace(self.rows, ids_R=torch.tensor(rows))
        return self.drafter.propose(self.rows)

    def chain(self, row: int = 0) -> list[int]:
        draft = self.propose(row)
        num_nodes = int(draft.num_nodes_R[0])
        assert draft.parents_RN[0, :num_nodes].tolist() == list(range(-1, num_nodes - 1))
        return draft.tokens_RN[0, :num_nodes].tolist()

    def leave(self, row: int) -> None:
        self.drafter.forget([row])
        self.rows.known_X[row] = self.rows.prompt_X[row] = 0

    def replay(self, row: int, text: list[int]) -> tuple[int, int, int]:
        """Decode `text` with drafts; passes, nodes checked, nodes accepted."""
        passes = drafted = accepted = done = 0
        while done < len(text):
            draft = self.propose(row)
            num_nodes = int(draft.num_nodes_R[0])
            guesses = list(
                zip(
                    draft.parents_RN[0, :num_nodes].tolist(),
                    draft.tokens_RN[0, :num_nodes].tolist(),
                    strict=True,
                )
            )
            at, walked = -1, 0
            while done + walked < len(text) and (at, text[done + walked]) in guesses:
                at = guesses.index((at, text[done + walked]))
                walked += 1
            passes, drafted, accepted = passes + 1, drafted + num_nodes, accepted + walked
            new = text[done : done + walked + 1]
            self.commit(row, new)
            done += len(new)
        return passes, drafted, accepted

"""Token recycling: drafts from what the target thought could follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hunch import LLM, SamplingParams
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.costs import CostCurve
from hunch.drafting.recycling import RecyclingDrafter
from hunch.errors import ConfigError
from hunch.kernels.phrases import PhraseTable
from hunch.kernels.successor_entries import ONE_TOKEN, Entries
from hunch.models.backends import TORCH
from tiny_models import write_llama

SMALL = {"max_num_seqs": 4, "max_model_len": 256, "kv_bytes": 8_000_000, "dtype": "float32"}


def drafter(
    entries: Entries | None = None, learns: bool = True, device: str = "cpu", **options: str
) -> RecyclingDrafter:
    context: Any = SimpleNamespace(
        target=SimpleNamespace(backend=TORCH), vocab_size=50, cost=CostCurve(), max_rows=4,
        device=torch.device(device),
    )  # fmt: skip
    options = {"adaptive": "false", **options}
    return RecyclingDrafter(options, None, context, entries, learns=learns)


def rows(last: list[int], max_draft: int = 99) -> Rows:
    count = len(last)
    return Rows(
        ids_R=torch.arange(count),
        tokens_XL=torch.tensor(last)[:, None],
        known_X=torch.ones(count, dtype=torch.int64),
        prompt_X=torch.ones(count, dtype=torch.int64),
        end_X=torch.full((count,), 99),
        computed_GX=torch.zeros(1, count, dtype=torch.int64),
        table_XB=torch.zeros(count, 1, dtype=torch.int64),
        max_draft_X=torch.full((count,), max_draft),
        block_size=16,
    )


def propose(d: RecyclingDrafter, asked: Rows) -> Draft:
    d.forget(asked.ids_R.tolist())
    d.follow(asked, asked.ids_R.tolist())
    return d.propose(asked)


def tell(d: RecyclingDrafter, successors: dict[int, list[int]]) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    step = TargetStep(replace(rows([0]), ids_R=nothing), nothing, nothing, nothing, None)
    step.checked_M = torch.tensor(list(successors))
    step.top_MC = torch.tensor(list(successors.values()))
    d.observe(step)


def paths(draft: Any, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node in range(int(draft.num_nodes_R[row])):
        parent = int(draft.parents_RN[row, node])
        before = found[parent] if parent >= 0 else ()
        found.append((*before, int(draft.tokens_RN[row, node])))
    return set(found)


def test_what_was_seen_is_drafted_and_nothing_else() -> None:
    d = drafter(candidates="2", num_nodes="6", depth="3")
    assert propose(d, rows([1])).num_nodes_R.tolist() == [0]
    tell(d, {1: [2, 3], 2: [4, 1]})
    draft = propose(d, rows([1, 2, 7]))
    assert {(2,), (3,), (2, 4), (2, 1)} <= paths(draft, 0)
    assert not any(path[:2] == (2, 4) and len(path) > 2 for path in paths(draft, 0))
    assert {(4,), (1,), (1, 2)} <= paths(draft, 1)
    assert paths(draft, 2) == set()


def test_the_last_word_counts() -> None:
    d = drafter(candidates="2")
    tell(d, {1: [2, 3]})
    tell(d, {1: [5, 6]})
    assert {(5,), (6,)} == paths(propose(d, rows([1])), 0)


def test_room_for_fewer_nodes() -> None:
    d = drafter(candidates="2")
    tell(d, {1: [2, 3], 2: [1, 3], 3: [1, 2]})
    draft = propose(d, rows([1], max_draft=3))
    assert draft.num_nodes_R.tolist() == [3]
    assert len(paths(draft, 0)) == 3


def test_pairs_of_tokens_say_more_than_the_last_one() -> None:
    """Until a token was seen, the table's successors of it count."""
    entries = Entries(*map(np.array, ([ONE_TOKEN, 7, 8], [1, 1, 1], [2, 3, 4], [90, 200, 60])))
    d = drafter(entries=entries, num_nodes="2")
    assert paths(propose(d, rows([1])), 0) == {(2,)}
    known = torch.tensor([[7, 1], [8, 1], [9, 1]])
    pairs = replace(rows([0, 0, 0]), tokens_XL=known, known_X=torch.full((3,), 2))
    draft = propose(d, pairs)
    assert [paths(draft, row) for row in range(3)] == [{(3,), (2,)}, {(2,), (4,)}, {(2,)}]
    tell(d, {1: [5, 6]})
    draft = propose(d, pairs)
    assert [paths(draft, row) for row in (0, 2)] == [{(3,), (5,)}, {(5,), (6,)}]
    d.clear()
    assert paths(propose(d, rows([1])), 0) == {(2,)}


def test_what_was_counted_since_the_start_is_used_until_it_is_counted_again() -> None:
    start = Entries(*map(np.array, ([ONE_TOKEN, 7], [1, 1], [2, 3], [90, 100])))
    d = drafter(entries=start, num_nodes="2")
    pair = replace(rows([0]), tokens_XL=torch.tensor([[7, 1]]), known_X=torch.tensor([2]))
    assert paths(propose(d, pair), 0) == {(3,), (2,)}
    for token in (5, 6):
        counted = Entries(*map(np.array, ([7], [1], [token], [150])))
        table = PhraseTable.of_successors(counted, 50)
        d.take_phrases(table)  # it holds no successors
        d.take_phrases(replace(table, successors=counted))
        assert paths(propose(d, pair), 0) == {(token,), (3,)}


def test_a_draft_is_where_the_target_is() -> None:
    """A target that torch runs on a GPU has host drafts too."""
    entries = Entries(*map(np.array, ([ONE_TOKEN], [1], [2], [200])))
    d = drafter(entries=entries, learns=False, device="meta")
    d.follow(rows([1]), [0])
    draft = d.propose_beside((np.array([3]), np.array([0.5])), 0, 8, 0.0)
    assert draft.tokens_RN.device == draft.parents_RN.device == torch.device("meta")


def test_a_table_alone_asks_the_target_for_nothing() -> None:
    d = drafter(learns=False)
    assert d.needs.top == 0
    tell(d, {1: [2, 3]})
    assert propose(d, rows([1])).num_nodes_R.tolist() == [0]


def test_it_saves_passes(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    expected = LLM(str(target), speculate="off", **SMALL).generate("the model", params)
    llm = LLM(str(target), speculate="recycling", **SMALL)
    found = llm.generate("the model", params)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    llm.generate("the model", params)
    assert llm.stats()["tokens_per_pass"] > 1.15


@pytest.mark.parametrize("options", [{"num_nodes": "0"}, {"depth": "0"}, {"candidate": "3"}])
def test_options_that_cannot_work(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="recycling"):
        drafter(**options)

"""Heads that start from the last state alone, in captured steps: plain decoding's tokens, and the
drafts that a replay makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from captured_heads import GREEDY, PARAMS, Drafts, World, load, tokens
from stand_in import stand_in

NAMES = ("medusa", "mlp")


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_text_and_drafts_of_heads_without_kv(
    name: str, max_num_seqs: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(world.model, name, max_num_seqs=max_num_seqs) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        drafts.check(world.heads[name], world.study, 30)
        assert sum(map(len, drafts.by_host)) == len(world.prompts)
        assert llm.stats()["tokens_per_pass"] > 1.5
        assert llm.stats()["drafted"] > 0
        for kind in ("stops", "filters"):
            assert tokens(llm, world.prompts, PARAMS[kind]) == world.plain[kind], kind
        mixed = [*PARAMS.values(), GREEDY]
        want = [world.plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
        assert tokens(llm, world.prompts, mixed) == want


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_and_go_beside_heads_without_kv(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [24, 1, 17, 2, 20]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    with load(world.model, name, max_num_seqs=2) as llm:
        drafts = Drafts(llm, monkeypatch)
        want = [answer[:n] for answer, n in zip(world.plain["greedy"], lengths, strict=True)]
        assert tokens(llm, world.prompts, params) == want
        drafts.check(world.heads[name], world.study)


@pytest.mark.slow
def test_guesses_below_a_confidence_are_left_out_by_the_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(world.model, "mlp", ":min_confidence=0.3:adaptive=false") as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, world.prompts, GREEDY) == world.plain["greedy"]
        assert drafts.found
        assert llm.stats()["accepted"] > 0

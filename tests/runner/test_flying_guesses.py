"""Heads that start from the last state alone, in steps that fly: plain decoding's tokens, and the
drafts that a replay makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import head_files
from head_files import Study
from runner.test_flying_heads import (  # noqa: F401  (fixtures)
    GREEDY,
    PARAMS,
    Drafts,
    flying,
    load,
    model,
    plain,
    prompts,
    study,
    tokens,
)
from spec.test_heads_replay import Chain, medusa_chain, mlp_chain

NAMES = ("medusa", "mlp")


@pytest.fixture(scope="module")
def heads(model: Path, study: Study) -> dict[str, Chain]:
    folder = model.parent
    return {
        "medusa": medusa_chain(head_files.make_medusa(study, folder / "medusa")),
        "mlp": mlp_chain(head_files.make_mlp(study, folder / "mlp")),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_text_and_drafts_of_heads_without_kv(
    name: str, max_num_seqs: int, model: Path, heads: dict[str, Chain], study: Study,
    prompts: list[list[int]], plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with load(model, name, max_num_seqs=max_num_seqs) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, prompts, GREEDY) == plain["greedy"]
        drafts.check(heads[name], study, 30)
        assert sum(map(len, drafts.by_host)) == len(prompts)
        assert llm.stats()["tokens_per_pass"] > 1.5
        watch = llm.engine.runner.device_drafter.watch
        assert watch.num_guessed == llm.stats()["drafted"] > 0
        for kind in ("stops", "filters"):
            assert tokens(llm, prompts, PARAMS[kind]) == plain[kind], kind
        mixed = [*PARAMS.values(), GREEDY]
        want = [plain[kind][i] for i, kind in enumerate([*PARAMS, "greedy"])]
        assert tokens(llm, prompts, mixed) == want


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_and_go_beside_heads_without_kv(
    name: str, model: Path, heads: dict[str, Chain], study: Study, prompts: list[list[int]],
    plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lengths = [24, 1, 17, 2, 20]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    with load(model, name, max_num_seqs=2) as llm:
        drafts = Drafts(llm, monkeypatch)
        want = [answer[:n] for answer, n in zip(plain["greedy"], lengths, strict=True)]
        assert tokens(llm, prompts, params) == want
        drafts.check(heads[name], study)


@pytest.mark.parametrize(
    ("name", "options"),
    [("medusa", ":tree=static"), ("medusa", ":tree=dynamic"), ("mlp", ":min_confidence=0.3")],
)
def test_what_the_host_must_grow(
    name: str, options: str, model: Path, heads: dict[str, Chain], prompts: list[list[int]],
    plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with load(model, name, options) as llm:
        drafts = Drafts(llm, monkeypatch)
        assert tokens(llm, prompts, GREEDY) == plain["greedy"]
        assert not drafts.found
        assert llm.stats()["accepted"] > 0

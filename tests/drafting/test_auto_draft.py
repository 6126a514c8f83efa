"""`auto` with a draft model: loaded where it can pay, asked where it does, no token changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_models import write_deep, write_shallow
from hunch import LLM, SamplingParams, Speculation
from hunch.config import SpecConfig
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.drafter_files import find_files
from hunch.drafting.auto import AutoDrafter
from hunch.drafting.costs import CostCurve
from hunch.drafting.host_network import NetworkDrafts, ProposedDraft
from hunch.drafting.options import MAX_LENGTH
from hunch.hub import ModelFiles
from hunch.models.heads.draft_model import byte_share
from hunch.models.weights import open_weights

PROMPTS = [[5, 6, 7, 8] * 4, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0, max_tokens=16, seed=3, ignore_eos=True),
    "processed": SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.7, max_tokens=16),
}
SMALL: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "max_model_len": 128, "kv_bytes": 4_000_000,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep(tmp_path_factory.mktemp("auto") / "model")


@pytest.fixture(scope="module")
def near(model: Path) -> Path:
    return write_shallow(model, model.parent / "near", noise=0.1)


@pytest.fixture(scope="module")
def exact(model: Path) -> Path:
    return write_shallow(model, model.parent / "exact")


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        return {kind: tokens(llm, params) for kind, params in PARAMS.items()}


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


def auto_of(llm: LLM) -> AutoDrafter:
    drafter = llm.engine.runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, AutoDrafter)
    return drafter


# --- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    [{}, {"max_num_seqs": 1}, {"num_blocks": 28, "block_size": 4, "max_num_seqs": 3}, {"depth": 1}],
    ids=["batch", "one", "few blocks", "depth 1"],
)
def test_text_does_not_depend_on_who_drafts(
    engine: dict[str, Any], model: Path, near: Path, plain: dict[str, list[list[int]]]
) -> None:
    given = {**SMALL, **engine, "always_draft": True}
    with LLM(str(model), speculate=f"auto:draft={near}", **given) as llm:
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == plain[kind], kind
        counts = llm.stats()["drafters"]["draft"]
        assert 0 < counts["accepted"] < counts["drafted"]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_verifiers_that_weigh_draws_take_both_kinds(verifier: str, model: Path, near: Path) -> None:
    given = {**SMALL, "always_draft": True, "verifier": verifier}
    with LLM(str(model), speculate="off", **SMALL) as llm:
        want = tokens(llm, GREEDY)
    with LLM(str(model), speculate=f"auto:draft={near}", **given) as llm:
        assert tokens(llm, GREEDY) == want
        assert all(map(len, tokens(llm, PARAMS["sampled"])))


def test_a_request_may_name_the_draft_model_or_the_lookup(
    model: Path, near: Path, plain: dict[str, list[list[int]]]
) -> None:
    def wish(mode: str) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, speculation=Speculation(mode=mode)
        )

    with LLM(str(model), speculate=f"auto:draft={near}:adaptive=false", **SMALL) as llm:
        outputs = llm.generate(PROMPTS, [wish(m) for m in ("draft", "suffix", "off", "draft")])
    assert [out.outputs[0].token_ids for out in outputs] == plain["greedy"]
    used = [set(out.outputs[0].stats["drafters"]) for out in outputs]
    assert used[0] == used[3] == {"draft"}
    assert used[1] <= {"suffix"}
    assert not used[2]


def test_nothing_stale_is_drafted_from_after_steps_without_it(
    model: Path, exact: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact copy is always right, if it has read every token."""
    turn = iter(range(10_000))

    def now_and_then(self: NetworkDrafts, rows: Rows, ids: list[int], *rest: Any) -> Any:
        now = next(turn)
        return ([], 0) if now % 3 else (list(range(len(ids)))[now % 2 :], 1 + now % 5)

    monkeypatch.setattr(NetworkDrafts, "plan", now_and_then)
    monkeypatch.setattr("hunch.drafting.routed.share_nodes", lambda rows, *_, **__: [0] * len(rows))
    with LLM(str(model), speculate=f"auto:draft={exact}", **SMALL) as llm:
        for kind in ("greedy", "sampled"):
            assert tokens(llm, PARAMS[kind]) == plain[kind]
        counts = llm.stats()["drafters"]["draft"]
    assert counts["accepted"] == counts["drafted"] > 20


# --- loading --------------------------------------------------------------------------------------


def test_a_draft_that_cannot_pay_is_not_loaded(
    model: Path, near: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(model), speculate=f"auto:draft={near}", **SMALL) as llm:
        assert auto_of(llm).network is not None
        assert llm.engine.capacity.methods["draft"] == MAX_LENGTH
        assert llm.stats()["drafter_bytes"] > 0
    assert not caplog.messages
    with (
        caplog.at_level(logging.WARNING, "hunch"),
        LLM(str(near), speculate=f"auto:draft={near}", **SMALL) as llm,
    ):
        assert auto_of(llm).network is None
        assert "draft" not in llm.engine.capacity.methods
        assert len(llm.engine.capacity.groups) == 1
    assert "reads 100% of what the target reads" in caplog.text


def test_what_comes_with_hunch_is_loaded_beside_a_large_target_alone(
    default_files: ModelFiles,
) -> None:
    given = find_files(SpecConfig.parse("auto:num_nodes=4"), default_files)
    assert given.options["num_nodes"] == "4"
    weights = open_weights(given.options["draft"])
    spec = SimpleNamespace(is_tied=True, vocab_size=49152, width=576)
    small = SimpleNamespace(
        is_quantised=True, dtype=torch.float32, weight_bytes=98_000_000, spec=spec
    )
    assert byte_share(weights, small) > 0.2
    large = SimpleNamespace(
        is_quantised=False, dtype=torch.bfloat16, weight_bytes=14_800_000_000, spec=spec
    )
    assert byte_share(weights, large) < 0.01
    assert find_files(SpecConfig.parse("auto:draft=off"), default_files).options["draft"] == "off"
    with LLM(max_model_len=256, max_num_seqs=1, device="cpu") as llm:
        assert auto_of(llm).network is None


# --- planning -------------------------------------------------------------------------------------


class Guesser:
    """A draft model whose chains are 100, 101, 102 ..."""

    def __init__(self) -> None:
        self.needs = Needs(max_nodes=5)

    def observe(self, step: TargetStep) -> None: ...

    def forget(self, rows: list[int]) -> None: ...

    def propose(self, rows: Rows) -> Draft:
        limits = rows.max_draft_X[rows.ids_R].tolist()
        return Draft.chains([list(range(100, 100 + min(5, limit))) for limit in limits])


class Table:
    """Rows in front of a draft model beside lookups."""

    def __init__(self, share: float, *, is_adaptive: bool = True, num_rows: int = 8) -> None:
        self.cost = CostCurve()
        for size, seconds in ((1, 1.0), (8, 1.02), (16, 1.1), (48, 1.4)):
            self.cost.record(size, seconds)
        context: Any = SimpleNamespace(cost=self.cost, max_rows=num_rows)
        self.network = NetworkDrafts(
            "draft", Guesser(), context, share=share, is_adaptive=is_adaptive
        )
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        self.rows = Rows(
            ids_R=torch.arange(1), tokens_XL=torch.zeros(num_rows, 4096, dtype=torch.int64),
            known_X=zeros + 10, prompt_X=zeros + 10, end_X=zeros + 4096,
            computed_GX=torch.zeros(2, num_rows, dtype=torch.int64) + 10,
            table_XB=zeros[:, None], max_draft_X=zeros + 16, block_size=16,
        )  # fmt: skip

    def plan(self, num_rows: int) -> tuple[int, int]:
        nothing = [(0, 0.0)] * num_rows
        places, num_levels = self.network.plan(
            self.rows, list(range(num_rows)), [16] * num_rows, nothing
        )
        return len(places), num_levels

    def step(self, *, is_right: bool) -> None:
        """One row drafts, and its guesses are right or wrong."""
        self.rows.ids_R = torch.arange(1)
        draft = self.network.propose(self.rows, [0], 5)
        self.network.policy._num_timed = 0  # this one is quicker than any model
        self.say([*draft.tokens_RN[0].tolist(), 7] if is_right else [7])

    def say(self, said: list[int]) -> None:
        known = int(self.rows.known_X[0])
        self.rows.tokens_XL[0, known : known + len(said)] = torch.tensor(said)
        self.rows.known_X[0] = self.rows.computed_GX[1, 0] = known + len(said)
        nowhere = torch.empty(0, dtype=torch.int64)
        self.rows.ids_R = torch.arange(1)
        self.network.observe(TargetStep(self.rows, nowhere, nowhere, nowhere, None))


def test_it_falls_silent_where_it_fails_and_is_tried_again_later() -> None:
    table = Table(0.1)
    assert table.plan(1)[0] == 1
    for _ in range(30):
        table.step(is_right=False)
    assert table.plan(1) == (0, 0)
    for _ in range(1500):
        table.say([7])
    assert table.plan(1)[0] == 1


def test_it_is_asked_for_more_the_more_is_right() -> None:
    table = Table(0.15)
    before = table.plan(1)[1]
    for _ in range(30):
        table.step(is_right=True)
    assert before < table.plan(1)[1] == 5


def test_long_texts_are_not_read_for_a_few_tokens() -> None:
    table = Table(0.01)
    table.rows.known_X[:] = 3000
    assert table.plan(1) == (1, 5)
    table.rows.end_X[:] = 3010
    assert table.plan(1) == (0, 0)
    eager = Table(0.01, is_adaptive=False)
    eager.rows.known_X[:], eager.rows.end_X[:] = 3000, 3010
    assert eager.plan(1) == (1, 5)


def test_a_tree_teaches_by_its_levels() -> None:
    sent = ProposedDraft(0, [5, 6, 7, 8], [-1, -1, 0, 2])
    assert sent.compare([5, 7, 8, 1]) == (3, 3)
    assert sent.compare([5, 7, 1]) == (2, 3)
    assert sent.compare([6, 7]) == (1, 1)
    assert sent.compare([9]) == (0, 1)
    assert sent.compare([]) == (0, 0)

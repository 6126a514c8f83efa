"""Captured steps: the same tokens as plain decoding, whoever drafts, whoever comes and goes.

The device's kernels are replaced by plain Python here; tests/kernels compares the two.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from hunch import LLM, SamplingParams
from hunch.drafting.lookup import DeviceLookup
from hunch.errors import ModelFormatError
from hunch.models.target import Hidden
from hunch.step.batch import Batch
from hunch.step.calibrate import is_finite
from hunch.step.host_step import HostStep
from hunch.step.pending import PendingStep
from hunch.step.prompts import PromptSteps
from hunch.step.runner import Runner
from hunch.step.step_graphs import StepGraphs
from hunch.types import StepPlan, StepResult
from stand_in import lead_by_host, stand_in
from tiny_models import write_llama

PROMPTS = [[5, 6, 7, 8] * 6, [9, 4], list(range(10, 43)), [7, 7, 7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    "stops": SamplingParams(temperature=1.2, max_tokens=24, seed=3, stop_token_ids=[9, 21, 40]),
    "filters": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=20, seed=5),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.7, max_tokens=16, seed=8),
    "rules": SamplingParams(
        temperature=0,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        max_tokens=20,
        min_tokens=9,
        stop_token_ids=[1, 2, 3, 284],
        logit_bias={5: 3.0, 9: -4.0},
    ),
}
SMALL = {"device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("captured") / "model", width=32, layers=2)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[list[int]]]:
    """One request at a time, every step by the host, on the same products."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
            lead_by_host(llm.engine.runner)
            return {name: tokens(llm, [params] * len(PROMPTS)) for name, params in PARAMS.items()}


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


ENGINES = {
    "one": {"max_num_seqs": 1},
    "all": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "few blocks": {"kv_bytes": None, "num_blocks": 28, "max_num_seqs": 4},
    "no prefix cache": {"enable_prefix_caching": False},
}


METHODS = (
    "off", "ngram", "ngram:adaptive=false", "suffix", "auto", "draft:num_nodes=3",
    "draft:num_nodes=3:adaptive=false", "draft:tree=dynamic:depth=3:num_nodes=6:adaptive=false",
    "draft:tree=fixed:num_nodes=7:branch=3:adaptive=false", "suffix:tree=true:adaptive=false",
)  # fmt: skip


# Every method once; plain decoding is what the tests of requests with grammars take.
DAILY = {
    ("ngram", "all"), ("auto", "all"), (METHODS[-3], "all"), (METHODS[-1], "few blocks"),
    ("suffix", "few blocks"), ("draft:num_nodes=3", "few blocks"),
}  # fmt: skip
CASES = [
    pytest.param(method, engine, marks=[] if (method, engine) in DAILY else [pytest.mark.slow])
    for method in METHODS
    for engine in ENGINES
]


@pytest.mark.parametrize(("method", "engine"), CASES)
@pytest.mark.usefixtures("plain_kernels")
def test_text_does_not_depend_on_who_drafts(
    method: str, engine: str, model: Path, plain: dict[str, list[list[int]]]
) -> None:
    name, _, options = method.partition(":")
    spec = f"draft:{model}:{options}" if name == "draft" else method
    given = {**SMALL, **ENGINES[engine]}
    with LLM(str(model), speculate=spec, **given) as llm:
        assert isinstance(llm.engine.runner, Runner)
        for kind, params in PARAMS.items():
            assert tokens(llm, [params] * len(PROMPTS)) == plain[kind], kind
        mixed = list(PARAMS.values())
        want = [plain[kind][i] for i, kind in enumerate(PARAMS)]
        assert tokens(llm, mixed) == want
        stats = llm.stats()
        if "adaptive" in method or method == "off":
            assert (stats["drafted"] > 0) == (method != "off")
        if name == "draft" and engine == "all":  # its own draft: but for penalties, all is right
            assert stats["tokens_per_pass"] > 1.8


@pytest.mark.usefixtures("plain_kernels")
def test_a_step_without_memory_loses_no_other_request_and_no_block(
    model: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows together do not fit; later one does not fit alone; nor can a step be captured."""
    run, num_failed = HostStep.run, 0

    def fail(host: HostStep, plan: StepPlan) -> StepResult:
        nonlocal num_failed
        tokens = [host.rows.tokens[work.row, 0] for work in plan.work]
        if len(tokens) > 1 or PROMPTS[2][0] in tokens:
            num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(host, plan)

    def no_capture(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(HostStep, "run", fail)
    monkeypatch.setattr(PromptSteps, "launch", no_capture)
    with LLM(str(model), speculate="suffix", **SMALL) as llm:
        for is_captured in (True, False):
            if not is_captured:
                monkeypatch.setattr(StepGraphs, "_capture", no_capture)
                llm.engine.runner.captured.steps._steps.clear()
            outs = llm.generate(PROMPTS, PARAMS["greedy"])
            reasons = [out.outputs[0].finish_reason for out in outs]
            assert reasons == ["length", "length", "abort", "length", "length"]
            for place in (0, 1, 3, 4):
                assert outs[place].outputs[0].token_ids == plain["greedy"][place]
            while llm.engine.has_work():  # a step may be pending when the last request ends
                llm.engine.step()
            assert llm.stats()["kv_usage"] == 0
            llm.reset_cache()
    assert num_failed >= 4


def test_the_others_fly_while_one_reads_its_prompt_or_needs_the_host(
    model: Path,
    plain: dict[str, list[list[int]]],
    plain_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_host: list[int] = []
    lengths = [24, 5, 9, 7, 3]
    params = [replace(PARAMS["greedy"], max_tokens=n) for n in lengths]
    with LLM(str(model), speculate="ngram", max_num_seqs=2, **SMALL) as llm:
        runner = llm.engine.runner
        for owner, name in ((runner, "_run_on_host"), (runner.prompts, "launch")):
            call = getattr(owner, name)

            def note(plan: Any, *rest: Any, call: Any = call) -> Any:
                by_host.append(len(plan.work))
                return call(plan, *rest)

            monkeypatch.setattr(owner, name, note)
        want = [ids[:n] for ids, n in zip(plain["greedy"], lengths, strict=True)]
        assert tokens(llm, params) == want
        assert by_host == [2, 1, 1, 1]  # the first two together, then each that comes
        by_host.clear()
        kinds = ["penalties", "greedy", "greedy", "greedy", "greedy"]
        want = [plain[kind][i] for i, kind in enumerate(kinds)]
        assert tokens(llm, [PARAMS[kind] for kind in kinds]) == want
        assert max(by_host[1:]) <= 2
        assert sum(by_host) < 30


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("method", ["off", "suffix", "draft"])
def test_first_tokens_are_waited_for_after_the_next_step_was_launched(
    method: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device would have nothing to do until the host has read them."""
    did: list[str] = []
    params = [replace(PARAMS["greedy"], max_tokens=n) for n in (24, 5, 9, 7, 3)]
    spec = f"draft:{model}:num_nodes=3:adaptive=false" if method == "draft" else method
    with LLM(str(model), speculate=spec, max_num_seqs=2, **SMALL) as llm:
        runner = llm.engine.runner
        captured, launch, receive = runner.captured, runner.captured.launch, runner.captured.receive
        read = runner.prompts.launch

        def note(pending: PendingStep) -> set[int]:
            if pending.follows_prompts and pending.received is None:
                did.append("first token")
            return receive(pending)

        monkeypatch.setattr(
            captured, "launch", lambda *given: did.append("launch") or launch(*given)
        )
        monkeypatch.setattr(runner.prompts, "launch", lambda *how: did.append("read") or read(*how))
        monkeypatch.setattr(captured, "receive", note)
        monkeypatch.setattr(captured.steps.download, "is_there", lambda buffer: False)
        tokens(llm, params)
    reads = [place for place, name in enumerate(did) if name == "read"]
    assert len(reads) == did.count("first token") > 2
    for place in reads:
        assert did[place : place + 3] == ["read", "launch", "first token"]


@pytest.mark.usefixtures("plain_kernels")
def test_an_answer_may_end_with_its_first_token_in_a_longer_ones_row(
    model: Path, plain: dict[str, list[list[int]]]
) -> None:
    first = plain["greedy"][1][0]
    with LLM(str(model), speculate="suffix", max_num_seqs=1, **SMALL) as llm:
        llm.generate(PROMPTS[2], PARAMS["greedy"])
        params = replace(PARAMS["greedy"], stop_token_ids=[first])
        answer = llm.generate(PROMPTS[1], params)[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == ([first], "stop")


@pytest.mark.usefixtures("plain_kernels")
def test_steps_too_large_to_check_anything_do_not_draft(
    model: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hunch.drafting.step_shapes.MAX_CHECKED", 3)  # one row may check a node
    drafted: list[int] = []
    draft = DeviceLookup.draft
    monkeypatch.setattr(
        DeviceLookup,
        "draft",
        lambda self, state, step, *rest: (
            drafted.append(len(step.ids_R)),
            draft(self, state, step, *rest),
        ),
    )
    # The first row says more than the others: at the end it is alone, and drafts.
    params = [replace(PARAMS["greedy"], max_tokens=24 if i == 0 else 8) for i in range(5)]
    with LLM(str(model), speculate="suffix", max_num_seqs=5, **SMALL) as llm:
        assert not llm.engine.runner.captured.policy.drafts_at(8)
        got = tokens(llm, params)
    assert set(drafted) == {1}
    want = plain["greedy"]
    assert got == [want[0]] + [answer[:8] for answer in want[1:]]


@pytest.mark.parametrize("captures", [False, True])
def test_weights_that_are_no_numbers_are_refused_at_the_start(
    captures: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captures:
        stand_in(monkeypatch)
    folder = shutil.copytree(model, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN"):
        LLM(str(folder), speculate="off", **SMALL)


def test_padding_need_not_be_numbers(
    model: Path, plain_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(model), speculate="off", **SMALL)
    forward = llm.engine.runner.host.forward

    def with_padding(batch: Batch) -> Hidden:
        hidden = forward(batch)
        last_TD = hidden.last_TD[: len(batch.ids_T)]
        return replace(hidden, last_TD=torch.cat([last_TD, last_TD * float("nan")]))

    monkeypatch.setattr(llm.engine.runner.host, "forward", with_padding)
    assert is_finite(llm.engine.runner)

"""Requests with grammars, scores and traces take captured steps, with the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from hunch import LLM, RequestOutput, SamplingParams, Speculation
from hunch.engine.scheduler import Scheduler
from hunch.grammar.matcher import Grammar
from hunch.pooling import params_to_pool
from hunch.step import grammars
from hunch.step.captured_step import CapturedSteps, PendingStep
from hunch.step.host_step import HostStep
from hunch.step.row_extras import HELD, RowExtras
from hunch.step.step_graphs import StepGraphs
from hunch.step.step_kinds import MASKS, StepKind
from hunch.step.upload import StepMasks
from hunch.text.tokenizer import load_tokenizer
from stand_in import lead_by_host, lead_noted, stand_in
from tiny_models import write_llama

SMALL: dict[str, Any] = {"device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 160}
PROMPTS = ["the model and the guess", "a token a token a token a", "fast token fast token fast"]
CHAIN = "suffix:adaptive=false:num_nodes=3"
SCHEMA = {
    "type": "object",
    "properties": {"fast": {"type": "boolean"}, "sizes": {"type": "array", "maxItems": 2}},
    "required": ["fast", "sizes"],
    "additionalProperties": False,
}
PARAMS = {
    "schema": SamplingParams(temperature=0, max_tokens=18, structured_outputs={"json": SCHEMA}),
    "regex": SamplingParams(
        temperature=1.1, seed=4, max_tokens=14, repetition_penalty=1.2,
        structured_outputs={"regex": "(ab|cde){2,4} [0-9]+"},
    ),
    "scores": SamplingParams(temperature=0.8, seed=2, max_tokens=9, logprobs=3, top_k=30),
    "own score": SamplingParams(temperature=0, max_tokens=9, logprobs=0, min_tokens=9),
    "trace": SamplingParams(temperature=0, max_tokens=16, speculation=Speculation(trace=True)),
    "free": SamplingParams(temperature=0.7, seed=9, max_tokens=8),
    "predicted": SamplingParams(
        temperature=0, max_tokens=12, prediction="token fast token fast token fast token",
    ),
    "stops": SamplingParams(temperature=0.9, seed=3, max_tokens=24, stop_token_ids=range(20, 110)),
    "not drafted": SamplingParams(
        temperature=0, max_tokens=8, prediction="fast", speculation=Speculation(mode="off"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("captured") / "model", width=32, layers=2)


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        yield


def run(llm: LLM, *names: str) -> list[RequestOutput]:
    prompts = [prompt for _ in names for prompt in PROMPTS]
    return llm.generate(prompts, [PARAMS[name] for name in names for _ in PROMPTS])


def shown(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that a user sees but the drafts."""
    found: list[Any] = []
    for output in outputs:
        (answer,) = output.outputs
        scores = [
            {token: (round(score.logprob, 5), score.rank) for token, score in entries.items()}
            for entries in answer.logprobs or []
        ]
        found.append((answer.token_ids, answer.text, answer.finish_reason, scores))
    return found


@pytest.mark.parametrize("method", [CHAIN, "draft:tree"])
def test_as_by_the_host(method: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        lead_by_host(llm.engine.runner)
        plain = shown(run(llm, *PARAMS))
    if method == "draft:tree":
        method = f"draft:{model}:tree=dynamic:depth=2:num_nodes=4:adaptive=false"
    with LLM(str(model), speculate=method, **SMALL) as llm:
        by_host = lead_noted(monkeypatch)
        outputs = run(llm, *PARAMS)
        assert shown(outputs) == plain
        assert llm.stats()["accepted"] > 0
    work = [item for plan in by_host for item in plan.work]
    assert sorted({item.row for item in work}) == list(range(len(outputs)))
    assert len(work) == len(outputs)  # the host reads the prompts and does nothing else
    for output in outputs[4 * len(PROMPTS) : 5 * len(PROMPTS)]:
        (answer,) = output.outputs
        traces = answer.trace or []
        accepted = sum(len(trace.accepted) for trace in traces)
        assert accepted + len(traces) >= len(answer.token_ids)
        assert any(trace.tokens for trace in traces)
        for trace in traces:
            assert all(trace.parents[node] < node for node in trace.accepted)


def test_nobody_waits_for_the_first_token_of_a_grammar(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask is written while the pass runs, once no pending step reads masks there."""
    names = ("schema", "regex")
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        lead_by_host(llm.engine.runner)
        plain = shown(run(llm, *names))
    with LLM(str(model), speculate=CHAIN, max_num_seqs=2, **SMALL) as llm:
        captured, fill, read = llm.engine.runner.captured, StepMasks.fill, list[int]()
        monkeypatch.setattr(HostStep, "run", None)
        monkeypatch.setattr(
            StepMasks, "fill", lambda *how: read.append(captured.num_with_masks) or fill(*how)
        )
        params = [PARAMS[name] for name in names for _ in PROMPTS]
        pairs = zip(PROMPTS * 2, params, strict=True)
        alone = [llm.generate(prompt, one)[0] for prompt, one in pairs]
        assert shown(alone) == plain
        assert shown(run(llm, *names)) == plain
        assert set(read) == {0}


def asked_of_prompts(llm: LLM) -> list[Any]:
    """Answers, scores and states of prompts of requests that ask for them, and of others."""
    free, scored = PARAMS["free"], replace(PARAMS["free"], prompt_logprobs=2)
    grammar = replace(PARAMS["schema"], prompt_logprobs=0)
    mean, last = params_to_pool("mean"), params_to_pool("last")
    params = [scored, free, mean, last, grammar, free, mean]
    prompts = [f"{PROMPTS[i % 3]} {PROMPTS[i % 2]}" for i in range(len(params))]
    outputs = llm.generate(prompts, params)
    scores = [
        [(token, round(score.logprob, 5), score.rank) for token, score in (entry or {}).items()]
        for output in outputs
        for entry in output.prompt_logprobs or []
    ]
    return [shown(outputs), scores, [output.embedding for output in outputs]]


def test_nobody_waits_for_what_is_asked_of_a_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and states of prompts come one step late, also of the parts of a prompt."""
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        lead_by_host(llm.engine.runner)
        plain = asked_of_prompts(llm)
    assert sum(map(bool, plain[1])) > 20
    assert sum(map(bool, plain[2])) == 3
    monkeypatch.setattr(HostStep, "run", None)
    for size in (160, 11):
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": size}
        with LLM(str(model), speculate=CHAIN, **sizes, **SMALL) as llm:
            assert asked_of_prompts(llm) == plain


def plain_of(model: Path, prompts: list[str], params: list[SamplingParams], **how: Any) -> Any:
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL, **how) as llm:
        lead_by_host(llm.engine.runner)
        return shown(llm.generate(prompts, params))


def test_preempted_requests_keep_all_scores_and_traces(model: Path) -> None:
    """Also those of a step that was launched before the request left its row."""
    trace = Speculation(trace=True)
    params = [
        SamplingParams(temperature=0, max_tokens=20 + i, logprobs=2, speculation=trace)
        for i in range(8)
    ]
    prompts = [f"{PROMPTS[i % 3]} {PROMPTS[i % 2]}" for i in range(len(params))]
    plain = plain_of(model, prompts, params)
    few = {"max_num_seqs": 6, "num_blocks": 30, "block_size": 4, "kv_bytes": None}
    with LLM(str(model), speculate=CHAIN, **{**SMALL, **few}) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["num_preemptions"] > 1
        assert shown(outputs) == plain
    for output in outputs:
        (answer,) = output.outputs
        assert answer.stats["accepted"] == sum(len(one.accepted) for one in answer.trace or [])


def test_preempted_requests_stop_at_any_of_many_ids(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at those that the device does not know, in a step that was launched before."""
    asked = {"temperature": 1.2, "max_tokens": 9, "stop_token_ids": range(5, 285)}
    params = [SamplingParams(seed=i, min_tokens=i % 4, **asked) for i in range(24)]
    prompts = [PROMPTS[i % 3] for i in range(len(params))]
    plain = plain_of(model, prompts, params)
    assert {reason for _, _, reason, _ in plain} == {"stop"}
    plan, chance = Scheduler.plan, Random(1)

    def preempting(scheduler: Scheduler) -> Any:
        if scheduler.running and chance.random() < 0.4:
            scheduler.num_preemptions += 1
            scheduler._leave(scheduler.running[-1])
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "plan", preempting)
    with LLM(str(model), speculate=CHAIN, max_num_seqs=3, **SMALL) as llm:
        assert shown(llm.generate(prompts, params)) == plain
        assert llm.stats()["num_preemptions"] > 9


def test_processed_scores_are_those_of_the_host(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"max_tokens": 6, "logprobs": 4}
    params = [
        SamplingParams(temperature=0, **asked),
        SamplingParams(temperature=0.8, seed=2, top_k=7, **asked),
        SamplingParams(temperature=1.3, seed=3, top_p=0.6, repetition_penalty=1.3, **asked),
        SamplingParams(temperature=0, structured_outputs={"regex": "(ab|cd)+ [0-9]+"}, **asked),
        SamplingParams(temperature=0, logit_bias={5: 4.0, 9: -3.0}, **asked),
    ]
    prompts, how = PROMPTS[:1] * len(params), {"logprobs_mode": "processed_logprobs"}
    plain = plain_of(model, prompts, params, **how)
    assert plain != plain_of(model, prompts, params)
    speculate = "suffix:adaptive=false:num_nodes=3"
    with LLM(str(model), speculate=speculate, **SMALL, **how) as llm:
        by_host = lead_noted(monkeypatch)
        assert shown(llm.generate(prompts, params)) == plain
    assert sum(len(plan.work) for plan in by_host) == len(prompts)


def test_many_scores_are_those_of_the_host(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than servers allow by default, up to the whole of a small vocabulary."""
    asked = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    params = [SamplingParams(logprobs=count, **asked) for count in (21, 3, 130, vocab_size)]
    prompts = [PROMPTS[1]] * len(params)
    plain = plain_of(model, prompts, params)
    assert [len(scores[0]) for *_, scores in plain] == [21, 3, 130, vocab_size]
    with LLM(str(model), speculate=CHAIN, **SMALL) as llm:
        by_host = lead_noted(monkeypatch)
        assert shown(llm.generate(prompts, params)) == plain
        assert shown(llm.generate(prompts[:2], params[:2])) == plain[:2]
    assert sum(len(plan.work) for plan in by_host) == len(prompts) + 2  # prompts are read, no more


def test_a_prediction_drafts_in_captured_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, and by its own name, whatever drafts for them."""
    (plain,) = plain_of(model, PROMPTS[:1], [SamplingParams(temperature=0, max_tokens=40)])
    expected = list(plain[0])
    expected[11:13] = [expected[11] + 1]  # a token left out, and another in place of the next
    params = SamplingParams(
        temperature=0, max_tokens=40, prediction=expected, speculation=Speculation(trace=True)
    )
    free = SamplingParams(temperature=0, max_tokens=20)
    for speculate in (
        "auto:num_nodes=7:adaptive=false",
        f"draft:{model}:num_nodes=2",
        "prediction:num_nodes=7:adaptive=false",
    ):
        with LLM(str(model), speculate=speculate, **SMALL) as llm:
            by_host = lead_noted(monkeypatch)
            found, other = llm.generate([PROMPTS[0], PROMPTS[0]], [params, free])
            assert shown([found]) == [plain]
            assert other.outputs[0].token_ids == plain[0][:20]
            assert sum(len(plan.work) for plan in by_host) == 2
        traces = found.outputs[0].trace or []
        told = [trace for trace in traces if trace.method == "prediction"]
        assert sum(len(trace.accepted) for trace in told) >= 20
        if speculate.startswith("auto"):
            assert len(traces) < 15


def test_a_row_is_drafted_for_by_the_method_it_names(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ngram", "suffix", "draft", "prediction", "auto")
    prompts = [PROMPTS[1]] * len(names)

    def asked(name: str) -> SamplingParams:
        wish = Speculation(mode=name, trace=True)
        return SamplingParams(temperature=0, max_tokens=12, speculation=wish)

    params = [asked(name) for name in names]
    plain = plain_of(model, prompts, [SamplingParams(temperature=0, max_tokens=12)] * len(names))
    with LLM(str(model), speculate=f"auto:draft={model}:any_size=true", **SMALL) as llm:
        by_host = lead_noted(monkeypatch)
        outputs = llm.generate(prompts, params)
        assert shown(outputs) == plain
        assert sum(len(plan.work) for plan in by_host) == len(names)
        for name, output in zip(names[:4], outputs, strict=False):
            methods = {trace.method for trace in output.outputs[0].trace or [] if trace.tokens}
            assert methods <= {name}
    # Where as many nodes as allowed are checked, whoever is named drafts.
    with LLM(str(model), speculate="auto:num_nodes=3:adaptive=false", **SMALL) as llm:
        for name in ("ngram", "suffix"):
            (found,) = llm.generate(prompts[:1], asked(name))
            assert shown([found]) == plain[:1]
            assert {t.method for t in found.outputs[0].trace or []} - {""} == {name}


@pytest.mark.parametrize(
    "method",
    [CHAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in ("off", "draft:tree"))],
)
def test_tokens_that_a_grammar_does_not_take_are_taken_back(
    method: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without a mask choose what they like, and go on from before it where it is refused."""
    if method == "draft:tree":
        method = f"draft:{model}:tree=dynamic:depth=2:num_nodes=4:adaptive=false"
    asked: dict[str, Any] = {"max_tokens": 24, "structured_outputs": {"json": SCHEMA}}
    text = {"max_tokens": 24, "structured_outputs": {"regex": "[a-f0-9 ]{6,16}[xyz]"}}
    params = [
        SamplingParams(temperature=0, **asked),
        SamplingParams(temperature=1.2, seed=5, **text),
        SamplingParams(temperature=0, logprobs=2, **text),
        SamplingParams(temperature=0.9, seed=6, top_k=5, **text),  # these always have one
        SamplingParams(temperature=0, repetition_penalty=1.3, **text),
        SamplingParams(temperature=0.7, seed=9, max_tokens=20),
    ]
    prompts = [PROMPTS[number % 3] for number in range(len(params))]
    plain = plain_of(model, prompts, params)
    monkeypatch.setattr(grammars, "PAUSE", 0)  # after every refused one further nodes
    taken_back: list[set[int]] = []
    receive = CapturedSteps.receive

    def note(steps: CapturedSteps, pending: PendingStep) -> set[int]:
        taken_back.append(receive(steps, pending))
        return taken_back[-1]

    monkeypatch.setattr(CapturedSteps, "receive", note)
    # After every mask a choice without one.
    monkeypatch.setattr(Grammar, "probe", property(lambda _: [], lambda *_: None), raising=False)
    few = {"kv_bytes": None, "block_size": 4, "num_blocks": 18, "max_model_len": 60}
    for how in ({}, few):
        with LLM(str(model), speculate=method, **SMALL | how) as llm:
            assert shown(llm.generate(prompts, params)) == plain
            assert (llm.stats()["num_preemptions"] > 0) == bool(how)
            assert (llm.stats()["accepted"] > 0) == (method != "off")
    rows = [len(some) for some in taken_back]
    assert sum(rows) > 20
    assert max(rows) > 1


def test_there_is_a_mask_for_every_node_of_many_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hunch.step.step_graphs.MAX_LOGITS", 4)
    with LLM(str(model), speculate=CHAIN, max_num_seqs=4, **SMALL) as llm:
        text = [out.outputs[0].text for out in llm.generate(PROMPTS, PARAMS["regex"])]
        assert len(llm.engine.runner.captured.steps.step_masks().of(16)[0]) == 16
    with LLM(str(model), speculate="off", **SMALL) as llm:
        assert text == [out.outputs[0].text for out in llm.generate(PROMPTS, PARAMS["regex"])]


def test_what_is_checked_of_rows_with_grammars_changes_every_few_steps() -> None:
    """Each change is an upload; what is checked meanwhile is as before."""
    worth = iter(range(100))
    extras = RowExtras.__new__(RowExtras)
    extras.grammars = SimpleNamespace(max_checked=lambda row, count: next(worth))  # type: ignore[assignment]
    group: Any = SimpleNamespace(
        extras=MASKS,
        has_waiting=True,
        ids=[4, 2],
        max_checked=[3, 3],
        worth_checking=[],
        num_held=0,
    )
    assert [extras.max_checked(group) for _ in range(2 * HELD)] == [[0, 1]] * HELD + [[2, 3]] * HELD
    group.has_waiting = False
    assert extras.max_checked(group) == [3, 3]


def test_steps_of_the_same_rows_look_for_their_graph_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StepKind] = []
    step = StepGraphs.step

    def note(steps: StepGraphs, kind: StepKind) -> Any:
        asked.append(kind)
        return step(steps, kind)

    with LLM(str(model), speculate="off", **SMALL) as llm:
        monkeypatch.setattr(StepGraphs, "step", note)
        run(llm, "free")
        assert llm.stats()["num_steps"] > 6
    assert 1 <= len(asked) <= 4  # fewer rows at the end are others


def test_a_row_whose_grammar_leaves_no_token_ends_alone(model: Path) -> None:
    """It is found out while the next step runs; the other rows go on."""
    letter = load_tokenizer(model).encode("a", add_special_tokens=False)[-1]
    stuck = SamplingParams(
        temperature=0, max_tokens=12, structured_outputs={"regex": "a{4}7"},
        allowed_token_ids=[letter], logprobs=2,
    )  # fmt: skip
    params = [PARAMS["schema"], stuck, PARAMS["schema"]]
    plain = plain_of(model, PROMPTS, params)
    assert plain[1][:3] == ([letter] * 4, "aaaa", "abort")
    for speculate in ("off", "suffix:adaptive=false:num_nodes=3"):
        with LLM(str(model), speculate=speculate, **SMALL) as llm:
            for _ in range(2):  # its row is used again
                assert shown(llm.generate(PROMPTS, params)) == plain


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_request_takes_the_row_of_one_that_was_aborted_before_its_grammar_refused_a_token(
    is_stuck: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its length nor its end is what the other one's result says."""
    tokenizer = load_tokenizer(model)
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    rules: dict[str, Any] = {"structured_outputs": {"regex": "[a-f0-9 ]{6,16}[xyz]"}}
    if is_stuck:
        rules = {"structured_outputs": {"regex": "a{2}7"}, "allowed_token_ids": [letter]}
    with_grammar = SamplingParams(temperature=0, max_tokens=12, **rules)
    free = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (plain,) = plain_of(model, PROMPTS[:1], [free])
    monkeypatch.setattr(grammars, "PAUSE", 0)
    chance, found, ids = Random(1), dict[str, list[int]](), tokenizer.encode(PROMPTS[0])
    with LLM(str(model), speculate="off", max_num_seqs=2, **SMALL) as llm:
        engine = llm.engine
        for i in range(40):
            engine.add(str(i), ids, free if i % 2 else with_grammar, stream=False)
        for _ in range(400):
            held = [one for one in engine._scheduler.running if one.request.grammar is not None]
            if held and chance.random() < 0.4:
                engine.abort(held[0].job_id)
            found |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
    assert len(found) == 40
    assert all(found[str(i)] == plain[0] for i in range(1, 40, 2))

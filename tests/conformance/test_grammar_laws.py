"""Grammars and speculation: an answer follows its grammar, and no drafter changes a token."""

import json
import re
import time
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest

from drafters import NETWORKS
from hunch import LLM, RequestOutput, SamplingParams, Speculation, StructuredOutput
from hunch.errors import GrammarError, RequestError
from hunch.registry import DRAFTERS, LOSSY, VERIFIERS

SLOW = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["guess", "token", "モデル"]},
        "fast": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["kind", "fast", "sizes"],
    "additionalProperties": False,
}
REGEX = "(ab|cde){2,4} [0-9]{2}"
KINDS: dict[str, StructuredOutput] = {
    "schema": StructuredOutput(json=SCHEMA),
    "schema, free layout": StructuredOutput(json=SCHEMA, whitespace=True),
    "object": StructuredOutput(json_object=True),
    "regex": StructuredOutput(regex=REGEX),
    "choice": StructuredOutput(choice=["the model", "the guess and the token", "no"]),
    "Lark": StructuredOutput(grammar='start: "fast" (" token" | " model")+ "."\n'),
    "GBNF": StructuredOutput(grammar='root ::= "x" ("=" [0-9] [0-9]?)? ("," root)?\n'),
}
PROMPTS = ["the model and the guess", "a", "fast token fast token fast"]
OTHERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2, "seed": 3, "n": 2},
    "processors": {
        "temperature": 0.8,
        "seed": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logprobs": 2,
        "ignore_eos": True,
    },
    "stops": {
        "temperature": 0.7,
        "seed": 1,
        "stop": ["to", ": t"],
        "include_stop_str_in_output": True,
    },
}


def check(kind: str, text: str) -> bool:
    """Whether a finished answer is what its grammar says, by other means."""
    if kind.startswith(("schema", "object")):
        value = json.loads(text)
        if kind == "object":
            return isinstance(value, dict)
        return (
            list(value) == ["kind", "fast", "sizes"]
            and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
            and isinstance(value["fast"], bool)
            and len(value["sizes"]) <= 2
            and all(isinstance(size, int) and size <= 99 for size in value["sizes"])
        )
    forms = {
        "regex": REGEX,
        "choice": "the model|the guess and the token|no",
        "Lark": r"fast( token| model)+\.",
        "GBNF": r"x(=[0-9][0-9]?)?(,x(=[0-9][0-9]?)?)*",
    }
    return re.fullmatch(forms[kind], text) is not None


def answers(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason) for o in outputs for a in o.outputs
    ]


def run(llm: LLM, kind: str, other: str) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=60, structured_outputs=KINDS[kind], **OTHERS[other])
    return llm.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def plain(tiny_llm: Callable[..., LLM]) -> dict[tuple[str, str], list[tuple[Any, ...]]]:
    llm = tiny_llm("off", max_num_seqs=1)
    return {(kind, other): answers(run(llm, kind, other)) for kind in KINDS for other in OTHERS}


@pytest.mark.parametrize("kind", KINDS)
def test_finished_answers_follow_the_grammar(kind: str, plain: dict[Any, Any]) -> None:
    finished = [
        text
        for other in ("greedy", "sampled", "processors")
        for _, text, reason, _ in plain[kind, other]
        if reason == "stop"
    ]
    assert finished or kind == "schema, free layout"  # a random model likes spaces
    assert all(check(kind, text) for text in finished)
    for other in OTHERS:
        assert all(reason in ("stop", "length") for _, _, reason, _ in plain[kind, other])


# Of drafters that meet a grammar in the same code one is enough each day.
ALIKE = ("dflash", "dspark", "eagle", "mlp", "mtp", "text", "synthetic")


# To a network a grammar is a mask: it meets a few of them each day, the cheaper drafters all.
FEW = ("schema", "regex", "GBNF")
NAMES = [pytest.param(n, marks=[SLOW] * (n in ALIKE)) for n in sorted(DRAFTERS)]


def check_texts(llm: LLM, plain: dict[Any, Any], kinds: Iterable[str], is_all: bool) -> None:
    for kind, other in plain:
        if kind in kinds and (is_all or other not in ("greedy", "stops")):
            assert answers(run(llm, kind, other)) == plain[kind, other], (kind, other)


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_the_drafter(
    name: str, tiny_llm: Callable[..., LLM], plain: dict[Any, Any]
) -> None:
    """The cheapest drafter does all, the others the harder half."""
    kinds = FEW if name in NETWORKS else KINDS
    check_texts(tiny_llm(name), plain, kinds, is_all=name == "ngram")


@SLOW
@pytest.mark.parametrize("name", NETWORKS)
def test_text_of_other_grammars_does_not_depend_on_networks(
    name: str, tiny_llm: Callable[..., LLM], plain: dict[Any, Any]
) -> None:
    check_texts(tiny_llm(name), plain, set(KINDS) - set(FEW), is_all=False)


@pytest.mark.parametrize(
    "speculate",
    ["suffix:adaptive=false", "draft:tree=dynamic:num_nodes=12", "medusa:tree=static", "recycling"],
)
def test_trees_are_masked_branch_by_branch(
    speculate: str, tiny_llm: Callable[..., LLM], plain: dict[Any, Any]
) -> None:
    llm = tiny_llm(speculate)
    for kind in ("schema", "regex", "GBNF"):
        for other in ("sampled", "processors"):
            assert answers(run(llm, kind, other)) == plain[kind, other], (kind, other)


@pytest.mark.parametrize(
    "engine",
    [{"max_num_batched_tokens": 5, "max_num_seqs": 4}, {"depth": 1},
     {"num_blocks": 24, "block_size": 8, "max_num_seqs": 6}],
    ids=["small chunks", "depth 1", "few blocks"],
)  # fmt: skip
def test_text_does_not_depend_on_how_steps_are_cut(
    engine: dict[str, int], tiny_llm: Callable[..., LLM], plain: dict[Any, Any]
) -> None:
    llm = tiny_llm("ngram", **engine)
    for kind in ("schema", "Lark"):
        for other in OTHERS:
            assert answers(run(llm, kind, other)) == plain[kind, other], (kind, other)
    if "num_blocks" in engine:
        assert llm.stats()["num_preemptions"] > 0


def test_forced_tokens_are_drafted_for_free(tiny_llm: Callable[..., LLM]) -> None:
    """Even a drafter that never guesses: the grammar's own text costs fewer passes than tokens."""
    llm = tiny_llm("ngram:min_match=4")
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=KINDS["schema"])
    (output,) = llm.generate("a", params)
    assert output.stats["accepted"] > 20
    assert output.stats["steps"] < 0.7 * len(output.outputs[0].token_ids)


TREE = "draft:tree=fixed:branch=2"


@pytest.mark.parametrize(
    ("speculate", "verifier"),
    [
        pytest.param(*pair, marks=[SLOW] * (pair == (TREE, "block")))
        for pair in product(("draft", TREE, "suffix"), sorted(set(VERIFIERS) - {"exact"}))
    ],
)
def test_other_verifiers_follow_the_grammar_too(
    verifier: str, speculate: str, tiny_llm: Callable[..., LLM], plain: dict[Any, Any]
) -> None:
    llm = tiny_llm(speculate, verifier=verifier)
    for kind in ("schema", "regex", "choice"):
        assert answers(run(llm, kind, "greedy")) == plain[kind, "greedy"]
        for _, text, reason, _ in answers(run(llm, kind, "sampled")):
            assert reason in ("stop", "length")
            assert reason == "length" or check(kind, text)
    assert verifier in LOSSY or verifier in ("rejection", "block")


def test_rows_with_and_without_a_grammar_share_a_step(tiny_llm: Callable[..., LLM]) -> None:
    wishes = [
        SamplingParams(temperature=0.9, seed=2, max_tokens=30, structured_outputs=asked)
        for asked in (None, KINDS["schema"], None, KINDS["regex"])
    ]
    prompts = [PROMPTS[0]] * len(wishes)
    alone = [
        tiny_llm("off", max_num_seqs=1).generate(p, w)[0]
        for p, w in zip(prompts, wishes, strict=True)
    ]
    assert answers(tiny_llm("ngram").generate(prompts, wishes)) == answers(alone)


def test_a_request_that_leaves_no_token_fails_closed(tiny_llm: Callable[..., LLM]) -> None:
    """Never a token outside the grammar: the answer so far is kept, the rest is an abort."""
    for name in ("off", "ngram"):
        llm = tiny_llm(name)
        digits = llm.tokenizer.encode("0123456789")
        params = SamplingParams(
            temperature=0.9,
            seed=1,
            allowed_token_ids=digits,
            structured_outputs={"regex": "[0-9]{3}[a-z]"},
        )
        (output,) = llm.generate("a", params)
        answer = output.outputs[0]
        assert re.fullmatch("[0-9]{3}", answer.text)
        assert answer.finish_reason == "abort"
        assert "no token is allowed" in str(answer.stop_reason)


def test_broken_grammars_are_refused_and_others_go_on(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("ngram")
    good = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("a", good)[0].outputs[0].token_ids
    began = time.perf_counter()
    for asked in ({"regex": "("}, {"json": {"$ref": "#/nowhere"}}, {"regex": "a" * 10_000_000}):
        with pytest.raises(GrammarError):
            llm.generate("a", SamplingParams(structured_outputs=asked))
    assert time.perf_counter() - began < 120
    with pytest.raises(RequestError):
        SamplingParams(structured_outputs={"regex": "a", "grammar": "b"})
    assert llm.generate("a", good)[0].outputs[0].token_ids == before


def test_a_grammar_works_without_speculation_for_one_request(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("ngram")
    params = {
        "temperature": 0.9,
        "seed": 8,
        "max_tokens": 40,
        "structured_outputs": KINDS["schema"],
    }
    (on,) = llm.generate("a", SamplingParams(**params))
    (off,) = llm.generate("a", SamplingParams(**params, speculation=Speculation(mode="off")))
    assert on.outputs[0].token_ids == off.outputs[0].token_ids
    assert off.stats["drafted"] == 0
    assert on.stats["drafted"] > 0

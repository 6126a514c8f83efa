"""A draft model: its own copy accepts everything, another vocabulary is told, windows hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import head_files
from cases import every_pair
from hunch import LLM, RequestOutput, SamplingParams
from hunch.errors import ConfigError, VocabMismatchError
from hunch.models.heads.vocabulary import compare
from tiny_models import write_llama

SMALL = {
    "always_draft": True,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "kv_bytes": 8_000_000,
    "dtype": "float32",
}
ENGINES: dict[str, dict[str, Any]] = {
    "batch of 8": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 2},
    "few blocks": {"num_blocks": 14, "block_size": 8, "max_num_seqs": 6},
}
KINDS = {"chain": "num_nodes=4", "tree": "tree=dynamic:num_nodes=12:depth=4"}
PROMPTS = [
    [int(t) for t in torch.randint(250, (n,), generator=torch.Generator().manual_seed(n))]
    for n in (5, 17, 40, 3, 60, 33, 20, 9)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def plain(target: Path) -> Callable[[SamplingParams], list[list[int]]]:
    llm = LLM(str(target), speculate="off", **SMALL)
    known: dict[float, list[list[int]]] = {}

    def answer(params: SamplingParams) -> list[list[int]]:
        if params.temperature not in known:
            known[params.temperature] = tokens(llm.generate(PROMPTS, params))
        return known[params.temperature]

    return answer


def params_at(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=24, ignore_eos=True, **{"seed": 3, **more}
    )


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("engine", "kind", "temperature"), every_pair([*ENGINES], [*KINDS], [0.0, 1.0])
)
def test_a_copy_of_the_target_is_always_right(
    engine: str, kind: str, temperature: float, target: Path, plain: Any
) -> None:
    """Finds every off-by-one in positions, KV and noise."""
    params = params_at(temperature)
    arguments = SMALL | ENGINES[engine]
    llm = LLM(str(target), speculate=f"draft:{target}:{KINDS[kind]}", **arguments)
    first = llm.generate(PROMPTS, params)
    assert tokens(first) == plain(params)
    again = llm.generate(PROMPTS, params)  # prompts now come from the prefix cache
    assert tokens(again) == plain(params)
    for output in (*first, *again):
        stats = output.outputs[0].stats
        if kind == "chain":
            assert stats["accepted"] == stats["drafted"] > 0
        # 24 tokens: the first has no draft before it, then 4 guesses and the target's own per step.
        if engine in ("batch of 8", "one at a time"):
            assert stats["steps"] == 6
    if engine == "few blocks":
        assert llm.stats()["num_preemptions"] > 0
    llm.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slightly_wrong_copy_changes_no_token(
    kind: str, target: Path, plain: Any, tmp_path: Path
) -> None:
    path = head_files.make_draft(target, tmp_path / "near", noise=0.15)
    for temperature in (0.0, 1.0):
        params = params_at(temperature)
        llm = LLM(str(target), speculate=f"draft:{path}:{KINDS[kind]}", **SMALL)
        assert tokens(llm.generate(PROMPTS, params)) == plain(params)
        stats = llm.stats()
        assert 0 < stats["accepted"] < stats["drafted"]
        assert 1.1 < stats["tokens_per_pass"] < 4.5
        llm.close()


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {7: 4.0, 9: -100.0, 30: 2.5}},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
}


@pytest.mark.parametrize(
    ("kind", "num_rows", "temperature"), [("chain", 1, 0.0), ("chain", 3, 0.8), ("tree", 3, 0.8)]
)
def test_a_copy_of_the_target_follows_the_requests_rules(
    kind: str, num_rows: int, temperature: float, target: Path
) -> None:
    """A guess is what the target says after its rules, with the drafted tokens as history."""
    llms = [
        LLM(str(target), speculate=speculate, **SMALL)
        for speculate in ("off", f"draft:{target}:{KINDS[kind]}")
    ]
    for rules in RULES.values():
        params = params_at(temperature, **rules)
        expected, got = (llm.generate(PROMPTS[:num_rows], params) for llm in llms)
        assert tokens(got) == tokens(expected)
        for output in got:
            assert output.outputs[0].stats["steps"] == 6  # every guess was right
    for llm in llms:
        llm.close()


def test_confidence_ends_a_draft_early(target: Path, plain: Any) -> None:
    """A draft that is sure of little guesses little, and most of it is right."""
    params, drafted, accepted = params_at(0.0), [], []
    for confidence in (0, 0.5):
        spec = f"draft:{target}:num_nodes=6:min_confidence={confidence}"
        llm = LLM(str(target), speculate=spec, **SMALL)
        assert tokens(llm.generate(PROMPTS, params)) == plain(params)
        drafted.append(llm.stats()["drafted"])
        accepted.append(llm.stats()["accepted"])
        llm.close()
    assert 0 < drafted[1] < drafted[0]
    assert accepted[1] == drafted[1]


def test_a_draft_of_short_context_goes_on_past_it(tmp_path: Path, target: Path) -> None:
    """Positions count from the window's start, so a long text stays within what it learned."""
    target = head_files.make_draft(target, tmp_path / "local")
    head_files.look_less_far(target)
    path = head_files.make_draft(target, tmp_path / "short")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 48}
    (path / "config.json").write_text(json.dumps(config))
    prompt = PROMPTS[4] + PROMPTS[2]  # 100 tokens, twice the draft's context
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = LLM(str(target), speculate="off", **SMALL).generate([prompt], params)
    llm = LLM(str(target), speculate=f"draft:{path}:num_nodes=4", **SMALL)
    assert tokens(llm.generate([prompt], params)) == tokens(expected)
    stats = llm.stats()
    assert stats["drafted"] > 40
    assert stats["accepted"] > 0.8 * stats["drafted"]


def test_a_context_too_short_for_blocks_is_refused(tmp_path: Path, target: Path) -> None:
    path = head_files.make_draft(target, tmp_path / "short")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 48}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"context of 48 tokens is too short .* block_size=32"):
        LLM(str(target), speculate=f"draft:{path}:num_nodes=4", block_size=32, **SMALL)
    sizes = {**SMALL, "max_model_len": 44}  # it never reads more than it can
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(str(target), speculate=f"draft:{path}:num_nodes=4", block_size=32, **sizes) as llm:
        assert len(tokens(llm.generate([PROMPTS[1]], params))[0]) == 44 - len(PROMPTS[1])


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_window_may_be_shorter_than_a_draft(num_rows: int, target: Path, plain: Any) -> None:
    draft, params = head_files.make_draft(target, target.parent / "near", noise=0.02), params_at(0)
    sizes = {"max_num_seqs": num_rows, "block_size": 2}
    with LLM(str(target), speculate=f"draft:{draft}:window=4", **{**SMALL, **sizes}) as llm:
        assert tokens(llm.generate(PROMPTS, params)) == plain(params)
        assert llm.stats()["drafted"] > 0


def test_a_dear_draft_is_warned_of(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hunch"):
        LLM(str(target), speculate=f"draft:{target}", **SMALL).close()
    assert "100% of the bytes the target reads" in caplog.text


def test_low_acceptance_is_warned_of_once(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = write_llama(tmp_path / "stranger", seed=9)
    llm = LLM(str(target), speculate=f"draft:{stranger}:num_nodes=8", **SMALL)
    with caplog.at_level(logging.WARNING, "hunch"):
        for seed in range(3):
            llm.generate(PROMPTS, params_at(1.0, seed=seed))
    warned = [record.getMessage() for record in caplog.records]
    assert len([text for text in warned if "of the guesses are accepted" in text]) == 1
    assert any("`hunch train` makes one" in text for text in warned)


def test_drafter_memory_is_reported(target: Path) -> None:
    llm = LLM(str(target), speculate=f"draft:{target}", **SMALL)
    size = (target / "model.safetensors").stat().st_size
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert llm.stats()["drafter_bytes"] > 0.9 * size  # its weights and its KV


# --- vocabularies --------------------------------------------------------------------------------

WORDS = {"a": 0, "b": 1, "\u0120c": 2, "d": 3}


def test_equal_but_for_padding_is_accepted() -> None:
    for size in (4, 6):
        columns = compare(WORDS, size, WORDS, 4, "draft")
        assert columns.ids_C is None
        assert columns.fit(torch.zeros(1, size)).shape == (1, 4)


def test_an_id_preserving_part_is_accepted() -> None:
    columns = compare({"a": 0, "b": 1}, 2, WORDS, 4, "draft")
    assert columns.ids_C is not None
    assert columns.ids_C.tolist() == [0, 1]
    assert columns.to_draft(torch.tensor([0, 1, 3])).tolist() == [0, 1, 1]


def test_other_vocabularies_are_named() -> None:
    other = {"a": 0, "x": 1, "y": 2, "d": 3, "e": 4}
    with pytest.raises(VocabMismatchError) as error:
        compare(other, 5, WORDS, 4, "DRAFT")
    for part in ("DRAFT", "5 tokens", "4 tokens", "at 2 ids", "1: target 'b', draft 'x'"):
        assert part in str(error.value)
    assert "cross_vocab=true" in str(error.value)
    with pytest.raises(VocabMismatchError, match="cannot be compared"):
        compare(None, 5, WORDS, 4, "DRAFT")


def test_crossing_vocabularies(caplog: pytest.LogCaptureFixture) -> None:
    other = {"\u2581c": 0, "z": 1, "a": 2}
    with caplog.at_level(logging.WARNING, "hunch"):
        columns = compare(other, 3, WORDS, 4, "DRAFT", is_crossed=True)
    assert columns.ids_C is not None
    assert columns.ids_C.tolist() == [0, 2]
    assert columns.fit(torch.tensor([[5.0, 6.0, 7.0]])).tolist() == [[7.0, 5.0]]
    assert columns.to_draft(torch.tensor([2, 0])).tolist() == [0, 2]
    assert "over the 2 tokens both vocabularies have, of the target's 4" in caplog.text


def test_crossed_vocabularies_may_spell_the_same_text_in_two_ways() -> None:
    pieces = {"<unk>": 0, "<0x0A>": 1, "\u2581\u00e9t\u00e9": 2, "\u00c3": 3}
    levels = {"\u0120\u00c3\u00a9t\u00c3\u00a9": 0, "\u010a": 1, "x": 2, "\u00c3": 3, "\u0120": 4}
    columns = compare(pieces, 4, levels, 5, "DRAFT", is_crossed=True)
    assert columns.ids_C is not None
    assert columns.pick_C is not None
    assert columns.ids_C.tolist() == [0, 1]  # " été" and the line end; a lone byte is no letter
    assert columns.pick_C.tolist() == [2, 1]


def test_a_crossed_draft_models_text_begins_with_its_own_mark() -> None:
    """Some models guess nothing right without it, and the target's may have none."""
    columns = replace(compare({"d": 0, "a": 1}, 2, WORDS, 4, "D", is_crossed=True), begin_id=7)
    ids_T, pos_T = torch.tensor([3, 0, 3, 0]), torch.tensor([0, 1, 0, 1])
    assert columns.to_draft(ids_T, pos_T).tolist() == [7, 1, 7, 1]
    assert columns.to(torch.device("cpu")).begin_id == 7


def test_the_mark_is_read_from_the_draft_models_tokenizer(target: Path, tmp_path: Path) -> None:
    path = head_files.make_draft(target, tmp_path / "other")
    head_files.shuffle_vocab(path)
    definition = json.loads((path / "tokenizer.json").read_text())
    name, number = next(iter(definition["model"]["vocab"].items()))
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": name, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(definition))
    llm = LLM(str(target), speculate=f"draft:{path}:cross_vocab=true", **SMALL)
    assert llm.engine.runner.drafter.network.method.columns.begin_id == number


def test_another_vocabulary_drafts_without_changing_the_text(
    target: Path, plain: Any, tmp_path: Path
) -> None:
    """The same model with its tokens in another order: only cross_vocab can use it."""
    path = head_files.make_draft(target, tmp_path / "other")
    head_files.shuffle_vocab(path)
    with pytest.raises(VocabMismatchError, match="cross_vocab"):
        LLM(str(target), speculate=f"draft:{path}", **SMALL)
    llm = LLM(str(target), speculate=f"draft:{path}:cross_vocab=true", **SMALL)
    assert tokens(llm.generate(PROMPTS, params_at(0.0))) == plain(params_at(0.0))
    stats = llm.stats()
    assert stats["accepted"] == stats["drafted"] > 0


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tree=oak", "tree='oak' must be one of"),
        ("num_nodes=0", "num_nodes=0 must be 1 or more"),
        ("num_nodes=999", "more than the engine has room for"),
        ("min_confidence=2", "min_confidence=2.0 must be from 0"),
        ("num_node=3", "did you mean 'num_nodes'"),
        ("width=4", "width=4 has no effect with tree=chain"),
        ("branch=4", "branch=4 has no effect with tree=chain"),
        ("depth=3", "depth=3 has no effect with tree=chain"),
        ("tree=fixed:width=2", "width=2 has no effect with tree=fixed"),
    ],
)
def test_options_that_cannot_work(options: str, message: str, target: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(target), speculate=f"draft:{target}:{options}", **SMALL)


def test_a_draft_needs_a_path(target: Path) -> None:
    with pytest.raises(ConfigError, match="draft:PATH"):
        LLM(str(target), speculate="draft", **SMALL)

"""Several MTP layers in the engine: drafts are the replay's, texts are the target's."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import head_files
from head_files import Study
from hunch import LLM, SamplingParams, Speculation
from mtp_files import StagedHead, make_stages
from tiny_models import write_llama

SMALL = {"always_draft": True, "max_model_len": 256, "dtype": "float32"}
ROOM = {"max_num_seqs": 4, "kv_bytes": 8_000_000}
FORMS = {"mimo": 2, "qwen": 3, "deepseek": 3}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True, seed=3),
    SamplingParams(temperature=1.0, n=2, max_tokens=16, ignore_eos=True, seed=5),
]
ENGINES: dict[str, dict[str, int]] = {
    "one row": {"max_num_seqs": 1, "kv_bytes": 8_000_000},
    "small chunks": {"max_num_batched_tokens": 9, **ROOM},
    "few blocks": {"num_blocks": 18, "block_size": 8, "max_num_seqs": 5},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target", layers=2, width=32)


@pytest.fixture(scope="module")
def texts(target: Path) -> Study:
    return head_files.study(target, num_texts=4, length=36)


@pytest.fixture(scope="module")
def heads(texts: Study, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        form: (folder / form, make_stages(texts, folder / form, form, count))
        for form, count in FORMS.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_engine_drafts_what_the_replay_drafts(
    form: str, target: Path, texts: Study, heads: dict[str, tuple[Path, StagedHead]]
) -> None:
    path, head = heads[form]
    params = SamplingParams(
        temperature=0, max_tokens=32, ignore_eos=True, speculation=Speculation(trace=True)
    )
    num_steps = num_same = num_past_first = 0
    for chunk in (512, 5):  # a prompt in one piece, and in several
        llm = LLM(
            str(target), speculate=f"mtp:{path}", max_num_batched_tokens=chunk, **SMALL, **ROOM
        )
        for output in llm.generate(texts.tokens[:3, :9].tolist(), params):
            answer, known = output.outputs[0], len(output.prompt_token_ids)
            tokens = [*output.prompt_token_ids, *answer.token_ids]
            hidden, _ = head_files.states_of(texts.target, tokens)
            for step in answer.trace:
                if step.tokens:
                    expected = head.replay(hidden, tokens, known, len(step.tokens))
                    num_steps += 1
                    num_same += expected == step.tokens
                    num_past_first += len(step.accepted) > 1
                known += len(step.accepted) + 1
        llm.close()
    assert num_steps > 20
    assert num_same >= 0.995 * num_steps
    assert num_past_first > 0.1 * num_steps  # later layers learned something too


@pytest.fixture(scope="module")
def plain(target: Path, texts: Study) -> list[list[list[int]]]:
    with LLM(str(target), speculate="off", **SMALL, **ROOM) as llm:
        return [run(llm, texts, params) for params in PARAMS]


def run(llm: LLM, texts: Study, params: SamplingParams) -> list[list[int]]:
    prompts = [*texts.tokens[:3, :9].tolist(), texts.tokens[3, :1].tolist()]
    prompts.append(texts.tokens[0, :20].tolist())  # blocks in common with another
    outputs = llm.generate(prompts, params)
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


TREE = ":tree=dynamic:num_nodes=16"
# Each form, each engine, trees and chains.
DAILY = {("mimo", "small chunks", TREE), ("deepseek", "few blocks", ""), ("qwen", "one row", "")}
CASES = [
    pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.slow])
    for case in product(FORMS, ENGINES, ["", TREE])
]


@pytest.mark.parametrize(("form", "engine", "options"), CASES)
def test_text_does_not_depend_on_the_layers(
    form: str,
    options: str,
    engine: str,
    target: Path,
    texts: Study,
    heads: dict[str, tuple[Path, StagedHead]],
    plain: list[list[list[int]]],
) -> None:
    speculate = f"mtp:{heads[form][0]}{options}"
    with LLM(str(target), speculate=speculate, **SMALL, **ENGINES[engine]) as llm:
        for params, expected in zip(PARAMS, plain, strict=True):
            assert run(llm, texts, params) == expected
        assert llm.stats()["accepted"] > 0


def test_a_tree_accepts_more_than_a_chain(
    target: Path, texts: Study, heads: dict[str, tuple[Path, StagedHead]]
) -> None:
    accepted = []
    for options in ("", ":tree=dynamic:num_nodes=24:depth=5"):
        speculate = f"mtp:{heads['qwen'][0]}{options}"
        with LLM(str(target), speculate=speculate, **SMALL, **ROOM) as llm:
            run(llm, texts, PARAMS[0])
            accepted.append(llm.stats()["tokens_per_pass"])
    chain, tree = accepted
    assert tree > chain

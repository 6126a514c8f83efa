"""DeepSeek's own layer drafts for a plain target: whatever it says, the text is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import head_files
from deepseek_files import make_deepseek
from head_files import Study
from hunch import LLM, SamplingParams, Speculation
from plain_heads import replay
from tiny_models import write_llama

PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, ignore_eos=True, seed=3),
]
ENGINES: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4, "kv_bytes": 8_000_000},
    "few blocks": {"num_blocks": 18, "block_size": 8, "max_num_seqs": 5},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target", layers=2, width=32)


@pytest.fixture(scope="module")
def texts(target: Path) -> Study:
    return head_files.study(target, num_texts=4, length=24)


def run(llm: LLM, texts: Study, params: SamplingParams) -> list[list[int]]:
    prompts = [*texts.tokens[:3, :9].tolist(), texts.tokens[3, :1].tolist()]
    prompts.append(texts.tokens[0, :20].tolist())  # blocks in common with another
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("num_layers", "dtype", "engine", "options"),
    [
        pytest.param(1, "float32", "small chunks", "", marks=pytest.mark.slow),
        (1, "int8", "few blocks", ":tree=dynamic:num_nodes=6"),
        pytest.param(
            2, "float32", "few blocks", ":tree=dynamic:num_nodes=16", marks=pytest.mark.slow
        ),
        (2, "int8", "small chunks", ""),
    ],
)
def test_text_does_not_depend_on_the_head(
    num_layers: int,
    dtype: str,
    engine: str,
    options: str,
    target: Path,
    texts: Study,
    tmp_path: Path,
) -> None:
    make_deepseek(texts, tmp_path, num_layers=num_layers)
    common: dict[str, Any] = {"max_model_len": 256, "dtype": dtype, "always_draft": True}
    with LLM(str(target), speculate="off", max_num_seqs=1, kv_bytes=8_000_000, **common) as llm:
        plain = [run(llm, texts, params) for params in PARAMS]
    speculate = f"mtp:{tmp_path}{options}"
    with LLM(str(target), speculate=speculate, **ENGINES[engine], **common) as llm:
        for params, expected in zip(PARAMS, plain, strict=True):
            assert run(llm, texts, params) == expected
        assert llm.stats()["drafted"] > 100


def test_the_engine_drafts_what_the_replay_drafts(
    target: Path, texts: Study, tmp_path: Path
) -> None:
    head = make_deepseek(texts, tmp_path)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, speculation=Speculation(trace=True)
    )
    num_steps = num_same = 0
    engine = ENGINES["small chunks"]
    with LLM(
        str(target),
        speculate=f"mtp:{tmp_path}:adaptive=false",
        max_model_len=256,
        dtype="float32",
        **engine,
    ) as llm:
        outputs = llm.generate(texts.tokens[:3, :9].tolist(), params)
    for output in outputs:
        answer, known = output.outputs[0], len(output.prompt_token_ids)
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        hidden, _ = head_files.states_of(texts.target, tokens)
        for step in answer.trace:
            if step.tokens:
                num_steps += 1
                num_same += step.tokens == replay(head, hidden, tokens, known, len(step.tokens))
            known += len(step.accepted) + 1
    assert num_steps > 20
    assert num_same >= 0.995 * num_steps

"""vLLM's documentation example with a draft model: other than the module's path and one flag, word
for word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from head_files import make_draft
from hunch import LLM, SamplingParams
from server.live_server import api_server
from tiny_models import write_llama

PROMPT = "A robot may not injure a human being"
WORDS = (
    "--host 0.0.0.0 --model {target} --seed 42 -tp 1 --speculative_model {draft} "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def client(target: Path) -> Iterator[OpenAI]:
    draft = make_draft(target, target.parent / "draft", noise=0.02)
    # A draft this large beside so small a target would rest, as it saves no time.
    words = [*WORDS.format(target=target, draft=draft).split(), "--always-draft"]
    with (
        api_server(words, target.parent / "log") as url,
        OpenAI(api_key="EMPTY", base_url=url) as made,
    ):
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_models_are_listed_and_two_answers_completed(
    client: OpenAI, target: Path, stream: bool
) -> None:
    models = client.models.list()
    model = models.data[0].id
    completion = client.completions.create(
        model=model,
        prompt=PROMPT,
        echo=False,
        n=2,
        stream=stream,
        logprobs=3,
        max_tokens=16,
        seed=7,
    )
    texts = ["", ""]
    for part in completion if stream else [completion]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
    params = SamplingParams(n=2, max_tokens=16, temperature=1.0, seed=7)
    with LLM(str(target), speculate="off") as llm:
        (plain,) = llm.generate(PROMPT, params)
    assert texts == [answer.text for answer in plain.outputs]


def test_the_draft_model_drafts(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
    drafters = answer.model_extra["hunch"]["stats"]["drafters"]  # type: ignore[index]
    assert drafters["draft"]["accepted"] > 10

"""200 JSON-schema requests on the default model: they finish, validate, and cost fewer passes."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest

from hunch import LLM, RequestOutput, SamplingParams
from hunch.hub import ModelFiles

SCHEMAS = json.loads((Path(__file__).parents[1] / "grammar" / "schemas.json").read_text())
SUBJECTS = [
    "a young doctor in Lyon", "the solar system", "a rainy day in Osaka", "an old bicycle",
    "a birthday party", "grandmother's soup", "a night train to Vienna", "the colour blue",
    "a novel about the sea", "a small software company",
]  # fmt: skip
ENGINE = {"max_num_seqs": 8, "max_model_len": 512, "threads": 2}


@pytest.fixture(scope="module")
def requests(default_files: ModelFiles) -> tuple[list[str], list[list[int]], list[SamplingParams]]:
    names, prompts, params = [], [], []
    with LLM("smollm2-135m", speculate="off", **ENGINE) as llm:
        for number, (name, schema) in enumerate(SCHEMAS.items()):
            for sample, subject in enumerate(SUBJECTS):
                text = f"Write a JSON object for '{name}' about {subject}."
                names.append(name)
                prompts.append(llm.encode_chat([{"role": "user", "content": text}]))
                params.append(
                    SamplingParams(
                        temperature=0.0 if sample % 2 else 0.7,
                        seed=100 * number + sample,
                        max_tokens=200,
                        structured_outputs={"json": schema},
                    )
                )
    return names, prompts, params


def run(
    speculate: str, prompts: list[list[int]], params: list[SamplingParams]
) -> Iterator[RequestOutput]:
    with LLM("smollm2-135m", speculate=speculate, **ENGINE) as llm:
        yield from llm.generate(prompts, params)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_schemas(
    requests: tuple[list[str], list[list[int]], list[SamplingParams]],
) -> None:
    names, prompts, params = requests
    plain = list(run("off", prompts, params))
    drafted = list(run("suffix", prompts, params))
    assert len(drafted) == 200
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    finished = 0
    for name, output in zip(names, drafted, strict=True):
        if output.outputs[0].finish_reason == "stop":
            finished += 1
            jsonschema_rs.validate(SCHEMAS[name], json.loads(output.outputs[0].text))
    passes = [sum(output.stats["steps"] for output in outputs) for outputs in (plain, drafted)]
    print(f"{finished} of 200 finished; {passes[1]} passes against {passes[0]}")
    assert finished >= 190
    assert passes[1] <= 0.7 * passes[0]

"""The same law for trees: whatever shape a draft has, the text is the target's."""

from collections.abc import Callable

import pytest

from hunch import LLM, SamplingParams

PROMPTS = [
    "the model and the guess",
    "fast token fast token fast token fast",
    "a",
    "in the model of the guess in the model of the",
    "0123456789 0123456789 0123",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "processors": SamplingParams(
        temperature=0.7,
        top_k=40,
        min_p=0.02,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={5: 2.0, 9: -50.0},
        bad_words=["the"],
        max_tokens=24,
        seed=3,
    ),
    "samples": SamplingParams(temperature=1.0, n=2, max_tokens=16, seed=5),
}
ENGINES: dict[str, dict[str, object]] = {
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "depth 1, few blocks": {"depth": 1, "num_blocks": 18, "block_size": 8, "max_num_seqs": 5},
}
TREES = {
    "draft": "draft:tree=dynamic:num_nodes=16",
    "draft, fixed": "draft:tree=fixed:num_nodes=12:branch=3",
    "mlp": "mlp:tree=dynamic:num_nodes=16:depth=3",
    "medusa": "medusa:tree=dynamic:num_nodes=16:depth=3",
    "medusa, static": "medusa:tree=static:num_nodes=16",
    "eagle": "eagle:tree=dynamic:num_nodes=16",
    "eagle3": "eagle3:tree=dynamic:num_nodes=16",
    "mtp": "mtp:tree=dynamic:num_nodes=16",
    "dspark": "dspark:tree=dynamic:num_nodes=16",
}


def run(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_llm: Callable[..., LLM]) -> dict[str, list[list[list[int]]]]:
    llm = tiny_llm("off", max_num_seqs=1)
    return {name: run(llm, params) for name, params in PARAMS.items()}


# Chunks reach these in the same way as they reach "eagle3" and "medusa, static".
ALIKE = ("eagle", "mtp", "mlp", "medusa")
PAIRS = [
    pytest.param(
        tree,
        engine,
        marks=[pytest.mark.slow] * (tree in ALIKE and engine == "small chunks"),
    )
    for tree in TREES
    for engine in ENGINES
]


@pytest.mark.parametrize(("tree", "engine"), PAIRS)
def test_text_does_not_depend_on_the_tree(
    tree: str,
    engine: str,
    tiny_llm: Callable[..., LLM],
    plain: dict[str, list[list[list[int]]]],
) -> None:
    llm = tiny_llm(TREES[tree], **ENGINES[engine])
    for kind, params in PARAMS.items():
        assert run(llm, params) == plain[kind], kind
    assert llm.stats()["accepted"] > 0

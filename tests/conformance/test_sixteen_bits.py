"""Models in 16 bits on a CPU: the text is decided by the target and the seed alone there too."""

from collections.abc import Callable
from functools import cache

import pytest

from cases import every_pair
from hunch import LLM, SamplingParams

PROMPTS = ["the model and the guess", "fast token fast token fast token fast", "to be or not to be"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "hot": SamplingParams(temperature=1.0, max_tokens=24, seed=11),
}
ENGINES: dict[str, dict[str, object]] = {
    "batch": {},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 2},
}


def run(llm: LLM) -> list[list[list[int]]]:
    answers = [llm.generate(PROMPTS, params) for params in PARAMS.values()]
    return [[output.outputs[0].token_ids for output in outputs] for outputs in answers]


@pytest.fixture(scope="module")
def plain(tiny_llm: Callable[..., LLM]) -> Callable[[str], list[list[list[int]]]]:
    """What a target says alone, by its type of numbers."""
    return cache(lambda dtype: run(tiny_llm("off", max_num_seqs=1, dtype=dtype)))


@pytest.mark.parametrize(
    ("speculate", "engine", "dtype"),
    every_pair(["off", "suffix", "recycling", "draft"], [*ENGINES], ["bfloat16", "float16"]),
)
def test_text_depends_on_the_target_and_the_seed_alone(
    tiny_llm: Callable[..., LLM],
    plain: Callable[[str], list[list[list[int]]]],
    speculate: str,
    engine: str,
    dtype: str,
) -> None:
    llm = tiny_llm(speculate, dtype=dtype, always_draft=True, **ENGINES[engine])
    assert run(llm) == plain(dtype)

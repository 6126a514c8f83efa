"""Models in 16 bits on a CPU: the text is decided by the target and the seed alone there too."""

from collections.abc import Callable

import pytest

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("speculate", ["off", "suffix", "recycling", "draft"])
def test_text_depends_on_the_target_and_the_seed_alone(
    tiny_llm: Callable[..., LLM], speculate: str, engine: str, dtype: str
) -> None:
    plain = tiny_llm("off", max_num_seqs=1, dtype=dtype)
    llm = tiny_llm(speculate, dtype=dtype, always_draft=True, **ENGINES[engine])
    for params in PARAMS.values():
        expected, got = (
            [output.outputs[0].token_ids for output in one.generate(PROMPTS, params)]
            for one in (plain, llm)
        )
        assert got == expected

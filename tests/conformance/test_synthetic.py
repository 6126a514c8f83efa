"""Synthetic drafts: the wished tokens per pass, the target's text, and the word said everywhere."""

from collections.abc import Callable

import pytest

from hunch import LLM, SamplingParams
from hunch.compat import config_from_vllm
from hunch.config import read_options
from hunch.drafting.synthetic import SyntheticConfig, chance_for, right_runs
from hunch.errors import ConfigError
from hunch.server.run import serve
from hunch.server.settings import ServeConfig

PROMPTS = ["the model and the guess", "fast token fast token", "a", "0123456789 0123"]


@pytest.mark.parametrize(("num_right", "num_nodes"), [(2.5, 5), (0.5, 1), (4.0, 4), (1.2, 8)])
def test_runs_have_the_wished_mean_and_fall_evenly(num_right: float, num_nodes: int) -> None:
    runs = right_runs(num_right, num_nodes)
    assert sum(runs) / len(runs) == pytest.approx(num_right, abs=0.01)
    chance = chance_for(num_right, num_nodes)
    for n in range(1, num_nodes + 1):
        share = sum(run >= n for run in runs) / len(runs)
        assert share == pytest.approx(chance**n, abs=0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_second_run_has_the_wished_tokens_per_pass(
    temperature: float, tiny_llm: Callable[..., LLM]
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=120, ignore_eos=True, n=2)
    plain = tiny_llm("off", max_num_seqs=1).generate(PROMPTS, params)
    llm = tiny_llm("synthetic:tokens_per_pass=2.5")
    first, second = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params)
    for outputs in (first, second):
        for one, other in zip(plain, outputs, strict=True):
            assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
    assert all(answer.stats["drafted"] == 0 for out in first[:1] for answer in out.outputs[:1])
    answers = [answer for output in second for answer in output.outputs]
    tokens = sum(len(answer.token_ids) for answer in answers)
    steps = sum(answer.stats["steps"] for answer in answers)
    assert tokens / steps == pytest.approx(2.5, rel=0.12)
    assert all(answer.stats["synthetic"] for answer in answers)
    assert llm.stats()["is_synthetic"]


def test_an_answer_under_other_rules_is_not_drafted_from_the_old_one(
    tiny_llm: Callable[..., LLM],
) -> None:
    llm = tiny_llm("synthetic:tokens_per_pass=3")
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    banned = llm.generate(PROMPTS[:1], plain)[0].outputs[0].token_ids[3]
    other = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logit_bias={banned: -100.0}
    )
    expected = tiny_llm("off", max_num_seqs=1).generate(PROMPTS[:1], other)
    assert llm.generate(PROMPTS[:1], other)[0].outputs[0].token_ids == (
        expected[0].outputs[0].token_ids
    )


@pytest.mark.parametrize(
    "options", [{"tokens_per_pass": "1"}, {"tokens_per_pass": "4", "num_nodes": "2"}]
)
def test_what_cannot_be_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        read_options(SyntheticConfig, options, "synthetic")


def test_a_server_wants_to_be_asked_twice() -> None:
    config = config_from_vllm(speculate="synthetic:tokens_per_pass=3.5")
    with pytest.raises(ConfigError, match="--allow-synthetic"):
        serve(config, ServeConfig())

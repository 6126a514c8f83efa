"""A draft model beside its target: what it prepares is used where the verdict was foreseen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters import speculate_for
from hunch import LLM, SamplingParams
from hunch.drafting import preparing
from hunch.drafting.preparing import PreparingDrafter
from hunch.errors import ConfigError
from tiny_models import write_llama

PROMPTS = ["the model and the guess", "fast token fast token fast token fast", "a", "to be or not"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=7, ignore_eos=True)
RULED = SamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("preparing") / "target")


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    arguments: Any = {"dtype": "float32", "max_model_len": 256, "kv_bytes": 8_000_000}
    llm = LLM(str(target), speculate="off", threads=1, max_num_seqs=8, **arguments)
    yield llm
    llm.close()


def beside(plain: LLM, target: Path, noise: str = "draft", **arguments: Any) -> LLM:
    speculate = speculate_for(noise, target, target.parent)
    return plain.sibling(speculate, **{"speculative_device": "cpu", **arguments})


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def drafter_of(llm: LLM) -> PreparingDrafter:
    found = llm.engine.runner.host._prepares  # type: ignore[attr-defined]
    assert isinstance(found, PreparingDrafter)
    return found


def test_text_is_that_of_the_target(plain: LLM, target: Path) -> None:
    llm = beside(plain, target)
    for params in (GREEDY, SAMPLED, RULED):
        assert tokens(llm, params) == tokens(plain, params)
    for prompt in PROMPTS[:2]:
        one = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        assert one == plain.generate(prompt, GREEDY)[0].outputs[0].token_ids
    drafter = drafter_of(llm)
    assert 0 < drafter.num_ready <= drafter.num_prepared
    assert llm.stats()["accepted"] > 0
    llm.close()


def test_a_draft_that_was_foreseen_is_ready_at_once(
    plain: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target drafts for itself: every verdict is foreseen, so the model is never waited for."""
    llm = plain.sibling(f"draft:{target}:adaptive=false:num_nodes=3", speculative_device="cpu")
    drafter, asked = drafter_of(llm), 0
    propose = drafter.propose

    def count(rows: Any) -> Any:
        nonlocal asked
        asked += not any(drafter._ready.get(row) for row in rows.ids_R.tolist())
        return propose(rows)

    monkeypatch.setattr(llm.engine.runner.drafter.network.method, "propose", count)  # type: ignore[attr-defined]
    output = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert output.token_ids == plain.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    assert asked <= 2  # for the first draft, and perhaps the last
    assert drafter.num_ready >= 4
    llm.close()


def test_drafts_are_ready_for_several_verdicts(
    plain: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worse model is left at some node in most steps: with time, drafts are there for that."""
    found = []
    for most in (0, 3):
        monkeypatch.setattr(preparing, "MAX_OTHERS", most)
        llm = beside(plain, target, always_draft=True)
        drafter = drafter_of(llm)
        monkeypatch.setattr(drafter, "_is_due", NotYet())
        for params in (GREEDY, SAMPLED):
            assert tokens(llm, params) == tokens(plain, params)
        found.append((drafter.num_ready, drafter.num_other, llm.stats()["drafted"]))
        llm.close()
    (_, none, _), (num_ready, num_other, _) = found
    assert none == 0
    assert num_other > 0
    assert num_ready > found[0][0]


class NotYet:
    """The target takes longer than anything that could be prepared."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool:
        return False


def test_devices_that_cannot_be_are_named(plain: LLM, target: Path) -> None:
    for device, words in (("tpu", "cpu, or cuda"), ("cuda:9", "this machine has")):
        with pytest.raises(ConfigError, match=words):
            beside(plain, target, speculative_device=device)
    with pytest.raises(ConfigError, match="eagle drafts from what the target computes"):
        plain.sibling(f"eagle:{target}", speculative_device="cpu")


@pytest.mark.gpu
def test_a_draft_model_on_the_cpu_beside_a_gpu(target: Path) -> None:
    arguments: Any = {"max_model_len": 256, "num_blocks": 64, "max_num_seqs": 8, "device": "cuda"}
    plain = LLM(str(target), speculate="off", **arguments)
    llm = beside(plain, target)
    for params in (GREEDY, SAMPLED):
        assert tokens(llm, params) == tokens(plain, params)
    assert llm.stats()["accepted"] > 0

"""A draft model with another tokenizer: its text is tokenized again, the target's text stays."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import count
from pathlib import Path

import pytest

import head_files
from hunch import LLM, SamplingParams
from hunch.drafting.text_draft import Followed, TextDrafter
from hunch.errors import ConfigError, UnsupportedModelError
from hunch.hub import ModelFiles
from tiny_models import write_llama, write_recurrent

SMALL = {
    "always_draft": True,
    "max_model_len": 256,
    "kv_bytes": 8_000_000,
    "dtype": "float32",
    "threads": 1,
}
PROMPTS = ["the model and the guess", "fast token fast token", "in the model of", "a"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=4, max_tokens=30, top_p=0.9),
    "ruled": SamplingParams(temperature=0.7, seed=2, max_tokens=24, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def renamed(model: Path) -> Path:
    """The same network under a tokenizer whose every id is another: nothing is in common by id."""
    path = head_files.make_draft(model, model.parent / "renamed")
    head_files.shuffle_vocab(path)
    return path


def load(model: Path, spec: str, **more: object) -> LLM:
    return LLM(str(model), speculate=spec, **{**SMALL, **more})


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[dict[str, list[list[int]]]]:
    with load(model, "off", max_num_seqs=1) as llm:
        yield {name: tokens(llm, params) for name, params in PARAMS.items()}


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("options", ["", ":window=24:num_nodes=3", ":max_rows=1"])
def test_text_is_the_targets_and_guesses_are_accepted(
    options: str, model: Path, renamed: Path, plain: dict[str, list[list[int]]]
) -> None:
    with load(model, f"text:{renamed}{options}", block_size=8) as llm:
        for name, params in PARAMS.items():
            assert tokens(llm, params) == plain[name], name
        # Bytes that are no whole character end a draft, and this text is full of them.
        assert llm.stats()["accepted"] > 0


@pytest.mark.parametrize("silent", ["own.encode", "own.decode", "codec.encode"])
def test_a_step_without_a_guess_is_a_plain_one(
    silent: str, model: Path, renamed: Path, plain: dict[str, list[list[int]]]
) -> None:
    """No token of the draft model spells the text, or the guess has no text, or no tokens."""
    with load(model, f"text:{renamed}") as llm:
        drafter = llm.engine.runner.drafter.network.method
        codec, method = silent.split(".")
        whole, turns = getattr(drafter, codec), count()
        some = copy(whole)
        nothing = "" if method == "decode" else []
        answer = getattr(whole, method)
        setattr(some, method, lambda *a, **more: nothing if next(turns) % 3 else answer(*a, **more))
        setattr(drafter, codec, some)
        for name, params in PARAMS.items():
            assert tokens(llm, params) == plain[name], name
        stats = llm.stats()
        assert 0 < stats["drafted"] < stats["steps"]
        num_tokens = sum(len(answer) for answers in plain.values() for answer in answers)
        assert stats["steps"] + stats["accepted"] == num_tokens


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_by_text_is_nearly_always_right(
    default_files: ModelFiles,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["The capital of France is", "def add(a, b):\n    "]
    answers = []
    with LLM(speculate="off") as llm:
        answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    with LLM(speculate=f"text:{default_files.path}:adaptive=false") as llm:
        answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        assert llm.stats()["tokens_per_pass"] > 3
    assert answers[0] == answers[1]


def test_a_recurrent_model_cannot_draft(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent layers cannot draft"):
        load(model, f"text:{write_recurrent(tmp_path / 'recurrent')}")


def test_without_it_the_vocabularies_do_not_fit(model: Path, renamed: Path) -> None:
    with pytest.raises(Exception, match="text:PATH"):
        load(model, f"draft:{renamed}")


def test_a_long_text_is_cut_where_it_was_cut_before(model: Path, renamed: Path) -> None:
    with load(model, f"text:{renamed}:window=16") as llm:
        drafter = llm.engine.runner.drafter.network.method
        assert isinstance(drafter, TextDrafter)
        state = drafter.rows[0] = Followed(drafter.free.pop())
        ids = [5 + i for i in range(40)]
        first = drafter._recent(state, ids)
        assert first == ids[-8:]
        state.ids = first
        longer = drafter._recent(state, [*ids, 90, 91, 92])
        assert longer == [*first, 90, 91, 92]


def test_options_are_checked(model: Path, renamed: Path) -> None:
    with pytest.raises(ConfigError, match="window"):
        load(model, f"text:{renamed}:window=0")
    with pytest.raises(ConfigError, match="context of 512; give fewer draft_tokens"):
        load(model, f"text:{renamed}:draft_tokens=600")

"""Beam search finds what a plain search over all tokens finds, and reads as vLLM's does."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from hunch import LLM, BeamSearchParams, SamplingParams
from hunch.beams import BeamSearchOutput
from hunch.errors import RequestError
from tiny_models import write_llama

PROMPTS: list[Any] = ["the model and the", {"prompt_token_ids": [5, 6, 7]}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("beams") / "model")
    with LLM(str(path), dtype="float32", max_model_len=64, kv_bytes=4_000_000, threads=1) as llm:
        yield llm


def searched(llm: LLM, ids: list[int], width: int, length: int, eos: frozenset[int]) -> Any:
    """The same by hand, from the scores of the whole vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    beams, done = [(0.0, ids)], []
    for _ in range(length):
        found = []
        for output, (total, tokens) in zip(
            llm.generate([tokens for _, tokens in beams], params), beams, strict=True
        ):
            scores = output.outputs[0].logprobs
            assert scores is not None
            best = sorted(scores[0].items(), key=lambda pair: -pair[1].logprob)[: 2 * width]
            found += [(total + score.logprob, [*tokens, token]) for token, score in best]
        done += [beam for beam in found if beam[1][-1] in eos]
        going = [beam for beam in found if beam[1][-1] not in eos]
        beams = sorted(going, key=lambda beam: -beam[0] / len(beam[1]))[:width]

    def score(beam: tuple[float, list[int]]) -> float:
        return -beam[0] / (len(beam[1]) - (beam[1][-1] in eos))

    return sorted(done + beams, key=score)[:width]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_a_search_over_all_scores(
    llm: LLM, width: int, ignore_eos: bool
) -> None:
    (plain,) = llm.generate("the model and the", SamplingParams(max_tokens=2, temperature=0))
    eos = frozenset(plain.outputs[0].token_ids[1:])  # an end that is met
    before, llm.tokenizer.eos_ids = llm.tokenizer.eos_ids, tuple(eos)
    try:
        params = BeamSearchParams(
            beam_width=width, max_tokens=4, ignore_eos=ignore_eos, include_stop_str_in_output=True
        )
        outputs = llm.beam_search(PROMPTS, params)
    finally:
        llm.tokenizer.eos_ids = before
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert isinstance(output, BeamSearchOutput)
        is_text = isinstance(prompt, str)
        ids = llm.tokenizer.encode(prompt) if is_text else prompt["prompt_token_ids"]
        expected = searched(llm, ids, width, 4, frozenset() if ignore_eos else eos)
        assert [beam.tokens for beam in output.sequences] == [tokens for _, tokens in expected]
        for beam, (total, tokens) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total)
            assert beam.text == llm.tokenizer.decode(tokens)
            assert len(beam.logprobs) == len(tokens) - len(ids)
            is_stop = tokens[-1] in eos and not ignore_eos
            assert beam.finish_reason == ("stop" if is_stop else "length")
    has_ended = any(beam.finish_reason == "stop" for beam in outputs[0].sequences)
    assert has_ended != ignore_eos or width == 1


def test_one_beam_is_greedy_and_ends_with_the_context(llm: LLM) -> None:
    (plain,) = llm.generate(
        "the model", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    found = llm.beam_search(
        "the model", BeamSearchParams(beam_width=1, max_tokens=500, ignore_eos=True), use_tqdm=True
    )
    tokens = [*plain.prompt_token_ids, *plain.outputs[0].token_ids]
    assert found[0].sequences[0].tokens == tokens


def test_vllms_paths_have_it() -> None:
    assert import_module("hunch.beam_search").BeamSearchOutput is BeamSearchOutput
    assert import_module("hunch.sampling_params").BeamSearchParams is BeamSearchParams


def test_mistakes_say_what_is_wrong(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width=0 must be"):
        BeamSearchParams(beam_width=0, max_tokens=3)
    with pytest.raises(RequestError, match="not BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="max_num_seqs"):
        llm.beam_search("a", BeamSearchParams(1, 1), concurrency_limit=2)


def test_a_bar_may_be_asked_for_by_its_place(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    (output,) = llm.generate(["the model"], params, False)
    assert len(output.outputs[0].token_ids) <= 2

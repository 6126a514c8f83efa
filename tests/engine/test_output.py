"""One sequence's output: text, stop strings and reasons to end."""

from __future__ import annotations

import pytest

from engine.fake_runner import FakeCodec
from hunch.engine.output import SequenceOutput
from hunch.engine.stats import Tally
from hunch.types import CompletionOutput, Logprob, Request, RowResult, SamplingParams
from tiny_text import sentence_piece


def say(
    text: str, *, step: int = 1, finish: str | None = None, **params: object
) -> CompletionOutput:
    """The text's tokens, `step` at a time; `finish` comes with the last."""
    codec = FakeCodec()
    tokens = codec.encode(text)
    request = Request(
        id="x",
        prompt_ids=[1],
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        stop_ids=(0, 26),
        eos_ids=(0,),
    )
    output = SequenceOutput(request, codec, Tally())
    for first in range(0, len(tokens), step):
        part = tokens[first : first + step]
        is_last = first + step >= len(tokens)
        row = RowResult(row=0, tokens=part, finish=finish if is_last else None)
        if output.push(row, 0):
            break
    return output.completion()


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_a_stop_string_cuts_the_text_and_keeps_its_token(step):
    answer = say("hello world and more", step=step, stop=["wor", "xx"])
    assert answer.text == "hello "
    assert len(answer.token_ids) == len("hello wor")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "wor")


@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_stop_string_may_be_included(step):
    answer = say("hello world", step=step, stop="wor", include_stop_str_in_output=True)
    assert answer.text == "hello wor"


def test_a_stop_string_wins_over_a_later_end():
    answer = say("abcdef$", step=100, finish="stop", stop="cd")
    assert (answer.text, answer.stop_reason) == ("ab", "cd")


def test_text_held_back_is_shown_while_it_cannot_be_a_stop_string_and_at_the_end():
    assert say("hello wo", stop="world").finish_reason is None
    assert "wo" not in say("hello wo", stop="world").text
    answer = say("hello wo", finish="length", stop="world")
    assert (answer.text, answer.finish_reason) == ("hello wo", "length")


def test_stop_strings_count_only_after_min_tokens():
    answer = say("bxb.bxb.", stop="xb", min_tokens=4)
    assert answer.text == "bxb.b"
    assert len(answer.token_ids) == 7


@pytest.mark.parametrize(
    ("text", "params", "shown", "reason"),
    [
        ("hi$", {}, "hi", None),
        ("hi$", {"skip_special_tokens": False}, "hi", None),
        (
            "hi$",
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "hi$",
            None,
        ),
        ("hiz", {}, "hi", 26),
        ("hiz", {"include_stop_str_in_output": True}, "hiz", 26),
        ("hiz", {"include_stop_str_in_output": True, "stop": ["izzz"]}, "hiz", 26),
    ],
)
def test_the_stop_tokens_own_text(text, params, shown, reason):
    answer = say(text, finish="stop", **params)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (shown, "stop", reason)
    assert len(answer.token_ids) == 3


def test_an_unfinished_character_is_shown_at_the_end():
    assert say("the").text == "th"
    assert say("the", finish="length").text == "the"


def test_a_token_beside_its_log_probability_keeps_the_space_before_a_word():
    text = sentence_piece()
    token = text.vocab()["▁hello"]
    request = Request(id="x", prompt_ids=[1], params=SamplingParams(logprobs=0), seed=0)
    output = SequenceOutput(request, text, Tally())
    scores = [{token: Logprob(logprob=-0.5, rank=1)}]
    output.push(RowResult(row=0, tokens=[token], logprobs=scores), 0)
    assert output.completion().logprobs[0][token].decoded_token == " hello"

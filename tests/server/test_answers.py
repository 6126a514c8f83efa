"""Outputs in OpenAI's forms."""

from __future__ import annotations

import pytest

from hunch.server.answers import ChatShape, CompletionShape
from hunch.server.origins import Painter, origins_of, overruled
from hunch.types import CompletionOutput, DraftTrace, Logprob, RequestOutput
from server.fake_engine import FakeText
from tiny_text import sentence_piece


def output(chosen: int, entry: dict[int, Logprob]) -> RequestOutput:
    choice = CompletionOutput(
        index=0, text=chr(chosen), token_ids=[chosen], logprobs=[entry], finish_reason="length"
    )
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[choice], finished=True
    )


A, B, C = map(ord, "abc")
IN_TOP = {A: Logprob(logprob=-0.1, rank=1), B: Logprob(logprob=-2.0, rank=2)}
BELOW = {**IN_TOP, C: Logprob(logprob=-9.0, rank=3)}


@pytest.mark.parametrize(("chosen", "entry"), [(B, IN_TOP), (C, BELOW), (A, IN_TOP)])
def test_as_many_alternatives_as_asked_and_in_completions_the_chosen_token_too(
    chosen: int, entry: dict[int, Logprob]
) -> None:
    chat = ChatShape(id="x", model="m", text=FakeText(), num_top=2)
    content = chat.whole([output(chosen, entry)])["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == chr(chosen)
    assert content[0]["bytes"] == [chosen]
    assert [other["token"] for other in content[0]["top_logprobs"]] == ["a", "b"]
    done = CompletionShape(id="x", model="m", text=FakeText(), num_top=2, num_answers=1)
    logprobs = done.whole([output(chosen, entry)])["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{chr(t): one.logprob for t, one in entry.items()}]
    assert logprobs["token_logprobs"] == [entry[chosen].logprob]


def test_tokens_beside_log_probabilities_join_to_the_text() -> None:
    text = sentence_piece()  # which decodes a word alone without the space before it
    spaced, bare = text.vocab()["▁hello"], text.vocab()["hello"]
    ids = text.encode("hello wé 🙂", add_special_tokens=False)
    assert ids[0] == spaced
    entries = [{token: Logprob(logprob=-0.5, rank=1)} for token in [*ids, spaced]]
    entries[0][bare] = Logprob(logprob=-1.5, rank=2)
    answer = output(spaced, {})
    answer.outputs[0].token_ids, answer.outputs[0].logprobs = [*ids, spaced], entries
    shape = CompletionShape(id="x", model="m", text=text, num_top=2, num_answers=1)
    logprobs = shape.whole([answer])["choices"][0]["logprobs"]
    shown = "".join(logprobs["tokens"]).replace("\ufffd" * 4, "🙂")  # of one byte each
    assert shown == " hello wé 🙂 hello"
    assert logprobs["text_offset"][-1] == shown.rindex(" hello")
    assert logprobs["top_logprobs"][0] == {" hello": -0.5, "hello": -1.5}


def step(num_nodes: int, num_accepted: int) -> DraftTrace:
    nodes = list(range(num_nodes))
    return DraftTrace(tokens=nodes, parents=[n - 1 for n in nodes], accepted=nodes[:num_accepted])


def test_a_step_is_its_accepted_nodes_and_one_token_of_the_targets() -> None:
    choice = CompletionOutput(
        index=0, token_ids=[1] * 5, trace=[step(0, 0), step(3, 2), step(3, 3)]
    )
    assert origins_of(choice) == ["target", "drafter", "drafter", "target", "drafter"]


def test_text_held_back_is_painted_when_it_comes() -> None:
    painter = Painter(FakeText(), [1], skip_special_tokens=True)
    ids = list("abcé!".encode())
    choice = CompletionOutput(index=0, token_ids=ids[:4], trace=[step(0, 0), step(2, 2)])
    assert painter.paint(choice, "ab") == [("a", "target"), ("b", "drafter")]
    choice.token_ids, choice.trace = ids, [step(0, 0), step(2, 2), step(0, 0), step(0, 0)]
    news = [("c", "drafter"), ("é", "target"), ("!", "target")]
    assert painter.paint(choice, "cé!") == news


def test_the_target_overruling_a_guess_says_what_the_guess_was() -> None:
    painter = Painter(FakeText(), [1], skip_special_tokens=True)
    #   x - y - z    a tree: the target took x, then neither of the two that follow it
    #     \ w
    draft = DraftTrace(tokens=list(b"xywz"), parents=[-1, 0, 0, 1], accepted=[0], method="suffix")
    assert bytes(overruled(draft)) == b"yz"
    choice = CompletionOutput(index=0, token_ids=list(b"x!"), trace=[draft])
    assert painter.paint(choice, "x!") == [("x", "suffix"), ("!", "target", "yz")]
    assert overruled(step(3, 3)) == overruled(step(0, 0)) == []

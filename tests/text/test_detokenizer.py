"""Text as tokens come equals text decoded at once, for any tokens of any kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.hub import ModelFiles
from hunch.text.pieces import Pieces
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from tiny_text import byte_level, sentence_piece, words

KINDS = {"byte level": byte_level(), "sentence piece": sentence_piece(), "words": words()}


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return "".join([detokenizer.push(token) for token in ids]) + detokenizer.flush()


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data(), skip=st.booleans())
@settings(max_examples=50)
def test_pushes_and_flush_are_the_whole_text(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert streamed(tokenizer, ids, [], skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data(), skip=st.booleans())
@settings(max_examples=40)
def test_many_at_once_say_what_one_by_one_would(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip)
    parts = [detokenizer.push_all(ids[:cut]), detokenizer.push_all(ids[cut:]), detokenizer.flush()]
    assert "".join(parts) == streamed(tokenizer, ids, [], skip)


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data(), skip=st.booleans())
@settings(max_examples=50)
def test_after_a_prompt_the_text_goes_on(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    answer = streamed(tokenizer, ids[cut:], ids[:cut], skip)
    assert whole.endswith(answer)
    before = tokenizer.decode(ids[:cut], skip_special_tokens=skip)
    shown = whole.removesuffix(answer)
    # All of the prompt but a character it left unfinished, which the answer then shows.
    assert before.startswith(shown)
    assert len(before) - len(shown) <= 3
    assert set(before[len(shown) :]) <= {"\ufffd"}


def test_a_character_is_never_split() -> None:
    tokenizer = KINDS["byte level"]
    smile = tokenizer.encode("😀")
    detokenizer = tokenizer.detokenizer([])
    assert [detokenizer.push(token) for token in smile] == ["", "", "", "😀"]


def test_half_a_character_at_the_end_is_flushed() -> None:
    tokenizer = KINDS["byte level"]
    detokenizer = tokenizer.detokenizer([])
    assert detokenizer.push(tokenizer.encode("😀")[0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_an_answer_keeps_its_first_space() -> None:
    tokenizer = KINDS["sentence piece"]
    prompt, answer = tokenizer.encode("hello"), tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.decode(answer) == "world"
    assert streamed(tokenizer, answer, prompt, True) == " world"


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = KINDS["byte level"]
    ids = [*tokenizer.encode("a"), tokenizer.eos_ids[0]]
    assert streamed(tokenizer, ids, [], True) == "a"
    assert streamed(tokenizer, ids, [], False) == "a<|end|>"


def test_the_default_models_tokens(
    default_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(default_files)
    ids = list(range(0, tokenizer.vocab_size, 7))
    assert streamed(tokenizer, ids, [], False) == tokenizer.decode(ids, skip_special_tokens=False)
    detokenizer = tokenizer.detokenizer(ids)
    made: list[int] = []
    make = Pieces._make
    monkeypatch.setattr(Pieces, "_make", lambda self, t: made.append(t) or make(self, t))
    for token in ids * 10:  # pieces were made the first time
        detokenizer.push(token)
    assert made == []

"""Prompts that are made while there is time, and the draft vocabulary that follows from answers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from train_setup import ENGINE, write_prompts, write_target

from hunch import LLM
from hunch.train.batches import Texts
from hunch.train.costs import Costs
from hunch.train.expect import METHODS, best_draft
from hunch.train.more_prompts import about_texts, about_words, more_prompts, whole_words
from hunch.train.progress import Progress
from hunch.train.prompts import add_prompts, read_prompts
from hunch.train.regenerate import AnswerOptions, read_answers, regenerate
from hunch.train.vocab import count_columns, coverage_of, enough_columns

TEXT = "The harbour opens in May. " * 8


def test_tasks_about_words_use_all_of_the_vocabulary() -> None:
    words = [f"word{n}" for n in range(40)]
    made = about_words(words, 400, random.Random(1))
    assert len(made) == 400
    assert len(set(made)) > 300
    assert all("{" not in text for text in made)
    assert all(any(word in text for text in made) for word in words)
    assert about_words([], 5, random.Random(1)) == []


def test_tasks_about_texts_hold_the_text_and_a_word_of_it() -> None:
    made = about_texts([TEXT.strip()], 100, random.Random(1))
    assert all(TEXT.strip() in text for text in made)
    assert any("what does it say about harbour?" in text for text in made)
    assert about_texts([], 5, random.Random(1)) == []


def test_prompts_come_from_words_texts_and_the_target(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    with LLM(str(target), speculate="off", **ENGINE) as llm:
        prompts = read_prompts(write_prompts(tmp_path / "p.jsonl", 6)).encode(llm, 64)
        options = AnswerOptions(max_tokens=24, ignore_eos=True, shard=2)
        regenerate(llm, prompts, tmp_path / "answers", options, Progress())
        answers = read_answers(tmp_path / "answers")
        assert list(answers.answer(0)) == list(answers.text(0)[answers.prompt_len[0] :])
        made = more_prompts(llm, answers, 12, Progress(), seconds=20.0, seed=3)
        assert made
        assert all(isinstance(token, int) for ids in made for token in ids)
        assert all(word.isalpha() for word in whole_words(llm))


def test_some_of_the_prompts_of_other_sources_are_held_out_in_turn() -> None:
    stored = {"held_out": [[1], [2]], "train": [[3]]}
    new = [[10 + n] for n in range(20)]
    add_prompts(stored, new, 2)
    assert stored["held_out"] == [[1], [10], [2], [11]]
    assert stored["train"] == [[3], *new[2:]]
    add_prompts(stored, [[40], [41], [42], [43], [44], [45], [46], [47]], 2)
    assert len(stored["held_out"]) == 4, "only once: what is held out was not learned from"


def texts_of(*answers: list[int]) -> Texts:
    offset = np.cumsum([0, *(len(one) + 1 for one in answers)])
    tokens = np.concatenate([[0, *one] for one in answers])
    return Texts(tokens, offset, np.ones(len(answers), dtype=np.int64))


def test_a_draft_vocabulary_has_frequent_tokens_and_the_first_ids() -> None:
    count_V = np.zeros(4000, dtype=np.int64)
    count_V[3900] = 50
    chosen = count_columns(count_V, 200).ids_C.tolist()
    assert chosen[0] == 3900
    assert sorted(chosen[1:]) == list(range(199)), "tokens of no answer: by their ids"


def test_answers_alone_do_not_promise_that_others_are_covered() -> None:
    texts = texts_of(*[[5000, 5001, 5002]] * 8)
    coverage = coverage_of(texts, 8000)
    assert 0.75 < coverage(3) < 0.76, "all of these answers, and little of any other"
    assert coverage(8000) == pytest.approx(1.0)
    assert enough_columns(texts, 49_152) == 8_192
    assert enough_columns(texts, 151_936) == 16_384


def test_the_width_of_a_tree_finds_no_token_that_cannot_be_guessed() -> None:
    costs = Costs(
        passes=((1, 1e-3), (32, 1.1e-3)), node=0.0, per_layer=1e-5, per_column=0.0, products=1e12
    )
    whole, part = (
        best_draft(costs, 0.5, 1e-5, METHODS["draft"], "cuda", covered) for covered in (1.0, 0.6)
    )
    assert part.tokens_per_pass < whole.tokens_per_pass

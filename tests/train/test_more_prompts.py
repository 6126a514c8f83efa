"""Prompts that are made while there is time, and the draft vocabulary that follows from answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from train_setup import ENGINE, write_prompts, write_target

from builders import tiny_config
from hunch import LLM
from hunch.models.spec import ModelSpec
from hunch.train.builtin import OF_WORDS, PARTS, builtin_prompts
from hunch.train.costs import Costs
from hunch.train.expect import METHODS, best_draft
from hunch.train.more_prompts import (
    Source,
    about_documents,
    about_texts,
    about_words,
    in_languages,
    language_of,
    more_prompts,
    whole_words,
)
from hunch.train.progress import Progress
from hunch.train.prompts import BUILTIN, held_prompts, read_prompts, split_prompts
from hunch.train.regenerate import AnswerOptions, read_answers, regenerate
from hunch.train.sizes import Ground
from hunch.train.texts import Texts
from hunch.train.vocab import count_columns, coverage_of, enough_columns

TEXT = "The harbour opens in May. " * 8


def test_tasks_about_words_use_all_of_the_vocabulary() -> None:
    words = [f"word{n}" for n in range(40)]
    made = about_words(words, 600, random.Random(1))
    assert len(made) == 600
    assert len(set(made)) > 400
    assert all("{" not in text for text in made)
    assert all(any(word in text for text in made) for word in words)
    assert about_words([], 5, random.Random(1)) == []


def test_words_are_tokens_that_mean_something_by_themselves() -> None:
    assert whole_words([" the", " harbour", "boat", " 1234", " harbour", " sail"]) == [
        "harbour",
        "sail",
    ]


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
        made = more_prompts(llm, answers, 24, Progress(), seconds=20.0, seed=3, room=64)
        assert made
        assert all(isinstance(token, int) for ids in made for token in ids)
        assert max(map(len, made)) <= 64


class Words:
    """A model whose tokens are words, and turns stand between marks."""

    has_chat_template = True
    special_ids = frozenset({1, 2, 3})
    config = SimpleNamespace(model=SimpleNamespace(chat_template=None))

    def __init__(self) -> None:
        self.ids = {"<user>": 1, "<end>": 2, "<answer>": 3}

    def get_tokenizer(self) -> Any:
        return self

    def vocab(self) -> dict[str, int]:
        return self.ids

    def token_text(self, token: int) -> str:
        return " " + next(text for text, own in self.ids.items() if own == token)

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.token_text(token).strip() for token in ids)

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids) + 1) for word in text.split()]

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        found = []
        for message in messages:
            is_user = message["role"] == "user"
            found += [1 if is_user else 3, *self.encode(message["content"]), 2]
        return [*found, 3]

    def encode_turn(self, text: str) -> list[int]:
        return self.encode_messages([{"role": "user", "content": text}])

    def render_chats(self, chats: Any, template: None) -> list[list[int]]:
        return [self.encode_messages(chat) for chat in chats]


def answered(llm: Words, *pairs: tuple[str, str]) -> Texts:
    asked = [llm.encode_turn(question) for question, _ in pairs]
    texts = [[*ids, *llm.encode(answer)] for ids, (_, answer) in zip(asked, pairs, strict=True)]
    offset = np.cumsum([0, *map(len, texts)])
    return Texts(np.concatenate(texts), offset, np.array([len(ids) for ids in asked]))


def test_documents_are_several_texts_of_all_lengths() -> None:
    llm = Words()
    answers = answered(llm, *[(f"ask {n}", f"Text {n} says " + "so " * 40) for n in range(30)])
    source = Source(llm, answers, random.Random(1))  # type: ignore[arg-type]
    documents = source.documents(60, 1024)
    sizes = [len(text.split()) for text in documents]
    assert all(text.count("says") > 1 for text in documents)
    assert min(sizes) < 300 < 700 < max(sizes) < 1000
    assert np.diff(sizes[::20]).min() > 100, "as many long ones as short ones"
    assert source.documents(5, 200) == [], "no room for any"
    made = about_documents(documents, random.Random(1))
    assert all(text in task for text, task in zip(documents, made, strict=True))


def test_conversations_go_on_from_a_prompt_and_its_answer() -> None:
    llm = Words()
    pairs = [(f"Where is house {n} ?", "The house is by the river") for n in range(20)]
    source = Source(llm, answered(llm, *pairs), random.Random(1))  # type: ignore[arg-type]
    chats = source.chats(8, 300)
    assert len(chats) == 8
    for first, answer, then in chats:
        assert (first["content"], answer["content"]) in pairs
        assert "{" not in then["content"]
        assert [turn["role"] for turn in (first, answer, then)] == ["user", "assistant", "user"]
    assert source.chats(8, 20) == []


GERMAN = "Das ist nicht so, und wir werden eine Lösung suchen, und zwar bald. Sie ist nicht fern."


def test_translations_go_both_ways_between_languages_the_vocabulary_has() -> None:
    llm = Words()
    source = Source(llm, answered(llm, ("a", "b")), random.Random(1))  # type: ignore[arg-type]
    assert source.languages() == []
    llm.encode("und nicht eine werden dans avec")
    source = Source(llm, answered(llm, ("a", "b")), random.Random(1))  # type: ignore[arg-type]
    assert source.languages() == ["German"]
    assert language_of(GERMAN) == "German"
    assert language_of("我们的房子可以, 这个的") == "Chinese"
    assert language_of("Pour, pour, pour and pour again.") == "", "one word is no language"
    made = in_languages(["German"], [GERMAN, TEXT], ["harbour"], 60, random.Random(1))
    assert len(made) == 60
    assert any("German to English" in task and "nicht" in task for task in made)
    assert any("English to German" in task and "harbour opens" in task for task in made)
    assert any("in German about harbour" in task for task in made)
    assert in_languages([], [GERMAN], ["harbour"], 60, random.Random(1)) == []


def test_held_out_prompts_are_worded_unlike_those_that_are_learned_from(tmp_path: Path) -> None:
    held = held_prompts()
    categories = [one["category"] for one in held]
    assert len(set(categories[:7])) == 7, "the first ones have some of every category"
    asked = [message["content"] for one in held for message in one["messages"]]
    openings = {text[:24] for text in asked}
    kinds = ("about_texts", "about_documents", "follow_ups")
    wordings = [text for kind in kinds for text in PARTS[kind]]
    learned = [*builtin_prompts(), *OF_WORDS, *wordings]
    assert not openings & {text[:24] for text in learned}
    llm: Any = Words()
    stored = split_prompts(llm, BUILTIN, read_prompts(BUILTIN), 1024, 32, 0)
    assert stored["categories"] == categories
    few = split_prompts(llm, BUILTIN, read_prompts(BUILTIN), 1024, 5, 0)
    assert few["categories"] == categories[:5]
    assert stored["held_out"] == [llm.encode_messages(one["messages"]) for one in held]
    assert not {tuple(ids) for ids in stored["held_out"]} & {tuple(i) for i in stored["train"]}
    lines = [{"turns": [f"a {n}"], "category": f"c{n % 2}"} for n in range(12)]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = split_prompts(llm, str(file), read_prompts(file), 1024, 3, 0)
    assert len(own["categories"]) == len(own["held_out"]) == 3
    assert set(own["categories"]) <= {"c0", "c1"}


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
    ground = Ground(costs, ModelSpec.from_config(tiny_config()), "cuda")
    whole, part = (
        best_draft(ground, 0.5, 1e-5, METHODS["draft"], covered) for covered in (1.0, 0.6)
    )
    assert part.tokens_per_pass < whole.tokens_per_pass

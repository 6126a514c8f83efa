"""More prompts than anyone wrote, for as long as there is time to answer them.

A drafter serves the subjects that its answers were about, and may guess the tokens that were in
them. A target that only asks itself comes back to what it was taught most. So the prompts have
three sources:

- tasks about words of the target's own vocabulary, rare ones too;
- tasks about texts that the target wrote: summaries, translations, questions, whose answers take
  much from their prompt, as those of users with documents do;
- questions that the target asks itself (`questions`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hunch.train.batches import Texts
from hunch.train.builtin import TASKS
from hunch.train.progress import Progress
from hunch.train.questions import ask_target

if TYPE_CHECKING:
    from hunch import LLM

_MIN_LETTERS = 4  # of a word that means something by itself
_CHARS = (120, 1200)  # of a text that a task is about
_OF_WORDS = (
    *TASKS,
    "What is {}?",
    "Who or what was {}, and what is known about it?",
    "How does {} work?",
    "Why do people talk about {}?",
    "When did {} begin, and where?",
    "Define {} and use it in three sentences.",
    "What is the connection between {} and {}?",
    "Write a paragraph with the words {}, {} and {} in it.",
    "Translate these words into Spanish, French and German: {}, {}, {}.",
    "Write a news report about {} and {}.",
    "Write a Python class for {} with methods for {} and {}.",
    "Tell me a joke about {}.",
    "How do I combine {} with {}? Give me instructions, step by step.",
    "You are an expert on {}. A customer asks you about {}. What do you answer?",
    "Write a review of a book that is called {}.",
    "Describe {} in one sentence, then in a whole paragraph.",
)
_OF_TEXTS = (
    "Summarize this text in two sentences:\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nTL;DR:",
    "What is the main point of this text?\n\n{text}",
    "Translate into German:\n\n{text}",
    "Translate into French: {text}",
    "Translate into Spanish: {text}",
    "Translate into English, or say that it is English already: {text}",
    "Answer with what the text says, and nothing else.\n\nText: {text}\n\n"
    "Question: what does it say about {word}?",
    "Here are some documents.\n\n1. {text}\n\n2. {other}\n\n"
    "With these documents, answer: what is {word}?",
    "List the names, places and numbers in this text:\n\n{text}",
    "Write a title and three tags for this text:\n\n{text}",
    "Correct the mistakes in this text, and change nothing else:\n\n{text}",
    "Rewrite this for a newspaper:\n\n{text}",
    "Write three questions that this text answers, with their answers:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Do you agree with this, and why?\n\n{text}",
)


def more_prompts(
    llm: LLM, answers: Texts, count: int, show: Progress, *, seconds: float, seed: int
) -> list[list[int]]:
    """About `count` prompts, a third of each source; the target's own within about `seconds`."""
    chance, each = random.Random(seed), count // 3
    made = about_words(whole_words(llm), each, chance)
    made += about_texts(_texts_of(llm, answers, 2 * each, chance), each, chance)
    asked = ask_target(llm, count - 2 * each, show, seconds=seconds, seed=seed)
    found = [*(llm.encode_turn(text) for text in made), *asked]
    chance.shuffle(found)
    return found


def whole_words(llm: LLM) -> list[str]:
    """Words that are one token of the vocabulary, in the order of their ids."""
    tokenizer, found = llm.get_tokenizer(), dict[str, None]()
    for token in sorted(set(tokenizer.vocab().values()) - tokenizer.special_ids):
        text = tokenizer.token_text(token)
        word = text.strip()
        if text[:1] == " " and word.isalpha() and len(word) >= _MIN_LETTERS:
            found[word] = None
    return list(found)


def about_words(words: list[str], count: int, chance: random.Random) -> list[str]:
    """Tasks about words; of a vocabulary, the first ones are in most texts and are drawn more."""

    def word() -> str:
        return words[int(len(words) * chance.random() ** 2)]

    tasks = [chance.choice(_OF_WORDS) for _ in range(count if words else 0)]
    return [task.format(*(word() for _ in range(task.count("{}")))) for task in tasks]


def about_texts(texts: list[str], count: int, chance: random.Random) -> list[str]:
    """Tasks about texts, or about words that are in them."""
    found = []
    for _ in range(count if texts else 0):
        text, other = chance.choice(texts), chance.choice(texts)
        words = [word for word in text.split() if word.isalpha() and len(word) >= _MIN_LETTERS]
        word = chance.choice(words or [text.split()[0]])
        task = chance.choice(_OF_TEXTS)
        found.append(task.format(text=text, other=other, word=word))
    return found


def _texts_of(llm: LLM, answers: Texts, count: int, chance: random.Random) -> list[str]:
    """Some answers, cut to whole lines or sentences."""
    tokenizer, (least, most) = llm.get_tokenizer(), _CHARS
    found = []
    for number in chance.sample(range(len(answers)), min(count, len(answers))):
        text = tokenizer.decode(answers.answer(number).tolist()).strip()
        if len(text) > most:
            ends = max(text.rfind(end, 0, most) for end in ("\n", ". "))
            text = text[: ends + 1 if ends > least else most].strip()
        if len(text) >= least:
            found.append(text)
    return found

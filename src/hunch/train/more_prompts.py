"""More prompts than anyone wrote, for as long as there is time to answer them.

A drafter is good at the subjects, the tokens and the prompt lengths that it was trained with. A
target that writes all prompts itself returns to what it was taught most. So the prompts have
several sources (`SHARES`):

- tasks about words of the target's own vocabulary, rare ones too;
- tasks about a text that the target wrote, and about several of them one after the other, in
  prompts of some hundred tokens: summaries, questions, extracts, whose answers take much from
  their prompt, as those of users with documents do;
- conversations that go on: a prompt, its answer, and what a user says next;
- translations, in both directions, where the vocabulary has a language's words;
- sums in words, with other numbers each time;
- questions that the target asks itself (`questions`).
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

from hunch.train.builtin import OF_WORDS, PARTS, sums
from hunch.train.progress import Progress
from hunch.train.prompts import encode_turns
from hunch.train.questions import ask_target, closing_of, opening_of
from hunch.train.texts import Texts

if TYPE_CHECKING:
    from hunch import LLM

# Of all prompts. The target writes the rest itself, and what a source cannot provide.
SHARES = {
    "words": 0.24,
    "texts": 0.12,
    "documents": 0.18,
    "chats": 0.1,
    "languages": 0.1,
    "sums": 0.05,
}
LONG = (200, 900)  # tokens of several texts that a task is about, as far as there is room
_AROUND = 80  # tokens of a task around its texts
_MIN_LETTERS = 4  # letters that a word must have to mean something by itself
_CHARS = (120, 1200)  # of a single text that a task is about
_MANY = 4  # words of a language that a text written in it must have
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s*(?=\S)")
_WORD = re.compile(r"[^\W\d_]+")


def more_prompts(
    llm: LLM, answers: Texts, count: int, show: Progress, *, seconds: float, seed: int, room: int
) -> list[list[int]]:
    """About `count` prompts of up to `room` tokens; the target's own within about `seconds`."""
    chance = random.Random(seed)
    each = {source: int(share * count) for source, share in SHARES.items()}
    source = Source(llm, answers, chance)
    made = about_words(source.words, each["words"], chance)
    made += about_texts(source.texts(2 * each["texts"]), each["texts"], chance)
    made += about_documents(source.documents(each["documents"], room), chance)
    made += sums(each["sums"], chance)
    if languages := source.languages():
        texts = source.texts(4 * each["languages"])
        made += in_languages(languages, texts, source.words, each["languages"], chance)
    found = encode_turns(llm, made)
    found += [llm.encode_messages(turns) for turns in source.chats(each["chats"], room)]
    asked = max(count - len(found), 0)
    found += ask_target(llm, asked, show, seconds=seconds, seed=seed)
    found = [ids for ids in found if len(ids) <= room]
    chance.shuffle(found)
    return found


class Source:
    """Material for prompts: the target's vocabulary, and texts that it wrote."""

    def __init__(self, llm: LLM, answers: Texts, chance: random.Random) -> None:
        self.llm, self.answers, self.chance = llm, answers, chance
        self.tokenizer = llm.get_tokenizer()
        tokens = set(self.tokenizer.vocab().values()) - self.tokenizer.special_ids
        self.tokens = [self.tokenizer.token_text(token) for token in sorted(tokens)]
        self.words = whole_words(self.tokens)

    def _drawn(self, count: int) -> list[int]:
        """The numbers of answers in random order, each once."""
        total = len(self.answers)
        return self.chance.sample(range(total), min(count, total))

    def answer(self, number: int) -> str:
        return self.tokenizer.decode(self.answers.answer(number).tolist()).strip()

    def texts(self, count: int) -> list[str]:
        """Some answers, cut to whole lines or sentences."""
        least, most = _CHARS
        found = []
        for number in self._drawn(count):
            text = self.answer(number)
            if len(text) > most:
                ends = max(text.rfind(end, 0, most) for end in ("\n", ". "))
                text = text[: ends + 1 if ends > least else most].strip()
            if len(text) >= least:
                found.append(text)
        return found

    def documents(self, count: int, room: int) -> list[str]:
        """Several answers one after the other, of as many tokens as each length has a share."""
        least, most = LONG[0], min(LONG[1], room - _AROUND)
        total, found = len(self.answers), list[str]()
        for number in range(count if most >= least and total else 0):
            wanted = least + (most - least) * (number + self.chance.random()) / count
            parts, num_tokens = list[str](), 0
            while num_tokens < wanted and len(parts) < 64:
                one = self.chance.randrange(total)
                size = len(self.answers.answer(one))
                if num_tokens + size > wanted + _AROUND / 2 and parts:
                    break
                parts.append(self.answer(one))
                num_tokens += size
            found.append(_joined(parts, self.chance))
        return found

    def chats(self, count: int, room: int) -> list[list[dict[str, Any]]]:
        """Prompts with their answers and what a user says next; some have a further turn."""
        opening, closing = opening_of(self.llm), closing_of(self.llm)
        if not opening or not closing or not self.llm.has_chat_template:
            return []
        found, special = list[list[dict[str, Any]]](), self.tokenizer.special_ids
        for number in self._drawn(2 * count):
            asked = self.answers.text(number)[: self.answers.prompt_len[number]].tolist()
            inner = asked[len(opening) : len(asked) - len(closing)]
            size = len(self.answers.text(number)) + 2 * _AROUND
            if not inner or special.intersection(inner) or size > room:
                continue
            text = self.answer(number)
            turns = [_turn("user", self.tokenizer.decode(inner)), _turn("assistant", text)]
            word = _some_word(text, self.chance)
            turns.append(_turn("user", self.chance.choice(PARTS["follow_ups"]).format(word=word)))
            found.append(turns)
            if len(found) == count:
                break
        return found

    def languages(self) -> list[str]:
        """The languages whose words are tokens of the vocabulary."""
        texts = {text.strip() for text in self.tokens}
        return [name for name, words in PARTS["languages"].items() if texts.issuperset(words)]


def whole_words(tokens: list[str]) -> list[str]:
    """Words that are one token of the vocabulary, in the order of their ids."""
    stripped = ((text, text.strip()) for text in tokens)
    found = dict.fromkeys(
        word
        for text, word in stripped
        if text[:1] == " " and word.isalpha() and len(word) >= _MIN_LETTERS
    )
    return list(found)


def about_words(words: list[str], count: int, chance: random.Random) -> list[str]:
    """Tasks about words; a vocabulary's first ones are frequent, and are drawn more often."""
    found = []
    for _ in range(count if words else 0):
        task = chance.choice(OF_WORDS)
        found.append(task.format(*(_early(words, chance) for _ in range(task.count("{}")))))
    return found


def _early(words: list[str], chance: random.Random) -> str:
    return words[int(len(words) * chance.random() ** 2)]


def about_texts(texts: list[str], count: int, chance: random.Random) -> list[str]:
    """Tasks about texts, or about words that are in them."""
    found = []
    for _ in range(count if texts else 0):
        text = chance.choice(texts)
        found.append(
            chance.choice(PARTS["about_texts"]).format(text=text, word=_some_word(text, chance))
        )
    return found


def about_documents(documents: list[str], chance: random.Random) -> list[str]:
    """A task about each of them."""
    return [
        chance.choice(PARTS["about_documents"]).format(
            text=text, word=_some_word(text, chance), other=_some_word(text, chance)
        )
        for text in documents
    ]


def in_languages(
    languages: list[str], texts: list[str], words: list[str], count: int, chance: random.Random
) -> list[str]:
    """Translations into these languages and, of texts that are written in them, from them; where
    there are few of those, the target is asked to write some."""
    foreign = [(language, text) for text in texts if (language := language_of(text)) in languages]
    plain = [text for text in texts if not language_of(text)]
    found = list[str]()
    for _ in range(count if languages and words else 0):
        language, draw = chance.choice(languages), chance.random()
        if draw < 0.4 and foreign:
            language, text = chance.choice(foreign)
            task, text = chance.choice(PARTS["from_language"]), _few_sentences(text, chance)
        elif draw < 0.75 and plain:
            task, text = (
                chance.choice(PARTS["into_language"]),
                _few_sentences(chance.choice(plain), chance),
            )
        else:
            task, text = chance.choice(PARTS["in_language"]), ""
        found.append(task.format(language=language, text=text, word=_early(words, chance)))
    return found


def language_of(text: str) -> str:
    """The language of `LANGUAGES` that a text is written in; empty: none of them."""
    words = _WORD.findall(text.lower())

    def counts(name: str) -> list[int]:
        own = PARTS["languages"][name]
        has_spaces = own[0] != own[0].upper()
        return [words.count(word) if has_spaces else text.count(word) for word in own]

    best = max(PARTS["languages"], key=lambda name: sum(counts(name)))
    found = counts(best)
    return best if sum(found) >= _MANY and sum(map(bool, found)) >= 2 else ""


def _few_sentences(text: str, chance: random.Random) -> str:
    """One to four sentences in a row."""
    sentences = [part.strip() for part in _SENTENCE.split(text) if len(part.strip()) > 20]
    if not sentences:
        return text
    first, size = chance.randrange(len(sentences)), chance.choice((1, 1, 2, 4))
    return " ".join(sentences[first : first + size])


def _some_word(text: str, chance: random.Random) -> str:
    words = [word for word in text.split() if word.isalpha() and len(word) >= _MIN_LETTERS]
    return chance.choice(words or text.split() or [text])


def _joined(parts: list[str], chance: random.Random) -> str:
    """Texts as users give them: as they are, numbered, or each with a title."""
    form = chance.choice(("{text}", "{number}. {text}", "Document {number}: {text}"))
    return "\n\n".join(form.format(number=n, text=text) for n, text in enumerate(parts, 1))


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}

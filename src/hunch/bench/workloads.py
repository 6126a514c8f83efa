"""Built-in workloads by name, made of texts of our own. Nothing is downloaded.

    chat code summary math retrieval rewrite json random multi-turn long:2k ... long:32k mixed

`mixed`, the default, is the first prompts of the seven kinds in turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hunch.errors import ConfigError

if TYPE_CHECKING:
    from hunch import LLM

TEXTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("texts.json").read_text(encoding="utf-8")
)
ARTICLES: dict[str, str] = TEXTS["articles"]
# A few prompts for checks, with texts that are easy and texts that are hard to draft.
PROMPTS: list[dict[str, Any]] = [
    {"id": "chat-tea", "turns": [TEXTS["chat"]["tea"]]},
    {
        "id": "summary-railway",
        "turns": [f"Summarize this article in three sentences: {ARTICLES['railway']}"],
    },
    {"id": "code-window", "prompt": TEXTS["code"]["window"]},
    {
        "id": "rewrite-names",
        "turns": [
            f"Rewrite this text with 'Brackwater' changed to 'Elmhaven': {ARTICLES['railway']}"
        ],
    },
    {"id": "math-boxes", "turns": [TEXTS["mathematics"]["boxes"] + " Think step by step."]},
    {"id": "list-capitals", "turns": [TEXTS["chat"]["capitals"]]},
    {"id": "extract-json", "turns": [f"Turn into JSON with name, age and city: {TEXTS['people']}"]},
    {"id": "story-lighthouse", "turns": [TEXTS["chat"]["lighthouse"]]},
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's text: `messages` for the chat template, or `text` as it is."""

    id: str
    category: str
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    text: str = ""
    prediction: str | None = None  # what the answer is expected to be
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer
    later: tuple[str, ...] = ()  # questions that follow the model's own answers, one by one
    conversation: str = ""  # prompts that share a cached prefix
    max_tokens: int | None = None  # of its own, if a data set has it

    @staticmethod
    def chat(name: str, category: str, question: str, **more: Any) -> Prompt:
        return Prompt(name, category, (("user", question),), **more)

    @staticmethod
    def turns(name: str, category: str, questions: Sequence[str], **more: Any) -> Prompt:
        """A conversation whose answers are the model's own."""
        first, *later = map(str, questions)
        return Prompt.chat(name, category, first, later=tuple(later), **more)

    @property
    def chat_messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]

    def encode(self, llm: LLM) -> list[int]:
        """Its tokens; messages go through the model's chat template."""
        if self.messages:
            return llm.encode_messages(self.chat_messages)
        return llm.tokenizer.encode(self.text)

    def body(self) -> dict[str, Any]:
        """The prompt in a body of OpenAI's API."""
        if not self.messages:
            return {"prompt": self.text}
        body: dict[str, Any] = {"messages": self.chat_messages}
        if self.prediction is not None:
            body["prediction"] = {"type": "content", "content": self.prediction}
        if self.schema is not None:
            form = {"name": "answer", "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _chat() -> list[Prompt]:
    return [Prompt.chat(f"chat-{name}", "chat", text) for name, text in TEXTS["chat"].items()]


def _code() -> list[Prompt]:
    return [Prompt(f"code-{name}", "code", text=text) for name, text in TEXTS["code"].items()]


def _summary() -> list[Prompt]:
    return [
        Prompt.chat(f"summary-{n}", "summary", f"Summarize this article in three sentences: {text}")
        for n, text in ARTICLES.items()
    ]


def _math() -> list[Prompt]:
    return [
        Prompt.chat(f"math-{name}", "math", text + TEXTS["think"])
        for name, text in TEXTS["mathematics"].items()
    ]


def _retrieval() -> list[Prompt]:
    passages = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(ARTICLES.values(), 1))
    return [
        Prompt.chat(
            f"retrieval-{name}",
            "retrieval",
            f"Answer from these passages alone and name the one you used.\n\n{passages}\n\n"
            f"Question: {question}",
        )
        for name, question in TEXTS["questions"].items()
    ]


def _rewrite() -> list[Prompt]:
    prompts = []
    for name, (old, new) in TEXTS["renames"].items():
        article = ARTICLES[name]
        question = f"Rewrite this text with '{old}' changed to '{new}': {article}"
        prompts.append(Prompt.chat(f"rewrite-{name}", "rewrite", question, prediction=article))
    return prompts


def _json() -> list[Prompt]:
    prompts, tasks = [], {"people": TEXTS["people"]}
    tasks |= {name: ARTICLES[name] for name in ("harbour", "orchard")}
    for name, text in tasks.items():
        is_people = name == "people"
        schema = TEXTS["people_schema" if is_people else "summary_schema"]
        keys = "name, age and city" if is_people else "title, place, numbers and summary"
        question = f"Turn into JSON with {keys}: {text}"
        prompts.append(Prompt.chat(f"json-{name}", "json", question, schema=schema))
    return prompts


def _random() -> list[Prompt]:
    """Words in random order, so that nothing in the prompt helps to guess the answer."""
    chooser = random.Random(0)
    return [
        Prompt(f"random-{number}", "random", text=" ".join(chooser.choices(TEXTS["words"], k=48)))
        for number in range(8)
    ]


def _multi_turn() -> list[Prompt]:
    """Conversations in which every turn begins with what was said before it."""
    prompts = []
    for name, turns in TEXTS["dialogues"].items():
        so_far: list[tuple[str, str]] = [("system", TEXTS["assistant"])]
        for number, (question, answer) in enumerate(turns, 1):
            so_far.append(("user", question))
            prompts.append(
                Prompt(f"turn-{name}-{number}", "multi-turn", tuple(so_far), conversation="office")
            )
            so_far.append(("assistant", answer))
    return prompts


def long_context(num_tokens: int) -> list[Prompt]:
    """Reports of a trading company up to about this many tokens, and a question about one line."""
    prompts = []
    for number in range(4):
        chooser = random.Random(number)
        lines: list[str] = []
        size, most = 0, num_tokens * 3.4  # characters; digits make it fewer per token than prose
        while size < most:
            place, goods = chooser.choice(TEXTS["places"]), chooser.choice(TEXTS["goods"])
            lines.append(
                f"Report {len(lines) + 1}: on day {chooser.randint(1, 365)} the store at {place} "
                f"held {chooser.randint(20, 990)} crates of {goods} and sent "
                f"{chooser.randint(1, 19)} of them to {chooser.choice(TEXTS['places'])}."
            )
            size += len(lines[-1]) + 1
        asked = chooser.randint(1, len(lines))
        question = (
            "\n".join(lines)
            + f"\n\nWhat does report {asked} say? Then list the three reports after it."
        )
        label = f"long-{num_tokens // 1024}k"
        prompts.append(Prompt.chat(f"{label}-{number}", label, question))
    return prompts


def _mixed() -> list[Prompt]:
    workloads = (_chat(), _summary(), _code(), _rewrite(), _math(), _retrieval(), _json())
    in_turn = chain.from_iterable(zip_longest(*workloads))
    return [prompt for prompt in in_turn if prompt is not None]


def _demo() -> list[Prompt]:
    """The prompts of `make demo` and of README's table."""
    return [
        Prompt.chat(one["id"], "demo", one["turns"][0])
        if "turns" in one
        else Prompt(one["id"], "demo", text=one["prompt"])
        for one in PROMPTS
    ]


WORKLOADS: dict[str, Callable[[], list[Prompt]]] = {
    "mixed": _mixed,
    "demo": _demo,
    "chat": _chat,
    "code": _code,
    "summary": _summary,
    "math": _math,
    "retrieval": _retrieval,
    "rewrite": _rewrite,
    "json": _json,
    "random": _random,
    "multi-turn": _multi_turn,
}
LENGTHS = {"2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}


def built_in(name: str) -> list[Prompt]:
    """A built-in workload; an unknown name is an error that lists the known ones."""
    if name.startswith("long:"):
        return long_context(length_of(name.removeprefix("long:")))
    if name not in WORKLOADS:
        raise ConfigError(
            f"workload {name!r} is not known: use one of {', '.join(WORKLOADS)}, long:2k to "
            "long:32k, or a file of prompts"
        )
    return WORKLOADS[name]()


def length_of(text: str) -> int:
    """'8k' or '8192' -> tokens."""
    if text in LENGTHS:
        return LENGTHS[text]
    try:
        length = int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
    except ValueError:
        length = 0
    if not 128 <= length <= 1 << 20:
        raise ConfigError(f"context length {text!r} must be tokens, say 4096, or 2k to 32k")
    return length


def cycle(prompts: list[Prompt], count: int) -> list[Prompt]:
    """As many prompts as a load needs; repeated ones get an id of their own."""
    turns = (divmod(place, len(prompts)) for place in range(count))
    return [
        replace(prompts[at], id=f"{prompts[at].id}#{turn}") if turn else prompts[at]
        for turn, at in turns
    ]

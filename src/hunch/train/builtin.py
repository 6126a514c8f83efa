"""Prompts made by rule from the parts in prompt_parts.json: a few thousand plain requests for those
who bring none of their own, and wordings for tasks about words, texts and languages.

None of them is among the held-out prompts (`prompts.held_prompts`), which are worded in other ways.
For "documents" {text} is several texts, one after the other. A language is recognised by words that
occur in every text of it. If these words are no tokens of the vocabulary, no prompt asks for the
language.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PARTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("prompt_parts.json").read_text(encoding="utf-8")
)
OF_WORDS: list[str] = [*PARTS["about_subjects"], *PARTS["about_words"]]


def builtin_prompts() -> list[str]:
    """About three thousand prompts, the same ones every time."""
    found = [
        task.format(one)
        for group in ("subjects", "functions", "sentences")
        for one in PARTS[group]
        for task in PARTS[f"about_{group}"]
    ]
    return found + sums(700, random.Random(7))


def sums(count: int, chance: random.Random) -> list[str]:
    """Sums in words, with other names and numbers each time."""
    found = []
    for number in range(count):
        a, b, c = chance.sample(PARTS["names"], 3)
        x, y, z = chance.randint(40, 400), chance.randint(3, 39), chance.randint(2, 9)
        numbers = {"a": a, "b": b, "c": c, "x": x, "y": y, "z": z}
        text = PARTS["sums"][number % len(PARTS["sums"])]
        found.append(text.format(goods=chance.choice(PARTS["goods"]), **numbers))
    return found

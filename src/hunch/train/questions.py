"""Prompts that the target writes itself.

A model that was taught conversations goes on with a user's words where a user's turn begins. Drawn
with chance, such openings are as varied as what it was taught, so a drafter meets far more kinds of
text than a few thousand written prompts bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING

from hunch.train.progress import Progress

if TYPE_CHECKING:
    from hunch import LLM

MAX_TOKENS = 96  # of a question; longer ones lose their last line
MIN_CHARS = 8
_PROBES = ("Alpha", "zebra", "7")  # share nothing, so what precedes all is the opening


def opening_of(llm: LLM) -> list[int]:
    """The token ids before a user's first words; none where texts begin with nothing."""
    turns = [llm.encode_turn(text) for text in _PROBES]
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*turns, strict=False))
    return [ids[0] for ids in same]


def closing_of(llm: LLM) -> list[int]:
    """The token ids between a user's last words and the answer."""
    turns = [llm.encode_turn(text)[::-1] for text in _PROBES]
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*turns, strict=False))
    return [ids[0] for ids in same][::-1]


def ask_target(
    llm: LLM, count: int, show: Progress, *, seconds: float, seed: int = 0
) -> list[list[int]]:
    """About `count` different prompts that the target writes itself, within about `seconds`."""
    from hunch import SamplingParams

    opening = opening_of(llm)
    if not opening:
        return []
    engine, open_ids = llm.engine, set[str]()
    began, num_asked = perf_counter(), 0
    most = engine.config.schedule.num_rows
    found: dict[str, None] = {}
    with show.stage("questions", float(count)) as bar:
        while num_asked < count or open_ids:
            is_late = perf_counter() - began > seconds
            while len(open_ids) < most and num_asked < count and not is_late:
                name = f"question-{num_asked}"
                params = SamplingParams(
                    temperature=0.85, top_p=0.95, max_tokens=MAX_TOKENS, seed=seed + num_asked
                )
                engine.add(name, opening, params, stream=False)
                open_ids.add(name)
                num_asked += 1
            if is_late and perf_counter() - began > 1.3 * seconds:
                break
            if not open_ids:
                break
            for output in engine.step():
                if output.finished:
                    open_ids.discard(output.request_id)
                    text = tidy(output.outputs[0].text, output.outputs[0].finish_reason == "length")
                    if text:
                        found[text] = None
            bar(float(len(found)), f"{len(found)} prompts of the target's own")
        for name in open_ids:
            engine.abort(name)
        while open_ids and engine.has_work():
            engine.step()
    return [llm.encode_turn(text) for text in found]


def tidy(text: str, is_cut: bool) -> str:
    """The part that can be asked: whole lines with enough letters, half of them distinct."""
    lines: Sequence[str] = text.strip().splitlines()
    if is_cut and len(lines) > 1:
        lines = lines[:-1]
    kept = "\n".join(lines).strip()
    has_words = sum(char.isalpha() for char in kept) >= MIN_CHARS
    return kept if has_words and len(set(lines)) * 2 >= len(lines) else ""

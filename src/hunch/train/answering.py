"""The target's answers to the given prompts, then to made ones, for as long as there is time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hunch.train.more_prompts import more_prompts
from hunch.train.progress import Progress
from hunch.train.regenerate import AnswerOptions, read_answers, regenerate

if TYPE_CHECKING:
    from hunch import LLM

ANSWERS = "answers"
HELD = "held"  # answers to held-out prompts
_HELD_SHARE = 0.03  # share of the time for answers that those may take
_FIRST_PART = 0.35  # share of the remaining time for answers to the first made prompts
_MAKING = 0.15  # share of that time in which the target writes prompts


def room_for(options: AnswerOptions, context: int) -> int:
    """How many tokens a prompt may have, so that there is room for its answer."""
    return context - min(options.max_tokens, context // 2)


def answer_for(
    seconds: float,
    llm: LLM,
    stored: dict[str, list[Any]],
    work: Path,
    options: AnswerOptions,
    context: int,
    show: Progress,
    keep: Callable[[], None] | None,
) -> None:
    """Answer the stored prompts for this time. If all are answered and `keep` is given, more are
    made, stored and kept. Some of those ask about earlier answers, so the first round takes a third
    of the time, and the next one the rest."""
    ends, folder = perf_counter() + seconds, work / ANSWERS
    held, quiet = stored["held_out"], Progress(is_quiet=True)
    regenerate(llm, held, work / HELD, options, quiet, _HELD_SHARE * seconds)
    left = ends - perf_counter()
    rate = regenerate(llm, stored["train"], folder, options, show, left)
    part, num_rounds = _FIRST_PART, len(options.read_temperatures())
    while keep is not None and ends - perf_counter() > max(0.1 * seconds, 2.0):
        left = part * (ends - perf_counter())
        # The target writes a question in about a fourth of the time that its answer takes.
        count = int(rate * left / (1.1 * options.max_tokens * num_rounds))
        words: dict[str, Any] = {"seconds": _MAKING * left, "room": room_for(options, context)}
        seed = options.seed + len(stored["train"])
        more = more_prompts(llm, read_answers(folder), count, show, seed=seed, **words)
        known = {tuple(ids) for ids in (*stored["train"], *held)}
        new = [ids for ids in more if tuple(ids) not in known]
        if not new:
            return
        stored["train"] += new
        keep()
        left, part = ends - perf_counter(), 1.0
        rate = regenerate(llm, stored["train"], folder, options, show, max(left, 1.0)) or rate

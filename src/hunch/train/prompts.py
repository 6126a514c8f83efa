"""The prompts a drafter is trained and tested on; broken records are counted and named."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hunch.errors import ConfigError, RequestError, check_file
from hunch.prompt_files import Found, records_in
from hunch.train.builtin import builtin_prompts

if TYPE_CHECKING:
    from hunch import LLM

log = logging.getLogger("hunch")

MAX_BAD_SHARE = 0.05  # of the lines; with more, the file is of another kind
_MAX_NAMED = 5
BUILTIN = "builtin"
_HELD = Path(__file__).with_name("held_prompts.jsonl")
LEAST = 4  # prompts that a file must have, as one is held out


@dataclass(slots=True)
class Prompts:
    """The contents of a prompt file."""

    records: list[dict[str, Any]]
    bad: list[str]  # "line 3: why"

    def encode(self, llm: LLM, max_len: int) -> list[list[int]]:
        """Token ids as they will be served, without prompts that leave no room for an answer."""
        return [ids for ids, _ in self.encode_each(llm, max_len)]

    def encode_each(self, llm: LLM, max_len: int) -> list[tuple[list[int], str]]:
        """The same, each with the category that its line names, if any."""
        is_turn = ["turns" in one and "prompt_ids" not in one for one in self.records]
        asked = [one["turns"][0] for one, yes in zip(self.records, is_turn, strict=True) if yes]
        turns, found = iter(encode_turns(llm, asked)), list[tuple[list[int], str]]()
        for one, yes in zip(self.records, is_turn, strict=True):
            ids = next(turns) if yes else _encode(llm, one)
            if 0 < len(ids) <= max_len:
                found.append((ids, str(one.get("category", ""))))
        return found


def encode_turns(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    """`LLM.encode_turn` for many texts, on all cores."""
    if not llm.has_chat_template:
        return [llm.encode_turn(text) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return llm.get_tokenizer().render_chats(chats, template=llm.config.model.chat_template)


def prompts_in(path: Path) -> Iterator[Found]:
    """The records of a file with their places, and broken ones with what is wrong."""
    check_file(path, "; give JSON lines with 'turns' or 'prompt'")

    def check(names: Iterable[str]) -> None:
        if not {"turns", "prompt"}.intersection(names):
            raise RequestError(
                f"{path}: needs a column 'turns' (questions, to which the chat template is "
                "applied) or 'prompt' (text as it is); it has "
                f"{', '.join(map(repr, names)) or 'none'}"
            )

    for place, why, record in records_in(path, check):
        yield place, why or _fault(record), record


def _fault(record: Any) -> str:
    if not isinstance(record, dict):
        return "not an object"
    if "prompt_ids" in record:
        ids = record["prompt_ids"]
        is_good = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        return "" if is_good else "prompt_ids must be token ids"
    return text_fault(record)


def text_fault(record: dict[str, Any]) -> str:
    """What is wrong with a record that must have a text."""
    turns, prompt = record.get("turns"), record.get("prompt")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        return ""
    has_text = isinstance(prompt, str) and prompt
    return "" if has_text else "needs 'turns' or 'prompt' with text in it"


def read_prompts(file: str | Path) -> Prompts:
    """Records with `turns` (the chat template on the first), `prompt` (raw), or the `prompt_ids`
    that a server wrote. BUILTIN: questions of every kind that come with hunch."""
    if file == BUILTIN:
        return Prompts([{"turns": [text]} for text in builtin_prompts()], [])
    path, found = Path(file), Prompts([], [])
    for place, why, record in prompts_in(path):
        if why:
            found.bad.append(f"{place}: {why}")
        else:
            found.records.append(record)
    named = "; ".join(found.bad[:_MAX_NAMED])
    if not found.records:
        raise RequestError(f"{path}: no prompts in it{f' ({named})' if named else ''}")
    if len(found.bad) > MAX_BAD_SHARE * (len(found.records) + len(found.bad)):
        raise RequestError(
            f"{path}: {len(found.bad)} of {len(found.records) + len(found.bad)} lines are broken "
            f"({named}); mend the file: nothing was started"
        )
    if found.bad:
        log.warning("%s: %d broken lines are left out (%s)", path, len(found.bad), named)
    return found


def held_prompts() -> list[dict[str, Any]]:
    """Prompts that no drafter learns from: one is tried on them, to see what users can expect.

    Prompts made by the rules of those that were learned promise too much. These are written one by
    one, worded in other ways, about texts that no target wrote. Their categories have the shares
    that a public server may see; the first ones, however many, include some of every category.
    """
    return [json.loads(line) for line in _HELD.read_text(encoding="utf-8").splitlines()]


def to_hold_out(llm: LLM, max_len: int) -> list[tuple[list[int], str]]:
    """The prompts that come with hunch to try a drafter on, those that the context has room for."""
    found = [(llm.encode_messages(one["messages"]), one["category"]) for one in held_prompts()]
    return [(ids, category) for ids, category in found if len(ids) <= max_len]


def split_prompts(
    llm: LLM, file: str, prompts: Prompts, max_len: int, count: int, seed: int
) -> dict[str, list[Any]]:
    """The prompts to train on, those that a drafter is tried on, and the categories of these."""
    if file == BUILTIN and (held := to_hold_out(llm, max_len)[:count]):
        ids, categories = zip(*held, strict=True)
        found = prompts.encode(llm, max_len)
        return {"train": found, "held_out": list(ids), "categories": list(categories)}
    short = prompts.encode_each(llm, max_len)
    _check_number(len(short), f"{file}, of up to {max_len} tokens")
    return hold_out(short, count, seed)


def check_prompts(file: str) -> None:
    """Raise for a file that nothing can be trained with, before anything is made."""
    _check_number(len(read_prompts(file).records), file)


def _check_number(count: int, where: str) -> None:
    if count < LEAST:
        raise ConfigError(
            f"{where}: {count} prompts are too few, as some are held out to choose by; give "
            f"{LEAST} or more (some hundreds make a drafter worth having)"
        )


def hold_out(prompts: list[tuple[list[int], str]], count: int, seed: int) -> dict[str, list[Any]]:
    """Some of the prompts are not trained on; each comes with its category, or none."""
    count = min(count, len(prompts) // LEAST)
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    held = [prompts[i] for i in sorted(order[:count])]
    categories = [category for _, category in held]
    return {
        "held_out": [ids for ids, _ in held],
        "train": [prompts[i][0] for i in sorted(order[count:])],
        "categories": categories if all(categories) else [],
    }


def _encode(llm: LLM, record: dict[str, Any]) -> list[int]:
    """Token ids of a prompt that is no turn of a conversation."""
    if "prompt_ids" in record:
        return list(record["prompt_ids"])
    return llm.get_tokenizer().encode(record["prompt"])

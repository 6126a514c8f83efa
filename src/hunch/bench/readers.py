"""Readers for common prompt files. The form is recognised by the first record, or named.

| form | a record |
|---|---|
| `hunch` | `turns`, `prompt` or `messages`; `id`, `category`, `prediction`, `max_tokens` |
| `spec-bench`, `mt-bench`, `speed-bench` | `question_id`, `category`, `turns` |
| `sharegpt` | `conversations` of `from` and `value`, in one JSON list |
| `humaneval` | `task_id`, `prompt` |
| `gsm8k` | `question`, `answer` |
| `cnn-dm` | `article`, `highlights` |
| `vllm` | `prompt`, optional `output_tokens` |

A .txt file has a question in every line. All but parquet may be packed, as .gz or .xz.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from hunch.bench.workloads import WORKLOADS, Prompt, built_in
from hunch.errors import RequestError, check_file
from hunch.prompt_files import records_in, unpacked

Record = dict[str, Any]
Reader = Callable[[Record, str], Prompt]
MAX_BYTES = 2**30  # of a prompt file
SUFFIXES = (".json", ".jsonl", ".txt", ".csv", ".parquet")


def _hunch(record: Record, number: str) -> Prompt:
    name, category = str(record.get("id", number)), str(record.get("category", "all"))
    most = record.get("max_tokens")
    more: dict[str, Any] = {"max_tokens": int(most) if most else None}
    if record.get("prediction"):
        more["prediction"] = str(record["prediction"])
    if "messages" in record:
        messages = tuple((str(m["role"]), _text_of(m["content"])) for m in record["messages"])
        return Prompt(name, category, messages, **more)
    if "turns" in record:
        return Prompt.turns(name, category, record["turns"], **more)
    return Prompt(name, category, text=str(record["prompt"]), **more)


def _text_of(content: Any) -> str:
    """A message's text, which may be in parts in OpenAI's form."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ValueError("a message's content must be text, or parts of the type text")
    return "".join(str(part["text"]) for part in parts)


def _questions(record: Record, number: str) -> Prompt:
    """Spec-Bench, MT-bench, SPEED-Bench: the turns of a question are one conversation."""
    name = str(record.get("question_id", number))
    return Prompt.turns(name, str(record.get("category", "all")), record["turns"])


def _sharegpt(record: Record, number: str) -> Prompt:
    """The first thing a person said."""
    conversation = [(str(m["from"]), str(m["value"])) for m in record["conversations"]]
    asked = next(place for place, (who, _) in enumerate(conversation) if who in ("human", "user"))
    return Prompt.chat(str(record.get("id", number)), "sharegpt", conversation[asked][1])


def _humaneval(record: Record, number: str) -> Prompt:
    return Prompt(str(record.get("task_id", number)), "code", text=str(record["prompt"]))


def _gsm8k(record: Record, number: str) -> Prompt:
    return Prompt.chat(f"gsm8k-{number}", "math", str(record["question"]))


def _cnn_dm(record: Record, number: str) -> Prompt:
    name = str(record.get("id", number))
    return Prompt.chat(name, "summary", "Summarize this article:\n\n" + str(record["article"]))


def _vllm(record: Record, number: str) -> Prompt:
    most = record.get("output_tokens")
    return Prompt.chat(
        f"prompt-{number}", "all", str(record["prompt"]), max_tokens=int(most) if most else None
    )


READERS: dict[str, Reader] = {
    "hunch": _hunch,
    "spec-bench": _questions,
    "mt-bench": _questions,
    "speed-bench": _questions,
    "sharegpt": _sharegpt,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
    "cnn-dm": _cnn_dm,
    "vllm": _vllm,
}


def detect(record: Record) -> str | None:
    """The form of a record; None: an unknown one."""
    keys = record.keys()
    for form, needed in (
        ("sharegpt", {"conversations"}),
        ("humaneval", {"task_id", "prompt"}),
        ("gsm8k", {"question", "answer"}),
        ("cnn-dm", {"article"}),
        ("spec-bench", {"question_id", "turns"}),
        ("vllm", {"prompt", "output_tokens"}),
    ):
        if needed <= keys:
            return form
    return "hunch" if keys & {"turns", "prompt", "messages"} else None


def read_file(path: Path, form: str | None = None, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file; a record that does not fit is named with its number."""
    if form is not None and form not in READERS:
        raise RequestError(f"prompt form {form!r} is not one of {', '.join(READERS)}")
    check_file(path)
    if path.stat().st_size > MAX_BYTES:
        raise RequestError(f"{path}: larger than {MAX_BYTES >> 30} GiB; give a part of it")
    prompts = _read(path, form)
    if not prompts:
        raise RequestError(f"{path}: no prompts in it")
    return prompts if limit is None else _some(prompts, limit)


def _some(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many prompts, in turn from each category, as data sets have one after the other."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in in_turn if prompt is not None][:count]


def _read(path: Path, form: str | None) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, (place, why, record) in enumerate(records_in(path), 1):
        where = f"{path}, {place}"
        if why:
            raise RequestError(f"{where}: {why}")
        if not isinstance(record, dict):
            raise RequestError(f"{where}: must be an object")
        form = form or detect(record)
        if form is None:
            raise RequestError(
                f"{where}: has {', '.join(list(record)[:6])}, which is none of the known forms "
                f"({', '.join(READERS)}); say which one with FORM:PATH"
            )
        try:
            prompt = READERS[form](record, str(number))
            if not prompt.text and not any(text for _, text in prompt.messages):
                raise ValueError("its prompt is empty")
            prompts.append(prompt)
        except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
            if form == "sharegpt":  # real files have conversations without a question
                continue
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{where}: not of the form {form!r} ({why})") from None
    return prompts


def read_workloads(names: str, limit: int | None = None) -> list[Prompt]:
    """'chat,code', 'long:8k', 'prompts.jsonl', 'gsm8k:test.jsonl': built in, files, or both.

    `limit` is the number of prompts of each. Ids are made distinct, as they identify answers.
    """
    prompts: list[Prompt] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        form, _, path = name.partition(":")
        if form in READERS and path:
            prompts += read_file(Path(path), form, limit)
        elif path and Path(path).is_file() and not Path(name).exists():
            raise RequestError(f"prompt form {form!r} is not one of {', '.join(READERS)}")
        elif _is_file(name):
            prompts += read_file(Path(name), None, limit)
        else:
            prompts += built_in(name)[:limit]
    if not prompts:
        raise RequestError("--workload names no prompts")
    return _distinct(prompts)


def _is_file(name: str) -> bool:
    """Whether a name that is no built-in workload's means a file, whether it exists or not."""
    is_path = "/" in name or unpacked(Path(name)).suffix in SUFFIXES
    return is_path or (name not in WORKLOADS and Path(name).is_file())


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """An id that came before gets its count."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        seen[prompt.id] += 1
        count = seen[prompt.id]
        found.append(prompt if count == 1 else replace(prompt, id=f"{prompt.id} ({count})"))
    return found

"""Stage 1: the target answers the prompts in the serving engine; answers are stored in shards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hunch.errors import ConfigError, TrainingError
from hunch.hub import resolve as find_files
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.train.files import write_whole
from hunch.train.progress import Progress
from hunch.train.texts import Texts

if TYPE_CHECKING:
    from hunch import LLM

SHARD = "shard-{:05d}.npz"
NUM_ROWS = 1024  # answers written at once on a GPU
ROUND = 2**32  # numbers of answers reserved for each temperature, as prompts may become more
_FEW_ROWS = 4  # answers written at once on a CPU, until the first of them was early
_MIN_ANSWER = 8  # tokens that an answer cut off by time must have, to be learned from


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How answers are made."""

    temperatures: str = "0"  # "0,0.7,1": each prompt is answered once at every one of them
    max_tokens: int = 256
    ignore_eos: bool = False  # go on past the end of text, if requests will be served so
    shard: int = 256  # answers that are written together, and lost together by a kill
    seed: int = 0

    def read_temperatures(self) -> list[float]:
        try:
            found = [float(part) for part in self.temperatures.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < 0:
            raise ConfigError(
                f"temperatures={self.temperatures!r} must be numbers from 0 on, commas between"
            )
        return found


def regenerate(
    llm: LLM,
    prompts: list[list[int]],
    folder: Path,
    options: AnswerOptions,
    show: Progress,
    seconds: float | None = None,
) -> float:
    """Answer the prompts that are not answered yet, with nearly all rows busy until the end.

    Answers are written as they come, so which of them share a shard is chance; each carries its
    number, and what it says depends on that alone. With `seconds`, none is begun after them, and a
    quarter later the open ones end where they are. Returns tokens per second.
    """
    temperatures, store = options.read_temperatures(), _Store(folder, prompts, options.shard)
    rounds = range(len(temperatures))
    order = [at * ROUND + number for at in rounds for number in range(len(prompts))]
    num_answers = len(order)
    if seconds is not None:  # so that any part of the answers has some of every kind
        order = [order[n] for n in np.random.default_rng(options.seed).permutation(num_answers)]
    todo = iter([n for n in order if n not in store.done])
    began, num_tokens = perf_counter(), 0

    def words() -> str:
        return f"{num_tokens / (perf_counter() - began):,.0f} tok/s, {len(store.done)} answers"

    total = num_answers if seconds is None else 1.25 * seconds
    with show.stage("regenerate", total) as bar:
        for number, answer in _answer(llm, prompts, temperatures, options, todo, seconds):
            num_tokens += len(answer)
            store.add(number, answer)
            gone = len(store.done) if seconds is None else perf_counter() - began
            bar(min(gone, 0.99 * total), words())  # the end is shown once
        store.flush()
        bar(total, words())
    return num_tokens / (perf_counter() - began)


def _answer(
    llm: LLM,
    prompts: list[list[int]],
    temperatures: list[float],
    options: AnswerOptions,
    todo: Iterator[int],
    seconds: float | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Answers with their numbers, in the order in which they end."""
    from hunch import SamplingParams

    engine, open_ids = llm.engine, set[str]()
    began, last = perf_counter(), inf if seconds is None else seconds
    room = most = engine.config.schedule.num_rows
    if seconds is not None and not torch.cuda.is_available():
        most = min(_FEW_ROWS, room)  # a slow machine would read prompts for all of the time
    try:
        while True:
            gone = perf_counter() - began
            if gone > 1.25 * last:
                yield from _so_far(llm, open_ids)
                return
            # Free rows wait for further ones, so that most steps decode and read no prompts.
            is_roomy = gone <= last and len(open_ids) <= most * 7 // 8
            num_free = most - len(open_ids) if is_roomy else 0
            for number in islice(todo, num_free):
                turn, prompt = divmod(number, ROUND)
                params = SamplingParams(
                    temperature=temperatures[turn],
                    max_tokens=options.max_tokens,
                    seed=options.seed + turn * len(prompts) + prompt,
                    ignore_eos=options.ignore_eos,
                )
                name = str(number)
                engine.add(name, prompts[prompt], params, stream=False)
                open_ids.add(name)
            if not open_ids:
                return
            for output in engine.step():
                if output.finished:
                    open_ids.discard(output.request_id)
                    most = min(2 * most, room) if gone < last / 4 else most
                    yield int(output.request_id), list(output.outputs[0].token_ids)
    finally:
        for name in open_ids:
            engine.abort(name)


def _so_far(llm: LLM, open_ids: set[str]) -> Iterator[tuple[int, list[int]]]:
    """End the open answers; returns them as they are."""
    for name in open_ids:
        llm.engine.abort(name)
    while open_ids and llm.engine.has_work():
        for output in llm.engine.step():
            open_ids.discard(output.request_id)
            answer = list(output.outputs[0].token_ids)
            if len(answer) >= _MIN_ANSWER:
                yield int(output.request_id), answer


class _Store:
    """Collects finished answers into shards."""

    def __init__(self, folder: Path, prompts: list[list[int]], size: int) -> None:
        self.folder, self.prompts, self.size = folder, prompts, size
        self.waiting: list[tuple[int, list[int]]] = []
        self.done: set[int] = set()
        self.num_shards = 0
        for path in folder.glob("shard-*.npz"):
            with np.load(path) as shard:
                self.done.update(shard["number"].tolist())
            self.num_shards += 1

    def add(self, number: int, answer: list[int]) -> None:
        self.waiting.append((number, answer))
        self.done.add(number)
        if len(self.waiting) >= self.size:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        numbers, answers = zip(*self.waiting, strict=True)
        prompts = [self.prompts[number % ROUND] for number in numbers]
        path = self.folder / SHARD.format(self.num_shards)
        write_shard(path, list(numbers), prompts, list(answers))
        self.num_shards += 1
        self.waiting.clear()


def write_shard(
    path: Path, numbers: list[int], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    prompt_len = np.array([len(prompt) for prompt in prompts])
    data = Texts(tokens, np.cumsum([0, *map(len, texts)]), prompt_len)
    write_whole(path, lambda part: part.write_bytes(data.to_bytes(number=np.array(numbers))))


def read_answers(folder: Path) -> Texts:
    """All shards as one collection, in the order of the prompts."""
    paths = sorted(folder.glob("shard-*.npz"))
    if not paths:
        raise TrainingError(
            f"{folder}: the target finished no answer in the time it had; give more --minutes, or "
            "run on a machine with less to do"
        )
    found = [Texts.from_bytes(path.read_bytes()) for path in paths]
    lengths = np.concatenate([texts.lengths for texts, _ in found])
    whole = Texts(
        np.concatenate([texts.tokens for texts, _ in found]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([texts.prompt_len for texts, _ in found]),
    )
    return whole.take(np.argsort(np.concatenate([more["number"] for _, more in found])))


def for_answers(
    target: str, given: dict[str, Any], context: int, num_rows: int = NUM_ROWS
) -> dict[str, Any]:
    """Arguments for an engine that answers many prompts; given ones stay as they are.

    On a GPU it has as many rows as pay, no longer than the texts that training reads.
    """
    if not torch.cuda.is_available() or given.get("device") == "cpu":
        return given
    own = ModelSpec.from_config(open_weights(find_files(target)).config).max_len
    more = {"max_num_seqs": num_rows, "max_model_len": min(context, own)}
    return {**more, "enable_prefix_caching": False, **given}


def give_back() -> None:
    """Release a GPU's memory that an earlier stage held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

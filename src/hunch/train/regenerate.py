"""Stage 1: the target answers the prompts through the serving engine, a shard at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from hunch.errors import ConfigError, TrainingError
from hunch.train.batches import Texts
from hunch.train.files import write_whole
from hunch.train.progress import Progress

if TYPE_CHECKING:
    from hunch import LLM

SHARD = "shard-{:05d}.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How answers are made."""

    temperatures: str = "0"  # "0,0.7,1": each prompt is answered once at every one of them
    max_tokens: int = 256
    shard: int = 256  # prompts whose answers are written together, and lost together by a kill
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
    llm: LLM, prompts: list[list[int]], folder: Path, options: AnswerOptions, show: Progress
) -> None:
    """Write every shard that is not there yet. The same prompts give the same shards."""
    from hunch import SamplingParams

    jobs = list(_jobs(prompts, options))
    num_answers = sum(len(part) for part, _ in jobs)
    began, num_tokens, num_done = perf_counter(), 0, 0
    with show.stage("regenerate", num_answers) as bar:
        for number, (part, temperature) in enumerate(jobs):
            path = folder / SHARD.format(number)
            if not path.is_file():
                each = [
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=options.max_tokens,
                        seed=options.seed + number * options.shard + place,
                    )
                    for place in range(len(part))
                ]
                outputs = llm.generate(part, each, use_tqdm=False)
                answers = [list(output.outputs[0].token_ids) for output in outputs]
                write_shard(path, part, answers)
                num_tokens += sum(map(len, answers))
            num_done += len(part)
            rate = num_tokens / (perf_counter() - began)
            bar(num_done, f"{rate:,.0f} tok/s")


def _jobs(
    prompts: list[list[int]], options: AnswerOptions
) -> Iterator[tuple[list[list[int]], float]]:
    for temperature in options.read_temperatures():
        for first in range(0, len(prompts), options.shard):
            yield prompts[first : first + options.shard], temperature


def write_shard(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([np.asarray(text, dtype=np.uint32) for text in texts]),
                offset=np.cumsum([0, *map(len, texts)]),
                prompt_len=np.array([len(prompt) for prompt in prompts]),
            )

    write_whole(path, write)


def read_answers(folder: Path) -> Texts:
    """All shards as one collection."""
    tokens, prompt_len, lengths = [], [], []
    for path in sorted(folder.glob("shard-*.npz")):
        with np.load(path) as shard:
            tokens.append(shard["tokens"].astype(np.int64))
            prompt_len.append(shard["prompt_len"])
            lengths.append(np.diff(shard["offset"]))
    if not tokens:
        raise TrainingError(f"{folder}: no answers in it; run the first stage again")
    offset = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return Texts(np.concatenate(tokens), offset, np.concatenate(prompt_len))

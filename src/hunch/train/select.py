"""Stage 3: choose by accepted length in the serving engine on held-out prompts, never by loss."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hunch.train.files import read_json, write_json


@dataclass(slots=True)
class Measured:
    """Measured drafting with a directory's drafter."""

    tokens_per_pass: float
    acceptance_rate: float
    per_position: list[float]
    cost_per_node: float  # of a target pass
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    target: str,
    method: str,
    folder: Path | None,
    prompts: list[list[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    arguments: dict[str, Any] | None = None,
) -> Measured:
    """Answer the prompts with the drafter of `folder`, in the engine that will serve it."""
    from hunch import LLM, SamplingParams

    speculate = method if folder is None else f"{method}:{folder}"
    # always_draft: how good its guesses are, whether or not they pay.
    with (
        without_advice(),
        LLM(target, speculate=speculate, always_draft=True, **(arguments or {})) as llm,
    ):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = sum(output.outputs[0].stats["steps"] for output in outputs)
    nodes = max(stats["drafted"] / max(stats["steps"], 1), 1e-9)
    return Measured(
        tokens_per_pass=num_tokens / max(steps, 1),
        acceptance_rate=stats["acceptance_rate"],
        per_position=[float(share) for share in stats["per_position"]],
        cost_per_node=float(stats["draft_overhead"]) / nodes,
        num_tokens=num_tokens,
    )


@contextmanager
def without_advice() -> Iterator[None]:
    """Silence the engine's advice on what a drafter costs and how often it is right.

    This drafter is only being measured.
    """
    log = logging.getLogger("hunch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def select(
    target: str,
    method: str,
    folders: list[Path],
    prompts: list[list[int]],
    notes: Path,
    arguments: dict[str, Any] | None = None,
) -> tuple[Path, Measured]:
    """The best of several drafters; what was measured before a kill is not measured again."""
    known: dict[str, Any] = read_json(notes) or {}
    for folder in folders:
        if folder.name not in known:
            found = measure(target, method, folder, prompts, arguments=arguments)
            known[folder.name] = found.to_json()
            write_json(notes, known)
    best = max(folders, key=lambda folder: float(known[folder.name]["tokens_per_pass"]))
    return best, Measured(**known[best.name])

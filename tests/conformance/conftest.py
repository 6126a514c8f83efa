"""A small model on disk, and engines over it that tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters import speculate_for
from hunch import LLM
from tiny_models import write_llama

SMALL = {
    "max_num_seqs": 16,
    "max_model_len": 256,
    "kv_bytes": 8_000_000,
    "dtype": "float32",
    "threads": 1,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_llm(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., LLM]]:
    """tiny_llm("ngram", depth=1): an engine over the small model, made once per arguments."""
    made: dict[tuple[Any, ...], LLM] = {}
    files = tmp_path_factory.mktemp("drafters")

    def make(speculate: str, **arguments: Any) -> LLM:
        key = (speculate, *sorted(arguments.items()))
        if key not in made:
            spec = speculate_for(speculate, tiny_model, files)
            made[key] = LLM(str(tiny_model), speculate=spec, **{**SMALL, **arguments})
        return made[key]

    yield make
    for llm in made.values():
        llm.close()

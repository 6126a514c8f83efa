"""One pool of ranks, and the small models that tests split over it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from builders import DictWeights
from drafters import speculate_for
from hunch import LLM
from hunch.compat import config_from_vllm
from hunch.config import ModelConfig
from hunch.parallel.executor import Ranks, start_ranks
from hunch.parallel.split_target import SplitTarget
from tiny_models import write_llama

SMALL = {"max_num_seqs": 16, "max_model_len": 256, "kv_bytes": 8_000_000, "dtype": "float32"}


def save(folder: Path, weights: DictWeights) -> Path:
    """A model's directory in Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(weights.config))
    save_file(weights.tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = start_ranks(4, "cpu", 1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def split(ranks: Ranks) -> Callable[..., SplitTarget]:
    """split(path, 2): a model over the first two ranks of the pool, loaded once; also in stages."""
    made: dict[tuple[Any, ...], SplitTarget] = {}

    def load(path: Path, num_ranks: int, num_stages: int = 1, **how: Any) -> SplitTarget:
        key = (path, num_ranks, num_stages, *sorted(how.items()))
        if key not in made:
            model = ModelConfig(model=str(path), threads=1, **how)
            made[key] = SplitTarget(ranks, path, model, num_ranks, num_stages)
        return made[key]

    return load


@pytest.fixture(scope="session")
def split_llm(
    tiny_model: Path,
    split: Callable[..., SplitTarget],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., LLM]:
    """split_llm(4, "ngram"): an engine over a small model on so many ranks of the pool."""
    files = tmp_path_factory.mktemp("drafters")

    def make(
        num_ranks: int,
        speculate: str,
        kernels: str = "auto",
        num_stages: int = 1,
        model: Path = tiny_model,
        **arguments: Any,
    ) -> LLM:
        config = config_from_vllm(
            model=str(model),
            speculative_config=None,
            speculate=speculate_for(speculate, model, files),
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=num_stages,
            kernels=kernels,
            threads=1,
            **{**SMALL, **arguments},
        )
        llm = LLM.__new__(LLM)
        how = {"dtype": "float32", "kernels": kernels}
        one = num_ranks * num_stages == 1
        load = None if one else lambda *_: split(model, num_ranks, num_stages, **how)
        llm._open(config, None, load)
        return llm

    return make

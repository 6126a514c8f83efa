"""Block drafters in the engine: right guesses are accepted, windows slide, trees are the best."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import head_files
from head_files import Study
from hunch import LLM, SamplingParams
from hunch.drafting.best_first import BestFirst
from hunch.drafting.costs import CostCurve
from hunch.drafting.tree_shape import Level, TreeShape
from hunch.drafting.trees import best_first
from plain_blocks import PlainBlocks
from tiny_models import write_llama

SMALL: dict[str, Any] = {
    "max_model_len": 256, "kv_bytes": 8_000_000, "dtype": "float32", "threads": 1,
    "always_draft": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("blocks") / "model")


@pytest.fixture(scope="module")
def study(model: Path) -> Study:
    return head_files.study(model, num_texts=3, length=36)


@pytest.fixture(scope="module")
def dspark(study: Study, model: Path) -> PlainBlocks:
    return head_files.make_dspark(study, model.parent / "dspark")


def run(model: Path, spec: str, prompts: list[list[int]], **more: Any) -> tuple[Any, float]:
    """Answers, and tokens per pass."""
    with LLM(str(model), speculate=spec, **SMALL, **more) as llm:
        answers = [out.outputs[0] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    tokens = sum(len(answer.token_ids) for answer in answers)
    return answers, tokens / sum(answer.stats["steps"] for answer in answers)


def prompts_of(study: Study, length: int = 6) -> list[list[int]]:
    return [text[:length] for text in study.tokens.tolist()]


def test_who_knows_the_text_has_whole_blocks_accepted(
    model: Path, study: Study, dspark: PlainBlocks
) -> None:
    """A fault by one place, layer or position anywhere would lose most of them."""
    answers, rate = run(model, f"dspark:{model.parent / 'dspark'}", prompts_of(study))
    assert rate > 4  # of 5
    assert [a.token_ids for a in answers] == [
        text[6 : 6 + GREEDY.max_tokens] for text in study.tokens.tolist()
    ]
    answers, found = run(model, f"auto:{model.parent / 'dspark'}", prompts_of(study))
    assert found == rate  # the files say whose they are


@pytest.mark.slow
def test_dflash_too(model: Path, study: Study) -> None:
    head_files.make_dflash(study, model.parent / "dflash", num_steps=160)
    assert run(model, f"dflash:{model.parent / 'dflash'}", prompts_of(study))[1] > 3.2  # of 4


def test_a_window_looks_back_no_further(model: Path, study: Study, dspark: PlainBlocks) -> None:
    """Short windows leave few states to guess from; the text is the same."""
    spec = f"dspark:{model.parent / 'dspark'}"
    whole, rate = run(model, spec, prompts_of(study), block_size=4)
    short, less = run(model, f"{spec}:window=8", prompts_of(study), block_size=4)
    assert [a.token_ids for a in whole] == [a.token_ids for a in short]
    assert 1 < less < rate


class Guess:
    """Places that tell random things, given the token before."""

    def __init__(self, num_places: int, num_tokens: int, odds: Tensor | None) -> None:
        noise = torch.Generator().manual_seed(2)
        size = (num_places, num_tokens, num_tokens)
        self.logits = 2 * torch.randn(size, generator=noise)
        self.odds = odds

    def scores(self, row_M: Tensor, depth: int, token_M: Tensor) -> Tensor:
        return self.logits[depth, token_M]

    def confidences(self, row_M: Tensor, depth: int, token_M: Tensor) -> Tensor | None:
        return None if self.odds is None else self.odds[token_M]


class Chooser:
    """Takes the likeliest, without noise."""

    ids_R = np.zeros(1, dtype=np.int64)
    sampling = SimpleNamespace(is_greedy=lambda row: True)

    def best(self, logits: Tensor, place_M: Any, depth: int, num: int) -> tuple[Any, Any]:
        top = logits.log_softmax(-1).topk(num, dim=-1)
        return top.indices.numpy(), top.values.double().numpy()


@pytest.mark.parametrize("has_odds", [False, True])
@pytest.mark.parametrize("num_nodes", [5, 14, 40])
def test_trees_hold_the_likeliest_paths(num_nodes: int, has_odds: bool) -> None:
    size, depth, branch, start = 12, 4, 3, 5
    odds = torch.linspace(-1, 2, size) if has_odds else None
    guess = Guess(depth, size, odds)
    shape = TreeShape(depth=depth, num_nodes=num_nodes, width=2, branch=branch)
    context: Any = SimpleNamespace(device=torch.device("cpu"), cost=CostCurve(is_measured=False))
    chooser: Any = Chooser()

    def feed(level: Level) -> Tensor:
        return guess.scores(torch.zeros(1), level.path_MP.shape[1], torch.from_numpy(level.token_M))

    def told(place_M: Any, depth: int, token_M: Any) -> Tensor | None:
        return guess.confidences(place_M, depth, torch.from_numpy(token_M))

    first = torch.tensor([start])
    tree = BestFirst(context, chooser, np.array([num_nodes]), shape, odds=told)
    draft = tree.grow(guess.scores(first, 0, first), feed, first.numpy())

    def expand(state: tuple[int, int]) -> list[tuple[int, float, int, tuple[int, int]]]:
        place, before = state
        if place == depth:
            return []
        top = guess.logits[place, before].softmax(-1).topk(branch)
        chances = top.values.double()
        if odds is not None:
            sure = torch.sigmoid(odds[before]).double()
            chances = torch.minimum(chances * (1 - sure) / (1 - chances[0]), sure)
            chances[0] = sure
        return [
            (token, float(chance), 0, (place + 1, token))
            for token, chance in zip(top.indices.tolist(), chances, strict=True)
        ]

    expected = best_first((0, start), expand, num_nodes)
    assert draft.num_nodes_R.tolist() == [num_nodes]
    assert draft.tokens_RN[0].tolist() == [node.token for node in expected]
    assert draft.parents_RN[0].tolist() == [node.parent for node in expected]


def test_a_tree_brings_no_less_than_the_chain(
    model: Path, study: Study, dspark: PlainBlocks
) -> None:
    spec = f"dspark:{model.parent / 'dspark'}"
    text = study.tokens.tolist()[0]
    prompts = [*prompts_of(study), text[20:28], text[3:9] + text[11:16]]  # some never learned
    chain, rate = run(model, spec, prompts)
    tree, more = run(model, f"{spec}:tree=dynamic:num_nodes=24", prompts)
    assert [a.token_ids for a in chain] == [a.token_ids for a in tree]
    assert more >= rate

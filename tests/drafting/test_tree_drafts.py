"""Trees: grown by confidence, fixed by choices, and worth more than the chain of their depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import head_files
from hunch import LLM, SamplingParams, Speculation
from hunch.draft import Draft
from hunch.drafting.grow import grow
from hunch.drafting.medusa import parse_choices
from hunch.drafting.token_chooser import Feed
from hunch.drafting.tree_shape import Level, TreeShape
from hunch.drafting.trees import by_rank
from hunch.errors import ConfigError
from tiny_models import write_llama

SIZE = 20


class PlainChooser:
    """Greedy rows only: the best token is the one of the highest logit."""

    wants_q = False

    def with_rules(self, logits_RC: Tensor, feed: Feed) -> tuple[Tensor, Feed]:
        return logits_RC, feed

    def best(
        self, logits_MC: Tensor, place_M: np.ndarray, depth: int, num_best: int
    ) -> tuple[np.ndarray, np.ndarray]:
        top = logits_MC.log_softmax(-1).double().topk(num_best)
        return top.indices.numpy(), top.values.numpy()

    def draw(self, logits_MC: Tensor, place_M: np.ndarray, depth: int) -> np.ndarray:
        return logits_MC.argmax(-1).numpy()


def logits_after(path: tuple[int, ...]) -> Tensor:
    """A language whose next scores hang on everything said so far."""
    seed = hash(path) % 2**31
    return 3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Language:
    """Feeds nodes, and checks that each is where its path says."""

    def __init__(self, num_rows: int) -> None:
        self.said: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_rows)]
        self.before: list[tuple[int, tuple[int, ...]]] = [(row, (row,)) for row in range(num_rows)]

    def start(self) -> Tensor:
        return torch.stack([logits_after(path) for _, path in self.before])

    def feed(self, level: Level) -> Tensor:
        now = []
        for m, (place, token) in enumerate(zip(level.place_M, level.token_M, strict=True)):
            row, path = self.before[level.parent_M[m]]
            assert row == place
            numbers = level.path_MP[m].tolist()
            said = self.said[place]
            if len(numbers) > 1:
                assert said[numbers[-2]] == path
            assert numbers[-1] not in said, "two nodes in one slot"
            said[numbers[-1]] = (*path, int(token))
            now.append((row, said[numbers[-1]]))
        self.before = now
        return torch.stack([logits_after(path) for _, path in now])


def nodes_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The path of every node, from the row's own first token."""
    paths: list[tuple[int, ...]] = []
    for node in range(int(draft.num_nodes_R[row])):
        parent = int(draft.parents_RN[row, node])
        assert parent < node, "a parent stands before its children"
        before = paths[parent] if parent >= 0 else (row,)
        paths.append((*before, int(draft.tokens_RN[row, node])))
    assert len(set(paths)) == len(paths), "no two children of one node say the same"
    return paths


def value(path: tuple[int, ...]) -> float:
    steps = range(1, len(path))
    return float(sum(logits_after(path[:i]).log_softmax(-1)[path[i]] for i in steps))


@pytest.mark.parametrize("branch", [2, 4, 50])
def test_a_dynamic_tree_keeps_the_likeliest_nodes(branch: int) -> None:
    shape = TreeShape(depth=4, num_nodes=12, width=4, branch=branch)
    limit_R = np.array([12, 5, 0, 1, 12])
    language = Language(len(limit_R))
    draft, number_RN = grow(language.start(), language.feed, PlainChooser(), limit_R, shape)  # type: ignore[arg-type]
    assert draft.num_nodes_R.tolist() == [12, 5, 0, 1, 12]
    for row, limit in enumerate(limit_R.tolist()):
        paths = nodes_of(draft, row)
        said = language.said[row]
        assert len(said) <= limit, "what is processed needs a slot each"
        for node, path in enumerate(paths):
            number = int(number_RN[row, node])
            assert number < 0 or said[number] == path
        best: tuple[int, ...] = (row,)
        for _ in range(min(4, limit)):
            best = (*best, int(logits_after(best).argmax()))
            assert best in paths, "the likeliest path is always there"
        # Of one level's guesses, those kept beat those that were looked at and dropped.
        first = [path for path in paths if len(path) == 2]
        dropped = set(range(SIZE)) - {path[1] for path in first}
        if first and branch == 50 and dropped:
            assert min(map(value, first)) >= max(value((row, token)) for token in dropped)


def test_a_tree_stops_where_it_is_not_sure() -> None:
    shape = TreeShape(depth=4, num_nodes=12, width=4, branch=4, min_confidence=0.2)
    language = Language(6)
    draft, _ = grow(language.start(), language.feed, PlainChooser(), np.full(6, 12), shape)  # type: ignore[arg-type]
    for row in range(6):
        assert all(value(path) >= np.log(0.2) - 1e-5 for path in nodes_of(draft, row))
    assert 0 < int(draft.num_nodes_R.sum()) < 6 * 12


def test_choices() -> None:
    tree = parse_choices("0/1/0.0/0.1/0.0.0", max_depth=3)
    assert tree.parent_N.tolist() == [-1, -1, 0, 0, 2]
    assert tree.rank_N.tolist() == [0, 1, 0, 1, 0]
    assert tree.width == (2, 2, 1)
    draft = tree.fill(np.arange(10).reshape(2, 5), np.array([5, 2]))
    assert draft.num_nodes_R.tolist() == [5, 2]
    for text, message in {
        "0/1.0": "node 1.0 needs node 1",
        "0/x": "ranks joined by dots",
        "0/0.0/0.0.0/0.0.0.0": "goes 4 deep",
        "-1": "count from 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_choices(text, max_depth=3)


def test_the_likeliest_ranks_make_a_fixed_tree() -> None:
    tree = by_rank([0.6, 0.3], 0.8, 2, 4)
    # 0: .6, then 1: .3, 0.0: .288 and 0.1: .144, which goes before 1.0 of the same chance
    assert [(node.token, node.parent) for node in tree] == [(0, -1), (1, -1), (0, 0), (1, 0)]


# --- through the engine --------------------------------------------------------------------------

SMALL = {
    "always_draft": True,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "kv_bytes": 8_000_000,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, head_files.Study]:
    """A target and its texts; heads that have half learned them are right about half the time."""
    target = write_llama(tmp_path_factory.mktemp("models") / "target", width=32)
    return target, head_files.study(target, num_texts=6, length=40)


def tokens_per_pass(
    target: Path, speculate: str, s: head_files.Study, **params: Any
) -> tuple[float, list[list[int]]]:
    llm = LLM(str(target), speculate=speculate, **SMALL)
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **params})
    outputs = llm.generate(s.tokens[:, :6].tolist(), settings)
    rate = float(llm.stats()["tokens_per_pass"])
    llm.close()
    return rate, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["draft", "mlp", "medusa", "eagle", "eagle3", "mtp"])
def test_a_tree_accepts_more_than_the_chain_of_its_depth(
    name: str, pair: tuple[Path, head_files.Study], tmp_path: Path
) -> None:
    target, s = pair
    if name == "draft":
        head_files.make_draft(target, tmp_path, noise=0.15)
    else:
        getattr(head_files, f"make_{name}")(s, tmp_path, num_steps=20)
    depth = 3 if name in ("mlp", "medusa") else 5
    chain, text = tokens_per_pass(target, f"{name}:{tmp_path}:num_nodes={depth}", s)
    trees = ["dynamic", "static"] if name == "medusa" else ["dynamic"]
    for kind in trees:
        options = f"tree={kind}:num_nodes=32:depth={depth}"
        tree, same = tokens_per_pass(target, f"{name}:{tmp_path}:{options}", s)
        assert same == text
        assert tree >= 1.08 * chain
        sampled = {"temperature": 0.7, "seed": 4, "top_p": 0.95}
        _, one = tokens_per_pass(target, f"{name}:{tmp_path}:{options}", s, **sampled)
        _, other = tokens_per_pass(target, "off", s, **sampled)
        assert one == other


def test_a_request_may_ask_for_fewer_nodes(
    pair: tuple[Path, head_files.Study], tmp_path: Path
) -> None:
    target, s = pair
    path = head_files.make_draft(target, tmp_path, noise=0.15)
    llm = LLM(str(target), speculate=f"draft:{path}:tree=dynamic:num_nodes=16", **SMALL)
    wish = Speculation(max_nodes=3, trace=True)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=wish)
    (output,) = llm.generate(s.tokens[:1, :6].tolist(), params)
    assert max(len(step.tokens) for step in output.outputs[0].trace) == 3
    assert output.outputs[0].token_ids == s.tokens[0, 6:26].tolist()

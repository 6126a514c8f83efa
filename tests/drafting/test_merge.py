"""Several drafters in one tree: grafted where they agree, none of what any would draft is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import head_files
from hunch import LLM, SamplingParams
from hunch.config import SpecConfig
from hunch.drafting.merge import graft
from hunch.drafting.trees import Node
from hunch.errors import ConfigError
from tiny_models import write_llama

SMALL = {"max_model_len": 256, "kv_bytes": 8_000_000, "dtype": "float32", "threads": 1}
LOOKUP, NETWORK = "suffix:adaptive=false", "draft:PATH:adaptive=false"
PROMPTS = ["the model and the guess", "fast token fast token fast token fast", "a b a b a b a"]


def chain(tokens: list[int], chances: list[float]) -> list[Node]:
    nodes, chance = [], 1.0
    for parent, (token, own) in enumerate(zip(tokens, chances, strict=True), start=-1):
        chance *= own
        nodes.append(Node(token, parent, chance))
    return nodes


def test_nodes_that_agree_are_one_and_others_branch() -> None:
    tree = graft([chain([1, 2, 3], [0.8, 0.5, 0.5]), chain([1, 2, 4], [0.6, 0.5, 0.2])])
    paths = {}
    for number, node in enumerate(tree):
        before = paths[node.parent][0] if node.parent >= 0 else ()
        paths[number] = ((*before, node.token), node.chance)
    chances = dict(paths.values())
    assert set(chances) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}
    assert chances[1,] == pytest.approx(1 - 0.2 * 0.4)
    assert chances[1, 2] == pytest.approx(chances[1,] * 0.75)
    assert chances[1, 2, 3] == pytest.approx(chances[1, 2] * 0.5)
    assert [node.chance for node in tree] == sorted(chances.values(), reverse=True)


def test_what_excludes_each_other_has_no_more_than_all_of_the_chance() -> None:
    tree = graft([chain([1], [0.9]), chain([2], [0.6]), []])
    assert [node.token for node in tree] == [1, 2]
    assert sum(node.chance for node in tree) == pytest.approx(1.0)
    assert graft([[], []]) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("suffix+draft:/a/b+c/d", ["suffix", "draft:/a/b+c/d"]),
        (
            "suffix:num_nodes=4+eagle3:/x:tree=dynamic",
            ["suffix:num_nodes=4", "eagle3:/x:tree=dynamic"],
        ),
        ("ngram+recycling+merge:num_nodes=9", ["ngram", "recycling"]),
    ],
)
def test_texts_name_the_parts(text: str, parts: list[str]) -> None:
    spec = SpecConfig.parse(text)
    assert spec.method == "merge"
    assert [str(part) for part in spec.parts] == parts
    if "merge" in text:
        assert spec.options["num_nodes"] == "9"


def test_a_plain_text_is_no_merge() -> None:
    assert SpecConfig.parse("draft:/a+b").path == "/a+b"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    model = write_llama(tmp_path_factory.mktemp("merge") / "model")
    files = model.parent / "draft"
    head_files.make_draft(model, files, noise=0.3)
    made: list[LLM] = []

    def make(spec: str) -> LLM:
        made.append(LLM(str(model), speculate=spec.replace("PATH", str(files)), **SMALL))
        return made[-1]

    return make


def test_a_merged_tree_brings_at_least_what_its_best_part_does(llm: Callable[[str], LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    rates, texts = {}, []
    for spec in (LOOKUP, NETWORK, "suffix+draft:PATH", "ngram+recycling"):
        with llm(spec) as engine:
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
        rates[spec] = 48 * len(PROMPTS) / sum(out.outputs[0].stats["steps"] for out in outputs)
    assert all(text == texts[0] for text in texts)
    best = max(rates[LOOKUP], rates[NETWORK])
    assert rates["suffix+draft:PATH"] >= best
    assert rates["ngram+recycling"] > 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("suffix+auto", "cannot be a part"),
        ("draft:PATH+draft:PATH", "only one"),
        ("suffix+merge:num_nodes=0", "1 or more"),
    ],
)
def test_what_cannot_be_merged_is_refused(spec: str, words: str, llm: Callable[[str], LLM]) -> None:
    with pytest.raises(ConfigError, match=words):
        llm(spec)


def test_parts_of_a_path(tmp_path: Path) -> None:
    assert str(SpecConfig.parse(f"suffix+draft:{tmp_path}").parts[1]) == f"draft:{tmp_path}"

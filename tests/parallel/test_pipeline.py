"""A model in stages: the text of one process to the bit, with every kind of drafter.

Shape letters: T packed tokens, D width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_families
from builders import DictWeights, Seq, new_kv, pack, tiny_config, tiny_weights
from hunch import LLM, SamplingParams
from hunch.compat import config_from_vllm
from hunch.errors import ConfigError
from hunch.models.load import load_decoder
from hunch.models.spec import ModelSpec
from hunch.models.stage import Stage
from hunch.parallel.group import SINGLE
from hunch.parallel.part import Layout, Part
from hunch.parallel.split_target import SplitTarget
from hunch.registry import DRAFTERS
from parallel.conftest import SMALL
from parallel.test_tensor_parallel import (
    FAMILIES,
    IDS,
    PARAMS,
    PROMPTS,
    RECURRENT,
    tokens,
)


class Heap:
    """A line between stages of one process."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self.sent.append(tensor.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        tensor = self.sent.popleft()
        assert tuple(tensor.shape) == tuple(shape)
        assert tensor.dtype == dtype
        return tensor


def stages_of(weights: DictWeights, count: int) -> list[Part]:
    line: Any = Heap()
    spec = ModelSpec.from_config(weights.config)
    return [
        Part(load_decoder(weights, stage=stage), spec, SINGLE, stage, line)
        for stage in (Stage(index, count) for index in range(count))
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_layers", [5, 30, 80])
def test_stages_join_to_the_model(num_stages: int, num_layers: int) -> None:
    spec = ModelSpec.from_config(tiny_config(num_hidden_layers=num_layers))
    parts = [Stage(index, num_stages).layers(spec) for index in range(num_stages)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert all(parts)
    assert len(parts[-1]) <= len(parts[0])  # the last has the output matrix to do


def test_rank_0_is_in_the_last_stage() -> None:
    layout = Layout(2, 3)
    assert [layout.stage_of(rank).index for rank in range(6)] == [2, 2, 0, 0, 1, 1]
    assert [layout.first_rank(stage) for stage in range(3)] == [2, 4, 0]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=4 .* layers \(3\)"):
        Stage(0, 4).layers(ModelSpec.from_config(tiny_config()))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "gemma 4" not in name])
def test_every_family_gives_the_bits_of_one_process(name: str) -> None:
    weights = tiny_weights(FAMILIES[name])
    whole = load_decoder(weights)
    parts = stages_of(weights, min(3, whole.spec.num_layers))
    (ids_T, attn), layers = pack([Seq(IDS)]), (2, 0, 1, whole.spec.num_layers, 1)
    expected = whole.forward(ids_T, attn, new_kv(whole), layers)
    for part in parts:
        hidden = part.forward(ids_T, attn, new_kv(part.model), layers)
    assert hidden.last_TD.equal(expected.last_TD)
    assert all(a.equal(b) for a, b in zip(hidden.features, expected.features, strict=True))
    assert parts[-1].logits(hidden.last_TD).equal(whole.logits(expected.last_TD))
    assert max(part.model.weight_bytes for part in parts) < 0.9 * whole.weight_bytes


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "kernels", "names"),
    [
        (1, 2, "auto", ("eagle",)),
        pytest.param(1, 2, "auto", ("draft",), marks=pytest.mark.slow),
        pytest.param(2, 2, "auto", ("eagle",), marks=pytest.mark.slow),
        pytest.param(1, 2, "torch", ("ngram", "eagle", "medusa"), marks=pytest.mark.slow),
        pytest.param(
            1,
            2,
            "auto",
            sorted({*DRAFTERS} - {"prediction", "synthetic", "off"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_text_is_that_of_one_process(
    num_ranks: int,
    num_stages: int,
    kernels: str,
    names: Sequence[str],
    split_llm: Callable[..., LLM],
) -> None:
    """Stages change no arithmetic: the same tokens, whatever is drafted and under way at once."""
    single = split_llm(num_ranks, "off", kernels)
    expected = {kind: tokens(single, params) for kind, params in PARAMS.items()}
    for name in ("off", *names):
        llm = split_llm(num_ranks, name, kernels, num_stages)
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == expected[kind], (name, kind)
        alone = [llm.generate(prompt, PARAMS["greedy"])[0] for prompt in PROMPTS]
        assert [one.outputs[0].token_ids for one in alone] == expected["greedy"], name
        assert llm.stats()["drafted"] > 0 or name in ("auto", "off"), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent", "recurrent", "gemma 4", "gemma 4, experts"])
def test_other_kinds_of_attention_keep_the_law(
    name: str,
    split: Callable[..., SplitTarget],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One latent for all heads, states of rows, layers that read others' KV: in stages the text of
    one process, and everywhere the same with drafts."""
    more = {
        "latent": tiny_families.FAMILIES["deepseek v3"],
        "recurrent": ("Qwen3_5ForCausalLM", RECURRENT),
    }
    if name in more:
        monkeypatch.setitem(tiny_families.FAMILIES, name, more[name])
    path = tiny_families.write_family(tmp_path / name, name)

    def texts(num_ranks: int, num_stages: int, speculate: str) -> list[list[list[int]]]:
        config = config_from_vllm(
            model=str(path),
            speculate=speculate,
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=num_stages,
            threads=1,
            **SMALL,
        )
        llm = LLM.__new__(LLM)
        one, how = num_ranks * num_stages == 1, {"dtype": "float32"}
        load = None if one else lambda *_: split(path, num_ranks, num_stages, **how)
        llm._open(config, None, load)
        return [tokens(llm, params) for params in PARAMS.values()]

    plain = texts(1, 1, "off")
    if name in more:  # Gemma 4 cannot be cut into stages
        assert texts(1, 2, "off") == texts(1, 2, "ngram:adaptive=false") == plain
    assert texts(2, 1, "off") == texts(2, 1, "ngram:adaptive=false")


def test_stages_work_at_different_rows_at_once(
    split_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = split_llm(1, "ngram", "auto", 2)
    host, under_way, seen = llm.engine.runner.host, [], []  # type: ignore[attr-defined]
    begin, finish = host.begin, host.finish

    def begin_and_note(plan: Any) -> Any:
        under_way.append(begin(plan))
        seen.append([step.rows for step in under_way])
        return under_way[-1]

    def finish_and_note(step: Any) -> Any:
        assert under_way.pop(0) is step
        return finish(step)

    monkeypatch.setattr(host, "begin", begin_and_note)
    monkeypatch.setattr(host, "finish", finish_and_note)
    tokens(llm, PARAMS["greedy"])
    both = [rows for rows in seen if len(rows) == 2]
    assert len(both) > len(seen) / 2
    assert all(not first & second for first, second in both)
    assert max(map(len, seen)) == 2


def test_a_prompt_of_many_steps_is_in_several_stages(split_llm: Callable[..., LLM]) -> None:
    """Parts of one prompt follow each other without waiting; prefix caching finds them after."""
    prompt = list(range(5, 65)) * 2
    small = {"max_num_batched_tokens": 16, "num_blocks": 20, "block_size": 16}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    expected = split_llm(1, "off", **small).generate([prompt], params)[0]
    llm = split_llm(1, "draft", "auto", 2, **small)
    for _ in range(2):
        found = llm.generate([prompt], params)[0]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.prompt_logprobs == expected.prompt_logprobs
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert llm.generate([prompt], short)[0].num_cached_tokens > 0


def test_leaving_in_the_middle_disturbs_nobody(split_llm: Callable[..., LLM]) -> None:
    """Aborted and preempted while steps are under way; their rows are taken at once."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = tokens(split_llm(1, "off"), params)
    llm = split_llm(1, "ngram", "auto", 2, max_num_seqs=2, num_blocks=6, block_size=16)
    stream = llm.stream("fast fast fast", params)
    next(stream)
    other = llm.stream("to be or not", params)
    next(other)
    stream.close()  # type: ignore[attr-defined]
    assert tokens(llm, params) == expected
    other.close()  # type: ignore[attr-defined]
